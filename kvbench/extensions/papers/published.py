"""`kvbench report view=published`: numbers printed in papers, with their locators; not measured here."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.errors import unknown_name
from kvbench.evidence.load import patterns
from kvbench.evidence.printed import PrintedPoint
from kvbench.evidence.view import write_frame
from kvbench.results.refusals import NoResults
from kvbench.show import terminal

if TYPE_CHECKING:
    import pandas as pd

# Names of the papers that are not ours with other punctuation.
METHODS = {"kvc": "kvcompress", "duoattn": "duoattention"}
TASKS = {"longbenchavg16": "longbench", "math": "math", "mathtest": "math"}
PRINTED_FULL = "Full"  # the printed method of an uncompressed cache
NOTE = "As printed in the papers, never corrected and not measured here; memory is nominal or unstated."


class PublishedPoint(NamedTuple):
    """A printed score as a difference to the same table's uncompressed cache."""

    paper: str
    model: str
    method: str
    variant: str
    memory_pct: float
    difference: float
    """In the unit of the score, 0.01 being one point."""


def plain(name: str) -> str:
    """A name without case and punctuation, a plus sign spelt out, so that `HumanEval+` finds `humaneval_plus`."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))


def method_name(name: str) -> str:
    """A paper's or our own name of a method in one spelling."""
    return METHODS.get(plain(name), plain(name))


def task_name(name: str) -> str:
    """A paper's or our own name of a task in one spelling."""
    return TASKS.get(plain(name), plain(name))


def locators_of(locator: str) -> list[str]:
    """The places that a locator names: `Sec 7.3 / Figure 15a` is two, and `Figure 11 + 13` too."""
    locators: list[str] = []
    for part in re.split(r" [/+] ", locator):
        kind = locators[-1].split()[0] if locators and part[0].isdigit() else ""
        locators.append(f"{kind} {part}".strip())
    return locators


SPELLINGS = {"papers": plain, "models": plain, "methods": method_name, "tasks": task_name}


@cache
def rows() -> "pd.DataFrame":
    """All collected printed numbers, in the order of the papers' tables.

    A `locator` is a table, a section or the abstract, a `variant` the setting as the paper names it. `memory_pct` is in
    % of the uncompressed cache, NaN where the paper gives none; its kind is `nominal`, or `unstated`, where the paper
    does not say whether metadata counts. `conditions` are the paper's words on the setting. `printed` is the value with
    all its printed digits.
    """
    import pandas as pd

    names = ("published.csv", "published_conditions.csv")
    paths = (io.BytesIO((files(__package__) / name).read_bytes()) for name in names)
    frame, texts = (pd.read_csv(path, dtype=str, keep_default_na=False) for path in paths)
    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in ("value", "memory_pct")}
    words = frame["conditions"].map(texts.set_index("conditions")["text"])
    return frame.assign(**numbers, conditions=words, printed=frame["value"])


def select(places: Sequence[str] | None = None, **wanted: Sequence[str] | None) -> "pd.DataFrame":
    """The numbers of some papers, models, methods, tasks and places; raises ValueError where no row has a name.

    For each of `SPELLINGS`, and for tables, figures and sections, case and punctuation of names are ignored; a star
    matches anything; None means all. `figure 15` is both of 15a and 15b.
    """
    result = rows()
    for what, names in wanted.items():
        if names is not None:
            column, spelling = what.removesuffix("s"), SPELLINGS[what]
            result = result[result[column].isin(_fitting(what, names, rows()[column].unique(), spelling))]
    if places is not None:
        known = {locator: locators_of(locator) for locator in rows()["locator"].unique()}
        each = list(dict.fromkeys(each_locator for there in known.values() for each_locator in there))
        fits = _fitting("places", places, each, _locator, end="[a-z]?$")
        result = result[result["locator"].map(lambda locator: not fits.isdisjoint(known[locator]))]
    return result


def _locator(name: str) -> str:
    """A table, a figure or a section in one spelling; the point in the number of a section counts."""
    return re.sub(r"^(sec)tion|^(fig)ure|^(tab)le", r"\1\2\3", re.sub(r"[^a-z0-9.]", "", name.lower()))


def _fitting(
    what: str, names: Sequence[str], known: Sequence[str], spelling: Callable[[str], str], end: str = "$"
) -> set[str]:
    """Known names that match some of the requested ones."""
    fits: set[str] = set()
    for name in names:
        test = re.compile(".*".join(re.escape(spelling(part)) for part in name.split("*")) + end)
        matching = {other for other in known if test.match(spelling(other))}
        if not matching:
            raise unknown_name(what, name, known)
        fits |= matching
    return fits


def conditions(stated: object) -> dict[str, str]:
    """Conditions that a paper states of a cell, by name."""
    return dict(part.partition("=")[::2] for part in str(stated).split(";") if "=" in part)


def with_full(rows: "pd.DataFrame", table: list[str], column: str) -> "pd.DataFrame":
    """Rows of methods with the uncompressed cache's number of the same table, as `COLUMN_full`.

    Args:
        table: The columns that say which table, and which place in it.
    """
    is_full = rows["method"] == PRINTED_FULL
    full = rows[is_full].drop_duplicates(table, keep="last")[[*table, column]]
    return rows[~is_full].merge(full, on=table, how="left", suffixes=("", "_full"))


def points(task: str, methods: Sequence[str]) -> list[PublishedPoint]:
    """Printed scores of a task and methods, by kvbench's names, that can be in a picture.

    They have a known memory share, and an uncompressed cache in the same table.
    """
    frame = rows()
    frame = frame[(frame["task"].map(task_name) == task_name(task)) & (frame["unit"] == "points")]
    frame = with_full(frame, ["paper", "locator", "model", "metric"], "value").dropna(subset=["value_full"])
    frame = frame[frame["method"].map(method_name).isin({method_name(name) for name in methods})]
    frame = frame[frame["memory_pct"] > 0].copy()
    frame["difference"] = (frame["value"] - frame["value_full"]) / 100
    return list(map(PublishedPoint._make, frame[list(PublishedPoint._fields)].values.tolist()))


def printed_points(task: str, methods: Sequence[str]) -> list[PrintedPoint]:
    """Points for a frontier, by the names of the runs' methods."""
    return [
        PrintedPoint(point.paper, method, point.memory_pct, point.difference)
        for method in methods
        for point in points(task, [method])
    ]


def of_model(model: str) -> "pd.DataFrame":
    """The rows of one model under our name, with or without what papers call its tuned form."""
    return rows()[rows()["model"].map(_untuned) == plain(model)]


def _untuned(model: str) -> str:
    """A paper's name of a model in one spelling, without what it calls the tuned form."""
    return re.sub(r"(instruct|chat)$", "", plain(model))


class PrintedShare(NamedTuple):
    """The memory that a row prints of a method."""

    paper: str
    locator: str
    model: str
    memory_pct: float


def shares(method: str, model: str) -> list[PrintedShare]:
    """Rows that print the memory of a method, by kvbench's name, on a model.

    Read without pandas, which takes longer to load than `kvbench bytes` has to count.
    """
    text = (files(__package__) / "published.csv").read_text(encoding="utf-8")
    listed = [row for row in csv.DictReader(io.StringIO(text)) if method_name(row["method"]) == method_name(method)]
    each = [(row, float(row["memory_pct"] or "nan")) for row in listed if _untuned(row["model"]) == plain(model)]
    return [PrintedShare(row["paper"], row["locator"], row["model"], share) for row, share in each if share > 0]


class PrintedLoss(NamedTuple):
    """Loss and memory that a table prints for a method's setting on a model."""

    paper: str
    locator: str
    model: str
    method: str
    variant: str
    memory_pct: float
    """The most of its tasks."""
    lost: float
    """The most of its tasks below the table's uncompressed cache, 0.01 being one point; below 0 where none lost."""
    num_tasks: int


def losses(model: str) -> list[PrintedLoss]:
    """The settings that papers print for a model, under our name, with their memory and an uncompressed cache."""
    frame = of_model(model)
    frame = frame[frame["unit"] == "points"]
    frame = with_full(frame, ["paper", "locator", "model", "task", "metric"], "value").dropna(subset=["value_full"])
    frame = frame[frame["memory_pct"] > 0].copy()
    frame["lost"] = (frame["value_full"] - frame["value"]) / 100
    each = frame.groupby(["paper", "locator", "model", "method", "variant"], sort=False)
    most = each.agg(memory_pct=("memory_pct", "max"), lost=("lost", "max"), num_tasks=("task", "nunique")).reset_index()
    return list(map(PrintedLoss._make, most[list(PrintedLoss._fields)].values.tolist()))


def _show(frame: "pd.DataFrame", limit: int, console: Console) -> None:
    for (paper, locator, model), group in groupby(
        frame[:limit].itertuples(), lambda row: (row.paper, row.locator, row.model)
    ):
        rows_of = list(group)
        table = terminal.plain_table(f"{paper}, {locator}: {model}")
        for heading in ("method", "variant", "task", "metric"):
            terminal.add_names(table, heading, [getattr(row, heading) for row in rows_of])
        for heading in ("value", "memory %"):
            table.add_column(heading, justify="right")
        for row in rows_of:
            memory = f"{row.memory_pct:g} ({row.memory_kind})" if row.memory_pct == row.memory_pct else "-"
            cells = (row.method, row.variant, row.task, row.metric)
            unit = "" if row.unit == "1" else f" {row.unit}"  # what has no dimension is printed alone
            table.add_row(*map(Text, cells), f"{row.value:g}{unit}", memory)
        console.print(table)
        console.print()
    if len(frame) > limit:
        console.print(Text(f"{len(frame) - limit} more rows; limit=null shows all", style="dim"))
    console.print(Text(NOTE, style="dim"))


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench report view=published`."""
    wanted = {name: patterns(cfg[name]) for name in (*SPELLINGS, "places")}
    frame = select(**wanted)
    if frame.empty:
        conditions = ", ".join(f"{name}={value}" for name, value in wanted.items() if value)
        raise NoResults(f"no printed number has all of {conditions}; leave one out")
    console = terminal.console(150)
    _show(frame, len(frame) if cfg.limit is None else int(cfg.limit), console)
    write_frame(frame.astype(object).where(frame.notna(), None), cfg.out)
    return 0
