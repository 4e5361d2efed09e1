"""Discovery of extensions: folders with a manifest, which is read without importing their code.

An extension is a package with an `extension.toml`:

    summary = "Times kernels and whole models."
    uses = ["calibrate"]            # other extensions that it imports
    [keeps]                         # unit of work that a stopped command keeps, to go on after
    bench = "cell"
    [dispatch]                      # key that chooses among the commands in conf/command/calibrate/
    calibrate = "what"
    [groups]                        # groups of choices that it adds to `kvbench list`
    suite = "a protocol of several tasks and methods"
    [hooks]                         # functions that the core calls, by hook point
    "report.section" = "kvbench.extensions.papers.report_papers:section"

Its `conf/` is searched after kvbench's own, so that `conf/command/NAME.yaml` is a command. Built-in extensions lie in
`kvbench/extensions/`; third parties name a package under the entry point `kvbench.extensions`. The core imports none.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvbench.errors import FileContent, PackageMissing, Unsupported, unknown_name

MANIFEST = "extension.toml"
PACKAGE = "kvbench.extensions"  # the package of the built-in ones, and the entry-point group of the others
KEYS = ("summary", "uses", "keeps", "dispatch", "groups", "hooks")


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension as its manifest describes it.

    Args:
        name: Name of its folder, or of its entry point.
        package: Dotted name of its package.
        folder: Folder of the package.
        summary: One sentence.
        uses: Extensions that it imports.
        keeps: Command -> unit of work that stays when it is stopped.
        dispatch: Command -> key that chooses among the further commands in its folder.
        groups: Groups of choices that it adds, and what each is.
        hooks: Hook point -> `module:function`.
    """

    name: str
    package: str
    folder: Path
    summary: str
    uses: tuple[str, ...] = ()
    keeps: Mapping[str, str] = field(default_factory=dict)
    dispatch: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """Folder of its configuration files; it may not exist."""
        return self.folder / "conf"


def read_manifest(folder: Path, name: str, package: str) -> Extension:
    """Read the manifest of an extension.

    Raises:
        ValueError: It is no TOML, or has a key that manifests do not have, or lacks `summary`.
    """
    path = folder / MANIFEST
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FileContent(f"extension {name}: {path} cannot be read: {error}") from error
    for key in content:
        if key not in KEYS:
            raise unknown_name(f"key of {path}", key, KEYS, setting=key)
    if not isinstance(content.get("summary"), str):
        raise FileContent(f"extension {name}: {path} has no summary; give one sentence")
    content["uses"] = tuple(content.get("uses", ()))
    return Extension(name=name, package=package, folder=folder, **content)


@lru_cache(maxsize=1)
def discovered() -> dict[str, Extension]:
    """Extensions by name, built-in ones first; also those whose `uses` are not met."""
    root = Path(__file__).resolve().parent.parent / "extensions"
    manifests = {
        path.parent.name: read_manifest(path.parent, path.parent.name, f"{PACKAGE}.{path.parent.name}")
        for path in sorted(root.glob(f"*/{MANIFEST}"))
    }
    for entry in entry_points(group=PACKAGE):
        if entry.name in manifests:
            raise Unsupported(f"two extensions are named {entry.name}; uninstall the package of {entry.value}")
        manifests[entry.name] = read_manifest(_folder_of(entry.value), entry.name, entry.value)
    return manifests


def _folder_of(package: str) -> Path:
    """Folder of a package, located without importing it or its parents.

    Raises:
        ValueError: There is no such package.
    """
    search: list[str] | None = None
    for part in package.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None or spec.submodule_search_locations is None:
            raise PackageMissing(f"the entry point {PACKAGE} names {package}, which is no installed package")
        search = list(spec.submodule_search_locations)
    return Path(search[0]) if search else Path()


@lru_cache(maxsize=1)
def enabled() -> dict[str, Extension]:
    """Extensions whose `uses` are enabled too."""
    manifests = dict(discovered())
    while lacking := [name for name, one in manifests.items() if not manifests.keys() >= set(one.uses)]:
        for name in lacking:
            del manifests[name]
    return manifests


def lacking(command: str) -> str:
    """Reason why the command of a disabled extension is not available; empty for every other word."""
    on = enabled()
    for name, one in discovered().items():
        if name not in on and any((one.conf / "command").rglob(f"{command}.yaml")):
            missing = ", ".join(sorted(set(one.uses) - on.keys()))
            return f"{command} belongs to the extension {name}, which needs the extension {missing}"
    return ""


def conf_folders() -> list[Path]:
    """Configuration folders of the enabled extensions."""
    return [one.conf for one in enabled().values() if one.conf.is_dir()]


def groups() -> dict[str, str]:
    """Groups of choices that enabled extensions add."""
    return {group: text for one in enabled().values() for group, text in one.groups.items()}


def dispatch_keys() -> dict[str, str]:
    """Commands of extensions that have further ones, and the key that chooses among these."""
    return {command: key for one in enabled().values() for command, key in one.dispatch.items()}


def kept_by(command: str) -> str:
    """Unit of work that stays when a command of an extension is stopped; empty where it starts again."""
    return next((one.keeps[command] for one in enabled().values() if command in one.keeps), "")


def hooks(point: str) -> Iterator[Callable[..., Any]]:
    """Functions that enabled extensions provide for a hook point, each imported when it is reached."""
    for one in enabled().values():
        if target := one.hooks.get(point):
            module, _, function = target.partition(":")
            yield getattr(import_module(module), function)
