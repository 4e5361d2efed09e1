"""A paired difference: its interval, its tests, and what they would have shown.

One estimator answers one question everywhere, in run tables, `compare`, `pareto` and `calibrate`:

- The p value decides whether there is a difference, and its direction is that of the weighted mean. Yes-or-no values
  take the sign-flip test with the weights of the mean: McNemar's exact test where every sample weighs the same. Where
  samples weigh unlike, subsets may pull in opposite ways, which the sign-flip test takes for impossible; there the p
  value is no smaller than the one at which the interval begins to exclude zero.
  Other values take the larger p value of the sign-flip test, which is exact if differences are symmetric, and of the
  studentised bootstrap, which allows for skewness.
- The interval is Newcombe's for yes-or-no values and the studentised bootstrap's for others. It reaches zero wherever
  the test does not exclude zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvbench.stats import binomial, studentised
from kvbench.stats.intervals import BINARY, BOOTSTRAP, FEW_DIFFER, NEWCOMBE, Z_95, Estimate, mover, newcombe, wilson
from kvbench.stats.sign_test import DRAWS, sign_flip
from kvbench.stats.strata import FEWEST_SAMPLES, Strata, Weighting, standard_error, weighed
from kvbench.stats.studentised import LEVEL, RESAMPLES, SEED, resamples_for

ALPHA = 1 - LEVEL
POWER = binomial.POWER
MOST_TIMES = 1e9  # a difference that is this many times smaller than what the samples show is shown by none
FEWEST_DIFFERENT = 6  # fewer than six differing samples, all one way, are no p < 0.05: 2 * 0.5^6 = 0.03
Pair = tuple[float, float]


@dataclass(kw_only=True)
class Paired:
    """The differences of two runs on the same samples."""

    strata: Strata
    """Differences of each subset, with the subsets' weights."""
    pairs: Sequence[Sequence[Pair]] | None = None
    """The values of each subset where all are yes or no."""
    bounded: bool = False
    """No difference can be larger than 1: then samples that do not differ prove something too."""
    resamples: int = RESAMPLES
    seed: int = SEED
    num_tests: int = 1
    """Tests that are corrected together: more of them need more resamples, or no p value could be small enough."""
    _known: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def value(self) -> float:
        """The weighted mean."""
        return float(self.strata.mean())

    @cached_property
    def num_different(self) -> int:
        """Samples whose difference is not zero."""
        return int(np.count_nonzero(self.strata.flat))

    @property
    def few_differ(self) -> bool:
        """True if so few samples of a bounded score differ that only their number is informative."""
        return self.bounded and self.num_different < FEWEST_DIFFERENT

    @cached_property
    def error(self) -> tuple[float, float] | None:
        """Standard error and degrees of freedom; None where nothing can be said of spread."""
        return standard_error(self.strata) if self.strata.count >= FEWEST_SAMPLES else None

    def among(self, num_tests: int) -> "Paired":
        """Copy of this test as one of `num_tests`."""
        return replace(self, num_tests=num_tests)

    def _t(self, resamples: int) -> np.ndarray:
        """The t statistics of so many resamples, in order."""
        if resamples not in self._known:
            self._known[resamples] = np.sort(studentised.t_statistics(self.strata, resamples, self.seed))
        return self._known[resamples]

    def _tail(self, null: float, above: bool) -> float | None:
        """One-sided p value of the studentised bootstrap: small where the mean is above (or below) the null."""
        if self.error is None:
            return None
        t = (self.value - null) / self.error[0]
        draws = self._t(resamples_for(self.num_tests, self.resamples))
        rank = int(np.searchsorted(draws, t, "left" if above else "right"))
        reached = len(draws) - rank if above else rank
        p = (1 + reached) / (1 + len(draws))
        if null == 0 or p >= ALPHA:
            return p
        # Of few samples no tail is known: the signs about the null are the second witness, as they are about zero.
        return max(p, sign_flip(self.strata.map(lambda values: values - null), seed=self.seed) / 2)

    @property
    def test(self) -> str:
        """Name of the test that `p` is of."""
        if self.pairs is None:
            return "sign flip and studentised bootstrap"
        return "mcnemar" if self.strata.weighs_samples_alike else "weighted sign flip and newcombe"

    @cached_property
    def p(self) -> float | None:
        """Two-sided p value of no difference; None where nothing can be said."""
        draws = max(DRAWS, resamples_for(self.num_tests, self.resamples))
        flipped = sign_flip(self.strata, draws=draws, seed=self.seed)
        if flipped == 1.0 or (self.pairs is not None and self.strata.weighs_samples_alike):
            return flipped
        if self.pairs is not None:
            return max(flipped, self._newcombe_p())
        tails = self._tail(0.0, True), self._tail(0.0, False)
        if tails[0] is None or tails[1] is None:
            return flipped if self.few_differ else None
        return max(flipped, min(1.0, 2 * min(tails[0], tails[1])))

    def p_beyond(self, margin: float) -> float | None:
        """Two-sided p value of a difference that is no larger than a margin.

        `p` with margin 0, None where that is None.
        """
        if margin == 0:
            return self.p
        if abs(self.value) <= margin or self.few_differ:
            return 1.0
        tail = self._tail(math.copysign(margin, self.value), self.value > 0)
        return None if tail is None else min(1.0, 2 * tail)

    def p_within(self, margin: float) -> float | None:
        """The larger of two one-sided p values of a mean inside (-margin, margin); None where nothing can be said.

        Yes-or-no values are tested exactly. Where fewer than six bounded values differ, each counts as a whole answer.

        Source: Schuirmann 1987, J. Pharmacokin. Biopharm. 15:657 (two one-sided tests).
        """
        if self.pairs is not None or self.few_differ:
            # Cautious where samples weigh unlike: the subset whose samples weigh most.
            each = self.strata.per_sample
            count = max(1, int(1 / each.max() + 1e-9))
            sides = []
            for sign in (-1, 1):
                lost, gained = (float(each[sign * self.strata.flat * side > 0].sum()) * count for side in (1, -1))
                gained = gained if self.pairs is not None else 0.0
                whole = min(count, math.ceil(lost - 1e-9))
                sides.append(binomial.within(whole, min(count - whole, int(gained + 1e-9)), count, margin))
            return max(sides)
        above, below = self._tail(-margin, True), self._tail(margin, False)
        return None if above is None or below is None else max(above, below)

    @cached_property
    def interval(self) -> tuple[tuple[float, float] | None, str]:
        """95 % interval of the mean and how it was computed; None and an empty name where nothing can be said."""
        ends, name = self._raw_interval()
        if ends is None or self.p is None:
            return None, ""
        low, high = ends
        if self.bounded:
            low, high = max(-1.0, low), min(1.0, high)
        if self.p >= ALPHA:
            low, high = min(low, 0.0), max(high, 0.0)
        return (low, high), name

    def _raw_interval(self) -> tuple[tuple[float, float] | None, str]:
        if self.pairs is not None:
            return self._newcombe(), NEWCOMBE
        if self.error is not None and not self.few_differ:
            ends = studentised.ends(self._t(self.resamples), self.value, self.error[0])
            if ends is not None:
                return ends, BOOTSTRAP
        if self.bounded:
            return self._clopper_pearson(), FEW_DIFFER
        return None, ""

    def _newcombe_p(self) -> float:
        """Level at which Newcombe's interval begins to exclude zero."""
        from scipy.optimize import brentq
        from scipy.stats import norm

        def end(z: float) -> float:
            low, high = self._newcombe(z)
            return low if self.value > 0 else -high

        if end(0.0) <= 0:  # no difference, but perhaps for the rounding of subsets that cancel
            return 1.0
        largest = 12.0
        return 0.0 if end(largest) > 0 else float(2 * norm.sf(brentq(end, 0.0, largest)))

    @cached_property
    def _counts(self) -> list[list[int]]:
        """Counts of pairs per group: right in both, in this one alone, in the other alone, in neither."""
        groups = self.pairs or ()
        if self.strata.weighs_samples_alike:
            groups = [[pair for group in groups for pair in group]]
        kinds = ((1, 1), (1, 0), (0, 1), (0, 0))
        return [[sum(pair == kind for pair in group) for kind in kinds] for group in groups]

    def _newcombe(self, z: float = Z_95) -> tuple[float, float]:
        ends = [newcombe(both, mine, theirs, neither, z) for both, mine, theirs, neither in self._counts]
        if len(ends) == 1:
            return ends[0]
        parts = [(float(v.mean()), *end) for v, end in zip(self.strata.values, ends, strict=True)]
        below, above = mover(parts, self.strata.weights)
        return self.value - below, self.value + above

    def _clopper_pearson(self) -> tuple[float, float]:
        """Ends that hold whatever the size of a change: no more is lost than the share of samples that lost."""
        from scipy.stats import beta

        count = max(1, int(1 / self.strata.per_sample.max() + 1e-9))
        each, ends = self.strata.per_sample, []
        for sign in (-1, 1):
            share = float(each[sign * self.strata.flat > 0].sum())
            whole = min(count, math.ceil(share * count - 1e-9))
            most = 1.0 if whole == count else float(beta.ppf(1 - ALPHA / 2, whole + 1, count - whole))
            ends.append(sign * most)
        return ends[0], ends[1]

    @property
    def churn(self) -> float:
        """Upper end of Wilson's interval of the share of samples that differ."""
        share = float(self.strata.per_sample[self.strata.flat != 0].sum())
        count = self.strata.effective_count
        return wilson(share * count, count)[1]

    def detectable(self, level: float = ALPHA) -> float | None:
        """Smallest true difference that `p` shows with 80 % probability, below a corrected level.

        The level is divided by the rows corrected together; None where it cannot be known, or none would.
        """
        if self.pairs is not None or self.few_differ:
            return binomial.detectable(self.churn, int(self.strata.effective_count + 1e-9), level)
        if self.error is None or 2.0 ** (1 - self.num_different) >= level:
            return None
        return self.error[0] * _noncentral(self.error[1], level)

    def needed(self, difference: float, level: float = ALPHA) -> int | None:
        """Number of samples that would show a true difference of this size with 80 % probability.

        At the churn or the spread seen here; None where that is not known, or without bounds.
        """
        if self.pairs is not None or self.few_differ:
            return binomial.samples_needed(difference, self.churn, level)
        if self.error is None:
            return None
        count = self.strata.count
        for _ in range(20):  # the t quantile depends weakly on the number looked for
            shows = _noncentral(max(2.0, count - 1.0), level) * self.error[0]
            if not shows < MOST_TIMES * difference:
                return None
            ratio = shows / difference
            wanted = max(FEWEST_SAMPLES, math.ceil(self.strata.count * ratio**2))
            if wanted == count:
                break
            count = wanted
        return count

    def needed_equal(self, margin: float, level: float) -> int | None:
        """Number of samples at which an equal run is confirmed within a margin with 80 % probability.

        By two one-sided tests at this level, at the churn or the spread seen here; None where that is not known.

        Source: Chow, Shao and Wang 2008, Sample Size Calculations in Clinical Research, section 3.2 (equivalence);
            Tango 1998, Statistics in Medicine 17:891, for yes-or-no values, whose spread is another at the margin.
        """
        from scipy.stats import norm

        if self.pairs is not None or self.few_differ:
            spread = math.sqrt(self.churn)
            at_margin = math.sqrt(binomial.restricted_churn(self.churn, margin) - margin**2)
        elif self.error is not None:
            spread = at_margin = self.error[0] * math.sqrt(self.strata.count)
        else:
            return None
        shows = float(norm.isf(level) * at_margin + norm.isf((1 - POWER) / 2) * spread)
        if not shows < MOST_TIMES * margin:
            return None
        return max(FEWEST_SAMPLES, math.ceil((shows / margin) ** 2))

    def estimate(self) -> Estimate:
        """Value, interval and number of samples."""
        ends, name = self.interval
        low, high = ends or (None, None)
        return Estimate(value=self.value, num_samples=self.strata.count, low=low, high=high, interval=name)


def _noncentral(freedom: float, level: float) -> float:
    """Difference, in standard errors, that a two-sided t test shows with 80 % probability."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    critical = t.ppf(1 - level / 2, freedom)
    return float(brentq(lambda shift: nct.sf(critical, freedom, shift) - POWER, 0.0, critical * 4 + 20))


def difference(
    mine: Strata, theirs: Strata, *, bounded: bool = True, resamples: int = RESAMPLES, seed: int = SEED
) -> Paired:
    """Pair the values of two runs on the same samples, first minus second; `bounded` ones are in [0, 1]."""
    both = [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(mine.values, theirs.values, strict=True)]
    is_binary = bounded and bool(np.isin(mine.flat, BINARY).all() and np.isin(theirs.flat, BINARY).all())
    return Paired(
        strata=Strata(tuple(a - b for a, b in zip(mine.values, theirs.values, strict=True)), mine.weights),
        pairs=both if is_binary else None,
        bounded=bounded,
        resamples=resamples,
        seed=seed,
    )


def paired(groups: Mapping[str, Sequence[Pair]], weighting: Weighting = "subset", **settings: Any) -> Paired | None:
    """Paired `difference` over subsets, weighted as `weighed` does; None without a pair.

    Raises ValueError for a value that is not finite: of such a pair there is no difference.
    """
    filled = [np.array(pairs, dtype=float) for pairs in groups.values() if pairs]
    if not filled:
        return None
    if not all(np.isfinite(pairs).all() for pairs in filled):
        raise ValueError("a paired difference is of finite values; leave out the samples that have none")
    mine, theirs = (weighed([pairs[:, side] for pairs in filled], weighting) for side in (0, 1))
    return difference(mine, theirs, **settings)


def paired_difference(groups: Mapping[str, Sequence[Pair]], weighting: Weighting = "subset") -> Estimate:
    """Weighted mean difference (first - second) of scores in [0, 1], with its 95 % interval; empty without a pair."""
    result = paired(groups, weighting)
    return Estimate() if result is None else result.estimate()


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-corrected p values; an unknown one counts as 1."""
    # Four lines of numpy: statsmodels' multipletests looks for garbage in the whole process at each call.
    known = np.array([1.0 if p is None else p for p in p_values])
    order, adjusted = np.argsort(known), np.empty(len(known))
    adjusted[order] = np.maximum.accumulate(known[order] * np.arange(len(known), 0, -1)).clip(max=1.0)
    return [None if p is None else float(q) for p, q in zip(p_values, adjusted, strict=True)]
