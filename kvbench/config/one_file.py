"""A method that is one Python file: `method=FILE.py` needs no YAML.

The file is read and not imported, so that a command answers without torch.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

from kvbench.errors import FileContent, FileMissing, SettingValue

SUFFIX = ".py"


def is_method_file(name: object) -> bool:
    """True for the path of a Python file."""
    return isinstance(name, str | Path) and str(name).endswith(SUFFIX)


def target_of(path: Path) -> str:
    """The class of the method in a file, as `_target_` names it.

    It is the dataclass that no other class of the file derives from, and that is not frozen, as statistics are.

    Raises:
        ValueError: The file cannot be read, or has none or several such classes.
    """
    return f"{path.stem}.{_class_of(path).name}"


def summary_of(path: Path) -> str:
    """The first line of the docstring of the method in a file."""
    return (ast.get_docstring(_class_of(path)) or "").partition("\n")[0]


def check_name(path: Path) -> None:
    """Refuse a file whose name is that of another module, which Python would import in its place.

    Raises:
        ValueError: Its name is no identifier, or is taken.
    """
    if not path.stem.isidentifier():
        raise SettingValue(
            f"method={path}: {path.stem} is no name of a Python module; rename the file", setting="method"
        )
    spec = find_spec(path.stem)
    if spec is not None and (not spec.origin or Path(spec.origin).resolve() != path.resolve()):
        raise SettingValue(
            f"method={path}: Python has a module {path.stem} already, {spec.origin}; rename the file", setting="method"
        )


def _class_of(path: Path) -> ast.ClassDef:
    try:
        body = ast.parse(path.read_bytes()).body
    except OSError as error:
        raise FileMissing(f"method={path} cannot be read: {error.strerror}", setting="method") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise FileContent(
            f"method={path}{line} is no Python: {getattr(error, 'msg', error)}", setting="method"
        ) from error
    classes = [item for item in body if isinstance(item, ast.ClassDef) and item.bases]
    bases = {ast.unparse(base) for item in classes for base in item.bases}
    candidates = [item for item in classes if item.name not in bases and any(map(_is_dataclass, item.decorator_list))]
    if len(candidates) != 1:
        several = f"several: {', '.join(item.name for item in candidates)}" if candidates else "none"
        raise FileContent(
            f"method={path} must have one class `@dataclass(kw_only=True) class NAME(Policy)`, and has {several}; "
            "keep one, or choose by a file method/NAME.yaml with `_target_: MODULE.CLASS` and --config-dir",
            setting="method",
        )
    return candidates[0]


def _is_dataclass(decorator: ast.expr) -> bool:
    """True for the decorator of a dataclass whose objects can change."""
    function, options = (decorator.func, decorator.keywords) if isinstance(decorator, ast.Call) else (decorator, [])
    frozen = any(item.arg == "frozen" and ast.unparse(item.value) == "True" for item in options)
    return ast.unparse(function).rpartition(".")[2] == "dataclass" and not frozen
