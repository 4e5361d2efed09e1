"""A mean as a share of another: Fieller's limits by inversion, the tests of the difference, and coverage."""

import math

import numpy as np
import pytest

from kvbench.stats import studentised
from kvbench.stats.intervals import Z_95, newcombe, wilson
from kvbench.stats.paired import paired
from kvbench.stats.shares import FIELLER, MOVER_R, share_of_pairs
from kvbench.stats.strata import Strata, standard_error


def graded(n, loss=0.2, seed=0, subsets=1):
    """Scores of a method that keeps part of the full cache's, in subsets: pairs of mine and theirs."""
    rng = np.random.default_rng(seed)
    full = rng.beta(2, 2, n)
    mine = np.clip(full * (1 - loss) + rng.normal(0, 0.1, n), 0, 1)
    return {
        str(k): list(zip(mine[k::subsets].tolist(), full[k::subsets].tolist(), strict=True)) for k in range(subsets)
    }


def test_fiellers_limits_are_where_the_test_turns():
    """At each end the mean of mine - share * theirs is its standard error times the bootstrap's quantile."""
    pairs = graded(60, subsets=3)
    found = share_of_pairs(pairs, resamples=999)
    (low, high), name = found.interval
    assert name == FIELLER
    means = [np.mean([np.mean([pair[place] for pair in each]) for each in pairs.values()]) for place in (0, 1)]
    assert found.value + 1 == pytest.approx(means[0] / means[1])

    def rest(share):
        return Strata(tuple(np.array([a - share * b for a, b in each]) for each in pairs.values()), (1 / 3,) * 3)

    t = np.sort(studentised.t_statistics(rest(found.value + 1), 999, 0))
    for end, quantile in ((low, studentised.quantiles(t)[1]), (high, studentised.quantiles(t)[0])):
        left = rest(end + 1)
        assert float(left.mean()) == pytest.approx(quantile * standard_error(left)[0], rel=1e-6)


def test_the_tests_are_those_of_the_difference():
    """p values, verdict and power are the paired difference's; margins and differences are shares of the whole."""
    pairs = graded(40)
    found, gap = share_of_pairs(pairs, resamples=999), paired(pairs, resamples=999)
    whole = np.mean([b for _, b in pairs["0"]])
    assert found.value * whole == pytest.approx(gap.value)
    assert found.p_beyond(0.0) == gap.p and found.p_within(0.3) == gap.p_within(0.3 * whole)
    assert found.detectable() * whole == pytest.approx(gap.detectable()) and found.needed(0.1) == gap.needed(
        0.1 * whole
    )
    assert found.among(30).num_tests == 30 and found.among(30).gap.strata is found.gap.strata


def test_rates_have_wilsons_limits_and_newcombes_correlation():
    """With no correlation the ends are Donner and Zou's; where no sample differs there is still a width, and 100 %."""
    same = {"a": [(1.0, 1.0)] * 12}
    (low, high), name = share_of_pairs(same).interval
    assert name == MOVER_R and (low, high) == pytest.approx((wilson(12, 12)[0] - 1, 1 / wilson(12, 12)[0] - 1))
    # Both, mine alone, theirs alone, neither, by hand.
    counts = (6, 4, 8, 12)
    pairs = {"a": sum(([kind] * n for kind, n in zip(((1, 1), (1, 0), (0, 1), (0, 0)), counts, strict=True)), [])}
    (low, high), _ = share_of_pairs(pairs).interval
    (l1, u1), (l2, u2) = wilson(10, 30), wilson(14, 30)
    m, f, both = 10 / 30, 14 / 30, max(6 * 12 - 4 * 8 - 15, 0) / math.sqrt(10 * 20 * 14 * 16)
    below = m * f - both * (m - l1) * (u2 - f)
    above = m * f - both * (u1 - m) * (f - l2)
    least = (below - math.sqrt(below**2 - l1 * u2 * (2 * m - l1) * (2 * f - u2))) / (u2 * (2 * f - u2))
    most = (above + math.sqrt(above**2 - u1 * l2 * (2 * m - u1) * (2 * f - l2))) / (l2 * (2 * f - l2))
    assert (low + 1, high + 1) == pytest.approx((least, most))
    assert newcombe(*counts, Z_95)[0] < 0 < newcombe(*counts, Z_95)[1] and low < 0 < high


def test_what_cannot_be_said():
    """No share of nothing, no interval of a whole that may be 0 or of too few samples."""
    assert share_of_pairs({}) is None and share_of_pairs({"a": [(0.5, 0.0)] * 9}) is None
    rare = [(0.2 + n / 100, 0.0) for n in range(30)] + [(0.1, 0.9)]
    assert share_of_pairs({"a": rare}, resamples=499).interval == (None, "")
    few = {"a": [(0.1 * n, 0.9 - 0.05 * n) for n in range(7)]}
    assert share_of_pairs(few, resamples=499, bounded=False).interval == (None, "")


@pytest.mark.parametrize("kind", ["rates", pytest.param("graded", marks=pytest.mark.exhaustive)])
def test_intervals_cover(kind):
    """Of 300 draws of 50 samples at a true share of 0.8, 95 % hold it: three standard errors of 300 draws are 3.8 %."""
    rng, held = np.random.default_rng(5), 0
    for _ in range(300):
        full = (rng.random(50) < 0.6).astype(float) if kind == "rates" else rng.beta(2, 2, 50)
        kept = full * (rng.random(50) < 0.75) + (1 - full) * (rng.random(50) < 0.075) if kind == "rates" else None
        mine = kept if kept is not None else full * rng.beta(8, 2, 50)
        found = share_of_pairs({"a": list(zip(mine.tolist(), full.tolist(), strict=True))}, resamples=399)
        low, high = found.interval[0]
        held += low <= -0.2 <= high
    assert 0.95 - 0.038 <= held / 300 <= 0.95 + 0.045
