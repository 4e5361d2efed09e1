"""95 % intervals of means over subsets. Those of paired differences are in `kvbench.stats.paired`, with their tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.stats import studentised
from kvbench.stats.strata import Strata, Weighting, has_spread, unit_of, weighed

Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution
BINARY = (0.0, 1.0)
WILSON, NEWCOMBE, BOOTSTRAP, FEW_DIFFER = "wilson", "newcombe", "studentised bootstrap", "clopper-pearson"


@dataclass(kw_only=True)
class Estimate:
    """A mean with its uncertainty."""

    value: float | None = None
    """The mean over the samples; None when no sample could be scored."""
    num_samples: int = 0
    """Samples in the mean; several answers to one prompt count as one sample."""
    low: float | None = None
    """Lower end of the 95 % interval; None when there are too few samples for one."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    interval: str = ""
    """Kind of interval: `wilson` (yes or no), `newcombe` (paired yes or no), `studentised bootstrap`,
    `clopper-pearson` (paired scores of which fewer than six differ); empty without one. See kvbench/stats."""
    num_nonfinite: int = 0
    """Samples left out because their value was NaN or infinite."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def wilson(successes: float, trials: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a rate, with the normal quantile `z`, 1.96 for 95 %.

    Inside [0, 1]; without trials it is all of that.

    Source: Wilson 1927, JASA 22:209; without continuity correction.
    """
    if not trials:
        return 0.0, 1.0
    rate, z2 = successes / trials, z * z
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(both: int, first_only: int, second_only: int, neither: int, z: float = Z_95) -> tuple[float, float]:
    """Interval of the difference (first - second) of two rates on the same samples, given how many succeeded in which.

    It has a width when no sample differs, so "no difference seen" is not mistaken for "no difference"; of no sample it
    is [-1, 1].

    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10.
    """
    n = both + first_only + second_only + neither
    if not n:
        return -1.0, 1.0
    p1, p2 = (both + first_only) / n, (both + second_only) / n
    (l1, u1), (l2, u2) = wilson(both + first_only, n, z), wilson(both + second_only, n, z)
    phi = _phi(both, first_only, second_only, neither)

    def width(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p1 - p2 - width(p1 - l1, u2 - p2), p1 - p2 + width(u1 - p1, p2 - l2)


def _phi(both: int, first_only: int, second_only: int, neither: int) -> float:
    """Correlation of two answers of yes or no, less a continuity correction where it is positive."""
    product: float = both * neither - first_only * second_only
    scale = math.sqrt((both + first_only) * (second_only + neither) * (both + second_only) * (first_only + neither))
    if product > 0:
        product = max(product - (both + first_only + second_only + neither) / 2, 0)
    return product / scale if scale else 0.0


def correlation(groups: Sequence[Sequence[tuple[float, float]]], weights: Strata) -> float:
    """Correlation of two weighted rates over the same samples, with Newcombe's correction in each subset.

    Args:
        groups: Both answers, yes or no, to each sample of a subset.
        weights: The same subsets with their weights.
    """
    shares = list(weights.weights)
    if weights.weighs_samples_alike:
        groups, shares = [[pair for group in groups for pair in group]], [1.0]
    sums = [0.0, 0.0, 0.0]  # covariance and both variances of the weighted rates
    for group, weight in zip(groups, shares, strict=True):
        counts = [sum(pair == kind for pair in group) for kind in ((1, 1), (1, 0), (0, 1), (0, 0))]
        rates = [(counts[0] + counts[index]) / len(group) for index in (1, 2)]
        first, second = (rate * (1 - rate) * weight**2 / len(group) for rate in rates)
        parts = (_phi(*counts) * math.sqrt(first * second), first, second)
        sums = [known + part for known, part in zip(sums, parts, strict=True)]
    return sums[0] / math.sqrt(sums[1] * sums[2]) if sums[1] and sums[2] else 0.0


def estimate(
    strata: Mapping[str, Sequence[float]],
    num_nonfinite: int = 0,
    bounds: tuple[float, float] | None = None,
    weighting: Weighting = "subset",
) -> Estimate:
    """Weighted mean over subsets with a 95 % interval: Wilson's for yes-or-no values, else the studentised bootstrap's.

    Args:
        strata: Values of each subset, one per sample.
        num_nonfinite: Samples the caller left out, for the record; what is not finite here is left out and added.
        bounds: Smallest and largest possible value; the interval is cut there.
        weighting: See `weighed`.
    """
    finite = [[value for value in values if math.isfinite(value)] for values in strata.values()]
    num_nonfinite += sum(map(len, strata.values())) - sum(map(len, finite))
    groups = weighed(finite, weighting)
    if not groups.values:
        return Estimate(num_nonfinite=num_nonfinite)
    result = Estimate(value=float(groups.mean()), num_samples=groups.count, num_nonfinite=num_nonfinite)
    if all(item in BINARY for item in groups.flat):
        result.low, result.high = rate_interval(groups)
        result.interval = WILSON
        return result
    ends = _graded(groups)
    if ends is not None:
        low, high = bounds or (-math.inf, math.inf)
        result.low, result.high = max(low, ends[0]), min(high, ends[1])
        result.interval = BOOTSTRAP
    return result


def _graded(strata: Strata) -> tuple[float, float] | None:
    """Interval of a weighted mean of values that are not all yes or no.

    A subset that is all right has no spread, yet doubt remains: it contributes Wilson's interval. The others contribute
    one bootstrap interval together.
    """
    same = [bool(all(item in BINARY for item in values)) and not has_spread(values) for values in strata.values]
    if not any(same):
        return studentised.interval(strata)
    rest = [(v, w) for v, w, is_same in zip(strata.values, strata.weights, same, strict=True) if not is_same]
    share = sum(weight for _, weight in rest)
    others = Strata(tuple(values for values, _ in rest), tuple(weight / share for _, weight in rest))
    ends = studentised.interval(others)
    if ends is None:
        return None
    sure = [(v, w) for v, w, is_same in zip(strata.values, strata.weights, same, strict=True) if is_same]
    parts = [(float(v.mean()), *wilson(float(v.sum()), len(v))) for v, _ in sure] + [(float(others.mean()), *ends)]
    below, above = mover(parts, [*(weight for _, weight in sure), share])
    value = float(strata.mean())
    return value - below, value + above


def rate_interval(strata: Strata) -> tuple[float, float]:
    """Wilson's interval of a weighted mean of rates."""
    if strata.weighs_samples_alike:
        return wilson(float(strata.flat.sum()), strata.count)
    value = float(strata.mean())
    parts = [(float(item.mean()), *wilson(float(item.sum()), len(item))) for item in strata.values]
    below, above = mover(parts, strata.weights)
    return max(0.0, value - below), min(1.0, value + above)


def mover(parts: Sequence[tuple[float, float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Reach of the interval of a weighted sum of independent values, below and above it.

    Each part is a value with its lower and upper end. Squared distances to the ends add up, on each side by itself.

    Source: Zou and Donner 2008, Statistics in Medicine 27:1693 (MOVER).
    """
    below = _length([w * (value - low) for w, (value, low, _) in zip(weights, parts, strict=True)])
    above = _length([w * (high - value) for w, (value, _, high) in zip(weights, parts, strict=True)])
    return below, above


def _length(steps: Sequence[float]) -> float:
    """Length of a sum of steps at right angles, of whatever magnitude."""
    unit = float(unit_of(np.array(steps)))
    return unit * math.sqrt(sum((step / unit) ** 2 for step in steps))
