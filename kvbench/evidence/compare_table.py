"""What `kvbench compare` prints and writes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.evidence.changes import Change
from kvbench.evidence.comparison import EQUAL_LEVEL, ComparedRun
from kvbench.evidence.runs import Group
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_bytes
from kvbench.show.terminal import NO_INTERVAL, number, p_text
from kvbench.show.text import safe
from kvbench.stats.paired import ALPHA

ESTIMATORS = (
    "Newcombe's for yes or no, Clopper and Pearson's where fewer than 6 scores differ, else the studentised "
    "bootstrap's; it reaches zero where the test does not exclude zero"
)
WIDEST = 10_000  # columns, more than a table needs
TEXT_LENGTH = 160  # characters of an answer on the terminal
Tables = Sequence[tuple[Group, list[ComparedRun], list[str]]]


def difference(row: ComparedRun) -> str:
    """The mean difference with its interval, in shown units."""
    scale = row.what.scale
    text = number(row.value, scale, signed=True)
    if row.interval is None:
        return f"{text} {NO_INTERVAL}"
    low, high = (number(end, scale, signed=True) for end in row.interval)
    return f"{text} [{low}, {high}]"


def worst(row: ComparedRun) -> str:
    """The difference if the missing answers were as bad as they can be, in shown units."""
    return "unknown" if row.worst is None else number(row.worst, row.what.scale, signed=True)


def _columns(rows: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Heading -> the cells of all runs; the verdict follows the difference that it judges."""
    what, margin = rows[0].what, number(rows[0].margin, rows[0].what.scale)
    columns = {
        "n": [
            f"{row.pairs.num_samples}" + (f" of {row.pairs.total}" if row.pairs.num_samples != row.pairs.total else "")
            for row in rows
        ],
        f"difference, {what.unit}": [difference(row) for row in rows],
    }
    if any(row.extremes is not None for row in rows):
        columns["worst\ncase"] = [worst(row) for row in rows]
    return columns | {
        "verdict": [row.verdict for row in rows],
        "lost/gained": [f"{row.num_lost}/{row.num_gained}" for row in rows],
        f"p\n>{margin}" if rows[0].null else "p": [p_text(row.p) for row in rows],
        "p Holm": [p_text(row.p_holm) for row in rows],
        f"p equal\n+-{margin}": [p_text(row.p_equal_holm) for row in rows],
        "would\nshow": [number(row.detectable, what.scale) for row in rows],
    }


def _table(rows: Sequence[ComparedRun], columns: dict[str, list[str]], title: str | None = None) -> Table:
    table = terminal.plain_table(title)
    terminal.add_names(table, "run", [row.label for row in rows])
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        table.add_row(row.label, *cells)
    return table


def _tables(title: str, rows: Sequence[ComparedRun], console: Console) -> Iterable[Table]:
    """One table, or where that is too wide for the console one up to the verdict and one of what it stands on."""
    columns = _columns(rows)
    whole = _table(rows, columns, title)
    needed = console.measure(whole, options=console.options.update(max_width=WIDEST)).minimum
    if needed <= console.width:
        return [whole]
    names = list(columns)
    cut = names.index("verdict") + 1
    first, second = ({name: columns[name] for name in part} for part in (names[:cut], names[cut:]))
    return [_table(rows, first, title), _table(rows, second)]


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
        cfg: `regressions`.
        num_family: Rows that Holm's correction is over.
        console: Where to print; stdout by default.
    """
    if console is None:
        console = terminal.console(120)
    for group, rows, notes in tables:
        console.print()
        if rows:
            beside = " and ".join(dict.fromkeys(row.other_label for row in rows))
            direction = "higher" if rows[0].what.higher_is_better else "lower"
            title = f"{group.title}: {rows[0].what.title} ({direction} is better), difference to {beside}"
            first, *others = _tables(title, rows, console)
            console.print(first)
            for table in others:
                console.print("", table)
        for note in (*group.notes, *notes):
            console.print(Text(f"! {note}"), soft_wrap=True)
        for row in rows:
            shown = list(_shown(row, cfg.regressions))
            if shown:
                console.print(Text(f"\n{row.label}: {row.num_lost} lost, {row.num_gained} gained", style="bold"))
            for change in shown:
                for line in change_lines(change, row.what.scale, (row.other_label, row.label)):
                    console.print(Text(line), soft_wrap=True)
    console.print()
    for line in legend(num_family):
        console.print(Text(line, style="dim"))


def legend(num_family: int) -> list[str]:
    """How the columns are computed, in sentences."""
    return [
        f"[a, b]: 95 % interval of the paired difference, {ESTIMATORS}. {NO_INTERVAL}: too few samples for one.",
        "p: sign-flip test with the weights of the mean; for yes-or-no scores that weigh alike it is McNemar's exact "
        "test; for other values the larger p of it and of the studentised bootstrap. `p >margin`, for nearness to the "
        "full cache: of a difference no larger than the margin.",
        f"p Holm: corrected over the {num_family} rows of this command (a narrower filter makes a smaller family). "
        f"worse, better: p Holm < {ALPHA:.2g}, and no missing answer could change the sign.",
        "p equal: one-sided, for a difference inside the margin above it, corrected likewise, the missing answers as "
        f"bad as they can be. equal: below {EQUAL_LEVEL:.3g}. worst case: the difference if every missing answer were "
        "wrong and every one that the other run lacks right. Below 90 % of the answers there is no verdict.",
        "would show: the smallest true difference that p Holm shows with 80 % probability, at the upper end of the "
        "share of answers that change at all. `cannot tell` is not `equal`.",
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
        "group,run,hash,against,metric,n,of,difference,low,high,interval,worst,lost,gained,test,null,p,p_holm,margin,"
        "p_equal,p_equal_holm,detectable,needed,verdict".split(",")
    )
    cells: list[list[Cell]] = []
    for group, rows, _ in tables:
        for row in rows:
            low, high = row.interval or (None, None)
            cells.append(
                [
                    group.title,
                    row.label,
                    row.run.record.hash[:12] if row.run else None,
                    row.other_label,
                    row.what.key,
                    row.pairs.num_samples,
                    row.pairs.total,
                    row.value,
                    low,
                    high,
                    row.interval_kind,
                    row.worst,
                    row.num_lost,
                    row.num_gained,
                    row.test,
                    row.null,
                    row.p,
                    row.p_holm,
                    row.margin,
                    row.p_equal,
                    row.p_equal_holm,
                    row.detectable,
                    row.needed,
                    row.verdict,
                ]
            )
    write_file(Path(path), csv_bytes(headings, cells))
