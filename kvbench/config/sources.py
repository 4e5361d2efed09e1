"""Hydra's plugins for configuration files: what is searched, and how a file is read.

`kvbench://FOLDER` on the search path is a folder whose methods have the defaults of their classes, and
`kvbench://FILE.py` one that has a single method.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from kvbench.config import extensions, files, one_file
from kvbench.config.methods import read_method, with_defaults
from kvbench.config.settings import faults_of
from kvbench.errors import FileContent

_root: Path | None = None  # while kvbench starts Hydra; another program's Hydra in this process is left alone


class Folder(ConfigSource):
    """Hydra plugin that reads a folder, and adds to a method what its class says."""

    @staticmethod
    def scheme() -> str:
        return "kvbench"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._file(config_path)
        if one_file.is_method_file(path):
            method = with_defaults(read_method(path))
            return ConfigResult(provider=self.provider, path=self.full_path(), config=method, header={"package": None})
        with faults_of(path):
            text, config = path.read_text(encoding="utf-8"), OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise FileContent(f"{path} holds a list; a configuration file holds key: value")
        header = self._get_header_dict(text[:512])
        if config_path.startswith("method/") and not header.get("package") and "defaults" not in config:
            config = with_defaults(config)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        if one_file.is_method_file(self.path):
            return config_path in ("", "method")
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        if one_file.is_method_file(self.path):
            return [Path(self.path).stem] if config_path == "method" else []
        for path in Path(self.path, config_path).iterdir():
            self._list_add_result(names, str(Path(config_path, path.name)), path.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        name = self._normalize_file_name(config_path)
        if one_file.is_method_file(self.path) and name == f"method/{Path(self.path).stem}.yaml":
            return Path(self.path)
        return Path(self.path, name)


class Folders(SearchPathPlugin):
    """Hydra plugin that has kvbench's folder, those of extensions and the user's own searched, in this order."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if _root is None:
            return
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = _address(_root)
        for provider, folders in (("extensions", extensions.conf_folders()), ("config-dir", files.config_dirs())):
            for folder in folders:
                search_path.append(f"kvbench-{provider}", _address(folder))


def _address(folder: Path) -> str:
    return f"{Folder.scheme()}://{folder}"


@contextmanager
def searched(root: Path) -> Iterator[None]:
    """Let a Hydra that is started in the block search a folder with config.yaml, the extensions' and the user's own."""
    global _root
    before, _root = _root, root
    try:
        yield
    finally:
        _root = before


Plugins.instance().register(Folder)
Plugins.instance().register(Folders)
