"""The contract of a view of stored runs, and the one renderer of what views compute.

A view is a `View`, which the YAML of its command names as `_target_` and whose settings that YAML declares. It gets
runs and samples as groups: what `kb.load` reads, sorted into what may be compared. It computes one frame, the texts of
the terminal and the figures; it prints, draws and writes nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import rich.table
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.evidence.load import Group, load_groups, patterns
from kvbench.evidence.model_pool import pool_models
from kvbench.evidence.settings import KINDS, check
from kvbench.results.identity import folder_name
from kvbench.results.writing import write_file, write_files
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.formats import FORMATS, Sheet

if TYPE_CHECKING:
    import pandas as pd

WIDEST = 10_000  # columns of a terminal, more than a table needs
NAME_LENGTH = 16  # characters of a name that stay on one line; the rest may go on in the next, numbers may not


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of texts."""

    title: str | None
    columns: Sequence[tuple[str, Sequence[str]]]
    """Heading and cells."""
    names: Sequence[str] = ()
    """The first column, one of names."""
    heading: str | None = "run"
    """Of the names; None for a table without them."""
    breaks: bool = False
    """On a narrow terminal, an interval goes below its number, in all columns but the last."""
    ends: Sequence[str] = ()
    """Headings behind which a table that is too wide for the terminal goes on as another, the first one first."""


Part = Grid | Text
Figure = tuple[str, str, Callable[[str], bytes | None]]
"""Title, end of the file's name, and what draws it as `png`, `svg` or `pdf`; None where there is nothing to draw."""


@dataclass(frozen=True, kw_only=True)
class ViewResult:
    """Result of a view: its numbers, and the tables and figures made of them."""

    frame: "pd.DataFrame"
    """The numbers, unrounded, of dtype object; the CSV has the same columns and rows."""
    parts: Sequence[Part] = ()
    """For the terminal, from top to bottom."""
    sheets: Sequence[Sheet] = ()
    """For a view with the setting `format`."""
    figures: Sequence[Figure] = ()
    names_files: bool = True
    """The terminal names the files that were written."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A view of stored runs; called with its settings, it is the command.

    Where its settings have `format`, it writes sheets or its frame so, into the file `out` or to the terminal. Where
    they have `kinds`, it writes a CSV and figures into the folder `out`, or one of its name below the
    results; else `out` is the file of the CSV, written where it is given.

    Args:
        name: Names the CSV, and the folder of CSV and figures.
        compute: Computes the view from groups and settings; raises ValueError where there is nothing to show.
        lists: Setting -> known words; a word, several, or null for all.
        choices: Setting -> known words, one of which it must be.
        check: Further checks of the settings; raises ValueError as `settings.check`.
        width: Columns of an output that is no terminal.
    """

    name: str
    compute: Callable[[Sequence[Group], DictConfig], ViewResult]
    lists: Mapping[str, Collection[str]] = field(default_factory=lambda: {"kinds": KINDS})
    choices: Mapping[str, Collection[str]] = field(default_factory=dict)
    check: Callable[[DictConfig], object] = field(default=lambda cfg: None)
    width: int = 120

    def __call__(self, cfg: DictConfig) -> int:
        """Compute the view, then print and write it."""
        result = self.evaluate(cfg)
        if "format" in cfg:
            self._format(result, cfg)
            return 0
        console = terminal.console(self.width)
        show(result.parts, console)
        written = self._drawn(result, cfg) if "kinds" in cfg else write_frame(result.frame, cfg.out)
        terminal.print_paths(written if result.names_files else (), console)
        return 0

    def evaluate(self, cfg: DictConfig) -> ViewResult:
        """Check the settings before anything is read; then read the runs and compute the view."""
        check(cfg, self.lists, self.choices)
        self.check(cfg)
        against = (str(cfg.against),) if "against" in cfg else ()
        return self.compute(pool_models(load_groups(cfg, also=against), cfg), cfg)

    def _format(self, result: ViewResult, cfg: DictConfig) -> None:
        """Write sheets, or the frame as CSV, into the file `out` or to the terminal."""
        if cfg.format == "csv":
            content = csv_of(result.frame)
        else:
            width = terminal.console(self.width).width if cfg.out is None else self.width
            content = ("\n\n".join(FORMATS[cfg.format](sheet, width) for sheet in result.sheets) + "\n").encode()
        if cfg.out is not None:
            write_file(Path(str(cfg.out)), content)
            print(cfg.out)
        else:
            print(content.decode(), end="")

    def _drawn(self, result: ViewResult, cfg: DictConfig) -> list[Path]:
        """Write CSV and figures."""
        root = Path(str(cfg.results_dir if cfg.out is None else cfg.out))
        folder = root / self.name if cfg.out is None else root
        contents = {folder / f"{self.name}.csv": csv_of(result.frame)}
        for title, end, draw in result.figures:
            for kind in patterns(cfg.kinds) or KINDS:
                if (picture := draw(kind)) is not None:
                    name = folder_name(title.replace(" with ", "_")).lower()
                    contents[folder / f"{name}{end}.{kind}"] = picture
        return write_files(root, contents)


def frame_of(records: Iterable[Mapping[str, Cell]]) -> "pd.DataFrame":
    """Records of one kind as a frame of dtype object: whole numbers stay whole next to None."""
    import pandas as pd

    return pd.DataFrame(list(records), dtype=object)


def csv_of(frame: "pd.DataFrame") -> bytes:
    """A frame of dtype object as CSV."""
    return csv_bytes(list(frame.columns), frame.to_numpy().tolist())


def write_frame(frame: "pd.DataFrame", out: object) -> list[Path]:
    """Write a frame into a CSV file where one is given."""
    if out is None:
        return []
    write_file(path := Path(str(out)), csv_of(frame))
    return [path]


def notes(said: Iterable[str]) -> list[Part]:
    """Notes needed to read the numbers."""
    return [Note(f"! {note}") for note in said]


class Note(Text):
    """Text of words, which a terminal does not break within one."""


def line(text: str, style: str = "") -> Text:
    """A text that the terminal alone breaks."""
    return Text(text, style, no_wrap=True)


def show(parts: Iterable[Part], console: Console) -> None:
    """Print the parts of a view."""
    for part in parts:
        if isinstance(part, Note):
            terminal.print_note(part, console)
            continue
        if isinstance(part, Text):
            console.print(part, soft_wrap=bool(part.no_wrap))
            continue
        for index, piece in enumerate(_pieces(part, console)):
            if index:
                console.print()
            console.print(_rendered(piece))


def _pieces(table: Grid, console: Console) -> list[Grid]:
    """A table, or several where it is too wide."""
    headings, wide = [heading for heading, _ in table.columns], console.options.update(max_width=WIDEST)
    least = min(NAME_LENGTH, max(map(len, table.names), default=0))
    for parts in range(len(table.ends) + 1):
        places = [0, *sorted(headings.index(end) + 1 for end in table.ends[:parts]), len(headings)]
        pieces = [replace(table, columns=table.columns[low:high]) for low, high in pairwise(places)]
        each = [console.measure(_rendered(replace(one, title=None, heading=None)), options=wide) for one in pieces]
        if least + 2 + max(one.maximum for one in each) <= console.width:
            break
    return [pieces[0], *(replace(piece, title=None) for piece in pieces[1:])]


def _rendered(table: Grid) -> rich.table.Table:
    """A table of numbers, which stay on one line, right of a column of names."""
    made, rows = terminal.plain_table(table.title), [cells for _, cells in table.columns]
    if table.heading is not None:
        terminal.add_names(made, table.heading, table.names)
        rows.insert(0, table.names)
    for number, (name, _) in enumerate(table.columns, 1):
        made.add_column(name, justify="right", no_wrap=not table.breaks or number == len(table.columns))
    for cells in zip(*rows, strict=True):
        made.add_row(*cells)
    return made
