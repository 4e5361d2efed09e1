"""`kvbench table`: the table of a paper from stored runs, for the terminal, Markdown, LaTeX or a program."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from kvbench.evidence.load import load_groups
from kvbench.evidence.settings import check as check_settings
from kvbench.evidence.table_content import AVERAGE, PaperTable, tables_of
from kvbench.evidence.table_formats import FORMATS, Layout
from kvbench.results.writing import write_file
from kvbench.show.csv_file import Cell, csv_row, records_csv

BY = ("subset", "category", "length", "method")
WIDTH = 120  # columns where the output is no terminal
LONGEST = 6  # decimals


def check(cfg: DictConfig) -> None:
    """Check the settings of the table; raises ValueError as `settings.check`."""
    check_settings(cfg, choices={"by": BY, "format": (*FORMATS, "csv")})
    if cfg.digits > LONGEST:
        raise ValueError(f"digits={cfg.digits} is more than {LONGEST}; take fewer decimals")


def csv_of(tables: Sequence[PaperTable]) -> bytes:
    """A line for each number: unrounded, scores as shares, with interval, n and whether it is bold."""
    records: list[dict[str, Cell]] = []
    for table, row in [(one, row) for one in tables for row in one.rows]:
        for key, heading in table.columns.items():
            cell = row.cells.get(key)
            low, high = (cell.interval if cell else None) or (None, None)
            records.append(
                csv_row(group=table.title, run=row.label, method=row.method)
                | csv_row(resident_ratio=row.resident, column="average" if key == AVERAGE else key)
                | csv_row(heading=heading, metric=table.what.key, value=cell.value if cell else None)
                | csv_row(low=low, high=high, n=cell.num_samples if cell else 0)
                | csv_row(best=int(cell.is_best) if cell else None)
            )
    return records_csv(records)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench table`."""
    check(cfg)
    tables = tables_of(load_groups(cfg), cfg)
    if cfg.format == "csv":
        content = csv_of(tables)
    else:
        on_terminal = cfg.out is None and sys.stdout.isatty()
        width = shutil.get_terminal_size((WIDTH, 24)).columns if on_terminal else WIDTH
        layout = Layout(turned=cfg.by == "method", intervals=cfg.intervals, digits=cfg.digits, width=width)
        text = "\n\n".join(FORMATS[cfg.format](table, layout) for table in tables)
        content = f"{text}\n".encode()
    if cfg.out is not None:
        write_file(Path(str(cfg.out)), content)
        print(cfg.out)
    else:
        sys.stdout.write(content.decode())
    return 0
