"""Python literals as bytes, between the cage and the process that trusts nothing in it; never pickle.

Both sides use this file: the parent imports it, the child gets its text. So it needs the standard library only. One
value is a tag and, after a length or count in ASCII digits and a colon, its content: `N`, `T`, `F` (None, True,
False); `i`, `f`, `c`, `s`, `b` (int in hexadecimal, float and complex as `float.hex`, UTF-8 text, bytes), each with a
length in bytes; `l`, `t`, `e`, `z`, `d` (list, tuple, set, frozenset, dict), each with a count of entries.
"""

TYPE_CHECKING = False  # a type checker takes it for True; the caged side imports no more than it runs
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_DEPTH = 60
MAX_NODES = 2_000_000


class WireError(ValueError):
    """A value that cannot be written, or bytes that are no value; the message says why."""


def encode(value: object, *, max_bytes: int) -> bytes:
    """Write a value for `decode`.

    Subclasses are written as the builtin they hold: their methods, `__eq__` for one, are neither called nor sent.

    Raises:
        WireError: Another type inside, nested deeper than 60 levels, or larger than `max_bytes`.
    """
    parts: list[bytes] = []
    room = [max_bytes]
    _write(value, parts, room, 0)
    return b"".join(parts)


_bases = type.__dict__["__mro__"].__get__


def _put(parts: list[bytes], room: list[int], *pieces: bytes) -> None:
    for piece in pieces:
        room[0] -= len(piece)
        parts.append(piece)
    if room[0] < 0:
        raise WireError("the value is too large")


def _write(value: object, parts: list[bytes], room: list[int], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"the value is nested deeper than {MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return _put(parts, room, {None: b"N", True: b"T", False: b"F"}[value])
    if type(value) is int:  # the most frequent, written without further checks
        content = b"%x" % value
        return _put(parts, room, b"i%d:%s" % (len(content), content))
    # The type itself is checked, not the value: `__class__` can lie, the type's base classes cannot.
    bases = _bases(type(value))
    for base, tag, items in _CONTAINERS:
        if base in bases:
            entries = list(items(value))
            _put(parts, room, b"%s%d:" % (tag, len(entries)))
            for entry in entries:
                _write(entry, parts, room, depth + 1)
            return None
    for base, tag, text in _SCALARS:
        if base in bases:
            content = text(value)
            return _put(parts, room, b"%s%d:" % (tag, len(content)), content)
    raise WireError(f"unsupported type {type(value).__name__[:80]}")


def _flat(value: dict) -> list:
    return [part for pair in dict.items(value) for part in pair]


def _hex(value: float) -> bytes:
    return float.hex(value).encode()


# Type, tag, and what gives the entries or the content of a value of that type, subclasses included.
_CONTAINERS: "tuple[tuple[type, bytes, Callable[[Any], Iterable[object]]], ...]" = (
    (list, b"l", list.__iter__),
    (tuple, b"t", tuple.__iter__),
    (set, b"e", set.__iter__),
    (frozenset, b"z", frozenset.__iter__),
    (dict, b"d", _flat),
)
_SCALARS: "tuple[tuple[type, bytes, Callable[[Any], bytes]], ...]" = (
    # Called on the builtin type, these give the held value whatever a subclass overrides.
    (int, b"i", lambda value: b"%x" % int.__add__(value, 0)),
    (float, b"f", _hex),
    (complex, b"c", lambda value: _hex(complex.real.__get__(value)) + b" " + _hex(complex.imag.__get__(value))),
    (str, b"s", lambda value: str.encode(value, "utf-8", "surrogatepass")),
    (bytes, b"b", lambda value: bytes.__getitem__(value, slice(None))),
)


def decode(data: bytes, *, max_nodes: int = MAX_NODES) -> object:
    """Read a value of builtin types that someone hostile may have written.

    Args:
        data: One value, nothing after it.
        max_nodes: Most values that it may hold, the outer one included.

    Raises:
        WireError: No value, too deep, too many parts, or keys made to collide.
    """
    reader = _Reader(data, max_nodes)
    try:
        value = reader.read(0)
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, IndexError) as error:
        raise WireError(f"malformed value: {error}") from None
    if reader.position != len(data):
        raise WireError("bytes follow the value")
    return value


class _Reader:
    def __init__(self, data: bytes, max_nodes: int) -> None:
        self.data, self.position, self.left = data, 0, max_nodes

    def read(self, depth: int) -> object:
        self.left -= 1
        if self.left < 0:
            raise WireError("the value has too many parts")
        if depth > MAX_DEPTH:
            raise WireError(f"the value is nested deeper than {MAX_DEPTH} levels")
        tag = self.data[self.position : self.position + 1]
        self.position += 1
        if tag in (b"N", b"T", b"F"):
            return {b"N": None, b"T": True, b"F": False}[tag]
        size = self.size()
        if tag in (b"l", b"t", b"e", b"z", b"d"):
            if size > self.left:
                raise WireError("the value has too many parts")
            return self.container(tag, [self.read(depth + 1) for _ in range(size)])
        content = self.data[self.position : self.position + size]
        if len(content) != size:
            raise WireError("the value is cut off")
        self.position += size
        return _scalar(tag, content)

    def size(self) -> int:
        end = self.data.find(b":", self.position, self.position + 12)
        digits = self.data[self.position : max(end, 0)]
        if end < 0 or not digits.isdigit():
            raise WireError("a length is missing")
        self.position = end + 1
        return int(digits)

    @staticmethod
    def container(tag: bytes, entries: list) -> object:
        if tag == b"l":
            return entries
        if tag == b"t":
            return tuple(entries)
        keys = entries[::2] if tag == b"d" else entries
        # Text and bytes hash with a secret; numbers do not, and thousands with one hash would stall the trusted side.
        if len(keys) > 64 and len({hash(key) for key in keys}) < len(keys) // 2:
            raise WireError("the keys were made to collide")
        if tag == b"d":
            if len(entries) % 2:
                raise WireError("a key has no value")
            return dict(zip(keys, entries[1::2], strict=True))
        return set(entries) if tag == b"e" else frozenset(entries)


def _scalar(tag: bytes, content: bytes) -> object:
    if tag == b"i":
        return int(content, 16)
    if tag == b"f":
        return float.fromhex(content.decode("ascii"))
    if tag == b"c":
        real, imaginary = content.decode("ascii").split(" ")
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if tag == b"s":
        return content.decode("utf-8", "surrogatepass")
    if tag == b"b":
        return content
    raise WireError(f"unknown tag {tag!r}")
