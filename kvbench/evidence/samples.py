"""Runs sample by sample.

The values of a metric, the samples that runs share, bounds on missing ones, and the answers that were lost or gained.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import SettingValue, unknown_name
from kvbench.evidence.load import Group, StoredRun
from kvbench.results.measures import (
    ANSWERS,
    BENCHMARKS,
    CATEGORIES,
    FIDELITY,
    SCORE,
    SHARE_MARK,
    Measure,
    of_category,
    of_full,
    score,
)
from kvbench.results.refusals import NoResults
from kvbench.results.sample import SampleRecord, answers_of
from kvbench.stats.paired import paired
from kvbench.stats.shares import Difference, share_of_pairs
from kvbench.stats.strata import Strata, Weighting, weighed

SampleName = tuple[str, str]  # subset, sample id
Range = tuple[float, float]
ENOUGH = 0.9  # of the samples; a run that lacks more than a tenth of them proves nothing


class NoCommonSample(NoResults):
    """Two runs share no sample and cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One value per sample, of a run or interpolated between several runs."""

    label: str
    values: dict[SampleName, float]
    """The samples of which every answer ended well."""
    ranges: dict[SampleName, Range]
    """Smallest and largest possible value of every sample that was answered; the two are one where it is known."""
    total: int
    """Samples that there should be, those to which the metric does not apply left out."""
    weighting: Weighting
    progress: str
    run: StoredRun | None = None
    """None for values that were made from several runs."""


def _unknown_range(what: Measure) -> Range:
    """The range of a missing value."""
    return (0.0, 1.0) if what.bounded else (-math.inf, math.inf)


def curve_of(run: StoredRun, what: Measure) -> Curve:
    """The values of a run, and the full range of a score for samples that did not end well."""
    by_sample: dict[SampleName, list[Range]] = {}
    others: set[SampleName] = set()
    for record in run.samples.values():
        name = (record["subset"], record["sample_id"])
        try:
            value = what.above(record) if record["status"] == "ok" else None
        except (KeyError, TypeError):
            others.add(name)
            continue
        if value is not None:
            by_sample.setdefault(name, []).append((float(value), float(value)))
        elif what.is_fidelity and record["status"] == "ok":
            others.add(name)  # the metric does not apply: no gold token was read from the compressed cache
        else:
            by_sample.setdefault(name, []).append(_unknown_range(what))
    sums = {name: tuple(map(sum, zip(*each, strict=True))) for name, each in by_sample.items()}
    ranges = {name: (low / len(by_sample[name]), high / len(by_sample[name])) for name, (low, high) in sums.items()}
    repeats = run.record.answers_each or max((repeat for _, repeat in run.samples), default=0) + 1
    num_expected = max(len({sample for sample, _ in run.samples}), (run.total or 0) // repeats)  # also missing ones
    return Curve(
        label=run.label,
        values={name: low for name, (low, high) in ranges.items() if low == high},
        ranges=ranges,
        total=num_expected - len(others - set(by_sample)),
        weighting=run.record.weighting,
        progress=run.progress,
        run=run,
    )


def measure(name: str, group: Group, *, shares: bool = False) -> Measure:
    """Find a metric by name.

    `score` for the task's primary one, a teacher-forced one, `tokens` and `loops` of the answers, any name of the
    task's scores, or a category of its subsets.

    Args:
        shares: Whether the command can show a score in % of the full cache's, of which `%` stands after the name.

    Raises:
        ValueError: Runs of the group have other scores only, or the name is of another kind of task or measure.
    """
    base = name.removesuffix(SHARE_MARK)
    if base != name and (not shares or base in FIDELITY | ANSWERS):
        raise SettingValue(
            f"metric={name}: in % of the full cache's are scores and categories, in compare, pareto and report; take "
            f"metric={base}",
            setting="metric",
        )
    if base in CATEGORIES and group.task not in BENCHMARKS:
        raise SettingValue(
            f"metric={name} is a category of {', '.join(BENCHMARKS)}, and {group.title} has none; give "
            f"tasks={next(iter(BENCHMARKS))}, or metric=score",
            setting="metric",
        )
    definition = _measure(SCORE.name if base in CATEGORIES else base, group)
    definition = of_category(definition, group.task, base) if base in CATEGORIES else definition
    return of_full(definition) if base != name else definition


def _measure(name: str, group: Group) -> Measure:
    if known := (FIDELITY | ANSWERS).get(name):
        if known.is_fidelity and group.largest:
            raise SettingValue(
                f"metric={name} measures each model against its own full cache and tokens, and says nothing between "
                "models; take score, tokens or loops",
                setting="metric",
            )
        return known
    records = [run.record for run in group.runs]
    chosen = next((record.primary for record in records if record.primary), "") if name == SCORE.name else name
    stored = next((record.metrics[chosen] for record in records if chosen in record.metrics), None)
    if stored is None:
        there = {metric for record in records for metric in record.metrics}
        if not there:  # of runs that have only begun, whose samples then lack it: a word on them, not the end of others
            return score(name)
        categories = CATEGORIES if group.task in BENCHMARKS else ()
        raise unknown_name("metric", name, {SCORE.name, *FIDELITY, *ANSWERS, *there, *categories})
    return score(chosen, stored.higher_is_better)


def by_subset(samples: Iterable[SampleName]) -> dict[str, list[SampleName]]:
    """The samples of each subset, in sorted order."""
    result: dict[str, list[SampleName]] = {}
    for sample in sorted(samples):
        result.setdefault(sample[0], []).append(sample)
    return result


def shared(curves: Iterable[Curve]) -> set[SampleName]:
    """The samples that all curves have; none without a curve."""
    each = [set(curve.values) for curve in curves]
    return set.intersection(*each) if each else set()


def strata_of(values: Mapping[Any, float], samples: Iterable[Sequence], weighting: Weighting) -> Strata:
    """The values of some samples, subset by subset."""
    return weighed([[values[sample] for sample in members] for members in samples], weighting)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The values of two runs on the samples both have."""

    samples: dict[str, list[SampleName]]
    """Subset -> samples."""
    mine: Curve
    theirs: Curve
    total: int
    """Samples at least one of the two was asked or is still to be asked."""
    unfit: str = ""
    """Reason why the full cache is unfit as a reference (`Group.unfit`); empty where it is fit."""

    @property
    def num_samples(self) -> int:
        """Samples in the comparison."""
        return sum(map(len, self.samples.values()))

    @property
    def is_enough(self) -> bool:
        """True where at most a tenth of the samples is missing, and the full cache is fit as a reference."""
        return not self.unfit and self.num_samples >= ENOUGH * self.total

    def paired(self, what: Measure, resamples: int, seed: int) -> Difference:
        """The differences with their statistics."""
        groups = {n: [(self.mine.values[s], self.theirs.values[s]) for s in m] for n, m in self.samples.items()}
        return _paired(groups, self.mine.weighting, what, resamples, seed)

    def extremes(self, what: Measure, resamples: int, seed: int) -> tuple[Difference | None, Difference | None] | None:
        """Differences with every missing answer of this run the worst and the other's the best, and vice versa.

        In the direction of the values; None where no sample is missing, and for each of the two where a missing value
        could be anything.
        """
        everything = set(self.mine.ranges) | set(self.theirs.ranges)
        if self.num_samples == self.total == len(everything):
            return None
        unknown = _unknown_range(what)
        differences: list[Difference | None] = []
        for end in (0, 1):
            groups = {
                name: [(self.mine.ranges.get(s, unknown)[end], self.theirs.ranges.get(s, unknown)[1 - end]) for s in m]
                for name, m in by_subset(everything).items()
            }
            finite = all(math.isfinite(value) for pairs in groups.values() for pair in pairs for value in pair)
            differences.append(_paired(groups, self.mine.weighting, what, resamples, seed) if finite else None)
        return differences[0], differences[1]


def _paired(
    groups: dict[str, list[Range]], weighting: Weighting, what: Measure, resamples: int, seed: int
) -> Difference:
    make = paired if what.of is None else share_of_pairs
    difference = make(groups, weighting, bounded=what.bounded, resamples=resamples, seed=seed)
    assert difference is not None  # there is a pair, and a whole of which it is a share: `pair` refuses others
    return difference


def pair(mine: Curve, theirs: Curve, what: Measure) -> Pairs:
    """Pair the judged run with another one on the samples that both have.

    Raises NoCommonSample without any, and where the measure is a share of a mean that is 0.
    """
    both = shared([mine, theirs])
    if not both:
        raise NoCommonSample(
            f"{mine.label} and {theirs.label} have no sample with {what.title} in common ({mine.progress} and "
            f"{theirs.progress} are there); a paired comparison needs the same samples in both"
        )
    if what.of is not None and not any(theirs.values[name] for name in both):
        raise NoCommonSample(f"{mine.label}: {what.title} of {theirs.label} is 0, of which nothing is a share")
    total = max(mine.total, theirs.total, len(set(mine.ranges) | set(theirs.ranges)))
    return Pairs(samples=by_subset(both), mine=mine, theirs=theirs, total=total)


def noise(group: Group, what: Measure) -> tuple[float, str]:
    """The largest difference of a sample that is only numerical noise, and its source.

    Repetitions of the full cache with other batches or kernels measure the noise of the full cache.
    """
    if not what.tolerance:
        return 0.0, ""
    base = curve_of(group.reference, what).values if group.reference else {}
    repeats = [curve_of(run, what).values for run in group.repeats]
    largest = [abs(value - base[name]) for values in repeats for name, value in values.items() if name in base]
    if largest and max(largest) > what.tolerance:
        return max(largest), "measured: the full cache run again"
    return what.tolerance, "the largest that other batches and orders ever made"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A sample whose score got worse or better."""

    sample: str
    subset: str
    mine: float
    theirs: float
    lost: bool
    text: str = ""
    """Answer of the run, every turn of a conversation; the first one whose score differs, when there are several."""
    other_text: str = ""
    """Answer of the other run."""
    expected: str = ""
    """The right answer, when the task keeps it."""


def changes(pairs: Pairs, what: Measure, tolerance: float = 0.0) -> list[Change]:
    """The samples that differ by more than noise, the largest losses first, then the largest gains."""
    run, other = pairs.mine.run, pairs.theirs.run
    sign = 1 if what.higher_is_better else -1
    result = []
    for subset, sample in (sample for members in pairs.samples.values() for sample in members):
        mine, theirs = pairs.mine.values[subset, sample], pairs.theirs.values[subset, sample]
        if mine == theirs or abs(mine - theirs) <= tolerance:
            continue
        texts = _texts(run, other, sample, what) if run and other else {}
        lost = sign * (mine - theirs) < 0
        result.append(Change(sample=sample, subset=subset, mine=mine, theirs=theirs, lost=lost, **texts))
    return sorted(result, key=lambda item: (not item.lost, -abs(item.mine - item.theirs), item.subset, item.sample))


def _texts(run: StoredRun, other: StoredRun, sample: str, what: Measure) -> dict[str, str]:
    """The first answers to a sample whose values differ, else the first ones; none where no answer is in both runs."""
    both = [
        (record, other.samples[key]) for key, record in run.samples.items() if key[0] == sample and key in other.samples
    ]
    if not both:
        return {}

    def value(record: SampleRecord) -> float | None:
        try:
            return what.above(record)
        except (KeyError, TypeError):
            return None

    mine, theirs = next((pair for pair in both if value(pair[0]) != value(pair[1])), both[0])
    return {"text": _said(answers_of(mine)), "other_text": _said(answers_of(theirs)), "expected": _expected(mine)}


def _said(texts: Sequence[str]) -> str:
    """Several texts as one, each with its number."""
    return texts[0] if len(texts) == 1 else "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))


def _expected(record: SampleRecord) -> str:
    if turns := record.get("turns"):
        return _said(["; ".join(right) for right in (*(turn["gold"] for turn in turns), record.get("gold", []))])
    if record.get("gold"):
        return "; ".join(record["gold"])
    meta = record.get("meta") or {}  # journals of before have the answer there, where the task kept it
    answer = next((meta[key] for key in ("answer", "answers", "gold", "target") if key in meta), "")
    return "; ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
