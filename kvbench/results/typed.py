"""Check that JSON has the types that a dataclass or a TypedDict declares: files on disk are untrusted."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any

LARGEST = 2.0**64  # a number of a record; seeds may be as large, and sums and squares of such numbers stay finite
DEEPEST = 50  # nested lists and objects; what kvbench writes has less than 10
MAX_BYTES = 1 << 28  # of a file of JSON; the longest, of a method with a model's own tables, has a tenth
Reader = Callable[[Any], Any]


class Misfit(ValueError):
    """A value does not have its declared type."""


class _Mismatch(Exception):
    """A misfit whose path is still being assembled, from the innermost key outwards."""

    def __init__(self, what: str, path: str = "") -> None:
        self.what, self.path = what, path


def read_json(content: bytes) -> Any:
    """Read strict JSON; a ValueError where it is none, says NaN or infinity, or is nested too deeply."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(content, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse(value: Any, kind: Any, where: str = "", *, null_numbers: bool = False) -> Any:
    """Check a JSON value against a type hint, and build the dataclasses that the hint names.

    Args:
        kind: A scalar type, Any, Literal, a union, `dict[str, X]`, `list[X]`, a dataclass or a TypedDict. A number in a
            TypedDict may be None: strict JSON has no word for one that is not finite.
        where: Name of the place, for the message.
        null_numbers: None is a float, and so is a truth value, as in the scores of a sample.

    Raises:
        Misfit: Names the place and what is wrong with it.
    """
    try:
        return _reader(kind, null_numbers)(value)
    except _Mismatch as error:
        path = f"{where}{error.path}" if where else error.path.removeprefix(".")
        whole = "the file" if dataclasses.is_dataclass(kind) else "the line"
        raise Misfit(f"{path or whole} {error.what}") from None


@functools.cache
def _reader(kind: Any, null_numbers: bool) -> Reader:
    """Checker of a value against a type hint, cached per hint: a line of a journal has a hundred values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _any
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, null_numbers)
    if origin is typing.Literal:
        return functools.partial(_literal, arguments)
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return _fields(kind)
    plain = origin or kind
    check, of = _plain(plain, null_numbers), arguments[-1] if arguments else Any
    if plain is dict:
        inner = _reader(of, null_numbers)
        return lambda value: _items(check(value), {}, inner)
    if plain is list:
        return _list(check, of, _reader(of, null_numbers))
    return check


def _any(value: Any) -> Any:
    """Refuse values nested so deeply that printing or comparing them might fail."""
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        inside = (x for item in level for x in (item.values() if isinstance(item, dict) else item))
        level = [item for item in inside if isinstance(item, dict | list)]
        if not level:
            return value
    raise _Mismatch("is nested too deeply")


def _literal(allowed: tuple, value: Any) -> Any:
    if value not in allowed:
        raise _Mismatch(f"is none of {', '.join(map(str, allowed))}")
    return value


def _union(kinds: tuple, null_numbers: bool) -> Reader:
    readers = [_reader(kind, null_numbers) for kind in kinds if kind is not type(None)]
    has_none = type(None) in kinds

    def read(value: Any) -> Any:
        if value is None and has_none:
            return None
        failure = _Mismatch("is empty")
        for reader in readers:
            try:
                return reader(value)
            except _Mismatch as error:
                failure = error
        raise failure

    return read


def _plain(kind: Any, null_numbers: bool) -> Reader:
    """Reader of a JSON class; a bool is no number."""
    takes_any_number, takes_bool = kind is float, kind is bool or (kind is float and null_numbers)
    is_number = kind in (int, float)

    def read(value: Any) -> Any:
        if type(value) is kind and (not is_number or -LARGEST <= value <= LARGEST):
            return value  # nearly all of a journal
        if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:  # NaN neither
            raise _Mismatch("is too large")
        if isinstance(value, bool):
            fits = takes_bool
        elif value is None and takes_any_number:
            fits = null_numbers
        else:
            fits = isinstance(value, int | float if takes_any_number else kind)
        if not fits:
            raise _Mismatch(f"is no {kind.__name__}")
        return value

    return read


def _items(value: dict, readers: dict[str, Reader], other: Reader) -> dict:
    """Read the value of each key with its reader, or with the default one."""
    result = {}
    for key, item in value.items():
        try:
            result[key] = readers.get(key, other)(item)
        except _Mismatch as error:
            error.path = f".{key}{error.path}"
            raise
    return result


def _list(check: Reader, kind: Any, inner: Reader) -> Reader:
    def read(value: Any) -> Any:
        if kind in (int, str) and all(type(item) is kind for item in check(value)):  # thousands of token ids
            return value
        items = []
        for index, item in enumerate(check(value)):
            try:
                items.append(inner(item))
            except _Mismatch as error:
                error.path = f"[{index}]{error.path}"
                raise
        return items

    return read


def _fields(kind: Any) -> Reader:
    """Reader of a TypedDict, which may have more keys and is returned unchanged, or of a dataclass, which is made."""
    is_made = dataclasses.is_dataclass(kind)
    readers = {name: _reader(hint, not is_made) for name, hint in typing.get_type_hints(kind).items()}
    if is_made:
        unset = dataclasses.MISSING
        needed = {i.name for i in dataclasses.fields(kind) if i.default is unset and i.default_factory is unset}
    else:
        needed = set(kind.__required_keys__)

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch("is no dict")
        if is_made:
            for key in value.keys() - readers.keys():
                raise _Mismatch("is new", f".{key}")
        if missing := needed - value.keys():
            raise _Mismatch("is missing", f".{min(missing)}")
        values = _items(value, readers, _any)
        return kind(**values) if is_made else value

    return read
