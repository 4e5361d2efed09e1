"""95 % intervals of means over subsets, and of paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # two-sided 95 % point of the normal distribution


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
    """How the interval was computed: `wilson`, `newcombe` (paired yes-or-no), `t`, or a sum; see
    kvbench/stats/intervals.py."""
    num_nonfinite: int = 0
    """Samples left out because their value was NaN or infinite."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)


YES_NO = (0.0, 1.0)


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a rate.

    Args:
        successes: Number of successes, 0..trials.
        trials: Number of trials, >= 1.

    Returns:
        Lower and upper end, each in [0, 1].

    Source: Wilson 1927, JASA 22:209; without continuity correction.
    """
    rate, z2 = successes / trials, Z_95 * Z_95
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(both: int, first_only: int, second_only: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference (first - second) of two rates measured on the same samples.

    Unlike the paired t interval it has a width when no sample differs, so "no difference seen" is not mistaken for
    "no difference".

    Args:
        both: Samples where both succeeded.
        first_only: Samples where only the first succeeded.
        second_only: Samples where only the second succeeded.
        neither: Samples where neither did.

    Returns:
        Lower and upper end, each in [-1, 1].

    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10.
    """
    n = both + first_only + second_only + neither
    p1, p2 = (both + first_only) / n, (both + second_only) / n
    (l1, u1), (l2, u2) = wilson(both + first_only, n), wilson(both + second_only, n)
    product: float = both * neither - first_only * second_only
    scale = math.sqrt((both + first_only) * (second_only + neither) * (both + second_only) * (first_only + neither))
    if product > 0:
        product = max(product - n / 2, 0)
    phi = product / scale if scale else 0.0

    def width(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p1 - p2 - width(p1 - l1, u2 - p2), p1 - p2 + width(u1 - p1, p2 - l2)


def estimate(
    strata: Mapping[str, Sequence[float]], num_nonfinite: int = 0, bounds: tuple[float, float] | None = None
) -> Estimate:
    """Mean of the subsets' means with a 95 % interval.

    A subset of yes-or-no values contributes Wilson's interval, the others Student's t.

    Args:
        strata: Values of each subset, one per sample.
        num_nonfinite: Samples the caller left out, for the record.
        bounds: Smallest and largest possible value; the interval is cut there.
    """
    strata = {name: values for name, values in strata.items() if values}
    count = sum(map(len, strata.values()))
    if not count:
        return Estimate(num_nonfinite=num_nonfinite)
    means = [sum(values) / len(values) for values in strata.values()]
    result = Estimate(value=sum(means) / len(means), num_samples=count, num_nonfinite=num_nonfinite)
    yes_no = [values for values in strata.values() if all(item in YES_NO for item in values)]
    if len(yes_no) == len(strata) and len({len(values) for values in yes_no}) == 1:
        # Every sample weighs the same, so the subsets are one sample.
        result.low, result.high = wilson(sum(map(sum, yes_no)), count)
        result.interval = "wilson"
        return result
    parts = []
    for values in yes_no:
        low, high = wilson(sum(values), len(values))
        parts.append((sum(values) / len(values), low, high))
    others = [values for values in strata.values() if values not in yes_no]
    return _with_interval(result, parts, others, "t" if not yes_no else "wilson+t" if others else "wilson", bounds)


def paired_difference(strata: Mapping[str, Sequence[tuple[float, float]]]) -> Estimate:
    """Mean of the subsets' mean differences (first - second) with a 95 % interval.

    A subset of yes-or-no values contributes Newcombe's interval, the others Student's t on the differences.

    Args:
        strata: Pairs of each subset, one per sample; all values in [0, 1].
    """
    strata = {name: pairs for name, pairs in strata.items() if pairs}
    count = sum(map(len, strata.values()))
    if not count:
        return Estimate()
    means = [sum(a - b for a, b in pairs) / len(pairs) for pairs in strata.values()]
    result = Estimate(value=sum(means) / len(means), num_samples=count)
    yes_no = [pairs for pairs in strata.values() if all(item in YES_NO for pair in pairs for item in pair)]
    if len(yes_no) == len(strata) and len({len(pairs) for pairs in yes_no}) == 1:
        yes_no = [[pair for pairs in yes_no for pair in pairs]]  # every sample weighs the same
        strata = {"all": yes_no[0]}
    parts = []
    for pairs in yes_no:
        low, high = newcombe(*(sum(pair == kind for pair in pairs) for kind in ((1, 1), (1, 0), (0, 1), (0, 0))))
        parts.append((sum(a - b for a, b in pairs) / len(pairs), low, high))
    others = [[a - b for a, b in pairs] for pairs in strata.values() if pairs not in yes_no]
    name = "t" if not yes_no else "newcombe+t" if others else "newcombe"
    return _with_interval(result, parts, others, name, (-1.0, 1.0))


def _with_interval(
    result: Estimate,
    parts: Sequence[tuple[float, float, float]],
    others: Sequence[Sequence[float]],
    name: str,
    bounds: tuple[float, float] | None,
) -> Estimate:
    """Put the intervals of the subsets together.

    There is no interval where a subset that is not yes-or-no has one sample or no spread, because nothing can be said
    about it.
    """
    half = _t_half_width(others)
    if half is None or result.value is None:
        return result
    below, above = mover(parts, len(parts) + len(others), half)
    low, high = bounds or (-math.inf, math.inf)
    result.low, result.high = max(low, result.value - below), min(high, result.value + above)
    result.interval = name
    return result


def mover(parts: Sequence[tuple[float, float, float]], count: int, half: float = 0.0) -> tuple[float, float]:
    """How far the interval of a mean of independent values reaches below and above it.

    Squared distances to the ends add up, on each side by itself.

    Args:
        parts: Value, lower and upper end of each.
        count: Values in the mean: the parts, and those that `half` stands for.
        half: Half of the symmetric interval of the sum of further values.

    Source: Zou and Donner 2008, Statistics in Medicine 27:1693 (MOVER).
    """
    below = math.sqrt(sum(((value - low) / count) ** 2 for value, low, _ in parts) + (half / count) ** 2)
    above = math.sqrt(sum(((high - value) / count) ** 2 for value, _, high in parts) + (half / count) ** 2)
    return below, above


def welch_satterthwaite(terms: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Variance of a sum of independent estimates, and its degrees of freedom.

    Args:
        terms: Variance and degrees of freedom of each; not all variances 0.

    Source: Satterthwaite 1946, Biometrics Bulletin 2:110; Welch 1947, Biometrika 34:28.
    """
    total = sum(variance for variance, _ in terms)
    return total, total**2 / sum(variance**2 / freedom for variance, freedom in terms)


def _t_half_width(groups: Sequence[Sequence[float]]) -> float | None:
    """Half of the 95 % t interval of the sum of the groups' means; 0.0 without groups, None where it is unknown."""
    if not groups:
        return 0.0
    from scipy.stats import t  # slow to import, and not needed to show help or lists

    terms = []
    for values in groups:
        n = len(values)
        if n < 2:
            return None
        mean = sum(values) / n
        variance = sum((item - mean) ** 2 for item in values) / (n - 1)
        if variance == 0:
            return None
        terms.append((variance / n, n - 1))
    total, freedom = welch_satterthwaite(terms)
    return float(t.ppf(0.975, freedom)) * math.sqrt(total)
