"""`kvbench report view=table`: the table of a paper from stored runs: terminal, Markdown, LaTeX, CSV."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from omegaconf import DictConfig

from kvbench.config.files import FULL
from kvbench.errors import SettingValue
from kvbench.evidence.load import Group
from kvbench.evidence.view import View, ViewResult, frame_of
from kvbench.extensions.views.table_content import AVERAGE, Cell, PaperTable, tables_of
from kvbench.results.measures import RESIDENT, TOTAL
from kvbench.show.csv_file import Cell as CsvCell
from kvbench.show.csv_file import csv_row
from kvbench.show.formats import FORMATS, Sheet
from kvbench.stats.paired import ALPHA
from kvbench.stats.strata import FEWEST_SAMPLES

BY = ("subset", "category", "length", "cut", "method")
LONGEST = 6  # decimals
MISSING = "-"
LABEL = re.compile(r"[\w:.+/-]*")
INTERVAL = "95 %"  # heading of the average's interval
BYTES = {RESIDENT: "KV %", TOTAL: f"{TOTAL.short}, {TOTAL.unit}"}  # headings of what is held


def _number(value: float, table: PaperTable, cfg: DictConfig) -> str:
    scaled = value * table.what.scale
    return f"{scaled + 0.0:.{cfg.digits}f}" if table.what.scale == 100.0 else f"{scaled:.3g}"


def _interval(cell: Cell | None, table: PaperTable, cfg: DictConfig) -> str:
    if cell is None or cell.interval is None:
        return MISSING
    return f"[{', '.join(_number(end, table, cfg) for end in cell.interval)}]"


def sheet(table: PaperTable, cfg: DictConfig, number: int = 1) -> Sheet:
    """Table with `cfg.digits` decimals, the one of that number.

    An interval is in every cell with `cfg.intervals`, else in the average's alone, where there are samples enough for
    one; with `cfg.by` as `method` there is a row for each subset, and a column for each run.
    """
    averages = [row.cells.get(AVERAGE) for row in table.rows]
    last = [INTERVAL] if not cfg.intervals and any(cell and cell.interval for cell in averages) else []
    judged = _judged(table)
    cells_by_row = [[(words, False) for words in ("run", BYTES[table.held], *table.columns.values(), *last)]]
    for row in table.rows:
        held = MISSING if (size := row.held(table.held)) is None else f"{size * table.held.scale:.1f}"
        cells = [(row.label, False), (held, False)]
        for key, cell in ((key, row.cells.get(key)) for key in table.columns):
            words = _number(cell.value, table, cfg) if cell else MISSING
            words += f" {_interval(cell, table, cfg)}" if cell and cell.interval and cfg.intervals else ""
            cells.append((words, cell is not None and cell.is_best and key in judged))
        if last:
            cells.append((_interval(row.cells.get(AVERAGE), table, cfg), False))
        cells_by_row.append(cells)
    is_transposed = cfg.by == "method"
    if is_transposed:
        cells_by_row = [list(column) for column in zip(*cells_by_row, strict=True)]
        cells_by_row[0][0] = ("subset", False)
    return Sheet(
        title=table.title,
        caption=f"{table.title}: {table.what.title}, {table.what.unit}.",
        latex_caption=cfg.caption or "",
        label=f"{cfg.label}-{number}" if cfg.label and number > 1 else cfg.label or "",
        rows=cells_by_row,
        legend=partial(legend, table),
        unfit=table.unfit,
        spans=() if is_transposed else table.spans,
    )


def _judged(table: PaperTable) -> set[str]:
    """Columns in which a run can be told from the best; all of one that has none would be bold."""
    others = [row.cells for row in table.rows if row.method != FULL]
    return {key for key in table.columns if any(key in cells and not cells[key].is_best for cells in others)}


def legend(table: PaperTable, mark: str) -> list[str]:
    """Notes to the table."""
    lines = [
        f"{table.what.title}, {table.what.unit}; {'higher' if table.what.higher_is_better else 'lower'} is better. "
        f"{BYTES[table.held]}: {table.held.title}, {table.held.unit}. {MISSING}: not there."
    ]
    if any(cell.is_best for row in table.rows for cell in row.cells.values()):
        lines.append(
            f"{mark}: the best of its column, the full cache apart, and all that a paired test on the same samples "
            f"cannot tell from it (p >= {ALPHA:.2g}, Holm over the column); none where that is every run."
        )
    counts = [cell.num_samples for row in table.rows for cell in row.cells.values()]
    if counts and min(counts) < FEWEST_SAMPLES:
        lines.append(
            f"n too small: some columns have {min(counts)} samples, and {FEWEST_SAMPLES} are needed to tell runs apart."
        )
    average = [row.cells[AVERAGE].num_samples for row in table.rows if AVERAGE in row.cells]
    if average:
        lines.append(f"Avg: mean over subsets, {average[0]} samples; brackets hold a 95 % interval.")
    if any(cell.interval is None for row in table.rows for cell in row.cells.values()):
        lines.append("No brackets: too few samples for an interval.")
    return [*lines, *table.notes]


def check(cfg: DictConfig) -> None:
    """Raise ValueError where there are more decimals than a score has, or a label is none of LaTeX's."""
    for name in ("caption", "label"):
        if not isinstance(cfg[name], str | None) or (name == "label" and not LABEL.fullmatch(cfg.label or "")):
            raise SettingValue(f"{name}={cfg[name]!r} is no {name}; write text, such as {name}=tab:kv", setting=name)
    if cfg.digits > LONGEST:
        raise SettingValue(f"digits={cfg.digits} is more than {LONGEST}; take fewer decimals", setting="digits")


def records(tables: Sequence[PaperTable]) -> Iterator[dict[str, CsvCell]]:
    """A record for each number: unrounded, scores as shares, with interval, n and whether it is bold."""
    for table, row in [(one, row) for one in tables for row in one.rows]:
        for key, heading in table.columns.items():
            cell = row.cells.get(key)
            low, high = (cell.interval if cell else None) or (None, None)
            yield (
                csv_row(group=table.title, run=row.label, method=row.method)
                | csv_row(resident_ratio=row.held(RESIDENT), column="average" if key == AVERAGE else key)
                | csv_row(heading=heading, metric=table.what.csv_name, value=cell.value if cell else None)
                | csv_row(low=low, high=high, n=cell.num_samples if cell else 0)
                | csv_row(best=int(cell.is_best) if cell else None)
                | (csv_row(total_bytes=row.held(TOTAL)) if any(one.held is TOTAL for one in tables) else {})
            )


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The tables of all groups."""
    tables = tables_of(groups, cfg)
    return ViewResult(
        sheets=[sheet(table, cfg, number) for number, table in enumerate(tables, 1)], frame=frame_of(records(tables))
    )


main = View(name="table", compute=compute, choices={"by": BY, "format": (*FORMATS, "csv")}, check=check)
