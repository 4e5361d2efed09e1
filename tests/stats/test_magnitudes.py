"""Numbers of any magnitude, and tables of nothing: an interval or none, never a fault."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.stats import binomial
from kvbench.stats.intervals import estimate, newcombe, wilson
from kvbench.stats.paired import paired
from kvbench.stats.ranks import agreement
from kvbench.stats.shares import share_of_pairs
from kvbench.stats.strata import standard_error, weighed

EXPONENTS = st.integers(-995, 990)  # of two: 1e-299 .. 1e298
SIZES = st.lists(st.sampled_from([1, 2, 3, 8, 11]), min_size=1, max_size=3)
DRAW = settings(max_examples=25, deadline=None, derandomize=True)


def values_of(sizes, seed):
    """Values of some subsets, of which some are alike; none is exactly yes or no."""
    rng = np.random.default_rng(seed)
    return [np.where(rng.random(size) < 0.3, 0.25, rng.lognormal(0, 1, size)) for size in sizes]


def scaled(numbers, factor):
    """Ends or a pair of numbers times a factor; None stays."""
    return None if numbers is None else tuple(factor * number for number in numbers)


@given(sizes=SIZES, seed=st.integers(0, 99), exponent=EXPONENTS)
@DRAW
def test_every_magnitude_has_the_same_statistics(sizes, seed, exponent):
    """Values in another unit have the same mean, error, interval and p value in that unit, to the bit: the unit is a
    power of two. Their squares would vanish or overflow."""
    factor, groups = 2.0**exponent, values_of(sizes, seed)
    others = [values - 0.5 for values in values_of(sizes, seed + 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = [standard_error(weighed([values * by for values in groups])) for by in (1.0, factor)]
        assert errors[1] == (errors[0] and (errors[0][0] * factor, errors[0][1]))
        means = [estimate({str(n): values * by for n, values in enumerate(groups)}) for by in (1.0, factor)]
        assert means[1].ends == scaled(means[0].ends, factor) and means[1].interval == means[0].interval
        for make in (paired, share_of_pairs):
            pairs = [
                {
                    str(n): [(a * by, b * by) for a, b in zip(*both, strict=True)]
                    for n, both in enumerate(zip(groups, others, strict=True))
                }
                for by in (1.0, factor)
            ]
            one, other = (make(each, bounded=False, resamples=199) for each in pairs)
            assert (one is None) == (other is None)
            if one is None:
                continue
            by = factor if make is paired else 1.0
            assert other.interval == (scaled(one.interval[0], by), one.interval[1])
            assert other.value == one.value * by and other.p_beyond(0.0) == one.p_beyond(0.0)
            assert other.p_within(0.1 * by) == one.p_within(0.1 * by / by)


@given(seed=st.integers(0, 99), exponent=EXPONENTS)
@DRAW
def test_ranks_of_every_magnitude_agree_alike(seed, exponent):
    """Runs that differ by little are not alike."""
    rng = np.random.default_rng(seed)
    mine, theirs = rng.random((12, 4)), rng.random((12, 4))
    first, second = (agreement(weighed([mine * by]), weighed([theirs]), resamples=50) for by in (1.0, 2.0**exponent))
    assert first == second


@pytest.mark.parametrize("size", [1e-60, 1e-90, 1e-105, 1e-160, 1e-300, 1e90, 1e160, 1e300])
def test_hopeless_fidelity_ends_no_run(size):
    """Values of about 1e-105, as of a model whose weights are wrong, divided by a variance of zero at the end of a run,
    for ever; beside a subset of ordinary ones, too."""
    found = estimate({"a": [size * number / 11 for number in range(1, 12)]})
    assert found.low < found.value < found.high
    mixed = estimate({"a": [size * number / 11 for number in range(1, 12)], "b": [0.25] * 9})
    assert mixed.low <= mixed.value <= mixed.high
    steps = {"a": [(size * number / 11, 0.0) for number in range(1, 12)]}
    made = paired(steps, bounded=False)
    assert made.interval[0][0] > 0
    for needed in (made.needed(0.01), made.needed_equal(0.01, 0.025)):
        assert needed is None or needed >= 8


def test_of_nothing_nothing_is_known():
    """Rates of no trial may be anything; a test of nothing shows nothing; what is no number is left out and counted."""
    assert wilson(0, 0) == (0.0, 1.0) and newcombe(0, 0, 0, 0) == (-1.0, 1.0)
    assert binomial.within(0, 0, 0, 0.01) == 1.0
    assert binomial.samples_needed(0.0, 0.1, 0.05) is None and binomial.samples_needed(1e-300, 0.1, 0.05) is None
    found = estimate({"a": [math.nan, 1.0, math.inf], "b": [-math.inf]}, num_nonfinite=2)
    assert (found.value, found.num_samples, found.num_nonfinite) == (1.0, 1, 5)


@pytest.mark.parametrize(
    ("counts", "margin"), [((0, 0, 5), 0.0), ((0, 0, 5), -0.1), ((0, 0, 5), math.nan), ((3, 3, 5), 0.1)]
)
def test_what_no_test_can_be_of_is_refused(counts, margin):
    """A margin of nothing, and more changes than samples."""
    with pytest.raises(ValueError, match="margin=|lost="):
        binomial.within(*counts, margin)


def test_a_difference_is_of_finite_values():
    """Of an infinite score there is none."""
    with pytest.raises(ValueError, match="finite"):
        paired({"a": [(math.inf, 1.0)] * 9}, bounded=False)
