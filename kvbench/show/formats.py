"""A table of finished texts as plain text, as Markdown or in LaTeX."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.show.text import visible

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
TEX |= {char: f"\\{char}" for char in "&%$#_{}"}


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of finished texts."""

    title: str
    caption: str
    """As the title, with what the numbers are; text."""
    latex_caption: str = ""
    """LaTeX that stands in its place; empty = the caption."""
    label: str = ""
    """Name for references in LaTeX; empty = none."""
    rows: Sequence[Sequence[tuple[str, bool]]]
    """Cells, and whether each is to stand out; headings are the first row and the first column."""
    legend: Callable[[str], Sequence[str]]
    """Sentences that must be known to read the table, by the word for what stands out."""
    unfit: Sequence[str] = ()
    """Sentences that are said before the table."""
    spans: Sequence[tuple[str, int]] = ()
    """Names above the columns from the third on, with how many columns each has."""

    def cells(self, write: Callable[[str, bool], str]) -> list[list[str]]:
        """The rows, each cell made by `write` from words in one line and whether it is to stand out."""
        return [[write(_line(words), stands_out) for words, stands_out in row] for row in self.rows]


def _line(words: str) -> str:
    """Words as one line of visible text."""
    return visible(words).replace("\n", " ")


def text(table: Sheet, width: int) -> str:
    """Text for a terminal: columns that do not fit continue below, under the same first column; a star for bold."""
    words = table.cells(lambda words, stands_out: f"{words}{'*' if stands_out else ' '}")
    words = [[row[0][:-1], *row[1:]] for row in words]
    widths = [max(len(row[column]) for row in words) for column in range(len(words[0]))]
    blocks, block, used = [], [0], widths[0]
    for column in range(1, len(widths)):
        if used + 1 + widths[column] > width and len(block) > 1:
            blocks.append(block)
            block, used = [0], widths[0]
        block.append(column)
        used += 1 + widths[column]
    lines = [piece for why in table.unfit for piece in textwrap.wrap(f"! {_line(why)}", max(40, width))]
    lines.append(table.title)
    for part in [*blocks, block]:
        for row in words:
            cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in part[1:])]
            lines.append(" ".join(cells).rstrip())
        lines.append("")
    for line in map(_line, table.legend("*")):
        lines += textwrap.wrap(line, max(40, width)) or [""]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]], rule: str = "---") -> str:
    """Finished cells as a table of Markdown.

    Args:
        rows: Their first is the heading.
        rule: Stands below the heading of each column but the first; `---:` puts numbers at the right.
    """
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *[rule] * (len(head) - 1)], *body))


def markdown(table: Sheet, width: int) -> str:
    """A table of GitHub's Markdown."""

    def write(words: str, stands_out: bool = False) -> str:
        words = re.sub(r"([\\|*_`<>\[\]])", r"\\\1", words)
        return f"**{words}**" if stands_out else words

    lines = [part for why in table.unfit for part in (write(_line(why), True), "")]
    lines += [write(_line(table.title), True), "", markdown_table(table.cells(write), "---:"), ""]
    return "\n".join([*lines, *(f"- {write(line)}" for line in map(_line, table.legend("bold")))])


def _escaped(words: str, stands_out: bool = False) -> str:
    """Escape a text for LaTeX."""
    shown = "".join(TEX.get(char, char) for char in words)
    return f"\\textbf{{{shown}}}" if stands_out else shown


def latex(table: Sheet, width: int) -> str:
    """A `table*` with booktabs; categories stand above their columns. The notes are comments."""
    head, *body = table.cells(_escaped)
    why = "".join(f"{_line(reason)}. " for reason in table.unfit)
    lines = [f"% {line}" for line in [*map(_line, table.unfit), *map(_line, table.legend("bold"))]]
    lines += [r"% needs \usepackage{booktabs,graphicx}", r"\begin{table*}[t]", r"\centering"]
    lines.append(f"\\caption{{{_escaped(why)}{table.latex_caption or _escaped(_line(table.caption))}}}")
    lines += [f"\\label{{{table.label}}}"] if table.label else []
    lines += [r"\resizebox{\textwidth}{!}{%", f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    if table.spans:
        cells, rules, column = ["", ""], [], 3  # the columns begin after two others
        for name, count in table.spans:
            cells.append(f"\\multicolumn{{{count}}}{{c}}{{{_escaped(_line(name))}}}")
            rules.append(f"\\cmidrule(lr){{{column}-{column + count - 1}}}")
            column += count
        lines += [" & ".join([*cells, *[""] * (len(head) - column + 1)]) + r" \\", "".join(rules)]
    rows = [" & ".join(row) + r" \\" for row in (head, *body)]
    lines += [rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join(lines)


FORMATS: dict[str, Callable[[Sheet, int], str]] = {"txt": text, "md": markdown, "tex": latex}
