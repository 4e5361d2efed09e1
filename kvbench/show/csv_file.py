"""The one writer of CSV: numbers stay numbers, and no text becomes a formula where a spreadsheet opens the file."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from kvbench.show.text import LINE_LENGTH, safe

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet computes

Cell = str | int | float | None


def csv_bytes(headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> bytes:
    """A table as CSV, under kvbench's names of the columns.

    Numbers are written unrounded, None as nothing. A text is one visible line; one that would be a formula gets an
    apostrophe in front, the convention of spreadsheets.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return buffer.getvalue().encode()


def csv_row(**cells: Cell) -> dict[str, Cell]:
    """A row of a CSV, or a part of one, by its headings."""
    return cells


def records_csv(records: Sequence[Mapping[str, Cell]]) -> bytes:
    """Records of one kind as CSV; the headings are the keys of the first."""
    return csv_bytes(list(records[0]), [list(record.values()) for record in records])


def _text(cell: str) -> str:
    guarded = f"'{cell}" if cell.lstrip(" ").startswith(FORMULA) and not _is_harmless(cell) else cell
    return safe(guarded, LINE_LENGTH)


def _is_harmless(cell: str) -> bool:
    """A sign by itself, or a number."""
    try:
        return cell in ("+", "-") or isinstance(float(cell), float)
    except ValueError:
        return False
