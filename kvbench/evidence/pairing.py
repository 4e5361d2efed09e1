"""Two runs sample by sample: the values of a metric, the samples both have, and what those could be that one lacks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.errors import unknown_name
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import FIDELITY, SCORE, Measure, score
from kvbench.stats.paired import Paired, paired
from kvbench.stats.strata import Weighting

SampleName = tuple[str, str]  # subset, sample id
Range = tuple[float, float]
ENOUGH = 0.9  # of the samples; a run that lacks more than a tenth of them proves nothing


class NoCommonSample(ValueError):
    """Two runs share no sample, so nothing can be said about them."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One value per sample, of a run or of what was made from several runs."""

    label: str
    values: dict[SampleName, float]
    """The samples of which every answer ended well."""
    ranges: dict[SampleName, Range]
    """Smallest and largest possible value of every sample that was answered; the two are one where it is known."""
    total: int
    """Samples that there should be, those to which the metric does not apply left out."""
    weighting: Weighting
    progress: str = ""


def curve_of(run: StoredRun, what: Measure) -> Curve:
    """The values of a run, and what the samples could be that did not end well: anything a score can be."""
    unknown = (0.0, 1.0) if what.bounded else (-math.inf, math.inf)
    found: dict[SampleName, list[Range]] = {}
    others: set[SampleName] = set()
    for record in run.samples.values():
        name = (record["subset"], record["sample_id"])
        try:
            value = what.above(record) if record["status"] == "ok" else None
        except (KeyError, TypeError):
            others.add(name)
            continue
        if value is not None:
            found.setdefault(name, []).append((float(value), float(value)))
        elif what.is_fidelity and record["status"] == "ok":
            others.add(name)  # the metric does not apply: no gold token was read from the compressed cache
        else:
            found.setdefault(name, []).append(unknown)
    ranges = {name: (_mean(low for low, _ in each), _mean(high for _, high in each)) for name, each in found.items()}
    return Curve(
        label=run.label,
        values={name: low for name, (low, high) in ranges.items() if low == high},
        ranges=ranges,
        total=num_samples(run) - len(others - set(found)),
        weighting=run.record.weighting,
        progress=run.progress,
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def values_of(run: StoredRun, what: Measure) -> dict[SampleName, float]:
    """One value per sample, the mean over its answers; without the samples of which an answer did not end well."""
    return curve_of(run, what).values


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
    mine: Curve
    theirs: Curve
    total: int
    """Samples at least one of the two was asked or is still to be asked."""

    @property
    def num_samples(self) -> int:
        """Samples in the comparison."""
        return sum(map(len, self.samples.values()))

    @property
    def is_enough(self) -> bool:
        """At most a tenth of the samples is missing."""
        return self.num_samples >= ENOUGH * self.total

    def paired(self, what: Measure, resamples: int, seed: int) -> Paired:
        """The differences with their statistics."""
        groups = {n: [(self.mine.values[s], self.theirs.values[s]) for s in m] for n, m in self.samples.items()}
        return _paired(groups, self.mine.weighting, what, resamples, seed)

    def extremes(self, what: Measure, resamples: int, seed: int) -> tuple[Paired | None, Paired | None] | None:
        """The differences if every missing answer of this run were the worst and every one of the other's the best, and
        the other way round, in the direction of the values.

        Returns:
            None where no sample is missing; None for the two where a missing value could be anything.
        """
        everything = set(self.mine.ranges) | set(self.theirs.ranges)
        if self.num_samples == self.total == len(everything):
            return None
        unknown = (0.0, 1.0) if what.bounded else (-math.inf, math.inf)
        found: list[Paired | None] = []
        for end in (0, 1):
            groups = {
                name: [(self.mine.ranges.get(s, unknown)[end], self.theirs.ranges.get(s, unknown)[1 - end]) for s in m]
                for name, m in strata(everything).items()
            }
            finite = all(math.isfinite(value) for pairs in groups.values() for pair in pairs for value in pair)
            found.append(_paired(groups, self.mine.weighting, what, resamples, seed) if finite else None)
        return found[0], found[1]


def _paired(
    groups: dict[str, list[tuple[float, float]]], weighting: Weighting, what: Measure, resamples: int, seed: int
) -> Paired:
    found = paired(groups, weighting, bounded=what.bounded, resamples=resamples, seed=seed)
    assert found is not None  # there is a pair: `pair` refuses others
    return found


def pair(mine: Curve, theirs: Curve, what: Measure) -> Pairs:
    """Put two runs side by side on the samples both have.

    Args:
        mine: The run that is judged.
        theirs: What it is compared with.
        what: The metric.

    Raises:
        NoCommonSample: They share no sample that ended well in both.
    """
    shared = mine.values.keys() & theirs.values.keys()
    if not shared:
        raise NoCommonSample(
            f"{mine.label} and {theirs.label} have no sample with {what.title} in common ({mine.progress} and "
            f"{theirs.progress} are there); a paired comparison needs the same samples in both"
        )
    total = max(mine.total, theirs.total, len(set(mine.ranges) | set(theirs.ranges)))
    return Pairs(samples=strata(shared), mine=mine, theirs=theirs, total=total)


def num_samples(*runs: StoredRun) -> int:
    """How many samples the runs are about, also those that are missing or did not end well."""
    known = {sample for run in runs for sample, _ in run.samples}
    totals = []
    for run in runs:
        repeats = max((repeat for _, repeat in run.samples), default=0) + 1
        totals.append((run.total or 0) // repeats)
    return max(len(known), *totals)


def noise(group: Group, what: Measure) -> tuple[float, str]:
    """The largest difference of a sample that is only numerical noise, and where it is from.

    Args:
        group: Its repetitions of the full cache with other batches or kernels measure the noise of the full cache.
        what: The metric.
    """
    if not what.tolerance:
        return 0.0, ""
    reference = group.reference
    base = values_of(reference, what) if reference else {}
    largest = [
        abs(value - base[name]) for run in group.repeats for name, value in values_of(run, what).items() if name in base
    ]
    if largest and max(largest) > what.tolerance:
        return max(largest), "measured: the full cache run again"
    return what.tolerance, "the largest that other batches and orders ever made"
