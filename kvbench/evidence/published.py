"""`kvbench published`: the numbers that papers printed, and where they stand. Never corrected, not measured here."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.errors import unknown_name
from kvbench.evidence.load import patterns
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import csv_bytes

COLUMNS = "paper locator model method variant task metric value unit memory_pct memory_kind".split()
# Names of the papers that are not ours with other punctuation.
METHODS = {"kvc": "kvcompress", "duoattn": "duoattention"}
TASKS = {"longbenchavg16": "longbench", "math": "math", "mathtest": "math"}
NOTE = "As printed in the papers, never corrected and not measured here; memory is nominal or unstated."


@dataclass(frozen=True, kw_only=True)
class Published:
    """One printed number."""

    paper: str
    locator: str
    """Table, section or abstract."""
    model: str
    method: str
    variant: str
    """Setting, as the paper names it."""
    task: str
    metric: str
    value: float
    unit: str
    memory_pct: float | None
    """Memory in % of the uncompressed cache, when the paper gives one."""
    memory_kind: str
    """`nominal`, or `unstated`: the paper does not say whether metadata counts."""
    conditions: str
    """The paper's words on the setting: `key=value;...`."""


@dataclass(frozen=True, kw_only=True)
class PublishedPoint:
    """A printed score as a difference to the same table's uncompressed cache."""

    row: Published
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


SPELLINGS = {"papers": plain, "models": plain, "methods": method_name, "tasks": task_name}


@cache
def rows() -> tuple[Published, ...]:
    """Every printed number that kvbench knows, in the order of the papers' tables."""
    tables = []
    for name in ("published_conditions.csv", "published.csv"):
        text = (files("kvbench.evidence") / name).read_bytes().decode("ascii")
        tables.append(list(csv.DictReader(io.StringIO(text, newline=""))))
    conditions = {row["conditions"]: row["text"] for row in tables[0]}
    return tuple(
        Published(
            **{name: row[name] for name in COLUMNS if name not in ("value", "memory_pct")},
            value=float(row["value"]),
            memory_pct=float(row["memory_pct"]) if row["memory_pct"] else None,
            conditions=conditions[row["conditions"]],
        )
        for row in tables[1]
    )


def select(**wanted: Sequence[str] | None) -> list[Published]:
    """The numbers of some papers, models, methods and tasks.

    Args:
        wanted: For any of `SPELLINGS`, names in any case and punctuation; a star matches anything; None means all.

    Raises:
        ValueError: A name is in none of the rows.
    """
    result = list(rows())
    for what, names in wanted.items():
        if names is None:
            continue
        field, name_of = what.removesuffix("s"), SPELLINGS[what]
        known = {getattr(row, field) for row in rows()}
        tests = [re.compile(".*".join(name_of(part) for part in name.split("*")) + "$") for name in names]
        for name, test in zip(names, tests, strict=True):
            if not any(test.match(name_of(other)) for other in known):
                raise unknown_name(what, name, known)
        result = [row for row in result if any(test.match(name_of(getattr(row, field))) for test in tests)]
    return result


def points(task: str, methods: Sequence[str]) -> list[PublishedPoint]:
    """Printed scores of a task and methods, by our names, that can stand in a picture: a known memory share, and an
    uncompressed cache beside them."""
    wanted = {method_name(name) for name in methods}
    same_task = [row for row in rows() if task_name(row.task) == task_name(task) and row.unit == "points"]
    full = {(row.paper, row.locator, row.model, row.metric): row.value for row in same_task if row.method == "Full"}
    found = []
    for row in same_task:
        base = full.get((row.paper, row.locator, row.model, row.metric))
        if method_name(row.method) in wanted and row.method != "Full" and row.memory_pct and base is not None:
            found.append(PublishedPoint(row=row, difference=(row.value - base) / 100))
    return found


def _show(found: Sequence[Published], limit: int, console: Console) -> None:
    for (paper, locator, model), together in groupby(found[:limit], lambda row: (row.paper, row.locator, row.model)):
        rows_of = list(together)
        table = terminal.plain_table(f"{paper}, {locator}: {model}")
        for heading in ("method", "variant", "task", "metric"):
            terminal.add_names(table, heading, [getattr(row, heading) for row in rows_of])
        for heading in ("value", "memory %"):
            table.add_column(heading, justify="right")
        for row in rows_of:
            memory = "-" if row.memory_pct is None else f"{row.memory_pct:g} ({row.memory_kind})"
            cells = (row.method, row.variant, row.task, row.metric)
            table.add_row(*map(Text, cells), f"{row.value:g} {row.unit}", memory)
        console.print(table)
        console.print()
    if len(found) > limit:
        console.print(Text(f"{len(found) - limit} more rows; limit=null shows all", style="dim"))
    console.print(Text(NOTE, style="dim"))


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench published`."""
    wanted = {name: patterns(cfg[name]) for name in SPELLINGS}
    found = select(**wanted)
    if not found:
        chosen = ", ".join(f"{name}={value}" for name, value in wanted.items() if value)
        raise ValueError(f"no printed number has all of {chosen}; leave one out")
    _show(found, len(found) if cfg.limit is None else int(cfg.limit), terminal.console(150))
    if cfg.out is not None:
        names = [*COLUMNS, "conditions"]
        write_file(Path(str(cfg.out)), csv_bytes(names, ([getattr(row, name) for name in names] for row in found)))
    return 0
