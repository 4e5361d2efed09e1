"""Reader of the header of a GGUF file, within the file's own bounds: no weights, no library, no memory map.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from kvbench.models.cache import file_state

_TEXT, _LIST = 8, 9
_KINDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS = 1024  # most numbers of a list that are kept, such as the heads of each layer
_LARGEST = 1 << 16  # bytes of a text that is kept
_LEAST = 13  # bytes of a field, and fewer than those of a tensor
_MOST_FIELDS, _MOST_TENSORS = 10_000, 100_000  # files have 20 to 60, and 200 to 13,000: readers take a millisecond each


@dataclass(frozen=True)
class GgufTensor:
    """Name of a tensor, its elements, the number of its type in ggml, and the offset of its data.

    The offset is in bytes after the start of all tensor data.
    """

    name: str
    elements: int
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """The fields and the tensors of a file."""

    fields: Mapping[str, Any]
    """Numbers, short texts and short lists of numbers by their keys; what is longer is not kept."""
    parameters: int
    """Elements of all tensors together."""
    tensors: tuple[GgufTensor, ...]
    data_at: int
    """The byte of the file at which the tensors' data begin."""

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

    def of_model(self, key: str) -> Any:
        """A field of the file's architecture, such as `block_count`; None where there is none."""
        return self.fields.get(f"{self.fields.get('general.architecture')}.{key}")


class _Reader:
    """Reads values from a stream, and never a byte more than the file has."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.left = os.fstat(stream.fileno()).st_size

    def skip(self, count: int) -> None:
        self._take(count)
        self.stream.seek(count, os.SEEK_CUR)

    def need(self, count: int) -> None:
        if count > self.left:
            raise ValueError("its header names more than the file holds")

    def _take(self, count: int) -> None:
        self.need(count)
        self.left -= count

    def number(self, kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        self._take(size)
        return struct.unpack(f"<{kind}", self.stream.read(size))[0]

    def text(self) -> str | None:
        """Text of a value; None of one that is too long to be kept."""
        length = self.number("Q")
        if length > _LARGEST:
            self.skip(length)
            return None
        self._take(length)
        return self.stream.read(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A field's value; None where it is not kept."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(self._layout(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _TEXT:
            for _ in range(count):
                self.skip(self.number("Q"))
            return None
        layout = self._layout(inner)
        if count > _NUMBERS:
            self.skip(count * struct.calcsize(f"<{layout}"))
            return None
        return [self.number(layout) for _ in range(count)]

    def _layout(self, kind: int) -> str:
        if kind not in _KINDS:
            raise ValueError(f"its header has a value of the unknown kind {kind}")
        return _KINDS[kind]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file, once while the file is unchanged: its vocabulary alone takes a third of a second.

    Raises:
        ValueError: The file is no GGUF file, or its header does not fit in it.
    """
    return _read_header(tuple(file_state(path)))


@lru_cache(maxsize=4)
def _read_header(state: tuple[str | int, ...]) -> GgufHeader:
    with Path(str(state[0])).open("rb") as stream:
        reader = _Reader(stream)
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin as a GGUF file does")
        reader.left -= 4
        if (version := reader.number("I")) not in (2, 3):
            raise ValueError(f"it has version {version} of the format, and 2 and 3 are read")
        num_tensors, num_fields = reader.number("Q"), reader.number("Q")
        for count, most, what in ((num_fields, _MOST_FIELDS, "keys"), (num_tensors, _MOST_TENSORS, "tensors")):
            reader.need(count * _LEAST)
            if count > most:
                raise ValueError(f"its header says that it has {count} {what}, and {most} are the most that are read")
        fields = {}
        for _ in range(num_fields):
            key, kind = reader.text(), reader.number("I")
            if (value := reader.value(kind)) is not None:
                fields[key or ""] = value
        tensors = []
        for _ in range(num_tensors):
            name, dimensions = reader.text(), reader.number("I")
            if dimensions > 4:
                raise ValueError(f"its tensor {name} has {dimensions} dimensions, and ggml has 4 at most")
            elements = math.prod(reader.number("Q") for _ in range(dimensions))
            tensors.append(GgufTensor(name or "", elements, reader.number("I"), reader.number("Q")))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment={alignment!r:.100} is no power of two")
        data_at = -(-stream.tell() // alignment) * alignment
    parameters = sum(tensor.elements for tensor in tensors)
    return GgufHeader(fields=fields, parameters=parameters, tensors=tuple(tensors), data_at=data_at)
