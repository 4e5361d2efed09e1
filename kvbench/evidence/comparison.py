"""Runs beside one another on the samples that both have: differences, intervals, tests, verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from kvbench.config.files import FULL
from kvbench.evidence.load import fits_settings
from kvbench.evidence.pairing import Change, NoCommonSample, Pairs, changes, measure, pair
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import Measure
from kvbench.stats import paired as stats
from kvbench.stats.intervals import paired_difference


@dataclass(kw_only=True)
class ComparedRun:
    """One run beside the run that it is compared with, and what the comparison proves."""

    run: StoredRun
    other: StoredRun
    what: Measure
    pairs: Pairs
    value: float
    """Mean difference, run minus other, in the metric's unit."""
    interval: tuple[float, float] | None
    """95 % interval of it; None where nothing can be said."""
    interval_kind: str
    """`bootstrap`, or `newcombe` where no yes-or-no answer differs and a bootstrap has no width."""
    p: float
    """Two-sided p value of no difference."""
    test: str
    """`mcnemar` or `sign flip`."""
    p_holm: float
    """The p value after Holm's correction over all rows of the command."""
    p_equal: float | None
    """p value of the equivalence test with the stated margin."""
    detectable: float | None
    """Smallest true difference that would have been seen with 80 % probability."""
    needed: int | None
    """Samples that would show a true difference of the margin's size with 80 % probability."""
    changes: list[Change]
    """Samples that got worse or better."""

    @property
    def num_lost(self) -> int:
        """Samples with a worse value than the other run's."""
        return sum(item.lost for item in self.changes)

    @property
    def num_gained(self) -> int:
        """Samples with a better value than the other run's."""
        return len(self.changes) - self.num_lost

    @property
    def verdict(self) -> str:
        """What is shown: `worse`, `better`, `equal`, or `cannot tell`."""
        if self.p_holm < 1 - stats.LEVEL:
            return "worse" if (self.value < 0) == self.what.higher_is_better else "better"
        if self.p_equal is not None and self.p_equal < 1 - stats.LEVEL:
            return "equal"
        return "cannot tell"


def find(group: Group, name: str, where: Mapping[str, object] | None = None) -> StoredRun | None:
    """Find the run of a group that a name means.

    Args:
        group: Where to look.
        name: `full` for the reference, a method, a label, or the first digits of a run's hash.
        where: Settings that choose among several runs that the name fits.

    Returns:
        None when the group has none.

    Raises:
        ValueError: Several runs fit; lists them.
    """
    if name == FULL:
        return group.reference
    fits = [run for run in group.runs if name in (run.method, run.label)]
    fits = fits or [run for run in group.runs if len(name) >= 4 and run.record.hash.startswith(name)]
    if len(fits) > 1 and where:
        fits = [run for run in fits if fits_settings(run.settings, where)] or fits
    if len(fits) > 1:
        listed = ", ".join(f"{run.record.hash[:6]} ({run.label})" for run in fits)
        raise ValueError(f"against={name} fits {len(fits)} runs of {group.title}; give the digits of one: {listed}")
    return fits[0] if fits else None


def _reference(group: Group, run: StoredRun, against: StoredRun) -> StoredRun:
    """The run to compare with: a full cache of the run's own batch size and backend when there is one."""
    if against.method != FULL or run.method == FULL:
        return against
    return next((full for full in group.repeats if full.conditions == run.conditions), against)


def compare_runs(run: StoredRun, other: StoredRun, what: Measure, cfg: DictConfig) -> ComparedRun:
    """Compare two runs on the samples both have.

    Args:
        run: The run that is judged.
        other: What it is compared with.
        what: The metric.
        cfg: `margin`, `resamples`, `seed`.

    Raises:
        NoCommonSample: They have no sample in common.
    """
    pairs = pair(run, other, what)
    values, yes_no, bounded = pairs.differences, pairs.yes_no, what.bounded
    interval, kind = stats.bootstrap(values, resamples=cfg.resamples, seed=cfg.seed), "bootstrap"
    if interval is None and yes_no:
        found = paired_difference(pairs.pairs())
        interval, kind = found.ends, "newcombe"
    elif interval is not None and bounded:
        interval = max(-1.0, interval[0]), min(1.0, interval[1])
    found_changes = changes(run, other, pairs, what)
    lost = sum(item.lost for item in found_changes)
    p = stats.mcnemar(lost, len(found_changes) - lost) if yes_no else stats.sign_flip(values, seed=cfg.seed)
    return ComparedRun(
        run=run,
        other=other,
        what=what,
        pairs=pairs,
        value=stats.mean(values),
        interval=interval,
        interval_kind=kind if interval else "",
        p=p,
        test="mcnemar" if yes_no else "sign flip",
        p_holm=p,
        p_equal=stats.equivalence(values, cfg.margin, bounded=bounded),
        detectable=stats.detectable(values, yes_no=yes_no),
        needed=stats.samples_needed(values, cfg.margin),
        changes=found_changes,
    )


def compare_group(group: Group, cfg: DictConfig) -> tuple[list[ComparedRun], list[str]]:
    """Compare every run of a group with one of them.

    Args:
        group: The runs.
        cfg: `against`, `metric`, `margin`, `resamples`, `seed`.

    Returns:
        Rows whose p values are not corrected yet, and one sentence for each run that could not be compared.

    Raises:
        ValueError: The metric does not exist, or `against` fits several runs.
    """
    against = find(group, str(cfg.against), cfg.get("where"))
    if against is None:
        return [], [f"{group.title}: no run fits against={cfg.against}, so nothing is compared"]
    what, rows, notes = measure(str(cfg.metric), group), [], []
    for run in group.runs:
        if run is against:
            continue
        other = _reference(group, run, against)
        try:
            rows.append(compare_runs(run, other, what, cfg))
        except NoCommonSample as error:
            notes.append(f"not compared: {error}")
            continue
        if run.conditions != other.conditions:
            notes.append(f"{run.label} and {other.label} ran with another batch size or backend, which adds noise")
    return rows, notes


def correct(rows: Sequence[ComparedRun]) -> None:
    """Correct the p values of a family, in place."""
    for row, p in zip(rows, stats.holm([row.p for row in rows]), strict=True):
        row.p_holm = p
