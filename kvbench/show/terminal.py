"""What the commands share when they print: the console, tables without lines, numbers and texts in narrow columns."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(width: int) -> Console:
    """Where a command prints: the terminal as wide as it is, anything else as wide as the command wants.

    Args:
        width: Columns when stdout is not a terminal.
    """
    found = Console()
    return found if found.is_terminal else Console(width=width)


def plain_table(title: str | None = None, *, title_style: str | None = "bold") -> Table:
    """A table without lines, one space beside each column.

    Args:
        title: Stands above the table, at the left.
        title_style: Style of the title, as rich names it; None for rich's own.
    """
    return Table(title=title, title_justify="left", title_style=title_style, box=None, padding=(0, 1), pad_edge=False)


def print_paths(paths: Sequence[Path], target: Console) -> None:
    """Name the files that were written, each on one line that a terminal can take as a path."""
    for path in paths:
        target.print(Text(str(path), overflow="fold"), soft_wrap=True)


def p_text(p: float | None) -> str:
    """A p value with two significant digits; `-` for None."""
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def number(value: float | None, scale: float, signed: bool = False) -> str:
    """A value in shown units: one decimal for points, three significant digits for nats; `-` for None.

    Args:
        value: In the unit of the records.
        scale: What it is multiplied by; 100 makes points.
        signed: Show a plus sign too.
    """
    if value is None:
        return "-"
    shown = value * scale + 0.0
    sign = "+" if signed else ""
    if scale == 100.0:
        return format(0.0 if abs(shown) < 0.05 else shown, f"{sign}.1f")
    return format(shown, f"{sign}.3g")


def shortened(text: str, length: int) -> str:
    """A text on one line, cut in the middle when it is long; control characters are shown as escapes."""
    flat = "".join(char if char.isprintable() else {"\n": "\\n", "\t": "\\t"}.get(char, "?") for char in text)
    if len(flat) <= length:
        return flat
    half = (length - 5) // 2
    return f"{flat[:half]} ... {flat[-half:]}"
