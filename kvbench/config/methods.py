"""The settings of a method: those that its YAML file lists, and the defaults of its class for all others.

The defaults are read from source, so that composing a configuration imports neither the method nor torch. A class that
cannot be read so is imported.
"""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import files, one_file
from kvbench.config.settings import read_config
from kvbench.rules import modes

CONTRACT = "kvbench.policy"  # the package of the settings that methods share
Default = tuple[str, str, Any]  # the module of a class, a field of it, and its default; MISSING = it is no setting


class UnreadableError(Exception):
    """Source from which a class's fields cannot be told without running it."""


def method_settings(name: str) -> DictConfig:
    """All settings of a method, kvbench's or the user's own, with their values."""
    return with_defaults(read_method(files.path_of("method", name)))


def read_method(path: Path) -> DictConfig:
    """What the file of a method lists: its YAML, or the Python file that is all of it."""
    if one_file.is_method_file(path):
        return OmegaConf.create({"_target_": one_file.target_of(path)})
    return read_config(path)


def with_defaults(listed: DictConfig) -> DictConfig:
    """What a method's file lists, behind the defaults of its class's other settings.

    Settings that all methods share (`files.SHARED`) are there where the file lists them, or the class redefines them.
    """
    plain: Any = OmegaConf.to_container(listed)
    target = plain.get("_target_")
    module, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    if not module:
        return listed
    try:
        declared = list(_read_class(module, ast.Name(name)))
    except (UnreadableError, OSError, SyntaxError):
        declared = list(_import_class(module, name))
    default = {field: value for _, field, value in declared}
    own = {field for place, field, _ in declared if field not in files.SHARED or not place.startswith(f"{CONTRACT}.")}
    added = {field: value for field, value in default.items() if field in own and value is not MISSING}
    return OmegaConf.merge({"_target_": target} | added, listed)  # type: ignore[return-value]  # a mapping, as it is


def _import_class(module: str, name: str) -> Iterator[Default]:
    """The fields of a class that is imported; none where there is no such class, which is said when it is made."""
    try:
        with modes.kept(f"method._target_={module}.{name}", once=module):
            kind = getattr(import_module(module), name)
    except modes.ChangedMode:
        raise
    except Exception:  # a user's module may fail with any error
        return
    defaults = {item.name: item for item in fields(kind)} if is_dataclass(kind) else {}
    for each in reversed(kind.__mro__) if defaults else ():
        for field in each.__dict__.get("__annotations__", {}).keys() & defaults.keys():
            item = defaults[field]
            made = item.default if item.default_factory is MISSING else item.default_factory()
            yield each.__module__, field, made if item.init else MISSING


def _read_class(module: str, wanted: ast.expr) -> Iterator[Default]:
    """The fields of a class, which an expression in a module names, and of its bases, theirs first.

    Raises:
        UnreadableError: The source does not tell.
    """
    place, found = _find(module, wanted)
    if not isinstance(found, ast.ClassDef):
        raise UnreadableError
    if place == f"{CONTRACT}.base":  # which has no settings
        return
    for base in found.bases:
        yield from _read_class(place, base)
    for item in found.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            yield place, ast.unparse(item.target), MISSING if item.value is None else _value(place, item.value)


def _value(module: str, given: ast.expr) -> Any:
    """A default, from the expression that says it; MISSING of a field that no constructor takes."""
    if isinstance(given, ast.Call) and ast.unparse(given.func) == "field":
        options = {item.arg: item.value for item in given.keywords}
        if "init" in options and not _value(module, options["init"]):
            return MISSING
    if isinstance(given, ast.Name | ast.Attribute):
        place, found = _find(module, given)
        if not isinstance(found, ast.expr):
            raise UnreadableError
        return _value(place, found)
    try:
        return ast.literal_eval(given)
    except (ValueError, TypeError) as error:
        raise UnreadableError from error


def _find(module: str, wanted: ast.expr) -> tuple[str, ast.AST]:
    """The module and the statement that define a name: a class, or the value of a constant.

    Raises:
        UnreadableError: None at the module's outermost level does.
    """
    where, _, name = ast.unparse(wanted).rpartition(".")
    for item in reversed(_source(module).body):
        if isinstance(item, ast.Import):
            imported = {alias.asname or alias.name: alias.name for alias in item.names}
            if where in imported:
                return _find(imported[where], ast.Name(name))
        if where:
            continue
        if isinstance(item, ast.ClassDef) and item.name == name:
            return module, item
        if isinstance(item, ast.Assign) and name in map(ast.unparse, item.targets):
            return module, item.value
        if isinstance(item, ast.ImportFrom) and item.module and not item.level:
            for alias in item.names:
                if name == (alias.asname or alias.name):
                    return _find(item.module, ast.Name(alias.name))
    raise UnreadableError


def _source(module: str) -> ast.Module:
    """The syntax tree of a module, which is not imported."""
    top, *rest = module.split(".")
    path = files.package_folder().joinpath(*rest)  # of kvbench itself, whose packages import torch
    if top == "kvbench":
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        try:
            found = find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None or not found.origin:
            raise UnreadableError
        path = Path(found.origin)
    return _parsed(path.read_bytes())


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> ast.Module:
    return ast.parse(content)
