"""Configurations that Hydra composed before, and files that OmegaConf read before, as copies.

Composing takes a tenth of a second, and a command and each job of a sweep do it several times, which was two thirds of
what the tests of commands took. What is kept is what files and the choices of groups make; Hydra applies all other
settings of a command to a copy. The exhaustive run has Hydra compose all.

These are Hydra's internals, in tests alone: no public interface lies between a command's choices and its settings. Of
211 compositions in 90 tests of commands, 76 repeat the words of another, which `kvbench.config.compose` could keep; and
reading files, which a `ConfigSource` could keep, is a sixth of one. This takes two thirds of all of it, a quarter of
what those tests take (2026-11-28).
"""

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

MOST = 200  # configurations that are kept, of some 20 KB each


class Kept(list):
    """A defaults list, and the bytes of what it makes once that is known."""

    made = b""


@lru_cache(maxsize=2000)
def _content(path: str, *state: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _files(folder: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every file of these kinds below a folder, and what is in it."""
    for top, _, names in os.walk(folder):
        for name in names:
            if name.endswith(kinds):
                found = os.stat(path := os.path.join(top, name))
                yield path.removeprefix(folder), _content(path, found.st_mtime_ns, found.st_size)


def listed_once(plain: Callable[..., DefaultsList]) -> Callable[..., DefaultsList]:
    """Hydra's function that lists which files a configuration is made of; one that it made of the same choices and
    files before is given again."""
    lists: OrderedDict[tuple, DefaultsList] = OrderedDict()

    def create_defaults_list(
        repo: Any, config_name: str | None, overrides_list: list[Override], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        def anew(skip_missing: bool) -> DefaultsList:
            return plain(repo, config_name, overrides_list, prepend_hydra, skip_missing)

        sources: list[ConfigSource] = repo.get_sources()
        folders = [source.path for source in sources if source.scheme() in ("file", "kvbench")]
        settings = Overrides(repo, overrides_list).config_overrides
        choices = (word.input_line for word in overrides_list if all(word is not each for each in settings))
        read = [sorted(_files(folder, (".yaml", ".py")[: 1 + (len(folders) > 1)])) for folder in folders]
        key = (config_name, prepend_hydra, *choices, *chain(*read))
        if key not in lists:
            try:
                found = anew(skip_missing=False)
            except Exception:  # a choice is missing, which may be allowed, or something is wrong
                return anew(skip_missing)
            lists[key] = replace(found, defaults=Kept(found.defaults))
        lists.move_to_end(key)
        if len(lists) > MOST:
            lists.popitem(last=False)
        return replace(lists[key], config_overrides=settings)

    return create_defaults_list


def merged_once(plain: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Hydra's function that merges the files of a list."""

    def _compose_config_from_defaults_list(
        self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: Any
    ) -> DictConfig:
        if not isinstance(defaults, Kept):
            return plain(self, defaults, repo)
        if not defaults.made:
            defaults.made = pickle.dumps(plain(self, defaults, repo))
        return pickle.loads(defaults.made)

    return _compose_config_from_defaults_list


def read_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """OmegaConf's reader of YAML, which reads the same text once."""
    read: dict[str, bytes] = {}

    def load(file: Any) -> Any:
        try:
            text = Path(file).read_bytes().decode() if isinstance(file, str | Path) else file.read()
        except (OSError, UnicodeDecodeError):
            return plain(file)
        if text not in read:
            if not isinstance(file, str | Path):
                file.seek(0)
            read[text] = pickle.dumps(plain(file))
        return pickle.loads(read[text])

    return load


def begin_repository(self: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """What Hydra's own does, without a copy of every schema in the process: a repository replaces its list of sources,
    and changes none of them."""
    self.delegate, self.cache = copy(delegate), {}


def install() -> None:
    """Has Hydra compose nothing twice."""
    CachingConfigRepository.__init__ = begin_repository
    config_loader_impl.create_defaults_list = listed_once(config_loader_impl.create_defaults_list)
    merged = merged_once(ConfigLoaderImpl._compose_config_from_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = merged
    OmegaConf.load = staticmethod(read_once(OmegaConf.load))
