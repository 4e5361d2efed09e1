"""Printed speeds and sizes joined with the results of a paper's further commands.

Those are documents of `bench`, and tables of `bytes`. A speed is of its machine and its baseline, so none is ever a
match; bytes that are counted can be one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.extensions.papers.papers import Entry, Paper
from kvbench.extensions.papers.printed import CANNOT, DIFFERENT, OTHER_MACHINE, REPRODUCED, Cell, row_of
from kvbench.extensions.papers.published import conditions
from kvbench.extensions.papers.report_section import OTHER_MODEL, OTHER_PROTOCOL
from kvbench.stats.intervals import Estimate

UNITS = {"%": 100.0, "% longer": 100.0, "K tokens": 1e-3, "GB": 1e-9, "MB": 1e-6}
COUNTED = "bytes are counted and have no interval: reproduced are those that round to the printed digits"
PLACES = {"Lc": "context", "seq": "context", "batch": "batch"}  # a paper's word for a condition -> that of a cell
PHASES = {"prompt phase": "prompt"}  # any other task is of decode steps
BYTES, BY_PARTS = "bytes", ", by parts"  # the second stands after the name of a row whose calls were timed

Document = Mapping[str, Any]  # a document of a bench, or `{"what": "bytes", "rows": ...}` with the lines of a table


def join(paper: Paper, entry: Entry, documents: Sequence[Document]) -> list[Cell]:
    """Join the printed cells of an entry with the documents of its commands."""
    return [_cell(paper, entry, dict(line), documents) for _, line in entry.printed(paper).iterrows()]


def _cell(paper: Paper, entry: Entry, line: dict[str, Any], documents: Sequence[Document]) -> Cell:
    row = row_of(line["method"], line["variant"])
    if why := entry.reason(line["metric"], line["method"], row):
        return Cell(printed=line, row=row, verdict=CANNOT, note=why)
    name, said = entry.rows().get(row), entry.measured.get(line["metric"])
    if name is None or said is None:
        return Cell(printed=line, row=row)
    what, *key = said.split(" ", 2)
    scale = UNITS.get(line["unit"], 1.0)
    if what == BYTES:
        return _counted(line, row, scale, key[0], _bytes(documents, name), _bytes(documents, "full"))
    stated = conditions(line["conditions"])
    wanted = {PLACES[word]: float(value) for word, value in stated.items() if word in PLACES and _is_number(value)}
    places = [
        (document, cell["cell"], measured)
        for document in documents
        if document["what"] == what
        for cell in document["cells"]
        if cell["cell"].get("phase") in (None, PHASES.get(line["task"], "decode"))
        if (measured := _value({row["name"]: row for row in cell["variants"]}, name, key)) is not None
    ]
    if not places:
        return Cell(printed=line, row=row)
    # As near to the printed conditions as there is; what is not printed is the largest that was measured.
    document, where, measured = max(
        places, key=lambda candidate: (-len(_others(candidate[1], wanted)), _size(candidate[1]))
    )
    differing = [f"{word}: {wanted[word]:g} there, {where[word]:g} here" for word in _others(where, wanted)]
    model = document.get("model", {}).get("name") or document["environment"]["device_name"]
    known: dict[str, Any] = {"printed": line, "row": row, "model": model, "ours": measured, "scale": scale}
    known["note"] = f"{row}, {line['metric'].replace('_', ' ')}: {'; '.join([*differing, f'at {_label(where)}'])}"
    if line["model"] != "unstated" and "model" in document and paper.printed_model(model) != line["model"]:
        return Cell(**known, verdict=OTHER_MODEL)
    machine = stated.get("hw", "").split(" ")[0]
    is_same = bool(machine) and machine in document["environment"]["device_name"].split(" ")
    return Cell(**known, verdict=OTHER_PROTOCOL if is_same else OTHER_MACHINE)


def _value(rows: Mapping[str, Mapping[str, Any]], name: str, key: Sequence[str]) -> Estimate | None:
    """A number of a row of a bench's cell.

    `ratio BASE` is its speed over a baseline's, `part NAMES` the share of some parts in its time; else a field, with
    `FIELD BASE` relative to that of another row.
    """
    kind, *more = key
    if (row := rows.get(name + BY_PARTS if kind == "part" else name)) is None:
        return None
    if kind == "part":
        rounds = np.sum([row["parts"].get(part, [0.0]) for part in more[0].split("+")], axis=0)
        value = dict(zip(("q1", "median", "q3"), map(float, np.quantile(rounds, (0.25, 0.5, 0.75))), strict=True))
    elif kind == "ratio":
        value = row.get("rate_ratios", row["ratios"]).get(more[0])
    else:
        values: list[Any] = [rows.get(one, {}).get(kind) for one in (name, *more)]
        if not all(values):
            return None
        return Estimate(value=values[0] / values[1] - 1 if more else float(values[0]), num_samples=1)
    if value is None:
        return None
    count = len(row["seconds"])
    return Estimate(value=value["median"], low=value["q1"], high=value["q3"], num_samples=count, interval="quartiles")


def _others(cell: Mapping[str, Any], wanted: Mapping[str, float]) -> list[str]:
    """The conditions that a cell has otherwise."""
    return [word for word, value in wanted.items() if word in cell and cell[word] != value]


def _size(cell: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(cell.get(size, 0) for size in ("kv_mb", "length", "context", "batch"))


def _label(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _bytes(documents: Sequence[Document], name: str) -> float | None:
    """The bytes that a table of `bytes` has for a method."""
    rows = [row for document in documents if document["what"] == BYTES for row in document["rows"]]
    return next((float(row["resident_bytes"]) for row in rows if row["method"] == name), None)


def _counted(
    line: dict[str, Any], row: str, scale: float, key: str, num_bytes: float | None, full: float | None
) -> Cell:
    """A size that is counted, or its share below the full cache; reproduced where it has the printed digits."""
    if num_bytes is None or not full:
        return Cell(printed=line, row=row)
    value = 1 - num_bytes / full if key == "saved" else num_bytes
    digits = len(str(line["printed"]).partition(".")[2])
    is_same = math.isclose(round(scale * value, digits), float(line["value"]), abs_tol=1e-9)
    ours = Estimate(value=value, num_samples=1)
    verdict = REPRODUCED if is_same else DIFFERENT
    return Cell(printed=line, row=row, model=line["model"], ours=ours, scale=scale, verdict=verdict, note=COUNTED)
