"""Does JSON have the types that a dataclass or a TypedDict declares? What lies on a disk may be anybody's."""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

DEEPEST = 50  # nested lists and objects; what kvbench writes has less than 10


class Misfit(ValueError):
    """A value is not what its place is declared to hold."""


def read_json(content: bytes) -> Any:
    """Read strict JSON; a ValueError where it is none, says NaN or infinity, or is nested too deeply."""
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parse(value: Any, kind: Any, where: str = "", *, null_numbers: bool = False) -> Any:
    """Check a JSON value against a type hint, and build the dataclasses that the hint names.

    Args:
        value: JSON types.
        kind: A scalar type, Any, Literal, a union, `dict[str, X]`, `list[X]`, a dataclass or a TypedDict. A number in a
            TypedDict may be None: strict JSON has no word for one that is not finite.
        where: Name of the place, for the message.
        null_numbers: None is a float.

    Returns:
        The value, with dataclasses in place of the objects that stand for them.

    Raises:
        Misfit: Names the place and what is wrong with it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        _check_depth(value, where)
        return value
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, arguments, where, null_numbers)
    if origin in (typing.Required, typing.NotRequired):
        return parse(value, arguments[0], where, null_numbers=null_numbers)
    if origin is typing.Literal:
        if value not in arguments:
            raise Misfit(f"{where} is none of {', '.join(map(str, arguments))}")
        return value
    if dict in (kind, origin):
        inner, found = arguments[1] if arguments else Any, _expect(value, dict, where)
        return {key: parse(item, inner, f"{where}.{key}", null_numbers=null_numbers) for key, item in found.items()}
    if list in (kind, origin):
        inner, items = arguments[0] if arguments else Any, _expect(value, list, where)
        if inner in (int, str) and all(type(item) is inner for item in items):  # thousands of token ids
            return items
        return [parse(item, inner, f"{where}[{place}]", null_numbers=null_numbers) for place, item in enumerate(items)]
    if typing.is_typeddict(kind):
        found = _expect(value, dict, where or "the line")
        _refuse_missing(kind.__required_keys__ - found.keys(), "")
        hints = _hints(kind)
        for key, item in found.items():
            parse(item, hints.get(key, Any), f"{where}.{key}" if where else key, null_numbers=True)
        return found
    if dataclasses.is_dataclass(kind):
        return _fit_dataclass(value, kind, where)
    if kind is float:
        # In a record of samples a score may be a truth value; a run has numbers only.
        if (value is None and null_numbers) or (_is_finite(value) and (null_numbers or not isinstance(value, bool))):
            return value
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise Misfit(f"{where} is no {kind.__name__}")


def _any_of(value: Any, kinds: tuple, where: str, null_numbers: bool) -> Any:
    if value is None and type(None) in kinds:
        return None
    error = Misfit(f"{where} is empty")
    for kind in kinds:
        if kind is not type(None):
            try:
                return parse(value, kind, where, null_numbers=null_numbers)
            except Misfit as found:
                error = found
    raise error


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise Misfit(f"{where} is no {kind.__name__}")
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _refuse_missing(names: Iterable[str], prefix: str) -> None:
    for name in sorted(names):
        raise Misfit(f"{prefix}{name} is missing")


def _fit_dataclass(value: Any, kind: Any, where: str) -> Any:
    found, hints, prefix = _expect(value, dict, where or "the file"), _hints(kind), f"{where}." if where else ""
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in found:
        if key not in fields:
            raise Misfit(f"{prefix}{key} is new")
    missing = dataclasses.MISSING
    needed = {name for name, item in fields.items() if item.default is missing and item.default_factory is missing}
    _refuse_missing(needed - found.keys(), prefix)
    return kind(**{key: parse(item, hints[key], f"{prefix}{key}") for key, item in found.items()})


def _check_depth(value: Any, where: str) -> None:
    """Refuse what is nested so deeply that printing or comparing it might fail."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise Misfit(f"{where} is nested too deeply")
