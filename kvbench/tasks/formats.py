"""Rows of a file in the formats that data come in: one way in for every file that a setting names, or a folder holds.

JSON lines, one JSON document, Parquet and Arrow; JSON packed by gzip, bzip2 or xz; and members of zip archives.
"""

import bz2
import gzip
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn, cast

from kvbench.errors import FileContent
from kvbench.tasks.rows import Source, file_lines, stream_lines

PACKERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda stream: cast(IO[bytes], gzip.GzipFile(fileobj=stream)),
    ".bz2": lambda stream: cast(IO[bytes], bz2.BZ2File(stream)),
    ".xz": lambda stream: cast(IO[bytes], lzma.LZMAFile(stream)),  # noqa: SIM115
}
JSON = (".jsonl", ".json")
FORMATS = (*JSON, ".parquet", ".arrow")
ARCHIVE = ".zip"
READ = f"{', '.join(FORMATS)}, {' or '.join(JSON)} packed as {', '.join(PACKERS)}, or in a {ARCHIVE}"
# Formats that are not read, and the missing step.
UNPACK = (".tar", ".tgz", ".zst", ".lz4", ".7z", ".rar", *PACKERS)
CONVERT = (".csv", ".tsv", ".txt", ".yaml", ".yml", ".xml", ".xlsx", ".feather", ".pkl", ".pt", ".npy")
_SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.parquet")


def is_rows(name: str) -> bool:
    """Tell whether a file's name says a format whose rows are read."""
    path = PurePosixPath(name.lower())
    return path.suffix in FORMATS or (path.suffix in PACKERS and PurePosixPath(path.stem).suffix in JSON)


def source_of(path: Path, stems: Sequence[str] = (), *, one_row: bool = False) -> Source | None:
    """The rows of a file, by what its name ends in; a name that ends otherwise is of JSON lines.

    Args:
        stems: Of a zip archive, names that the member may have without its ending, best first; its only member with
            rows where empty.
        one_row: A JSON document that is one object is a row; else it is none of a benchmark's lists.

    Returns:
        The rows; None for an archive without such a member.

    Raises:
        ValueError: An archive cannot be read, or has several members to choose from.
    """
    if path.suffix.lower() != ARCHIVE:
        return Source(str(path), lines_of(path, one_row), path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if is_rows(name) and not name.startswith("__MACOSX/")]
    except (zipfile.BadZipFile, OSError) as error:
        raise FileContent(f"{path} cannot be read as a zip archive ({error}); delete it and fetch it again") from error
    if stems:
        wanted = [f"{stem}{ending}" for stem in stems for ending in _endings()]
        members = [name for want in wanted for name in members if PurePosixPath(name).name == want]
    elif len(members) > 1:
        listed = ", ".join(members[:5])
        raise FileContent(f"{path} holds {len(members)} files with rows ({listed}); unpack it and name one of them")
    return Source(f"{path}:{members[0]}", _member_lines(path, members[0], one_row), path) if members else None


def find_source(folder: Path, stems: Sequence[str], *, one_row: bool = False) -> Source | None:
    """The rows of the first file of a folder that has one of some names, in any format; archives come last.

    Args:
        one_row: See `source_of`.

    Raises:
        ValueError: Parts of a Parquet file are missing, or an archive cannot be read.
    """
    for stem in stems:
        for path in (folder / f"{stem}{ending}" for ending in _endings()):
            if path.is_file():
                return source_of(path, one_row=one_row)
        parts = [path for path in sorted(folder.glob(f"{stem}-*.parquet")) if _SHARD.fullmatch(path.name[len(stem) :])]
        if parts:
            return _of_parts(parts)
    for path in sorted(folder.glob(f"*{ARCHIVE}")):
        if path.is_file() and (source := source_of(path, stems, one_row=one_row)):
            return source
    return None


def unread(folder: Path, stems: Sequence[str]) -> dict[Path, str]:
    """The files of a folder that might hold rows, cannot be read, and the step that is missing for each.

    Args:
        stems: Names, without their ending, that are looked for: an archive counts whatever it is called.
    """
    steps = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        ending, has_stem = path.suffix.lower(), any(path.name.startswith(f"{stem}.") for stem in stems)
        if not path.is_file():
            continue
        if ending in UNPACK and (has_stem or not is_rows(path.name)):
            steps[path] = "unpack it"
        elif ending == ARCHIVE:
            steps[path] = f"it holds no {stems[0]}.jsonl"
        elif ending in CONVERT and has_stem:
            steps[path] = "write its rows as JSON lines"
    return steps


def lines_of(path: Path, one_row: bool = False) -> Iterator[bytes]:
    """The rows of a file that is no archive, each as a line of JSON without its line break.

    Raises:
        ValueError: It is not what its name says.
    """
    ending = path.suffix.lower()
    if ending == ".arrow":
        import datasets

        with _named(str(path), "Arrow"):
            yield from _dumped(str(path), datasets.Dataset.from_file(str(path)))
    elif not is_rows(path.name) or ending == ".jsonl":
        yield from file_lines(path)
    else:
        with path.open("rb") as stream:
            yield from _lines_in(str(path), path.name, stream, one_row)


def read_json(path: Path) -> Any:
    """The one JSON document of a file, which may be packed.

    Raises:
        OSError, ValueError: It cannot be read, or is none.
    """
    with path.open("rb") as stream:
        packer = PACKERS.get(path.suffix.lower())
        with _named(str(path), "JSON"):
            return json.loads((packer(stream) if packer else stream).read())


def _endings() -> Iterator[str]:
    """Endings of the names of files with rows, best first."""
    yield from FORMATS
    for ending in JSON:
        yield from (f"{ending}{packed}" for packed in PACKERS)


def _of_parts(paths: Sequence[Path]) -> Source:
    """The rows of a Parquet file in parts, as the hub cuts large ones."""
    whole = int(paths[0].stem.rpartition("-")[2])
    if len(paths) != whole:
        raise FileContent(
            f"{paths[0].parent} holds {len(paths)} of the {whole} parts of {paths[0].name}; copy them all"
        )
    return Source(str(paths[0]), chain.from_iterable(map(lines_of, paths)), paths[0])


def _member_lines(archive: Path, member: str, one_row: bool) -> Iterator[bytes]:
    name = f"{archive}:{member}"
    with _named(name, "zip archive"), zipfile.ZipFile(archive) as opened, opened.open(member) as stream:
        yield from _lines_in(name, member, stream, one_row)


def _lines_in(name: str, file_name: str, stream: IO[bytes], one_row: bool) -> Iterator[bytes]:
    """The rows of an open file, whose name says its format."""
    path = PurePosixPath(file_name.lower())
    if path.suffix in PACKERS:
        with _named(name, path.suffix.removeprefix(".")):
            yield from _lines_in(name, path.stem, PACKERS[path.suffix](stream), one_row)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        with _named(name, "Parquet"):
            parts = pyarrow.parquet.ParquetFile(stream).iter_batches()
            yield from _dumped(name, chain.from_iterable(part.to_pylist() for part in parts))
    elif path.suffix == ".json":
        yield from _document(name, stream.read(), one_row)
    elif path.suffix == ".arrow":
        raise FileContent(f"{name} is an Arrow file in an archive, where it cannot be read; unpack it")
    else:
        yield from stream_lines(stream)


def _document(name: str, content: bytes, one_row: bool) -> Iterator[bytes]:
    """The rows of a `.json` file: one list of them, one row over several lines, or JSON lines."""
    lines = content.removesuffix(b"\n").split(b"\n")
    full = [line for line in lines if line.strip()]
    if len(full) > 1 and _is_json(full[0]):
        yield from lines
        return
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from lines  # each is named by what is wrong with it
            return
        raise FileContent(f"{name} cannot be read as JSON ({error}); fetch or copy it again") from error
    if not isinstance(rows, list) and not one_row:
        raise FileContent(f"{name} must be a list of rows, it is {type(rows).__name__}; fetch or copy it again")
    if len(full) == 1 and isinstance(rows, dict):
        yield from lines
    else:
        yield from _dumped(name, rows if isinstance(rows, list) else [rows])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _dumped(name: str, rows: Iterable[Any]) -> Iterator[bytes]:
    def refuse(value: object) -> NoReturn:
        raise FileContent(
            f"{name} has a value of type {type(value).__name__}, which is no JSON; write its rows as JSON"
        )

    for row in rows:
        yield json.dumps(row, default=refuse).encode()


@contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    """Name the file in what its reader raises."""
    broken = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RecursionError, NotImplementedError)
    try:
        yield
    except (*broken, RuntimeError, ValueError) as error:
        if str(error).startswith(name):
            raise
        raise FileContent(f"{name} cannot be read as {kind} ({error}); fetch or copy it again") from error
