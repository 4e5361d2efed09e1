"""`kvbench table`: the table of a paper from stored runs, for the terminal, Markdown, LaTeX or a program."""

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
from kvbench.evidence.table_content import AVERAGE, Cell, PaperTable, tables_of
from kvbench.results.measures import RESIDENT
from kvbench.results.writing import write_file
from kvbench.show.csv_file import csv_row, records_csv
from kvbench.show.terminal import NO_INTERVAL
from kvbench.show.text import visible
from kvbench.stats.paired import ALPHA
from kvbench.stats.strata import FEWEST_SAMPLES

BY = ("subset", "category", "length", "method")
WIDTH = 120  # columns where the output is no terminal
LONGEST = 6  # decimals
MISSING = "-"
INTERVAL = "95 %"  # heading of the average's interval
BYTES = "KV %"  # heading of the resident bytes
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


@dataclass(frozen=True)
class _Text:
    """A cell as words, and whether it is to stand out."""

    words: str
    bold: bool = False


Grid = list[list[_Text]]


def _number(value: float, table: PaperTable, layout: Layout) -> str:
    scaled = value * table.what.scale
    if table.what.scale == 100.0:
        return f"{scaled + 0.0:.{layout.digits}f}"
    return f"{scaled:.3g}"


def _interval(cell: Cell, table: PaperTable, layout: Layout) -> str:
    if cell.interval is None:
        return NO_INTERVAL
    return f"[{', '.join(_number(end, table, layout) for end in cell.interval)}]"


def _cell(cell: Cell | None, table: PaperTable, layout: Layout) -> _Text:
    if cell is None:
        return _Text(MISSING)
    words = _number(cell.value, table, layout)
    if layout.intervals:
        words += f" {_interval(cell, table, layout)}"
    return _Text(words, cell.is_best)


def grid(table: PaperTable, layout: Layout) -> Grid:
    """The cells with their headings in the first row and the first column."""
    head = [_Text("run"), _Text(BYTES), *(_Text(heading) for heading in table.columns.values())]
    body = []
    for row in table.rows:
        cells = [_cell(row.cells.get(key), table, layout) for key in table.columns]
        held = MISSING if row.resident is None else f"{row.resident * RESIDENT.scale:.1f}"
        body.append([_Text(row.label), _Text(held), *cells])
        if not layout.intervals:
            average = row.cells.get(AVERAGE)
            body[-1].append(_Text(_interval(average, table, layout) if average else MISSING))
    if not layout.intervals:
        head.append(_Text(INTERVAL))
    found = [head, *body]
    if layout.turned:
        found = [list(column) for column in zip(*found, strict=True)]
        found[0][0] = _Text("subset")
    return found


def legend(table: PaperTable, mark: str) -> list[str]:
    """Sentences that must be known to read the table."""
    lines = [
        f"{table.what.title}, {table.what.unit}; {'higher' if table.what.higher_is_better else 'lower'} is better. "
        f"{BYTES}: resident bytes, {RESIDENT.unit}. {MISSING}: not there."
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
    return [visible(line).replace("\n", " ") for line in [*lines, *table.notes]]


def text(table: PaperTable, layout: Layout) -> str:
    """For a terminal: columns that do not fit go on below, under the same first column; a star for bold."""
    found = grid(table, layout)
    words = [
        [f"{cell.words}{'*' if cell.bold else ' '}" if place else cell.words for place, cell in enumerate(row)]
        for row in found
    ]
    words = [[visible(cell).replace("\n", " ") for cell in row] for row in words]
    widths = [max(len(row[place]) for row in words) for place in range(len(words[0]))]
    blocks, block, used = [], [0], widths[0]
    for place in range(1, len(widths)):
        if used + 1 + widths[place] > layout.width and len(block) > 1:
            blocks.append(block)
            block, used = [0], widths[0]
        block.append(place)
        used += 1 + widths[place]
    lines = [table.title]
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

    def cell(one: _Text) -> str:
        words = re.sub(r"([\\|*_`<>\[\]])", r"\\\1", visible(one.words).replace("\n", " "))
        return f"**{words}**" if one.bold else words

    head, *body = ([cell(one) for one in row] for row in grid(table, layout))
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [f"**{cell(_Text(table.title))}**", "", *(f"| {' | '.join(row)} |" for row in (head, rule, *body)), ""]
    return "\n".join([*lines, *(f"- {cell(_Text(line))}" for line in legend(table, "bold"))])


def escape_tex(words: str) -> str:
    """A text that LaTeX prints as it is."""
    return "".join(TEX.get(char, char) for char in visible(words).replace("\n", " "))


def latex(table: PaperTable, layout: Layout) -> str:
    """A `table*` with booktabs; categories stand above their columns. The notes are comments."""
    found = grid(table, layout)

    def cell(one: _Text) -> str:
        return f"\\textbf{{{escape_tex(one.words)}}}" if one.bold else escape_tex(one.words)

    lines = [f"% {line}" for line in legend(table, "bold")]
    lines += [r"% needs \usepackage{booktabs,graphicx}", r"\begin{table*}[t]", r"\centering"]
    caption = f"{table.title}: {table.what.title}, {table.what.unit}."
    lines.append(f"\\caption{{{escape_tex(caption)}}}")
    lines += [r"\resizebox{\textwidth}{!}{%", f"\\begin{{tabular}}{{l{'r' * (len(found[0]) - 1)}}}", r"\toprule"]
    if table.spans and not layout.turned:
        lines += _spans(table.spans, len(found[0]))
    for place, row in enumerate(found):
        lines.append(" & ".join(map(cell, row)) + r" \\")
        if place == 0:
            lines.append(r"\midrule")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table*}"])


def _spans(spans: Sequence[tuple[str, int]], columns: int) -> list[str]:
    """A line of categories over the columns, which begin after the run and its bytes, and a rule under each."""
    cells, rules, place = ["", ""], [], 3
    for name, count in spans:
        cells.append(f"\\multicolumn{{{count}}}{{c}}{{{escape_tex(name)}}}")
        rules.append(f"\\cmidrule(lr){{{place}-{place + count - 1}}}")
        place += count
    cells += [""] * (columns - place + 1)
    return [" & ".join(cells) + r" \\", "".join(rules)]


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
