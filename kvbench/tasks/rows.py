"""Rows of a file, one JSON object a line; broken ones are set aside by file and line."""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.errors import FileContent
from kvbench.rules import is_half

# Takes the JSON object of one line; gives the row, or raises ValueError with the reason why it is none.
RowCheck = Callable[[dict[str, Any]], Mapping[str, Any]]
ID_FIELDS = ("_id", "id", "task_id", "unique_id")  # LongBench, AIME, EvalPlus, MATH-500


class Rows(list[dict[str, Any]]):
    """Checked rows of one subset, in the order of the file, with the `features` that lm-eval reads of a data set.

    Args:
        rows: The rows that passed the check; `index` is the position in the file, so ids do not shift when a row is set
            aside.
        quarantined: Rows that did not: dicts with `file`, `line` (from 1) and `reason`.
        copies: Rows that are, or are called, the same as an earlier one, as in `quarantined`; they are among the rows.
        file: Name of the file for messages.

    `unused` has the names of fields that nothing reads, where a reader looks for them.
    """

    unused: Sequence[str] = ()

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        *,
        quarantined: Sequence[dict] = (),
        copies: Sequence[dict] = (),
        file: str = "",
    ) -> None:
        super().__init__(rows)
        self.quarantined, self.copies, self.file = list(quarantined), list(copies), file

    def made_into(self, documents: Iterable[dict[str, Any]], *, skipped: Sequence[dict] = ()) -> "Rows":
        """Replace the rows by documents with the same `index`; `skipped` rows of other files were set aside, too."""
        return Rows(documents, quarantined=[*self.quarantined, *skipped], copies=self.copies, file=self.file)

    def set_aside(self, index: int, reason: str) -> dict:
        """The entry of `quarantined` for the row with this index, when it cannot be used."""
        return {"file": self.file, "line": index + 1, "reason": reason}

    @property
    def features(self) -> dict[str, None]:
        """The names of the fields."""
        return dict.fromkeys(self[0] if self else ())


class Source(NamedTuple):
    """The lines of one subset, without line breaks, and the name of their file for messages."""

    name: str
    lines: Iterable[bytes]
    path: Path | None = None  # the file that holds them, which may be an archive


def file_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, split at line feeds only: some rows hold other Unicode line separators."""
    with path.open("rb") as stream:
        yield from stream_lines(stream)


def stream_lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of an open file, as `file_lines`."""
    for line in stream:
        yield line.removesuffix(b"\n")


def read_rows(source: Source, check: RowCheck, max_line_bytes: int | None = None) -> Rows:
    """Read and check every row; one broken row does not stop the others, and a longer line is none.

    Returns:
        The good rows, each with its `index` (0-based line of the file), the broken ones, and which of the good ones are
        copies: the official scores count every row, so they stay, but nobody should count twice unknowingly.

    Raises:
        ValueError: the file has no rows, or all of them are broken.
    """
    rows: list[dict[str, Any]] = []
    quarantined: list[dict] = []
    copies: list[dict] = []
    seen: dict[tuple[str, object], int] = {}
    for index, line in enumerate(source.lines):
        line = line.removeprefix(codecs.BOM_UTF8) if not index else line  # some editors put it before the first row
        if not line.strip():
            continue
        try:
            if max_line_bytes is not None and len(line) > max_line_bytes:
                raise ValueError(f"a line of {len(line)} bytes; a row may have {max_line_bytes}")
            row = _parse(line)
            checked = {**check(row), "index": index}
            if re.search(rb"\\u[dD][89a-fA-F]", line) and is_half(json.dumps(row, ensure_ascii=False)):
                raise ValueError("a text holds half of a character pair, which is no UTF-8")
            rows.append(checked)
            for what, name in _names(line, row):
                if (earlier := seen.setdefault((what, name), index)) != index:
                    reason = f"the same {what} as in line {earlier + 1}"
                    copies.append({"file": source.name, "line": index + 1, "reason": reason})
                    break
        except ValueError as error:
            quarantined.append({"file": source.name, "line": index + 1, "reason": str(error)})
    if not rows:
        if not quarantined:
            raise FileContent(f"{source.name} holds no rows; fetch or copy it again")
        first = quarantined[0]
        raise FileContent(
            f"all {len(quarantined)} rows of {source.name} are broken; the first, line {first['line']}: "
            f"{first['reason']}; mend the rows, or fetch the file again"
        )
    return Rows(rows, quarantined=quarantined, copies=copies, file=source.name)


def _names(line: bytes, row: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Keys that identify a row of its file: its content, and its id where it has one."""
    yield "row", hashlib.sha256(line.strip()).digest()
    for key in ID_FIELDS:
        if isinstance(value := row.get(key), str | int):
            yield key, value


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        cut = "" if error.doc.rstrip().endswith("}") else " (the line seems to be cut off)"
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}{cut}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, this is a {type(row).__name__}")
    return row


def text_field(row: Mapping[str, object], *names: str, required: bool = True) -> str:
    """Read a text that a row may call by several names, best first; one that is not `required` is empty when missing.

    Raises:
        ValueError: The field is missing, empty or no text.
    """
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value.strip()):
        raise ValueError(f"field {names[0]} must be a text, it is {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """The kind of thing that a field holds in place of a text, for messages."""
    return "missing" if value is None else "empty" if isinstance(value, str) else type(value).__name__
