"""`kvbench report view=table`: the table of a paper from stored runs: terminal, Markdown, LaTeX, CSV."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from kvbench.evidence.load import load_groups
from kvbench.evidence.settings import check as check_settings
from kvbench.evidence.together import together
from kvbench.extensions.views.table_content import AVERAGE, Cell, PaperTable, tables_of
from kvbench.results.measures import RESIDENT, TOTAL
from kvbench.results.writing import write_file
from kvbench.show.csv_file import csv_row, records_csv
from kvbench.show.terminal import NO_INTERVAL
from kvbench.show.text import visible
from kvbench.stats.paired import ALPHA
from kvbench.stats.strata import FEWEST_SAMPLES

BY = ("subset", "category", "length", "cut", "method")
WIDTH = 120  # columns where the output is no terminal
LONGEST = 6  # decimals
MISSING = "-"
INTERVAL = "95 %"  # heading of the average's interval
BYTES = {RESIDENT: "KV %", TOTAL: f"{TOTAL.short}, {TOTAL.unit}"}  # headings of what is held
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
TEX |= {char: f"\\{char}" for char in "&%$#_{}"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The way a table is written."""

    turned: bool = False
    """A row for each subset, and a column for each run."""
    intervals: bool = False
    """An interval in every cell; else the average's alone."""
    digits: int = 1
    """Decimals of a score."""
    width: int = 120
    """Columns of the terminal; a wider table goes on below."""


def _number(value: float, table: PaperTable, layout: Layout) -> str:
    scaled = value * table.what.scale
    return f"{scaled + 0.0:.{layout.digits}f}" if table.what.scale == 100.0 else f"{scaled:.3g}"


def _interval(cell: Cell | None, table: PaperTable, layout: Layout) -> str:
    if cell is None:
        return MISSING
    if cell.interval is None:
        return NO_INTERVAL
    return f"[{', '.join(_number(end, table, layout) for end in cell.interval)}]"


def grid(table: PaperTable, layout: Layout, write: Callable[[str, bool], str]) -> list[list[str]]:
    """The cells with their headings in the first row and the first column; `write` makes a cell from words in one line,
    and whether it is to stand out."""
    last = [] if layout.intervals else [INTERVAL]
    found = [[(words, False) for words in ("run", BYTES[table.held], *table.columns.values(), *last)]]
    for row in table.rows:
        held = MISSING if (size := row.held(table.held)) is None else f"{size * table.held.scale:.1f}"
        cells = [(row.label, False), (held, False)]
        for cell in map(row.cells.get, table.columns):
            words = _number(cell.value, table, layout) if cell else MISSING
            words += f" {_interval(cell, table, layout)}" if cell and layout.intervals else ""
            cells.append((words, cell is not None and cell.is_best))
        if not layout.intervals:
            cells.append((_interval(row.cells.get(AVERAGE), table, layout), False))
        found.append(cells)
    if layout.turned:
        found = [list(column) for column in zip(*found, strict=True)]
        found[0][0] = ("subset", False)
    return [[write(_line(words), is_best) for words, is_best in row] for row in found]


def _line(words: str) -> str:
    """Words as one line of visible text."""
    return visible(words).replace("\n", " ")


def legend(table: PaperTable, mark: str) -> list[str]:
    """Sentences that must be known to read the table."""
    lines = [
        f"{table.what.title}, {table.what.unit}; {'higher' if table.what.higher_is_better else 'lower'} is better. "
        f"{BYTES[table.held]}: {table.held.title}, {table.held.unit}. {MISSING}: not there."
    ]
    if any(cell.is_best for row in table.rows for cell in row.cells.values()):
        lines.append(
            f"{mark}: the best of its column but for the full cache, and all that a paired test on the same samples "
            f"cannot tell from it (p >= {ALPHA:.2g}, Holm over the column)."
        )
    counts = [cell.num_samples for row in table.rows for cell in row.cells.values()]
    if counts and min(counts) < FEWEST_SAMPLES:
        lines.append(
            f"n too small: some columns have {min(counts)} samples, and {FEWEST_SAMPLES} are needed to tell runs apart."
        )
    average = [row.cells[AVERAGE].num_samples for row in table.rows if AVERAGE in row.cells]
    if average:
        lines.append(f"Avg: mean over subsets, {average[0]} samples; the brackets hold its 95 % interval.")
    return [_line(line) for line in [*lines, *table.notes]]


def text(table: PaperTable, layout: Layout) -> str:
    """For a terminal: columns that do not fit go on below, under the same first column; a star for bold."""
    words = grid(table, layout, lambda words, is_best: f"{words}{'*' if is_best else ' '}")
    words = [[row[0][:-1], *row[1:]] for row in words]
    widths = [max(len(row[place]) for row in words) for place in range(len(words[0]))]
    blocks, block, used = [], [0], widths[0]
    for place in range(1, len(widths)):
        if used + 1 + widths[place] > layout.width and len(block) > 1:
            blocks.append(block)
            block, used = [0], widths[0]
        block.append(place)
        used += 1 + widths[place]
    lines = [piece for why in table.unfit for piece in textwrap.wrap(f"! {_line(why)}", max(40, layout.width))]
    lines.append(table.title)
    for part in [*blocks, block]:
        for row in words:
            cells = [row[0].ljust(widths[0]), *(row[place].rjust(widths[place]) for place in part[1:])]
            lines.append(" ".join(cells).rstrip())
        lines.append("")
    for line in legend(table, "*"):
        lines += textwrap.wrap(line, max(40, layout.width)) or [""]
    return "\n".join(lines)


def markdown(table: PaperTable, layout: Layout) -> str:
    """A table of GitHub's Markdown."""

    def write(words: str, is_best: bool = False) -> str:
        words = re.sub(r"([\\|*_`<>\[\]])", r"\\\1", words)
        return f"**{words}**" if is_best else words

    head, *body = grid(table, layout, write)
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [part for why in table.unfit for part in (write(_line(why), True), "")]
    lines += [write(_line(table.title), True), "", *(f"| {' | '.join(row)} |" for row in (head, rule, *body)), ""]
    return "\n".join([*lines, *(f"- {write(line)}" for line in legend(table, "bold"))])


def _escaped(words: str, is_best: bool = False) -> str:
    """A text that LaTeX prints as it is."""
    shown = "".join(TEX.get(char, char) for char in words)
    return f"\\textbf{{{shown}}}" if is_best else shown


def latex(table: PaperTable, layout: Layout) -> str:
    """A `table*` with booktabs; categories stand above their columns. The notes are comments."""
    head, *body = grid(table, layout, _escaped)
    why = "".join(f"{_line(reason)}. " for reason in table.unfit)
    lines = [f"% {line}" for line in [*map(_line, table.unfit), *legend(table, "bold")]]
    lines += [r"% needs \usepackage{booktabs,graphicx}", r"\begin{table*}[t]", r"\centering"]
    caption = f"{why}{_line(f'{table.title}: {table.what.title}, {table.what.unit}.')}"
    lines.append(f"\\caption{{{_escaped(caption)}}}")
    lines += [r"\resizebox{\textwidth}{!}{%", f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    if table.spans and not layout.turned:
        cells, rules, place = ["", ""], [], 3  # the columns begin after the run and its bytes
        for name, count in table.spans:
            cells.append(f"\\multicolumn{{{count}}}{{c}}{{{_escaped(_line(name))}}}")
            rules.append(f"\\cmidrule(lr){{{place}-{place + count - 1}}}")
            place += count
        lines += [" & ".join([*cells, *[""] * (len(head) - place + 1)]) + r" \\", "".join(rules)]
    rows = [" & ".join(row) + r" \\" for row in (head, *body)]
    lines += [rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join(lines)


FORMATS: dict[str, Callable[[PaperTable, Layout], str]] = {"txt": text, "md": markdown, "tex": latex}


def check(cfg: DictConfig) -> None:
    """Check the settings of the table; raises ValueError as `settings.check`."""
    check_settings(cfg, choices={"by": BY, "format": (*FORMATS, "csv")})
    if cfg.digits > LONGEST:
        raise ValueError(f"digits={cfg.digits} is more than {LONGEST}; take fewer decimals")


def csv_of(tables: Sequence[PaperTable]) -> bytes:
    """A line for each number: unrounded, scores as shares, with interval, n and whether it is bold."""
    records = []
    for table, row in [(one, row) for one in tables for row in one.rows]:
        for key, heading in table.columns.items():
            cell = row.cells.get(key)
            low, high = (cell.interval if cell else None) or (None, None)
            records.append(
                csv_row(group=table.title, run=row.label, method=row.method)
                | csv_row(resident_ratio=row.held(RESIDENT), column="average" if key == AVERAGE else key)
                | csv_row(heading=heading, metric=table.what.csv_name, value=cell.value if cell else None)
                | csv_row(low=low, high=high, n=cell.num_samples if cell else 0)
                | csv_row(best=int(cell.is_best) if cell else None)
                | (csv_row(total_bytes=row.held(TOTAL)) if any(one.held is TOTAL for one in tables) else {})
            )
    return records_csv(records)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench report view=table`."""
    check(cfg)
    tables = tables_of(together(load_groups(cfg), cfg), cfg)
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
