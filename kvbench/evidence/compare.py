"""`kvbench compare`: is a method worse than the full cache, or than another method, on the same samples?"""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.evidence.comparison import EQUAL_LEVEL, ComparedRun, compare_group, correct
from kvbench.evidence.load import Group, load_groups
from kvbench.evidence.samples import Change
from kvbench.evidence.settings import check
from kvbench.results.writing import write_file
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_row, records_csv
from kvbench.show.terminal import NO_INTERVAL, number, p_text, span
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
    return f"{number(row.value, row.what.scale, signed=True)} {span(row.interval, row.what.scale, signed=True)}"


def count(row: ComparedRun) -> str:
    """Samples in the comparison, and of how many, where some are missing."""
    held, total = row.pairs.num_samples, row.pairs.total
    return f"{held}" if held == total else f"{held} of {total}"


def worst(row: ComparedRun) -> str:
    """The difference if the missing answers were as bad as they can be, in shown units."""
    return "unknown" if row.worst is None else number(row.worst, row.what.scale, signed=True)


def _columns(rows: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Heading -> the cells of all runs; the verdict follows the difference that it judges."""
    what, margin = rows[0].what, number(rows[0].margin, rows[0].what.scale)
    missing = any(row.extremes is not None for row in rows)
    return {
        "n": [count(row) for row in rows],
        f"difference, {what.unit}": [difference(row) for row in rows],
        **({"worst\ncase": [worst(row) for row in rows]} if missing else {}),
        "verdict": [row.verdict for row in rows],
        "lost/gained": [f"{row.num_lost}/{row.num_gained}" for row in rows],
        f"p\n>{margin}" if rows[0].null else "p": [p_text(row.p) for row in rows],
        "p Holm": [p_text(row.p_holm) for row in rows],
        f"p equal\n+-{margin}": [p_text(row.p_equal_holm) for row in rows],
        "would\nshow": [number(row.detectable, what.scale) for row in rows],
    }


def _tables(title: str, rows: Sequence[ComparedRun], console: Console) -> list[Table]:
    """One table, or where that is too wide for the console one up to the verdict and one of what it stands on."""
    columns, names = list(_columns(rows).items()), [row.label for row in rows]
    whole = terminal.table_of(title, "run", names, columns)
    needed = console.measure(whole, options=console.options.update(max_width=WIDEST)).minimum
    if needed <= console.width:
        return [whole]
    cut = [heading for heading, _ in columns].index("verdict") + 1
    parts = ((title, columns[:cut]), (None, columns[cut:]))
    return [terminal.table_of(name, "run", names, part) for name, part in parts]


def change_lines(change: Change, scale: float, names: tuple[str, str]) -> list[str]:
    """A lost or gained answer as lines of text; `names` are those of the other run and of the run."""
    head = f"{'lost' if change.lost else 'gained'} {safe(change.sample)} ({safe(change.subset)}): "
    head += f"{number(change.theirs, scale)} -> {number(change.mine, scale)}"
    lines = [head + (f", expected: {safe(change.expected, TEXT_LENGTH)}" if change.expected else "")]
    width = max(map(len, names)) + 1
    for name, text in zip(names, (change.other_text, change.text), strict=True):
        lines.append(f"    {name + ':':<{width}} {safe(text, TEXT_LENGTH)}")
    return lines


def show(tables: Tables, cfg: DictConfig, console: Console) -> None:
    """Print one table for each group, what must be known to read it, and `cfg.regressions` answers that changed."""
    for group, rows, notes in tables:
        console.print()
        if rows:
            beside = " and ".join(dict.fromkeys(row.pairs.theirs.label for row in rows))
            direction = "higher" if rows[0].what.higher_is_better else "lower"
            title = f"{group.title}: {rows[0].what.title} ({direction} is better), difference to {beside}"
            first, *others = _tables(title, rows, console)
            console.print(first)
            for table in others:
                console.print("", table)
        terminal.print_notes((*group.notes, *notes), console)
        for row in rows:
            shown = [c for lost in (True, False) for c in [c for c in row.changes if c.lost == lost][: cfg.regressions]]
            if shown:
                console.print(Text(f"\n{row.label}: {row.num_lost} lost, {row.num_gained} gained", style="bold"))
            for change in shown:
                for line in change_lines(change, row.what.scale, (row.pairs.theirs.label, row.label)):
                    console.print(Text(line), soft_wrap=True)
    console.print()
    for line in legend(sum(len(rows) for _, rows, _ in tables)):
        console.print(Text(line, style="dim"))


def legend(num_family: int) -> list[str]:
    """Sentences on how the columns are computed; Holm's correction is over `num_family` rows."""
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


def record_of(group: Group, row: ComparedRun) -> dict[str, Cell]:
    """A row of the CSV with all its numbers, unrounded, in the metric's own unit."""
    (low, high), kind = row.interval or (None, None), row.found.interval[1]
    mine = row.run.record.hash[:12] if row.run else None
    tests = ("null", "p", "p_holm", "margin", "p_equal", "p_equal_holm", "detectable", "needed", "verdict")
    return (
        csv_row(group=group.title, run=row.label, hash=mine, against=row.pairs.theirs.label, metric=row.what.key)
        | csv_row(n=row.pairs.num_samples, of=row.pairs.total, difference=row.value, low=low, high=high)
        | csv_row(interval=kind, worst=row.worst, lost=row.num_lost, gained=row.num_gained)
        | {"test": row.found.test, **{name: getattr(row, name) for name in tests}}
    )


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench compare`."""
    check(cfg)
    groups = load_groups(cfg, also=(str(cfg.against),))
    tables = [(group, *compare_group(group, cfg)) for group in groups]
    rows = [row for _, found, _ in tables for row in found]
    if not rows:
        reasons = [note for group, _, notes in tables for note in (*notes, *group.notes)]
        raise ValueError(f"nothing to compare. {reasons[0] if reasons else 'There is only one run.'}")
    correct(rows)
    show(tables, cfg, terminal.console(120))
    if cfg.out is not None:
        records = [record_of(group, row) for group, found, _ in tables for row in found]
        write_file(Path(str(cfg.out)), records_csv(records))
    return 0
