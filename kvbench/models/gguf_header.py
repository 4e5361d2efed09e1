"""What the header of a GGUF file says, read within the file's own bounds: no weights, no library, no memory map.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

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


@dataclass(frozen=True)
class GgufHeader:
    """The fields and the tensors of a file."""

    fields: Mapping[str, Any]
    """Numbers, short texts and short lists of numbers by their keys; what is longer is not kept."""
    parameters: int
    """Elements of all tensors together."""
    num_tensors: int

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

    def _take(self, count: int) -> None:
        if count > self.left:
            raise ValueError("its header names more than the file holds")
        self.left -= count

    def number(self, kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        self._take(size)
        return struct.unpack(f"<{kind}", self.stream.read(size))[0]

    def text(self) -> str | None:
        """None of one that is too long to be kept."""
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
    """Read the header of a file, once while the file is as it is: its vocabulary alone takes a third of a second.

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
        fields = {}
        for _ in range(num_fields):
            key, kind = reader.text(), reader.number("I")
            if (value := reader.value(kind)) is not None:
                fields[key or ""] = value
        parameters = 0
        for _ in range(num_tensors):
            reader.text()
            elements = 1
            for _ in range(min(reader.number("I"), 4)):  # ggml has no tensor of more dimensions
                elements *= reader.number("Q")
            parameters += elements
            reader.skip(12)  # its kind and its place
    return GgufHeader(fields=fields, parameters=parameters, num_tensors=num_tensors)
