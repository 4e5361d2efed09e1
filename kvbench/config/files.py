"""Locations of the configuration files and their choices, without importing anything heavy."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from kvbench.config import extensions, one_file
from kvbench.errors import FileMissing, SettingsConflict

FULL = "full"  # conf/method/full.yaml: the reference of every other method, the only name in the harness
# The store of the full cache that others are compared with, whatever theirs is: see `RunConfig.of_full`.
FULL_STORE: Mapping[str, Any] = {"budget_bytes": None, "rotation": "none", "windows": "exact", "key_offset": "none"}
AGREED = "allow_code_execution"  # the setting of tasks that run code of the model, by which the user agrees to it
GROUPS = {
    "method": "how the cache is compressed",
    "task": "what the model is asked",
    "model": "which model",
    "protocol": "how it is asked",
    "backend": "which kernels",
    "experiment": "several settings at once, in files of your own",
}
# Settings that all methods have which rank a prompt's tokens, and some others, and that no YAML has to list (a test
# compares them with the classes in kvbench/policy/, whose import takes seconds).
BY_LAYER = ("tiers_by_layer", "protect_layers", "protect_tier")  # of methods with one precision
SHARED = (
    *("allocation", "alpha", "beta", "table", "chunk", "cut_chunk", "value_aware"),
    *("protect", "protect_tokens", "threshold"),
    *BY_LAYER,
)


DISPATCH = {"report": "view"}
_config_dirs: tuple[Path, ...] = ()  # of this process: what `--config-dir` named


def config_dirs() -> tuple[Path, ...]:
    """The user's own folders with method/, task/, ... files, which add to the choices; and files of one method each."""
    return _config_dirs


@contextmanager
def with_config_dirs(folders: Sequence[Path]) -> Iterator[None]:
    """Let the choices of the user's own folders count like kvbench's.

    Raises:
        ValueError: One is no folder, or it has a file by the name of one of kvbench's.
    """
    global _config_dirs
    before, resolved = _config_dirs, tuple(Path(os.path.realpath(folder)) for folder in folders)
    for folder, named in zip(resolved, folders, strict=True):
        if one_file.is_method_file(folder):
            one_file.check_name(folder)
            one_file.target_of(folder)
        elif not folder.is_dir():
            raise FileMissing(
                f"--config-dir {named} is no folder; give one that has method/, task/, ... with YAML files",
                setting="--config-dir",
            )
        for group in GROUPS:
            both = _paths(group, folder).keys() & {name for root in shipped_folders() for name in _paths(group, root)}
            if both:
                name = min(both)
                path = folder if one_file.is_method_file(folder) else f"{folder / group / name}.yaml"
                raise SettingsConflict(
                    f"{path} has the name of kvbench's own {group}={name}; rename it", setting="--config-dir"
                )
    _config_dirs = resolved
    try:
        yield
    finally:
        _config_dirs = before


def package_folder() -> Path:
    """The folder of the `kvbench` package."""
    return Path(__file__).resolve().parent.parent


def conf_folder() -> Path:
    """The folder with config.yaml and the groups.

    Raises:
        ValueError: It is missing, as in a checkout whose links became files.
    """
    folder = package_folder() / "conf"
    if not folder.is_dir():
        raise FileMissing(
            f"{folder} is no folder: kvbench/ needs its links to kernels/, methods/ and conf/; clone the repository "
            "again with `git clone -c core.symlinks=true`, or install the wheel"
        )
    return folder


def shipped_folders() -> list[Path]:
    """Configuration folders of kvbench and of its extensions."""
    return [conf_folder(), *extensions.conf_folders()]


def all_groups() -> dict[str, str]:
    """Groups of a run, and those that extensions add."""
    return GROUPS | extensions.groups()


def describe(path: Path) -> str:
    """The leading comment of a YAML file up to its first full stop, on one line."""
    if one_file.is_method_file(path):
        return one_file.summary_of(path)
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text.startswith("#"):
            if text and text != "---":
                break
            continue
        text = text.lstrip("#").strip()
        if text.startswith("@package") or (text.startswith("source:") and not words):
            continue
        if text.startswith("source:"):
            break
        words.append(text)
    sentence, stop, _ = " ".join(words).partition(". ")
    return sentence + ("." if stop else "")


def command_files() -> dict[str, str]:
    """Commands that have a file in a `conf/command/`, and what each does."""
    return {name: text for name, text in options("command").items() if "/" not in name}


def dispatch_keys() -> dict[str, str]:
    """Commands that have further ones in a folder of their name, and the key that chooses among these."""
    return DISPATCH | extensions.dispatch_keys()


def subcommands(command: str) -> dict[str, str]:
    """Further commands in the folder of one, by the value that chooses each, and what each does."""
    folder = f"{command}/"
    return {name.removeprefix(folder): text for name, text in options("command").items() if name.startswith(folder)}


def full_command(name: str) -> str:
    """Name of a command's file below `conf/command/`: the word itself, or `report/ranks` of `ranks`.

    Raises:
        KeyError: There is no such command.
    """
    known = _paths("command")
    return name if name in known else {full.rpartition("/")[2]: full for full in known}[name]


def spelled(name: str) -> str:
    """A command as the user writes it: `report view=ranks`."""
    command, sign, choice = full_command(name).partition("/")
    return f"{command} {dispatch_keys()[command]}={choice}" if sign else command


def options(group: str, conf: Path | None = None) -> dict[str, str]:
    """Names of a group's configurations with a description each, in one folder or in kvbench's and the user's.

    For an unreadable file of the user's, the reason.
    """
    return {name: _fault(path) or describe(path) for name, path in _paths(group, conf).items()}


def _fault(path: Path) -> str:
    """Reason why a user's file cannot be read, in brackets; empty where it can."""
    if _config_dirs and any(folder in path.parents for folder in _config_dirs):  # a method's own file was checked
        from kvbench.config.settings import read_config

        try:
            read_config(path)
        except (ValueError, OSError) as error:
            return f"({error})"
    return ""


def import_folders(folders: Sequence[Path]) -> list[str]:
    """Folders that modules of `--config-dir` folders, and methods of one file, are imported from."""
    places = (folder.parent if one_file.is_method_file(folder) else folder for folder in folders)
    return list(dict.fromkeys(os.path.realpath(path) for path in places))


def path_of(group: str, name: str) -> Path:
    """The file of a configuration that there is; of a command by its short name too.

    Raises:
        KeyError: There is none.
    """
    name = full_command(name) if group == "command" else name
    pure = PurePath(name)
    if str(pure) != name or pure.is_absolute() or ".." in pure.parts:  # a way to a file, which is no name
        raise KeyError(name)
    for root in reversed(_roots()):
        if one_file.is_method_file(root):
            if group == "method" and root.stem == name:
                return root
        elif (path := root / group / f"{name}.yaml").is_file():
            return path
    raise KeyError(name)


def _roots() -> list[Path]:
    """Folders of configurations, kvbench's own first; a file of a later one replaces that of an earlier one."""
    return [*shipped_folders(), *_config_dirs]


def _paths(group: str, conf: Path | None = None) -> dict[str, Path]:
    """The files of a group by name."""
    paths: dict[str, Path] = {}
    for root in [conf] if conf else _roots():
        if one_file.is_method_file(root):
            paths |= {root.stem: root} if group == "method" else {}
            continue
        folder = root / group
        paths |= {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}
    return paths
