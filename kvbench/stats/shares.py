"""A mean as a share of another mean of the same samples: a method's score in % of the full cache's.

Its difference from 1 is zero exactly where the paired difference is, so every test is that of `kvbench.stats.paired`.
Its interval includes the uncertainty of the full cache's mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvbench.stats import studentised
from kvbench.stats.intervals import correlation, rate_interval
from kvbench.stats.paired import ALPHA, Pair, Paired, difference
from kvbench.stats.strata import Strata, Weighting, standard_error, unit_of, weighed

FIELLER, MOVER_R = "fieller, studentised bootstrap", "wilson, mover-r"
Ends = tuple[float, float]


@dataclass(kw_only=True)
class Share:
    """A share of a mean, less 1: -0.07 where 93 % of it are left. It answers what `Paired` answers."""

    gap: Paired
    """The differences of the two."""
    mine: Strata
    theirs: Strata
    """Of the whole; its mean is above 0."""

    @cached_property
    def whole(self) -> float:
        """The mean that it is a share of."""
        return float(self.theirs.mean())

    @property
    def value(self) -> float:
        """Mean over mean, less 1."""
        return self.gap.value / self.whole

    @property
    def resamples(self) -> int:
        """Bootstrap resamples."""
        return self.gap.resamples

    @property
    def num_tests(self) -> int:
        """Tests that are corrected together."""
        return self.gap.num_tests

    @property
    def num_different(self) -> int:
        """Samples whose difference is not zero."""
        return self.gap.num_different

    @property
    def test(self) -> str:
        """Name of the test of the difference."""
        return self.gap.test

    def among(self, num_tests: int) -> "Share":
        """Copy of this test as one of `num_tests`."""
        return replace(self, gap=self.gap.among(num_tests))

    def p_beyond(self, margin: float) -> float | None:
        """See `Paired.p_beyond`, with a margin in shares of the whole as it was measured."""
        return self.gap.p_beyond(margin * self.whole)

    def p_within(self, margin: float) -> float | None:
        """See `Paired.p_within`, with a margin in shares of the whole as it was measured."""
        return self.gap.p_within(margin * self.whole)

    def detectable(self, level: float = ALPHA) -> float | None:
        """See `Paired.detectable`, in shares of the whole."""
        least = self.gap.detectable(level)
        return None if least is None else least / self.whole

    def needed(self, difference: float, level: float = ALPHA) -> int | None:
        """See `Paired.needed`, in shares of the whole."""
        return self.gap.needed(difference * self.whole, level)

    def needed_equal(self, margin: float, level: float) -> int | None:
        """See `Paired.needed_equal`, in shares of the whole."""
        return self.gap.needed_equal(margin * self.whole, level)

    @cached_property
    def interval(self) -> tuple[Ends | None, str]:
        """95 % interval and its method; None and an empty name where nothing can be said, or the whole may be 0.

        It reaches 0 wherever the test does not exclude a difference of 0.
        """
        ends, name = self._raw_interval()
        if ends is None or self.gap.p is None:
            return None, ""
        low, high = ends
        if self.gap.bounded:
            low = max(-1.0, low)
        if self.gap.p >= ALPHA:
            low, high = min(low, 0.0), max(high, 0.0)
        return (low, high), name

    def _raw_interval(self) -> tuple[Ends | None, str]:
        if self.gap.pairs is not None:
            return self._of_rates(), MOVER_R
        if self.gap.few_differ:
            ends, name = self.gap.interval
            return None if ends is None else (ends[0] / self.whole, ends[1] / self.whole), name
        return self._fieller(), FIELLER

    def _fieller(self) -> Ends | None:
        """Fieller's interval: shares s at which the mean of `mine - s * theirs` may be 0.

        It is no further from 0 than its standard error times the quantiles of the studentised bootstrap.

        Source: Fieller 1954, J. Royal Statistical Society B 16:175; the quantiles: Hwang 1995, Biometrika 82:217.
        """
        share = self.value + 1
        rest = self._rest(share)
        if self.gap.error is None or standard_error(rest) is None:
            return None
        low, high = studentised.quantiles(np.sort(studentised.t_statistics(rest, self.resamples, self.gap.seed)))
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        mine, theirs = (one.map(lambda values: values / self._unit) for one in (self.mine, self.theirs))
        errors = [math.sqrt(_covariance(one, one)) for one in (mine, theirs)]
        both = _covariance(mine, theirs) / (errors[0] * errors[1]) if errors[0] and errors[1] else 0.0
        return self._ends(both, *((max(0.0, t) * errors[0], max(0.0, t) * errors[1]) for t in (high, -low)))

    @property
    def _unit(self) -> float:
        """Unit of both means in which their squares can be told."""
        return float(unit_of(self.mine.flat, self.theirs.flat))

    def _rest(self, share: float) -> Strata:
        values = tuple(m - share * t for m, t in zip(self.mine.values, self.theirs.values, strict=True))
        return Strata(values, self.mine.weights)

    def _of_rates(self) -> Ends | None:
        """Interval for yes-or-no values, from Wilson's limits of both rates and Newcombe's correlation.

        So it has a width where no sample differs.

        Source: Donner and Zou 2012, Statistical Methods in Medical Research 21:347 (MOVER for a ratio).
        """
        rates = [(float(one.mean()), *rate_interval(one)) for one in (self.mine, self.theirs)]
        (mine, mine_low, mine_high), (theirs, theirs_low, theirs_high) = rates
        both = correlation(self.gap.pairs or (), self.mine)
        below, above = (mine - mine_low, theirs_high - theirs), (mine_high - mine, theirs - theirs_low)
        return self._ends(both, *((reach / self._unit, of_whole / self._unit) for reach, of_whole in (below, above)))

    def _ends(self, both: float, below: Ends, above: Ends) -> Ends | None:
        """The two shares, less 1, at reaches of `mine` and `theirs`, in `_unit`, and their correlation.

        None where the whole's interval contains 0.
        """
        mine, whole, roots = float(self.mine.mean()) / self._unit, self.whole / self._unit, []
        for sign, (reach, of_whole) in ((-1, below), (1, above)):
            rest = whole**2 - of_whole**2
            if rest <= 0:
                return None
            middle = mine * whole - both * reach * of_whole
            root = math.sqrt(max(0.0, middle**2 - rest * (mine**2 - reach**2)))
            roots.append((middle + sign * root) / rest - 1)
        return roots[0], roots[1]


Difference = Paired | Share


def _covariance(one: Strata, other: Strata) -> float:
    """Covariance of two weighted means over the same samples."""
    parts = zip(one.values, other.values, one.weights, strict=True)
    return sum(w * w * float(np.cov(a, b)[0, 1]) / len(a) for a, b, w in parts)


def share(mine: Strata, theirs: Strata, **how: Any) -> Share | None:
    """First mean as a share of the second, of values of the same samples; `how` as in `paired.difference`.

    None where the second mean is not above 0.
    """
    if float(theirs.mean()) <= 0:
        return None
    return Share(gap=difference(mine, theirs, **how), mine=mine, theirs=theirs)


def share_of_pairs(groups: Mapping[str, Sequence[Pair]], weighting: Weighting = "subset", **how: Any) -> Share | None:
    """`share` of the pairs of each subset, weighed as `weighed` says; None also without a pair."""
    columns = [[[pair[side] for pair in pairs] for pairs in groups.values() if pairs] for side in (0, 1)]
    return share(weighed(columns[0], weighting), weighed(columns[1], weighting), **how) if columns[0] else None
