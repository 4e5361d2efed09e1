"""`kvbench table`: the table of a paper from stored runs, for the terminal, Markdown, LaTeX or a program."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from kvbench.errors import check_whole, unknown_name
from kvbench.evidence.load import load_groups
from kvbench.evidence.table_content import AVERAGE, PaperTable, tables_of
from kvbench.evidence.table_formats import FORMATS, Layout
from kvbench.results.measures import RESIDENT
from kvbench.results.writing import write_file
from kvbench.show.csv_file import Cell, csv_bytes

BY = ("subset", "category", "length", "method")
WIDTH = 120  # columns where the output is no terminal
LONGEST = 6  # decimals


def check(cfg: DictConfig) -> None:
    """Check the settings of the table.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    for name, known in (("by", BY), ("format", (*FORMATS, "csv"))):
        if cfg[name] not in known:
            raise unknown_name(name, cfg[name], known)
    for name in ("incomplete", "intervals"):
        if not isinstance(cfg[name], bool):
            raise ValueError(f"{name}={cfg[name]} is neither true nor false")
    for name, least in (("resamples", 100), ("seed", 0), ("digits", 0)):
        check_whole(name, cfg[name], least)
    if cfg.digits > LONGEST:
        raise ValueError(f"digits={cfg.digits} is more than {LONGEST}; take fewer decimals")


def csv_of(tables: Sequence[PaperTable]) -> bytes:
    """A line for each number: unrounded, scores as shares, with interval, n and whether it is bold."""
    rows: list[list[Cell]] = []
    for table in tables:
        for row in table.rows:
            for key, heading in table.columns.items():
                cell = row.cells.get(key)
                name = "average" if key == AVERAGE else key
                start: list[Cell] = [table.title, row.label, row.method, row.resident, name, heading, table.what.key]
                if cell is None:
                    rows.append([*start, None, None, None, 0, None])
                else:
                    rows.append(
                        [*start, cell.value, *(cell.interval or (None, None)), cell.num_samples, int(cell.is_best)]
                    )
    headings = f"group,run,method,{RESIDENT.name}_ratio,column,heading,metric,value,low,high,n,best".split(",")
    return csv_bytes(headings, rows)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench table`.

    Args:
        cfg: The settings in conf/command/table.yaml.

    Returns:
        0.

    Raises:
        ValueError: A setting is wrong, or there is nothing to show.
    """
    check(cfg)
    tables = tables_of(load_groups(cfg), cfg)
    if cfg.format == "csv":
        content = csv_of(tables)
    else:
        width = (
            WIDTH if cfg.out is not None or not sys.stdout.isatty() else shutil.get_terminal_size((WIDTH, 24)).columns
        )
        layout = Layout(turned=cfg.by == "method", intervals=cfg.intervals, digits=cfg.digits, width=width)
        text = "\n\n".join(FORMATS[cfg.format](table, layout) for table in tables)
        content = f"{text}\n".encode()
    if cfg.out is not None:
        write_file(Path(str(cfg.out)), content)
        print(cfg.out)
    else:
        sys.stdout.write(content.decode())
    return 0
