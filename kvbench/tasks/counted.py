"""A task's part of the `code` of a run's identity: files of the user's own, their libraries, the interpreter."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.config import code
from kvbench.tasks import BENCHMARKS, settings_class
from kvbench.tasks.lmeval import TASKS_FOLDER, lmeval_tasks_folder
from kvbench.tasks.taskset import TaskSet

if TYPE_CHECKING:
    from kvbench.tasks.harness.score import HarnessTaskSet

CAGE = TASKS_FOLDER / "code" / "cage"


def code_of(group: Mapping[str, Any], task: TaskSet) -> dict[str, str]:
    """The entries of a task; none for one of kvbench's own whose answers are compared and not run.

    Args:
        group: The settings of the task.
        task: The resulting task.

    Returns:
        `task`: the hash of the user's own files, where there are some; `task:LIBRARY`: the versions of what the Python
        files of a task of lm-eval import; `python`: where such files are the user's, or answers are run.
    """
    if group.get("harness"):
        return _of_harness(group, task)  # type: ignore[arg-type]  # lm-eval's have a set of their own
    return code.interpreter() if group.get("name") in BENCHMARKS and runs_code(settings_class(group).folder()) else {}


def runs_code(folder: Path) -> bool:
    """True for the folder of a task that runs answers, which none can without the cage."""
    files = [path for path in folder.rglob("*.py") if CAGE not in path.parents]
    return any(CAGE in path.parents for path in code.reached(files, "kvbench.tasks", TASKS_FOLDER))


def _of_harness(group: Mapping[str, Any], task: "HarnessTaskSet") -> dict[str, str]:
    """The entries of a task, a group or a tag of lm-eval.

    The YAMLs count that define it, with those that they include, and the Python files that these name by `!function`,
    with those that these import, at any remove: of lm-eval's own none where it is installed, since its version counts,
    and all of them where it is a checkout. Files that they open at run time are not counted.
    """
    from kvbench.tasks.harness.find import manager_of

    name, include_path = group["name"], group.get("include_path")
    tasks = {doc.leaf: doc.task for doc in task.docs.values()}.values()
    index = manager_of([name], [include_path] if include_path else []).task_index
    yamls = {
        each for entry in _entries(name, index) if entry.yaml_path for each in _included(entry.yaml_path.resolve())
    }
    named = {reference for path in yamls for reference in _functions(path)}
    files = {reference for reference in named if isinstance(reference, Path)}
    # A module that lm-eval loads by its path has that as its name, and is reached by its file.
    modules = {reference for reference in named if isinstance(reference, str)}
    modules |= {kind.__module__ for each in tasks for kind in type(each).__mro__ if os.sep not in kind.__module__}
    modules |= {imported for path in files for imported in code.names_imported(path)}
    reached = code.users_files(modules, room="kvbench.tasks")
    files_by_name = {
        _name_of(path, include_path): path for path in {*yamls, *files} if not code.is_library(path)
    } | reached
    code.check_unchanged(files_by_name)
    inside = {"lm-eval", *(path.stem for path in files), *(module.partition(".")[0] for module in reached)}
    imported = code.libraries({*files, *reached.values()})
    is_run = any(path.suffix == ".py" for path in files_by_name.values()) or any(
        getattr(each, "UNSAFE_CODE", False) for each in tasks
    )
    return {
        **({"task": code.hash_files(files_by_name)} if files_by_name else {}),
        **{f"task:{library}": version for library, version in imported.items() if library not in inside},
        **(code.interpreter() if is_run else {}),
    }


def _name_of(path: Path, include_path: str | None) -> str:
    """The name under which a file counts: its path within the folder of tasks, wherever that lies."""
    for root in (Path(include_path or os.devnull).expanduser().resolve(), lmeval_tasks_folder().resolve()):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _entries(name: str, index: Mapping[str, Any]) -> Iterable[Any]:
    """The entries of lm-eval's index that a task, a group or a tag stands for: its own, and those of all members."""
    entries: dict[str, Any] = {}
    todo: list[Any] = [name]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo += item
        elif isinstance(item, Mapping):  # a member with changes, or a group that a group defines itself
            todo += [item.get("group"), item.get("task")]
        elif item in index and item not in entries:
            entries[item] = index[item]
            todo += [key for key, entry in index.items() if item in entry.tags and entry.kind.name != "TAG"]
            todo.append((index[item].cfg or {}).get("task"))
    return entries.values()


def _included(path: Path) -> Iterator[Path]:
    """A YAML and those that it includes, at any remove; lm-eval has refused a circle."""
    yield path
    for key, node in _nodes(path):
        if key == "include" and isinstance(node, yaml.ScalarNode) and (path.parent / node.value).is_file():
            yield from _included((path.parent / node.value).resolve())


def _functions(path: Path) -> Iterator[Path | str]:
    """Files and modules of the functions that a YAML names, looked up like lm-eval: next to it, else by import."""
    for _, node in _nodes(path):
        if node.tag == "!function":
            module = node.value.rpartition(".")[0]
            file = path.parent / f"{module.replace('.', '/')}.py"
            yield file.resolve() if file.is_file() else module


def _nodes(path: Path) -> Iterator[tuple[str, yaml.Node]]:
    """Every node of a YAML, with the key under which it lies, alone or in a list."""
    todo: list[tuple[str, yaml.Node | None]] = [("", yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader))]
    seen: set[int] = set()  # an anchor may stand for what it lies in
    while todo:
        key, node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield key, node
        if isinstance(node, yaml.MappingNode):
            todo += [(name.value, value) for name, value in node.value if isinstance(name, yaml.ScalarNode)]
        elif isinstance(node, yaml.SequenceNode):
            todo += [(key, value) for value in node.value]
