"""Printed cells of a paper joined with kvbench's runs, each with a verdict.

No number is corrected, and only equal conditions match: another model or protocol is named and is never a match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.evidence import view
from kvbench.evidence.load import StoredRun
from kvbench.evidence.samples import by_subset, curve_of
from kvbench.extensions.papers.papers import Entry, Paper
from kvbench.extensions.papers.published import PRINTED_FULL, conditions
from kvbench.extensions.papers.report_section import OTHER_MODEL, OTHER_PROTOCOL, estimate_of
from kvbench.results.lines import read_samples
from kvbench.results.measures import score
from kvbench.results.record import RunRecord
from kvbench.show import terminal
from kvbench.show.csv_file import csv_row, records_csv
from kvbench.show.formats import markdown_table
from kvbench.show.terminal import number, span
from kvbench.stats.intervals import Estimate
from kvbench.stats.shares import share_of_pairs

REPRODUCED, DIFFERENT, OPEN = "reproduced", "not reproduced", "cannot tell"
OTHER_MACHINE, NOT_RUN, CANNOT = "other machine", "not run", "cannot be"
MEANING = {
    REPRODUCED: "the printed value lies in our 95 % interval, same model by its name, same protocol as far as stated",
    DIFFERENT: "it lies outside; the difference is ours minus theirs",
    OPEN: "the paper prints a bound, and our interval has it inside",
    OTHER_MODEL: "measured on a model that the paper has not; never a match",
    OTHER_MACHINE: "speed or memory, measured on another machine than the paper's; never a match",
    OTHER_PROTOCOL: "settings were changed (a limit is one), or a speed has another baseline; never a match",
    NOT_RUN: "no complete run answers it",
    CANNOT: "it cannot be run here; the reason stands beside it",
}
# Printed shares of the full cache's score, which are bounds: the word of the condition -> the claim is that ours is
# above (1) or below (-1).
SHARES = {"share_of_FP16_accuracy", "share_of_full_cache_score"}
BOUNDS = {"gt": 1, "ge": 1, "lt": -1, "up_to": -1}
NO_SHARE = "a share of the full cache's score takes a run of it that scored above 0 on the same samples"
ACROSS = 4  # tasks in a row on a terminal
LATER = {"LeanKV": "DiffKV"}  # a method's name in an earlier paper of the same authors -> in the later one


class Ran(NamedTuple):
    """A job of an entry: the row it stands for, and the folder of its run, None where there is none."""

    row: str
    folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A printed number with our counterpart."""

    printed: Mapping[str, Any]
    """Its line of published.csv."""
    row: str
    model: str = ""
    """Our model; empty without a run."""
    ours: Estimate | None = None
    """In the unit of the record; of a bench, median and quartiles over rounds."""
    scale: float = 100.0
    """Of ours, to the printed unit."""
    verdict: str = NOT_RUN
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Ours minus theirs, in the printed unit; None where there is nothing to compare."""
        if self.ours is None or self.ours.value is None:
            return None
        return self.scale * self.ours.value - float(self.printed["value"])


def join(paper: Paper, entry: Entry, ran: Sequence[Ran], changed: Sequence[str]) -> list[Cell]:
    """Join the printed cells of an entry with our runs.

    Args:
        ran: The entry's jobs.
        changed: Words of the user's that change the task.
    """
    runs: dict[str, list[StoredRun]] = {}
    for row, folder in ran:
        record = RunRecord.load(folder) if folder is not None else None
        if folder is not None and record is not None:
            run = StoredRun(name=str(folder), record=record, samples={}, total=record.counts.total or None)
            runs.setdefault(row, []).append(run)
    cells = []
    for _, line in entry.printed(paper).iterrows():
        row = row_of(line["method"], line["variant"])
        cells.append(_cell(paper, entry, dict(line), row, runs, changed))
    return cells


def row_of(method: str, variant: str) -> str:
    """The name of a printed row."""
    return f"{LATER.get(method, method)} {variant}".strip()


def _cell(
    paper: Paper,
    entry: Entry,
    line: dict[str, Any],
    row: str,
    runs: Mapping[str, list[StoredRun]],
    changed: Sequence[str],
) -> Cell:
    if why := entry.cannot or entry.reason(line["metric"], line["method"], row):
        return Cell(printed=line, row=row, verdict=CANNOT, note=why)
    stated = conditions(line["conditions"])
    match = next(
        (
            (run, estimate)
            for run in runs.get(row, ())
            if (estimate := estimate_of(run, line["task"], stated)) is not None
        ),
        None,
    )
    if match is None or line["unit"] not in ("points", "%") or (line["unit"] == "%" and line["metric"] not in SHARES):
        return Cell(printed=line, row=row)
    run, estimate = match
    if line["metric"] in SHARES:
        full = next(
            (
                one
                for name in runs
                if name.split()[0] == PRINTED_FULL
                for one in runs[name]
                if one.record.task == run.record.task
            ),
            None,
        )
        share = None if full is None else _share(run, full)
        if share is None:
            return Cell(printed=line, row=row, note=NO_SHARE)
        estimate = share
    known: dict[str, Any] = {"printed": line, "row": row, "model": run.record.model, "ours": estimate}
    if not run.complete:
        return Cell(**known, verdict=NOT_RUN, note=f"{run.progress}; the same command goes on")
    if paper.printed_model(run.record.model) != line["model"]:
        return Cell(**known, verdict=OTHER_MODEL)
    if changed:
        return Cell(**known, verdict=OTHER_PROTOCOL, note=" ".join(changed))
    return Cell(**known, verdict=_verdict(estimate, line["value"] / 100, stated.get("bound", "")))


def _share(run: StoredRun, full: StoredRun) -> Estimate | None:
    """A run's score as a share of the full cache's on the same samples; None where there is none."""
    curves = []
    for one in (run, full):
        if not one.record.primary:
            return None
        if not one.samples:  # once for all cells of a run
            one.samples = read_samples(Path(one.name) / "samples.jsonl", one.record.hash, sealed=one.record.sealed)[0]
        curves.append(curve_of(one, score(one.record.primary)).values)
    mine, theirs = curves
    groups = by_subset(set(mine) & set(theirs))
    pairs = {subset: [(mine[name], theirs[name]) for name in names] for subset, names in groups.items()}
    share = share_of_pairs(pairs, run.record.weighting)
    if share is None:
        return None
    ends, kind = share.interval
    low, high = (None, None) if ends is None else (1 + ends[0], 1 + ends[1])
    count = sum(map(len, pairs.values()))
    return Estimate(value=1 + share.value, num_samples=count, low=low, high=high, interval=kind)


def _verdict(ours: Estimate, printed: float, bound: str) -> str:
    """The verdict on a printed value or bound, in the unit of ours."""
    if ours.ends is None:
        return OPEN
    if (side := BOUNDS.get(bound)) is None:
        return REPRODUCED if ours.ends[0] <= printed <= ours.ends[1] else DIFFERENT
    low, high = sorted(side * (end - printed) for end in ours.ends)
    return REPRODUCED if low >= 0 else DIFFERENT if high < 0 else OPEN


def csv_of(cells: Sequence[Cell]) -> bytes:
    """Every cell with its verdict: printed values as printed, ours unrounded in the same unit."""
    records = []
    for cell in cells:
        line = {name: cell.printed[name] for name in ("paper", "locator", "model", "method", "variant", "task")}
        numbers = (cell.ours.value, cell.ours.low, cell.ours.high) if cell.ours else (None, None, None)
        ours, low, high = (None if one is None else cell.scale * one for one in numbers)
        records.append(
            line
            | csv_row(metric=cell.printed["metric"], printed=float(cell.printed["value"]), unit=cell.printed["unit"])
            | csv_row(our_model=cell.model or None, ours=ours, low=low, high=high)
            | csv_row(n=cell.ours.num_samples if cell.ours else None)
            | csv_row(difference=cell.difference, verdict=cell.verdict, note=cell.note or None)
        )
    return records_csv(records)


def grid(cells: Sequence[Cell]) -> list[list[str]]:
    """Table of the paper: a row for each printed model and row, its columns the tasks.

    Below the printed row kvbench's, where there is one. The first line is the heading.
    """
    if any(cell.printed["unit"] != "points" and cell.printed["metric"] not in SHARES for cell in cells):
        return _listed(cells)
    tasks = list(dict.fromkeys(str(cell.printed["task"]) for cell in cells))
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((str(cell.printed["model"]), cell.row), {})[str(cell.printed["task"])] = cell
    lines, shown = [["row", "model", *tasks]], set[tuple[str, str]]()
    for (model, row), cells_of in rows.items():
        printed = [
            f"{cells_of[task].printed['printed']}{_unit(cells_of[task])}" if task in cells_of else "-" for task in tasks
        ]
        lines.append([row, f"{model}, printed", *printed])
        there = {task: cell for task, cell in cells_of.items() if cell.ours is not None}
        ours = next(iter(there.values()), None)
        is_match = ours is not None and ours.verdict not in (OTHER_MODEL,)
        if ours is not None and (is_match or (row, ours.model) not in shown):
            shown.add((row, ours.model))
            lines.append(["", f"{ours.model}, here", *(_ours(there.get(task)) for task in tasks)])
        elif ours is None:
            verdicts = dict.fromkeys(cell.verdict for cell in cells_of.values())
            lines[-1][1] += f" ({', '.join(verdicts)})"
    return lines


def _listed(cells: Sequence[Cell]) -> list[list[str]]:
    """A line for each speed or size, which no columns of tasks hold."""
    lines = [["row", "model", "of", "printed", "here"]]
    for cell in cells:
        words = (cell.printed[name] for name in ("task", "metric"))
        bound = conditions(cell.printed["conditions"]).get("bound", "").replace("_", " ")
        printed = f"{cell.printed['printed']}{_unit(cell)}{f' ({bound})' if bound else ''}"
        here = cell.verdict if cell.ours is None else f"{_ours(cell)} ({cell.model})"
        lines.append([cell.row, str(cell.printed["model"]), ": ".join(words).replace("_", " "), printed, here])
    return lines


def _unit(cell: Cell) -> str:
    return "" if cell.printed["unit"] == "points" else f" {cell.printed['unit']}"


def _ours(cell: Cell | None) -> str:
    if cell is None or cell.ours is None:
        return NOT_RUN
    interval = f" {span(cell.ours.ends, cell.scale)}" if cell.ours.ends else ""
    digits = ".1f" if cell.scale == 100 else ".2g"
    less = f" by {cell.difference:+{digits}}" if cell.verdict == DIFFERENT and cell.difference is not None else ""
    return f"{number(cell.ours.value, cell.scale)}{interval} {cell.verdict}{less}"


def markdown(paper: Paper, entry: Entry, cells: Sequence[Cell]) -> str:
    """The table as a page, with what must be known to read it."""
    table = markdown_table([[cell.replace("|", "/") for cell in row] for row in grid(cells)])
    said = "\n".join(f"- {note}" for note in notes(entry, cells))
    return f"# {paper.name}, {entry.at}: {entry.shows}\n\n{table}\n\n{said}\n"


def notes(entry: Entry, cells: Sequence[Cell]) -> list[str]:
    """Notes on a table: each verdict with its count and meaning; reasons; known differences."""
    counts = {word: sum(cell.verdict == word for cell in cells) for word in MEANING}
    lines = [f"{word}: {count} of {len(cells)} cells; {MEANING[word]}" for word, count in counts.items() if count]
    reasons = dict.fromkeys((cell.row, cell.note) for cell in cells if cell.note and cell.verdict == CANNOT)
    lines += [f"{row}: {note}" for row, note in reasons]
    lines += dict.fromkeys(cell.note for cell in cells if cell.note and cell.verdict != CANNOT)
    if any(cell.ours is not None for cell in cells):
        lines += [f"known to differ: {text}" for text in entry.differs]
    return lines


def show(paper: Paper, entry: Entry, cells: Sequence[Cell]) -> None:
    """Print the table and the notes."""
    console = terminal.console(160)
    (_, *headings), *rest = grid(cells)
    model, *columns = [(heading, [line[column] for line in rest]) for column, heading in enumerate(headings, 1)]
    for first in range(0, len(columns), ACROSS):
        title = None if first else f"{paper.name}, {entry.at}: {entry.shows}"
        shown = [model, *columns[first : first + ACROSS]]
        view.show([view.Grid(title=title, heading="row", names=[line[0] for line in rest], columns=shown)], console)
    view.show(view.notes(notes(entry, cells)), console)
