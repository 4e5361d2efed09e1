"""Finds lm-eval's tasks by name without its index of 14,000 YAMLs, and builds them from what is on this machine."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.code import drop_stale_bytecode
from kvbench.errors import FileContent, FileMissing, NameUnknown, PackageMissing, SettingMissing, what_happened
from kvbench.stats.strata import Weighting
from kvbench.tasks.files import MissingDataError
from kvbench.tasks.lmeval import lmeval_tasks_folder, quiet

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

_NAME = re.compile(rb"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?([^\s\"'#\[]+)", re.MULTILINE)
_TAGS = re.compile(rb"^[\"']?tag[\"']?:([^\n]*(?:\n[ \t]*-[^\n]*)*)", re.MULTILINE)


@cache
def _files(root: Path) -> list[Path]:
    """Every YAML below a folder, and every file that YAMLs include, in lm-eval's own order."""
    paths = [
        Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith((".yaml", ".yml", "_yaml"))
    ]
    return sorted(paths, key=lambda path: path.as_posix())


def folders_of(name: str, roots: Iterable[Path]) -> list[Path]:
    """The folders that define a task, a group or a tag: one, or more for a tag; none where it is unknown.

    The first of the roots that has the name counts.
    """
    wanted = name.encode()
    for root in roots:
        files = _files(root)
        # A file that is named after the task is nearly always the one; reading all takes seconds.
        likely = [path for path in files if name in path.name]
        for path in (*likely, *files):
            if path.suffix in (".yaml", ".yml") and wanted in _NAME.findall(path.read_bytes()):
                return [path.parent]
        tagged = {
            path.parent
            for path in files
            if any(wanted in re.findall(rb"[\w.-]+", words) for words in _TAGS.findall(path.read_bytes()))
        }
        if tagged:
            return sorted(tagged)
    return []


def manager_of(
    names: Iterable[str],
    include_path: Sequence[str] = (),
    *,
    extra: Sequence[Path] = (),
    kind: type | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> "TaskManager":
    """lm-eval's task manager over the folders of some tasks, and of everything that their groups name.

    Args:
        names: Tasks, groups or tags.
        include_path: Folders with further task YAMLs; they are looked in first.
        extra: Folders that are looked in last.
        kind: The class of manager; lm-eval's by default.
        metadata: Metadata that the manager passes to every task that it makes.

    Raises:
        ValueError: No such name, or no such folder; the message has the nearest names.
    """
    from lm_eval.tasks import TaskManager

    include = [Path(path).expanduser() for path in include_path]
    for path in include:
        if not path.is_dir():
            raise FileMissing(
                f"task.include_path={path} is not a folder; give one that holds task YAMLs", setting="task.include_path"
            )
        drop_stale_bytecode(path.rglob("*.py"))
    roots = [*include, lmeval_tasks_folder(), *extra]
    folders: dict[Path, None] = {}
    seen: set[str] = set()
    todo = list(names)
    while todo:
        for name in todo:
            matches = folders_of(name, roots)
            if not matches:
                raise _unknown(name, roots)
            folders |= dict.fromkeys(matches)
        seen |= set(todo)
        with quiet():
            # Later folders win, so the user's own come last.
            ordered = sorted(folders, key=lambda folder: any(folder.is_relative_to(root) for root in include))
            extra_args = {} if metadata is None else {"metadata": dict(metadata)}
            manager = (kind or TaskManager)(include_defaults=False, include_path=ordered, **extra_args)
        children = {child for entry in manager.task_index.values() for child in _members(entry)}
        todo = sorted(children - set(manager.task_index) - seen)
    return manager


def _members(entry: Any) -> list[str]:
    """The names that a group of the index lists, other than tasks that it defines itself; none for a task or a tag."""
    listed = ((entry.cfg or {}).get("task") or ()) if entry.kind.name == "GROUP" else ()
    return [child for child in listed if isinstance(child, str)]


def _unknown(name: str, roots: Iterable[Path]) -> NameUnknown:
    known = {match.decode() for root in roots for path in _files(root) for match in _NAME.findall(path.read_bytes())}
    near = get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f" Near: {', '.join(near)}." if near else ""
    return NameUnknown(
        f"task.name={name}: lm-eval {version('lm_eval')} has no task, group or tag of that name.{hint} A task of your "
        "own needs task.include_path=FOLDER with its YAML.",
        setting="task.name",
    )


def missing_package(what: str, error: ImportError) -> PackageMissing:
    """The error of something that needs a package that is not installed, with the line that installs it."""
    if error.name is None:
        return PackageMissing(f"{what} needs a package that is not installed: {' '.join(str(error).split())[:500]}")
    package = error.name.partition(".")[0]
    line = f"pip install {package}"
    for need in requires("lm_eval") or ():
        named, extra = re.match(r"[\w.-]+", need), re.search(r"extra == ['\"]([^'\"]+)", need)
        if named and extra and re.sub(r"[-.]", "_", named[0]).lower() == package.lower():
            line = f"pip install 'lm_eval[{extra[1]}]'"
            break
    return PackageMissing(
        f"{what} needs the package {package}, which is not installed; `{line}`, or see the README of the task in "
        "lm-eval"
    )


def weighting_of(name: str, include_path: str | None = None) -> Weighting:
    """The weights of lm-eval's mean: `sample` where all groups weigh by size, as MMLU does; else `subset`."""
    index = manager_of([name], [include_path] if include_path else []).task_index
    todo, groups = [name], []
    while todo:
        entry = index.get(todo.pop())
        if entry is not None and entry.kind.name == "GROUP":
            groups.append((entry.cfg or {}).get("aggregate_metric_list"))
            todo += _members(entry)
    # lm-eval's own default is true.
    by_size = [[item.get("weight_by_size", True) for item in ([g] if isinstance(g, dict) else g or [])] for g in groups]
    return "sample" if groups and all(flags and all(flags) for flags in by_size) else "subset"


def load_tasks(manager: "TaskManager", name: str, data_dir: str | None) -> "dict[str, Task]":
    """Name -> task of every leaf, in lm-eval's order; data from the local caches or, when it answers, from the hub.

    Raises:
        MissingDataError: The data is not here and not to be had.
        ValueError: A task needs something else that is not here, or is broken.
    """
    import datasets

    from kvbench.models.files import hub_reachable

    specs = _specs(name, manager.task_index, data_dir)
    try:
        try:
            with _offline():
                return manager.load(specs)["tasks"]
        except (OSError, ValueError, datasets.exceptions.DatasetsError):
            if not hub_reachable():
                raise
            return manager.load(specs)["tasks"]
    except ImportError as error:
        raise missing_package(f"task.name={name}", error) from error
    except AssertionError as error:
        why = " ".join(str(error).split())[:300] or "an assertion of its code failed"
        raise SettingMissing(
            f"task.name={name} cannot make its data: {why}; tell it more with task.metadata={{NAME: VALUE}}",
            setting="task.metadata",
        ) from error
    except KeyError as error:
        raise FileContent(
            f"task.name={name}: its data has no split {error} (or lm-eval no task of that name); give a whole copy of "
            "the data set's repository as task.data_dir, or leave it out",
            setting="task.data_dir",
        ) from error
    except LookupError as error:  # nltk's, for a text model of its own that it has not
        wanted = re.search(r"nltk\.download\('([\w.]+)'\)", str(error))
        if wanted is None:
            raise cannot(name, "its data", error) from error
        raise PackageMissing(
            f"task.name={name} needs {wanted[1]} of nltk, which is not here; `python -m nltk.downloader {wanted[1]}` "
            "gets it where there is a network",
            setting="task.name",
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _missing(name, manager, error) from error
    except Exception as error:  # a task is YAML, templates and programs of its makers, which may raise anything
        raise cannot(name, "its data", error) from error


def cannot(name: str, what: str, error: Exception) -> FileContent:
    """Say that lm-eval raised something over a task, and which of it."""
    return FileContent(
        f"task.name={name}: lm-eval cannot make {what} ({what_happened(error)}); repair the task's YAML",
        setting="task.name",
    )


def _missing(name: str, manager: "TaskManager", error: Exception) -> MissingDataError:
    from huggingface_hub import constants

    paths = {(entry.cfg or {}).get("dataset_path") for entry in manager.task_index.values()}
    repos = sorted(path for path in paths if path and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)))[:3]
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "OfflineModeIsEnabled" in why or "offline" in why.lower():
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached from here"
    which = " or ".join(repos) or "its data set"
    fetch = f"`hf download {repos[0]} --repo-type dataset --local-dir DIR`" if repos else "fetch it"
    return MissingDataError(
        f"task.name={name} of lm-eval has no data here: {which} is neither in the cache of the datasets library nor to "
        f"be had from the hub ({why}). Run this task once where there is a network (gated data also needs `hf auth "
        f"login`), or {fetch} there and set task.data_dir=DIR. Without it, `kvbench task=longctx` runs on "
        "generated data."
    )


def _specs(name: str, index: Mapping[str, Any], data_dir: str | None) -> list:
    """The names for lm-eval's manager to load: the members of a tag, and with `data_dir` every task by itself."""
    if not data_dir:
        # A tag is spread over folders, and lm-eval's index keeps one folder's tasks of it.
        return sorted(_tagged(name, index)) if index[name].kind.name == "TAG" else [name]
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise FileMissing(
            f"task.data_dir={data_dir} is not a folder; give a local copy of the data set's repository",
            setting="task.data_dir",
        )
    # Only members of a group take changes on top of what lm-eval has registered under their name.
    members = [leaf | {"dataset_path": str(folder)} for leaf in _leaves({"task": name}, index)]
    return [{"group": f"kvbench_{name}", "task": members}]


def _tagged(name: str, index: Mapping[str, Any]) -> set[str]:
    return {key for key, entry in index.items() if name in entry.tags and entry.kind.name != "TAG"}


def _leaves(item: Mapping[str, Any], index: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of a group, nested groups and tags resolved, with what the groups change of them."""
    name = item.get("group", item.get("task"))
    changes = {key: value for key, value in item.items() if key not in ("group", "task")}
    entry = index.get(name)
    if entry is None or entry.kind.name in ("TASK", "PY_TASK"):
        yield {"task": name, **changes}
        return
    members = entry.cfg["task"] if entry.kind.name == "GROUP" else sorted(_tagged(name, index))
    for member in members:
        yield from _leaves(changes | (dict(member) if isinstance(member, Mapping) else {"task": member}), index)


def leaves_of(name: str, index: Mapping[str, Any]) -> list[str]:
    """The names of the tasks that a task, a group or a tag stands for."""
    return [leaf["task"] for leaf in _leaves({"task": name}, index)]


@contextmanager
def _offline() -> Iterator[None]:
    """Context without network for the data libraries: their client retries for half a minute where there is none."""
    import datasets
    from huggingface_hub import constants

    flags = [(constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(owner, key) for owner, key in flags]
    try:
        for owner, key in flags:
            setattr(owner, key, True)
        yield
    finally:
        for (owner, key), value in zip(flags, before, strict=True):
            setattr(owner, key, value)
