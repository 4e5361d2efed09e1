"""Digests of outputs that are too large to send: two values have one digest where Python calls them equal.

Its text goes into the cage after a program, so it needs the standard library only. A program could change what it
computes there; but the digest that is right stays outside, and is as hard to guess as the value.
"""

import hashlib
import math
import os

TYPE_CHECKING = False  # a type checker takes it for True; the caged side imports no more than it runs
if TYPE_CHECKING:
    from collections.abc import Iterator

_AS_WRITTEN = {int, str, type(None)}
_NO_NUMBER = os.urandom(16).hex()  # not a number is equal to nothing, in another process least of all


def digest(value: object) -> list[object]:
    """Digest a value of the types of `wire.encode`: SHA-256 in hexadecimal digits, and whether it is made of floats.

    Raises:
        TypeError: Another type inside.
    """
    hashed = hashlib.sha256()
    for piece in _pieces(value):
        hashed.update(piece.encode("utf-8", "surrogatepass"))
    entries = value if isinstance(value, list | tuple) and value else [value]
    return [hashed.hexdigest(), all(isinstance(entry, float) for entry in entries)]


def _pieces(value: object) -> "Iterator[str]":
    """The text of `_written`; that of a long list in parts, which together would need much memory."""
    if not isinstance(value, list | tuple) or set(map(type, value)) <= _AS_WRITTEN:
        yield _written(value)
        return
    yield _opening(value) + "["
    for number, entry in enumerate(value):
        yield ", " + _written(entry) if number else _written(entry)
    yield "]"


def _opening(value: object) -> str:
    return "t" if isinstance(value, tuple) else "l"


def _written(value: object) -> str:
    """A text that equal values share."""
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= _AS_WRITTEN:
            try:
                return _opening(value) + repr([*value])
            except ValueError:
                pass  # an integer of so many digits that Python does not write it
        return _opening(value) + "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_written, value))) + "}"
    if isinstance(value, dict):
        return "d{" + ", ".join(sorted(f"{_written(key)}: {_written(entry)}" for key, entry in value.items())) + "}"
    if value is None or isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, int):
        try:
            return int.__repr__(value + 0)
        except ValueError:
            return hex(value)
    if isinstance(value, float):
        if value.is_integer():
            return _written(int(value))
        return float.__repr__(value) if not math.isnan(value) else _NO_NUMBER
    if isinstance(value, complex):
        return f"({_written(value.real)} {_written(value.imag)})" if value.imag else _written(value.real)
    raise TypeError(f"unsupported type {type(value).__name__}")
