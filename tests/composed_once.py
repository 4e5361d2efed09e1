"""Configurations that Hydra composed before, as copies.

Each takes it a tenth of a second, and the jobs of a sweep are composed several times, which was two thirds of what the
tests of commands took. The exhaustive run has Hydra compose all.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig

MOST = 200  # configurations that are kept, of some 100 KB each
PLACE = re.compile(r"(results_dir|out)=(/[\w/.-]+)")  # of a command, and another one for each test


@lru_cache(maxsize=2000)
def _content(path: str, *state: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Every file of settings below a folder, and what is in it."""
    for top, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".yaml"):
                found = os.stat(path := os.path.join(top, name))
                yield os.path.relpath(path, folder), _content(path, found.st_mtime_ns, found.st_size)


def once(plain: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Hydra's function, which gives a copy where the words and the files are those of a call before."""
    made: OrderedDict[tuple, DictConfig] = OrderedDict()

    def load_configuration(
        self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode, *more, **named
    ) -> DictConfig:
        sources = self.repository.get_sources()
        folders = [source.path for source in sources if source.scheme() == "file"]
        if len(folders) != 1 or any("hydra.searchpath" in word for word in overrides):  # a user's own, with modules
            return plain(self, config_name, overrides, run_mode, *more, **named)
        once_each = len({word.partition("=")[0] for word in overrides}) == len(overrides)  # else the last one holds
        spared = once_each and str(config_name).startswith("command/")
        places = [PLACE.fullmatch(word) if spared else None for word in overrides]
        given = dict(place.groups() for place in places if place)
        words = [place[1] if place else word for place, word in zip(places, overrides, strict=True)]
        asked = (config_name, *words, run_mode, *more, *sorted(named.items()), JobRuntime.instance().get("name"))
        key = (*asked, *sorted(_files(folders[0])))
        if key not in made:
            made[key] = plain(self, config_name, overrides, run_mode, *more, **named)
        made.move_to_end(key)
        if len(made) > MOST:
            made.popitem(last=False)
        found = deepcopy(made[key])
        found.update(given)
        found.hydra.runtime.cwd = os.getcwd()
        for told, source in zip(found.hydra.runtime.config_sources, sources, strict=True):
            told.path = source.path
        return found

    return load_configuration


def install() -> None:
    """Has Hydra compose nothing twice."""
    ConfigLoaderImpl.load_configuration = once(ConfigLoaderImpl.load_configuration)
