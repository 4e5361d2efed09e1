"""Checks that JSON has the types that a dataclass or a TypedDict declares. What lies on a disk may be anybody's."""

import dataclasses
import functools
import json
import types
import typing
from typing import Any

LARGEST = 2.0**64  # a number of a record; seeds may be as large, and sums and squares of such numbers stay finite
DEEPEST = 50  # nested lists and objects; what kvbench writes has less than 10
MAX_BYTES = 1 << 28  # of a file of JSON; the longest, of a method with a model's own tables, has a tenth
_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple, bool]:
    """What a hint is made of, its arguments, and whether it has fields; asked once per hint, not per value."""
    has_fields = typing.is_typeddict(kind) or dataclasses.is_dataclass(kind)
    return typing.get_origin(kind), typing.get_args(kind), has_fields


class Misfit(ValueError):
    """A value is not what its place is declared to hold."""


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
    if type(value) is kind and (kind in (str, bool) or (kind in (int, float) and -LARGEST <= value <= LARGEST)):
        return value  # nearly all of a journal
    origin, arguments, has_fields = _form(kind)
    if kind is Any:
        _check_depth(value, where)
        return value
    if origin in (typing.Required, typing.NotRequired):
        return parse(value, arguments[0], where, null_numbers=null_numbers)
    if origin in (typing.Union, types.UnionType):
        return _any_of(value, arguments, where, null_numbers)
    if origin is typing.Literal:
        if value not in arguments:
            raise Misfit(f"{where} is none of {', '.join(map(str, arguments))}")
        return value
    if has_fields:
        return _of_fields(value, kind, where)
    plain = origin or kind
    if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:  # NaN neither
        raise Misfit(f"{where} is too large")
    if kind is float:
        is_number = isinstance(value, int | float) and (null_numbers or type(value) is not bool)
        fits = is_number or (value is None and null_numbers)
    else:
        fits = isinstance(value, plain) and (plain is bool or type(value) is not bool)
    if not fits:
        raise Misfit(f"{where} is no {plain.__name__}")
    if plain is dict:
        inner = arguments[1] if arguments else Any
        return {key: parse(item, inner, f"{where}.{key}", null_numbers=null_numbers) for key, item in value.items()}
    if plain is list:
        inner = arguments[0] if arguments else Any
        if inner in (int, str) and all(type(item) is inner for item in value):  # thousands of token ids
            return value
        return [parse(item, inner, f"{where}[{place}]", null_numbers=null_numbers) for place, item in enumerate(value)]
    return value


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


def _of_fields(value: Any, kind: Any, where: str) -> Any:
    """A TypedDict, which may have more keys and stays as it is, or a dataclass, which is made."""
    hints, prefix, is_made = _hints(kind), f"{where}." if where else "", dataclasses.is_dataclass(kind)
    if not isinstance(value, dict):
        raise Misfit(f"{where or ('the file' if is_made else 'the line')} is no dict")
    if not is_made:
        needed = kind.__required_keys__
    else:
        unset = dataclasses.MISSING
        needed = {i.name for i in dataclasses.fields(kind) if i.default is unset and i.default_factory is unset}
        for key in value.keys() - hints.keys():
            raise Misfit(f"{prefix}{key} is new")
    for key in sorted(needed - value.keys()):
        raise Misfit(f"{prefix}{key} is missing")
    found = {k: parse(v, hints.get(k, Any), f"{prefix}{k}", null_numbers=not is_made) for k, v in value.items()}
    return kind(**found) if is_made else value


def _check_depth(value: Any, where: str) -> None:
    """Refuse what is nested so deeply that printing or comparing it might fail."""
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        inside = (x for item in level for x in (item.values() if isinstance(item, dict) else item))
        level = [item for item in inside if isinstance(item, dict | list)]
        if not level:
            return
    raise Misfit(f"{where} is nested too deeply")
