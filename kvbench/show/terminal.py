"""The console, tables without lines, numbers and texts in narrow columns."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text, TextType

from kvbench.show.text import visible

NO_INTERVAL = "[no interval]"  # in the place of an interval that cannot be computed


class PlainConsole(Console):
    """Console that interprets no text, neither rich's markup nor a terminal's escape.

    Names in tables, titles, notes and bars may come from anywhere.
    """

    def __init__(self, *, file: TextIO | None = None, width: int | None = None) -> None:
        # In a notebook rich would show output that is meant for a file.
        super().__init__(file=file, width=width, markup=False, emoji=False, force_jupyter=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """See `Console.render_str`; the text is made visible before its width is measured."""
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        """End quietly when the reader closes the pipe, as in `kvbench compare | head`; rich would call `sys.exit()`."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`; what was no string is made visible here."""
        for segment in super().render(renderable, options):
            if segment.control or (shown := visible(segment.text)) == segment.text:
                yield segment
            else:
                yield Segment(shown, segment.style)


def console(width: int | None = None, *, file: TextIO | None = None) -> Console:
    """The console of a command: the width of the terminal, else the width that the command requests."""
    result = PlainConsole(file=file)
    return result if result.is_terminal or width is None else PlainConsole(file=file, width=width)


class PlainTable(Table):
    """Table that is split by columns where a word of a heading or of a cell would be cut.

    Each part has the first column.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its parts with an empty line between two."""
        groups = self._groups(console, options)
        if len(groups) == 1:
            yield from super().__rich_console__(console, options)
            return
        for index, group in enumerate(groups):
            if index:
                yield Text("")
            yield self._part([self.columns[0], *group], self.title if index == 0 else None)

    def _groups(self, console: Console, options: ConsoleOptions) -> list[list[Column]]:
        """The columns after the first one, as many together as fit."""
        if len(self.columns) < 3:
            return [list(self.columns[1:])]
        first, *widths = (_least_width(column, console, options) for column in self.columns)
        groups: list[list[Column]] = [[]]
        taken = first
        for column, width in zip(self.columns[1:], widths, strict=True):
            if groups[-1] and taken + 2 + width > options.max_width:
                groups.append([])
                taken = first
            groups[-1].append(column)
            taken += 2 + width
        return groups

    def _part(self, columns: Sequence[Column], title: TextType | None) -> Table:
        """A table of some of the columns."""
        part = plain_table(None)
        part.title, part.title_style, part.show_header = title, self.title_style, self.show_header
        for each in columns:
            part.add_column(
                each.header,
                style=each.style,
                justify=each.justify,
                overflow=each.overflow,
                min_width=each.min_width,
                no_wrap=each.no_wrap,
            )
        for cells, row in zip(zip(*(each.cells for each in columns), strict=True), self.rows, strict=True):
            part.add_row(*cells, style=row.style, end_section=row.end_section)
        return part


def _least_width(column: Column, console: Console, options: ConsoleOptions) -> int:
    """The width in which no word of a column is cut."""
    if column.overflow == "fold":  # its words may be divided
        return column.min_width or 1
    wide = options.update(max_width=1 << 16)
    measured = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    return max(column.min_width or 0, *(each.maximum if column.no_wrap else each.minimum for each in measured))


def plain_table(title: str | None = None, *, title_style: str | None = "bold") -> Table:
    """A table without lines, one space between two columns; the title stands above it, at the left."""
    return PlainTable(
        title=title, title_justify="left", title_style=title_style, box=None, padding=(0, 1), pad_edge=False
    )


def print_note(note: Text, target: Console) -> None:
    """Print a note, on a terminal in lines that end between two words, elsewhere on one line."""
    target.print(note, soft_wrap=not target.is_terminal)


def add_names(table: Table, heading: str, names: Iterable[str]) -> None:
    """Add a column of names, which is narrowed last: a name broken into pieces cannot be read."""
    table.add_column(heading, overflow="fold", min_width=min(16, max(map(len, names), default=0)))


def print_paths(paths: Sequence[Path], target: Console) -> None:
    """Print the paths of written files, each on one line."""
    for path in paths:
        target.print(Text(str(path), overflow="fold"), soft_wrap=True)


def p_text(p: float | None) -> str:
    """A p value with two significant digits; `-` for None."""
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def span(ends: tuple[float, float] | None, scale: float, signed: bool = False) -> str:
    """An interval in shown units, as `number` has its ends."""
    if ends is None:
        return NO_INTERVAL
    return f"[{number(ends[0], scale, signed)}, {number(ends[1], scale, signed)}]"


def three_digits(ends: tuple[float, float], scale: float) -> str:
    """An interval in shown units with three significant digits each, also of points."""
    return f"[{ends[0] * scale:.3g}, {ends[1] * scale:.3g}]"


def number(value: float | None, scale: float, signed: bool = False) -> str:
    """A value in shown units: one decimal for points (scale 100), three significant digits for nats; `-` for None."""
    if value is None:
        return "-"
    shown = value * scale + 0.0
    sign = "+" if signed else ""
    if scale == 100.0:
        return format(0.0 if abs(shown) < 0.05 else shown, f"{sign}.1f")
    return format(shown, f"{sign}.3g")
