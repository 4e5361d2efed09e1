"""Two runs sample by sample: the values of a metric, the samples both have, the answers that were lost or gained."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvbench.errors import unknown_name
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import FIDELITY, SCORE, Measure, score
from kvbench.results.sample import SampleRecord
from kvbench.results.summary import values_by_sample
from kvbench.stats.intervals import YES_NO

SampleName = tuple[str, str]  # subset, sample id


class NoCommonSample(ValueError):
    """Two runs share no sample, so nothing can be said about them."""


def values_of(run: StoredRun, what: Measure) -> dict[SampleName, float]:
    """One value per sample, the mean over its answers; without the samples that did not end well."""
    found, _ = values_by_sample(run.samples.values(), what.above)
    return {(subset, sample): value for subset, values in found.items() for sample, value in values.items()}


def measure(name: str, group: Group) -> Measure:
    """Find a metric.

    Args:
        name: `score` for the task's primary metric; `nll`, `kl` or `top1` for the teacher-forced ones; or any name of
            the task's scores.
        group: Runs that must have it.

    Raises:
        ValueError: No run has it; lists what there is.
    """
    if name in FIDELITY:
        return FIDELITY[name]
    records = [run.record for run in group.runs]
    chosen = next((record.primary for record in records if record.primary), "") if name == SCORE.name else name
    found = next((record.metrics[chosen] for record in records if chosen in record.metrics), None)
    if found is None:
        there = {metric for record in records for metric in record.metrics}
        if not there:
            how = ", ".join(f"{run.label} is {run.record.status}" for run in group.runs)
            raise ValueError(f"no run of {group.title} has scores yet ({how}); `kvbench status` shows what is left")
        raise unknown_name("metric", name, {SCORE.name, *FIDELITY, *there})
    return score(chosen, found.higher_is_better)


def strata(samples: Iterable[SampleName]) -> dict[str, list[SampleName]]:
    """The samples of each subset, in sorted order."""
    result: dict[str, list[SampleName]] = {}
    for sample in sorted(samples):
        result.setdefault(sample[0], []).append(sample)
    return result


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The values of two runs on the samples both have."""

    samples: dict[str, list[SampleName]]
    """Subset -> samples."""
    mine: dict[SampleName, float]
    theirs: dict[SampleName, float]
    total: int
    """Samples at least one of the two was asked or is still to be asked."""

    @property
    def num_samples(self) -> int:
        """Samples in the comparison."""
        return sum(map(len, self.samples.values()))

    @property
    def differences(self) -> list[np.ndarray]:
        """This run minus the other, for each subset."""
        return [np.array([self.mine[s] - self.theirs[s] for s in members]) for members in self.samples.values()]

    @property
    def yes_no(self) -> bool:
        """Every value is 0 or 1."""
        return all(values[s] in YES_NO for values in (self.mine, self.theirs) for m in self.samples.values() for s in m)

    def pairs(self) -> dict[str, list[tuple[float, float]]]:
        """(mine, theirs) for each subset."""
        return {name: [(self.mine[s], self.theirs[s]) for s in members] for name, members in self.samples.items()}


def pair(run: StoredRun, other: StoredRun, what: Measure) -> Pairs:
    """Put two runs side by side on the samples both have.

    Args:
        run: The run that is judged.
        other: What it is compared with.
        what: The metric.

    Raises:
        NoCommonSample: They share no sample that ended well in both.
    """
    mine, theirs = values_of(run, what), values_of(other, what)
    shared = mine.keys() & theirs.keys()
    if not shared:
        raise NoCommonSample(
            f"{run.label} and {other.label} have no sample with {what.title} in common ({run.progress} and "
            f"{other.progress} are there); a paired comparison needs the same samples in both"
        )
    return Pairs(samples=strata(shared), mine=mine, theirs=theirs, total=num_samples(run, other))


def num_samples(*runs: StoredRun) -> int:
    """How many samples the runs are about, also those that are missing or did not end well."""
    known = {sample for run in runs for sample, _ in run.samples}
    totals = []
    for run in runs:
        repeats = max((repeat for _, repeat in run.samples), default=0) + 1
        totals.append((run.total or 0) // repeats)
    return max(len(known), *totals)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A sample whose score got worse or better."""

    sample: str
    subset: str
    mine: float
    theirs: float
    text: str
    """Answer of the run; the first one whose score differs, when there are several."""
    other_text: str
    """Answer of the other run."""
    expected: str
    """The right answer, when the task keeps it."""
    lost: bool


def changes(run: StoredRun, other: StoredRun, pairs: Pairs, what: Measure) -> list[Change]:
    """The samples that differ, the largest losses first, then the largest gains.

    Args:
        run: The run that is judged.
        other: What it is compared with.
        pairs: `pair(run, other, what)`.
        what: The metric.
    """
    sign = 1 if what.higher_is_better else -1
    found = []
    for members in pairs.samples.values():
        for sample in members:
            mine, theirs = pairs.mine[sample], pairs.theirs[sample]
            if mine == theirs:
                continue
            answers = _answers(run, other, sample[1], what)
            found.append(
                Change(
                    sample=sample[1],
                    subset=sample[0],
                    mine=mine,
                    theirs=theirs,
                    text=answers[0].get("text", "") if answers else "",
                    other_text=answers[1].get("text", "") if answers else "",
                    expected=_expected(answers[0]) if answers else "",
                    lost=sign * (mine - theirs) < 0,
                )
            )
    return sorted(found, key=lambda item: (not item.lost, -abs(item.mine - item.theirs), item.subset, item.sample))


def _answers(run: StoredRun, other: StoredRun, sample: str, what: Measure) -> tuple[SampleRecord, SampleRecord] | None:
    """The first answers to a sample whose values differ, else the first ones; None where no answer is in both runs."""
    both = [
        (record, other.samples[key]) for key, record in run.samples.items() if key[0] == sample and key in other.samples
    ]
    differ = (pair for pair in both if _value(pair[0], what) != _value(pair[1], what))
    return next(differ, both[0] if both else None)


def _value(record: SampleRecord, what: Measure) -> float | None:
    try:
        return what.above(record)
    except (KeyError, TypeError):
        return None


def _expected(record: SampleRecord) -> str:
    meta = record.get("meta") or {}
    found = next((meta[key] for key in ("answer", "answers", "gold", "target") if key in meta), "")
    return "; ".join(map(str, found)) if isinstance(found, list) else str(found)
