"""Weights in parts: `model.safetensors.part000` and further ones, with a SHA256SUMS file of `sha256sum`."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvbench.errors import FileContent, FileMissing

SUMS = "SHA256SUMS"
PIECE_BYTES = 1 << 20


def join(folder: Path) -> None:
    """Check the files of a folder against its SHA256SUMS, and join those that are there in parts.

    A folder without that list is unchanged.

    Raises:
        ValueError: A file is damaged, or parts are missing; the message names them.
    """
    sums = _read(folder / SUMS)
    for name, digest in sums.items():
        parts = sorted(one for one in sums if one.startswith(f"{name}.part"))
        path = folder / name
        if ".part" in name or (path.is_file() and _digest(_pieces(path)) == digest):
            continue
        if not parts:
            raise FileContent(f"{path} is missing or damaged: {SUMS} has another SHA-256; copy it again")
        if missing := [part for part in parts if not (folder / part).is_file()]:
            raise FileMissing(f"{path} lacks {len(missing)} of its {len(parts)} parts: {', '.join(missing)}; copy them")
        for part in parts:
            if _digest(_pieces(folder / part)) != sums[part]:
                raise FileContent(f"{folder / part} is damaged: {SUMS} has another SHA-256; copy it again")
        whole = folder / f".{name}.joining"
        with whole.open("wb") as file:
            copied = _digest(_copied(folder, parts, file.write))
        if copied != digest:
            whole.unlink()
            raise FileContent(f"{path}: its parts together have another SHA-256 than {SUMS} says; split it again")
        os.replace(whole, path)


def _read(path: Path) -> dict[str, str]:
    """Read a SHA256SUMS file: name -> digest."""
    digests = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        read = re.fullmatch(r"([0-9a-f]{64}) [ *]([^/\\]+)", line)
        if read is None or read[2] in (".", ".."):
            raise FileContent(
                f"{path}: {ascii(line[:80])} is no line of sha256sum in this folder; write it again there"
            )
        digests[read[2]] = read[1]
    return digests


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _copied(folder: Path, parts: Sequence[str], write: Callable[[bytes], object]) -> Iterator[bytes]:
    """Yield the concatenated content of parts, and write it too."""
    for part in parts:
        for piece in _pieces(folder / part):
            write(piece)
            yield piece


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
