"""Short forms of settings, expanded before Hydra reads them.

`budget=0.5` is `method.budget=0.5`, and the folder or the hub id of a model is `model=hf model.path=...`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvbench.config import files, methods
from kvbench.config.settings import read_config
from kvbench.errors import FileMissing, SettingUnknown

ROOT = "config"  # the configuration of a run, conf/config.yaml
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PLAIN = re.compile(r"[\w./-]+")  # what Hydra reads as it stands


def long_form(words: Sequence[str], name: str = ROOT) -> list[str]:
    """Spell out the short forms in the words of a command line.

    A setting needs no group before it where one group alone has a setting of that name, with the choices that the words
    make.

    Args:
        words: `key=value` words, and flags.
        name: The configuration that they change: `config`, or `command/NAME`.

    Raises:
        ValueError: Several groups have the setting.
    """
    words = [part for word in words for part in _model_words(word)]
    root = _Root(name)
    if not root.groups:
        return words
    result = []
    for word in words:
        key, sign, _ = word.partition("=")
        if sign and key.isidentifier() and key not in root.names:
            holders = [f"{group}.{key}" for group in root.holders(key, words)]
            if len(holders) > 1:
                raise SettingUnknown(f"{key} is a setting of several groups; write {' or '.join(holders)}", setting=key)
            word = f"{holders[0]}{word.removeprefix(key)}" if holders else word
        result.append(word)
    return result


def every_setting(words: Sequence[str], name: str = ROOT) -> list[str]:
    """Every setting that words can change, with its group before it where it lies in one."""
    root = _Root(name)
    inner = [f"{group}.{key}" for group in root.groups for key in root.keys_of(group, words)]
    return sorted({*root.names, *inner})


class _Root:
    """A configuration that words change: its settings, and the groups in it."""

    def __init__(self, name: str) -> None:
        self.names: set[str] = set()
        self.groups: dict[str, list[str]] = {}  # group -> settings; of a group of choices those of its choices
        self.default: dict[str, str] = {}  # group of choices -> the choice where no word makes one
        path = files.conf_folder() / f"{ROOT}.yaml" if name == ROOT else files.path_of("command", name[8:])
        self._read(path)

    def _read(self, path: Path) -> None:
        content = read_config(path)
        for entry in content.pop("defaults", ()):
            if entry == f"/{ROOT}":
                self._read(files.conf_folder() / f"{ROOT}.yaml")
            for group, choice in entry.items() if isinstance(entry, Mapping) else ():
                group = str(group).removeprefix("override ").removeprefix("/")
                if group in files.GROUPS:
                    self.groups.setdefault(group, [])
                    self.default[group] = str(choice)
        self.names |= {str(key) for key in content} | self.groups.keys() | {"hydra"}
        for key, value in content.items():
            if isinstance(value, Mapping) and key != "hydra":
                self.groups[str(key)] = [*self.groups.get(str(key), ()), *map(str, value)]

    def holders(self, key: str, words: Sequence[str]) -> list[str]:
        """The groups that have a setting."""
        return [group for group in self.groups if key in self.keys_of(group, words)]

    def keys_of(self, group: str, words: Sequence[str]) -> set[str]:
        """The settings of a group, with the choices of it that words make."""
        if group not in self.default:
            return set(self.groups[group])
        made = [choice for word in words for choice in _choices(word, group)]
        made = made or [choice for word in words for choice in self._by_experiment(word, group)]
        known = files.options(group)
        named = [name for name in dict.fromkeys(made or [self.default[group]]) if name in known]
        return {*self.groups[group], *(key for name in named for key in settings_of(group, name))}

    def _by_experiment(self, word: str, group: str) -> Iterator[str]:
        """The choices that the file of an experiment makes."""
        for name in _choices(word, "experiment"):
            if name in files.options("experiment"):
                for entry in read_config(files.path_of("experiment", name)).get("defaults", ()):
                    if isinstance(entry, Mapping) and f"override /{group}" in entry:
                        yield str(entry[f"override /{group}"])


def _choices(word: str, group: str) -> list[str]:
    """The choices of a group that a word makes, as `method=a,b`."""
    key, sign, value = word.partition("=")
    if key != group or not sign:
        return []
    if value.startswith("glob("):
        pattern = value.removeprefix("glob(").partition(")")[0]
        return [name for name in files.options(group) if fnmatchcase(name, pattern)]
    return value.strip("[]").split(",")


def settings_of(group: str, name: str) -> set[str]:
    """The settings of one choice of a group."""
    if group == "method":
        return {str(key) for key in methods.method_settings(name) if not str(key).startswith("_")} | set(files.SHARED)
    content: Any = read_config(files.path_of(group, name))
    keys: set[str] = set()
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str) and entry in files.options(group):
            keys |= settings_of(group, entry)
    inner = content.get(group)
    return keys | {str(key) for key in (inner if isinstance(inner, Mapping) else content)}


def _model_words(word: str) -> list[str]:
    """The words of a model that is named by its folder, its hub id or its .gguf file."""
    key, _, value = word.partition("=")
    value = value.strip("'\"")
    if key != "model" or value in files.options("model"):
        return [word]
    path = Path(value).expanduser()
    if value.endswith(".gguf") and "," not in value:
        kind = "gguf"
    elif path.is_dir() or _HUB_ID.fullmatch(value):
        kind = "hf"
    elif value.startswith(("/", "./", "../", "~")) and "," not in value:
        raise FileMissing(f"model={value} is no folder and no .gguf file; give one that there is", setting="model")
    else:
        return [word]
    value = str(path) if value.startswith("~") else value
    return [f"model={kind}", f"model.path={value if _PLAIN.fullmatch(value) else repr(value)}"]
