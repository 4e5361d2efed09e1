"""What `kvbench compare` prints and writes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.evidence.comparison import ComparedRun
from kvbench.evidence.pairing import Change
from kvbench.evidence.runs import Group
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.terminal import number, p_text
from kvbench.show.text import safe

TEXT_LENGTH = 160  # characters of an answer on the terminal
Tables = Sequence[tuple[Group, list[ComparedRun], list[str]]]


def difference(row: ComparedRun) -> str:
    """The mean difference with its interval, in shown units."""
    scale = row.what.scale
    text = number(row.value, scale, signed=True)
    if row.interval is None:
        return text
    low, high = (number(end, scale, signed=True) for end in row.interval)
    return f"{text} [{low}, {high}]"


def _table(title: str, rows: Sequence[ComparedRun], margin: float) -> Table:
    what = rows[0].what
    table = terminal.plain_table(title)
    table.add_column("run", justify="left", overflow="fold", min_width=min(16, max(len(row.run.label) for row in rows)))
    for heading in (
        "n",
        f"difference, {what.unit}",
        "lost/gained",
        "p",
        "p Holm",
        f"p equal\n+-{number(margin, what.scale)}",
        "would\nshow",
        "verdict",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        count, total = row.pairs.num_samples, row.pairs.total
        table.add_row(
            row.run.label,
            f"{count}" if count == total else f"{count} of {total}",
            difference(row),
            f"{row.num_lost}/{row.num_gained}",
            p_text(row.p),
            p_text(row.p_holm),
            p_text(row.p_equal),
            number(row.detectable, what.scale),
            row.verdict,
        )
    return table


def change_lines(change: Change, scale: float, names: tuple[str, str]) -> list[str]:
    """A lost or gained answer as lines of text; `names` are those of the other run and of the run."""
    head = f"{'lost' if change.lost else 'gained'} {safe(change.sample)} ({safe(change.subset)}): "
    head += f"{number(change.theirs, scale)} -> {number(change.mine, scale)}"
    lines = [head + (f", expected: {safe(change.expected, TEXT_LENGTH)}" if change.expected else "")]
    width = max(map(len, names)) + 1
    for name, text in zip(names, (change.other_text, change.text), strict=True):
        lines.append(f"    {name + ':':<{width}} {safe(text, TEXT_LENGTH)}")
    return lines


def _shown(row: ComparedRun, limit: int) -> Iterable[Change]:
    lost = [item for item in row.changes if item.lost][:limit]
    return [*lost, *[item for item in row.changes if not item.lost][:limit]]


def show(tables: Tables, cfg: DictConfig, num_family: int, console: Console | None = None) -> None:
    """Print one table for each group, what must be known to read it, and the answers that changed.

    Args:
        tables: Group, its rows, its notes.
        cfg: `margin`, `regressions`.
        num_family: Rows that Holm's correction is over.
        console: Where to print; stdout by default.
    """
    if console is None:
        console = terminal.console(120)
    for group, rows, notes in tables:
        console.print()
        if rows:
            others = " and ".join(dict.fromkeys(row.other.label for row in rows))
            direction = "higher" if rows[0].what.higher_is_better else "lower"
            title = f"{group.title}: {rows[0].what.title} ({direction} is better), difference to {others}"
            console.print(_table(title, rows, cfg.margin))
        for note in (*group.notes, *notes):
            console.print(Text(f"! {note}"), soft_wrap=True)
        for row in rows:
            shown = list(_shown(row, cfg.regressions))
            if shown:
                console.print(Text(f"\n{row.run.label}: {row.num_lost} lost, {row.num_gained} gained", style="bold"))
            for change in shown:
                for line in change_lines(change, row.what.scale, (row.other.label, row.run.label)):
                    console.print(Text(line), soft_wrap=True)
    console.print()
    for line in legend(num_family):
        console.print(Text(line, style="dim"))


def legend(num_family: int) -> list[str]:
    """How the columns are computed, in sentences."""
    return [
        "[a, b]: 95 % bootstrap interval of the paired difference, resampled inside each subset; every subset weighs "
        "the same. Where no yes-or-no answer differs: Newcombe's interval.",
        "p: exact McNemar test for yes-or-no scores, else a sign-flip permutation test; "
        f"p Holm: corrected over the {num_family} rows above. p equal: two one-sided t tests with the margin above it.",
        "would show: the smallest true difference that these samples show with 80 % probability. `cannot tell` is "
        "not `equal`.",
    ]


def write_csv(tables: Tables, path: str) -> None:
    """Write every row with all its numbers, unrounded, in the metric's own unit.

    Args:
        tables: Group, its rows, its notes.
        path: CSV file.

    Raises:
        ValueError: The folder does not exist or cannot be written.
    """
    headings = (
        "group,run,hash,against,metric,n,of,difference,low,high,interval,lost,gained,test,p,p_holm,p_equal,"
        "detectable,needed,verdict".split(",")
    )
    cells: list[list[Cell]] = []
    for group, rows, _ in tables:
        for row in rows:
            low, high = row.interval or (None, None)
            cells.append(
                [
                    group.title,
                    row.run.label,
                    row.run.record.hash[:12],
                    row.other.record.hash[:12],
                    row.what.key,
                    row.pairs.num_samples,
                    row.pairs.total,
                    row.value,
                    low,
                    high,
                    row.interval_kind,
                    row.num_lost,
                    row.num_gained,
                    row.test,
                    row.p,
                    row.p_holm,
                    row.p_equal,
                    row.detectable,
                    row.needed,
                    row.verdict,
                ]
            )
    write_file(Path(path), csv_bytes(headings, cells))
