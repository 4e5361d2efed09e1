"""`kvbench suite plan`: number of samples that a verdict needs, at the disagreement of the runs so far."""

from collections.abc import Sequence

from omegaconf import DictConfig
from rich.text import Text

from kvbench.evidence.compare import compare_group, correct
from kvbench.evidence.compared import ComparedRun, difference
from kvbench.evidence.legends import EQUAL_LEVEL
from kvbench.evidence.load import load_groups
from kvbench.evidence.settings import check
from kvbench.evidence.view import Grid, notes, show
from kvbench.results.refusals import NoResults
from kvbench.show import terminal
from kvbench.show.terminal import number
from kvbench.stats.paired import ALPHA


def columns(rows: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Heading -> the cells of all runs."""
    what, margin = rows[0].what, rows[0].margin
    width = number(margin, what.scale)
    return {
        "n": [f"{row.pairs.num_samples}" for row in rows],
        "differ, %": [f"{100 * row.difference.num_different / row.pairs.num_samples:.1f}" for row in rows],
        f"difference, {what.unit}": [difference(row) for row in rows],
        "verdict": [row.verdict for row in rows],
        f"n to show\n{width}": [_samples(row.needed) for row in rows],
        f"n for equal\n+-{width}": [
            _samples(row.difference.needed_equal(margin, EQUAL_LEVEL / row.num_family)) for row in rows
        ],
    }


def _samples(count: int | None) -> str:
    return "-" if count is None else f"{count}"


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench suite plan`."""
    check(cfg)
    groups = load_groups(cfg)
    tables = [(group, *compare_group(group, cfg)) for group in groups]
    family = [row for _, rows, _ in tables for row in rows]
    if not family:
        raise NoResults(
            f"nothing to plan with under {cfg.results_dir}: run a few samples first, such as limit=20",
            setting="results_dir",
        )
    correct(family)
    console = terminal.console(120)
    for group, rows, said in tables:
        console.print()
        if rows:
            names = [row.label for row in rows]
            show([Grid(title=group.title, names=names, columns=list(columns(rows).items()))], console)
        show(notes([*group.notes, *said]), console)
    for line in (
        f"\nn to show: samples that show a true difference of the margin with 80 % probability, p < {ALPHA:.2g} "
        f"divided by the {len(family)} rows that are corrected together, at the upper end of the share of answers that "
        "change (yes or no) or at the spread seen here. -: more than a million, or nothing is known.",
        "n for equal: samples at which a method that loses nothing is found equal with 80 % probability, likewise.",
    ):
        console.print(Text(line, style="dim"))
    return 0
