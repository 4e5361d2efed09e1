"""`kvbench report view=tiers`: the shares of tokens that methods prune or hold in each precision, by task and model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.report_bars import named, tier_names
from kvbench.evidence.view import Grid, View, ViewResult, frame_of, notes
from kvbench.results.refusals import NoResults
from kvbench.show.csv_file import csv_row
from kvbench.show.picture import drawn, share_bars
from kvbench.show.terminal import number, span
from kvbench.sizing.stored import tier_shares
from kvbench.stats.intervals import Estimate, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRUNED = "pruned"
STYLE: dict[Any, Any] = {"font.size": 7}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """One run.

    Args:
        name: Task, model and run.
        parts: Name of a precision -> its share of the tokens over all layers and KV heads, the mean over samples, each
            subset alike; `pruned` last.
    """

    name: str
    task: str
    model: str
    run: str
    parts: dict[str, Estimate]


def shares_of(group: Group, run: StoredRun) -> Shares | None:
    """The shares of a run when its answers ended; None where no sample has them."""
    held: dict[str, dict[str, list[float]]] = {}
    names = cache(partial(tier_names, run))  # which makes the method again
    for record in run.samples.values():
        shares = tier_shares([record])
        if not shares:
            continue
        each = named(names(len(shares)), shares) | {PRUNED: max(0.0, 1 - sum(shares))}
        for name, share in each.items():
            held.setdefault(name, {}).setdefault(record["subset"], []).append(share)
    if not held:
        return None
    parts = {name: estimate(each, bounds=(0, 1), weighting=run.record.weighting) for name, each in held.items()}
    ordered = [name for name in parts if name != PRUNED] + [PRUNED]
    return Shares(
        name=f"{group.task}, {group.model}: {run.label}",
        task=group.task,
        model=group.model,
        run=run.label,
        parts={name: parts[name] for name in ordered},
    )


def figure(all_shares: Sequence[Shares]) -> "Figure":
    """A stacked bar of precisions for each run, with the pruned share at the right."""
    rows = [
        (shares.name, {name: estimate.value or 0.0 for name, estimate in shares.parts.items()}) for shares in all_shares
    ]
    return share_bars(rows, PRUNED, "% of the tokens over layers and KV heads, as an answer ends")


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The shares of every run; raises ValueError where no run has them."""
    all_shares = [
        shares for group in groups for run in group.runs if run.method != FULL and (shares := shares_of(group, run))
    ]
    if not all_shares:
        raise NoResults(f"no run under results_dir={cfg.results_dir} says what it holds; run a method beside full")
    names = list(dict.fromkeys(name for shares in all_shares for name in shares.parts))
    columns = [
        (f"{name}, %", [_text(shares.parts.get(name)) for shares in all_shares])
        for name in [*(name for name in names if name != PRUNED), PRUNED]
    ]
    records = [
        csv_row(task=shares.task, model=shares.model, run=shares.run, part=name, share=estimate.value)
        | csv_row(low=estimate.low, high=estimate.high, n=estimate.num_samples)
        for shares in all_shares
        for name, estimate in shares.parts.items()
    ]
    return ViewResult(
        parts=[
            Grid(title=None, names=[shares.name for shares in all_shares], columns=columns),
            Text("[a, b]: 95 % interval over samples.", style="dim"),
            *notes(dict.fromkeys(note for group in groups for note in group.notes)),
        ],
        frame=frame_of(records),
        figures=[("tiers", "", partial(drawn, lambda: figure(all_shares), style=STYLE))],
    )


def _text(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{number(estimate.value, 100)} {span(estimate.ends, 100)}"


main = View(name="tiers", compute=compute)
