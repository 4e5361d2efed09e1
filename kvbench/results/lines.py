"""Bounded, incremental reader of a journal's lines, packed ones too; `kvbench.results.sample` parses a line."""

import lzma
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import IO

from kvbench.results.sample import LONGEST_LINE, Key, Line, SampleRecord, answer_facts, key_of, read_line
from kvbench.rules.files import open_regular

PACKED = ".xz"  # what a packed journal's name has at its end
MOST_BYTES = 1 << 30  # of a packed journal, and of one line
MOST_LINES = 1 << 20  # of a journal
MOST_STREAMS = 1 << 10  # that a packed journal is made of, as `cat a.xz b.xz` makes them
MOST_FAULTS = 1 << 14  # lines of it that do not count: a file of newlines is small and long
PIECE_BYTES = 1 << 20  # that are read at a time
UNPACKER_BYTES = 1 << 28  # of memory for the unpacker; `xz -9` needs a quarter


def read_lines(pieces: Iterable[bytes], run: str, *, is_sealed: bool = True) -> Iterator[Line]:
    """Iterate over the lines of a journal, with one line in memory at a time.

    Args:
        pieces: The content, wherever it is cut.

    Raises:
        ValueError: It has more lines, or a longer one, than any journal.
    """
    begun, length, count, faults = b"", 0, 0, 0
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line = read_line(begun + end, run, is_sealed=is_sealed)
            begun, length, count, faults = b"", 0, count + 1, faults + (line.record is None)
            if count > MOST_LINES:
                raise ValueError(f"holds more than {MOST_LINES} lines")
            if faults > MOST_FAULTS:
                raise ValueError(f"holds more than {MOST_FAULTS} lines that are no records of its run")
            yield line
        length += len(rest)
        if length > MOST_BYTES:
            raise ValueError(f"has a line of more than {MOST_BYTES} bytes")
        if len(begun) <= LONGEST_LINE:  # else it is no record any more, whatever follows
            begun += rest
    # A line without its newline may look complete and yet lack its end (a number cut short parses), so it never counts.
    if begun:
        yield Line(content=begun, record=None, fault="torn line")


def journal_lines(path: Path, run: str, *, is_sealed: bool = True) -> Iterator[Line]:
    """Iterate over the lines of a journal, or of its packed copy where there is only that; none where there is neither.

    Runs that are kept for good may be packed: `xz samples.jsonl` makes `samples.jsonl.xz` of it, and `xz -d` undoes it.
    All streams of a packed one are read, as `xz -d` does.

    Raises:
        OSError: It is no regular file, cannot be read or unpacked, or is no journal of kvbench.
    """
    packed = path.with_name(path.name + PACKED)
    if not os.path.lexists(path):
        if not os.path.lexists(packed):
            return
        path = packed
    with open_regular(path) as file:
        try:
            yield from read_lines(_unpacked(file) if path is packed else _pieces(file), run, is_sealed=is_sealed)
        except lzma.LZMAError as error:
            raise OSError(f"{path} cannot be unpacked ({error}); remove it, or copy it again") from error
        except ValueError as error:
            raise OSError(f"{path} {error}, so it is no journal of kvbench; remove it, or copy it again") from error


def copy_lines(path: Path, numbers: Container[int], target: IO[bytes]) -> None:
    """Copy lines of a journal that is not packed, byte for byte however long they are; a torn one gets its line feed.

    Args:
        numbers: Numbers of the lines, from 1.
        target: File that they are written to.

    Raises:
        OSError: The journal cannot be read, or the target not written.
    """
    number, torn = 1, False
    with open_regular(path) as file:
        while part := file.readline(PIECE_BYTES):
            is_end = part.endswith(b"\n")
            if number in numbers:
                target.write(part)
                torn = not is_end
            number += is_end
    if torn:
        target.write(b"\n")


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """Stream the content of a packed file, which may expand to more than the memory."""
    count = streams = 0
    rest = b""
    while rest or not streams:
        if (streams := streams + 1) > MOST_STREAMS:
            raise ValueError(f"holds more than {MOST_STREAMS} packed streams")
        kind = lzma.FORMAT_AUTO if streams == 1 else lzma.FORMAT_XZ
        unpacker = lzma.LZMADecompressor(kind, memlimit=UNPACKER_BYTES)
        while not unpacker.eof:
            fed = b""
            if unpacker.needs_input:
                fed, rest = rest or file.read(PIECE_BYTES), b""
                if not fed:
                    raise ValueError("lacks its end")
            piece = unpacker.decompress(fed, PIECE_BYTES)
            if (count := count + len(piece)) > MOST_BYTES:
                raise ValueError(f"holds more than {MOST_BYTES} bytes")
            yield piece
        rest = _behind_padding(unpacker.unused_data, file)


def _behind_padding(read: bytes, file: IO[bytes]) -> bytes:
    """Bytes after a packed stream and its zero padding (a multiple of four); empty at the end of the file.

    Args:
        read: Bytes that were read already.
    """
    padding = 0
    while read or (read := file.read(PIECE_BYTES)):
        rest = read.lstrip(b"\0")
        padding, read = padding + len(read) - len(rest), rest
        if rest:
            break
    if padding % 4:
        raise ValueError(f"has {padding} zeros behind a packed stream, where they come four by four")
    return read


def read_samples(path: Path, run: str, *, sealed: bool = False) -> tuple[dict[Key, SampleRecord], int]:
    """Read a journal without changing it, also while a run is writing; a missing one is an empty one.

    Args:
        sealed: `RunRecord.sealed`: a line without a seal does not count. A journal that has no seal at all may else be
            of before there were seals, and its lines count as they are.

    Returns:
        Records by sample and repeat, with what their token ids say instead of these, and the number of lines that do
        not count.

    Raises:
        OSError: It is no regular file, cannot be read, or is no journal.
    """
    samples: dict[Key, SampleRecord] = {}
    loose: dict[Key, SampleRecord] = {}  # without a seal
    damaged = num_loose = 0
    for line in journal_lines(path, run, is_sealed=sealed):
        sealed |= b'"seal":' in line.content
        if line.record is None:
            damaged += 1
            continue
        num_loose += not line.is_sealed
        line.record["answer"] = answer_facts(line.record)
        line.record.pop("token_ids", None)
        (samples if line.is_sealed else loose).setdefault(key_of(line.record), line.record)
    return (samples, damaged + num_loose) if sealed else (loose, damaged)
