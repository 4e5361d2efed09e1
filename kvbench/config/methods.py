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
    """Settings that the file of a method lists: its YAML, or the Python file that is all of it."""
    if one_file.is_method_file(path):
        return OmegaConf.create({"_target_": one_file.target_of(path)})
    return read_config(path)


def with_defaults(listed: DictConfig) -> DictConfig:
    """Add the defaults of the class's other settings to those that a method's file lists.

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
    names = {
        field
        for source_module, field, _ in declared
        if field not in files.SHARED or not source_module.startswith(f"{CONTRACT}.")
    }
    added = {field: value for field, value in default.items() if field in names and value is not MISSING}
    return OmegaConf.merge({"_target_": target} | added, listed)  # type: ignore[return-value]  # a mapping, unchanged


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
        UnreadableError: The source does not define it statically.
    """
    source_module, node = _find(module, wanted)
    if not isinstance(node, ast.ClassDef):
        raise UnreadableError
    if source_module == f"{CONTRACT}.base":  # which has no settings
        return
    for base in node.bases:
        yield from _read_class(source_module, base)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            yield (
                source_module,
                ast.unparse(item.target),
                MISSING if item.value is None else _value(source_module, item.value),
            )


def _value(module: str, expression: ast.expr) -> Any:
    """A default, from the expression that says it; MISSING of a field that no constructor takes."""
    if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "field":
        options = {item.arg: item.value for item in expression.keywords}
        if "init" in options and not _value(module, options["init"]):
            return MISSING
    if isinstance(expression, ast.Name | ast.Attribute):
        source_module, node = _find(module, expression)
        if not isinstance(node, ast.expr):
            raise UnreadableError
        return _value(source_module, node)
    try:
        return ast.literal_eval(expression)
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
            spec = find_spec(module)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.origin:
            raise UnreadableError
        path = Path(spec.origin)
    return _parsed(path.read_bytes())


@lru_cache(maxsize=256)
def _parsed(content: bytes) -> ast.Module:
    return ast.parse(content)
