"""The statistics against scipy, statsmodels and plain loops, and their behaviour on the same thing measured twice."""

import math

import numpy as np
import pytest
import scipy.stats
import statsmodels.api as sm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from kvbench.stats import intervals
from kvbench.stats import paired as stats


@pytest.fixture
def strata():
    """Differences of three subsets of unequal size and spread."""
    rng = np.random.default_rng(3)
    return [rng.normal(0.02, spread, size) for size, spread in ((11, 0.2), (40, 0.1), (7, 0.5))]


def test_bootstrap_is_scipys(strata):
    """With the same generator the interval is scipy's percentile interval of the independent, stretched subsets at the
    level that Student's t puts in the place of 95 %."""
    stretched = [np.mean(v) + math.sqrt(len(v) / (len(v) - 1)) * (v - np.mean(v)) for v in strata]
    for values, given in ((strata, stretched), (strata[:1], stretched[:1])):
        freedom = stats.standard_error(values)[1]
        level = 1 - 2 * scipy.stats.norm.cdf(scipy.stats.t.ppf(0.025, freedom))
        assert 0.95 < level < 0.99
        # scipy draws all subsets in turn from one generator, as one batch.
        expected = scipy.stats.bootstrap(
            given,
            lambda *samples, axis: sum(np.mean(item, axis=axis) for item in samples) / len(samples),
            n_resamples=1500,
            confidence_level=level,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(8),
        ).confidence_interval
        assert stats.bootstrap(values, resamples=1500, seed=8) == pytest.approx(tuple(expected), abs=1e-12)


def test_bootstrap_says_nothing_without_spread():
    """One sample in a subset, or values that are all the same, give no interval."""
    assert stats.bootstrap([np.array([0.3])], resamples=200, seed=0) is None
    assert stats.bootstrap([np.zeros(9), np.full(3, 0.5)], resamples=200, seed=0) is None
    assert stats.bootstrap([], resamples=200, seed=0) is None


def test_columns_share_their_draws(strata):
    """The differences of two columns are the resamples of the differences."""
    two = [np.stack([values, 2 * values + 1], axis=1) for values in strata]
    means = stats.resampled_means(two, 300, 4)
    alone = stats.resampled_means([values + 1 for values in strata], 300, 4)
    np.testing.assert_allclose(means[:, 1] - means[:, 0], alone, atol=1e-12)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 1), (3, 3), (17, 4), (0, 6), (150, 201)])
def test_mcnemar_is_the_binomial_test(lost, gained):
    """The exact test is statsmodels', and scipy's binomial test of a fair coin over the samples that differ."""
    expected = scipy.stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert stats.mcnemar(lost, gained) == pytest.approx(expected, abs=1e-12)
    assert stats.mcnemar(lost, gained) == pytest.approx(mcnemar([[7, gained], [lost, 9]], exact=True).pvalue, abs=1e-6)


def test_equivalence_is_statsmodels_paired_tost(strata):
    """With one subset the p value is that of statsmodels' paired test, whatever the margin."""
    rng = np.random.default_rng(0)
    mine = rng.random(50)
    theirs = mine + rng.normal(0.01, 0.05, 50)
    for margin in (0.005, 0.02, 0.1):
        expected = ttost_paired(mine, theirs, -margin, margin)[0]
        assert stats.equivalence([mine - theirs], margin) == pytest.approx(expected, abs=1e-6)


def test_standard_error_is_the_contrast_of_subset_means(strata):
    """With several subsets it is the error of the contrast 1/k of a model with one mean per subset and HC2 errors."""
    values = np.concatenate(strata)
    which = np.repeat(np.arange(3), list(map(len, strata)))
    fitted = sm.OLS(values, (which[:, None] == np.arange(3)).astype(float)).fit(cov_type="HC2")
    contrast = fitted.t_test(np.full((1, 3), 1 / 3))
    error, freedom = stats.standard_error(strata)
    assert stats.mean(strata) == pytest.approx(contrast.effect[0], abs=1e-12)
    assert error == pytest.approx(contrast.sd[0, 0], rel=1e-9)
    assert 6 < freedom < 55
    welch = scipy.stats.ttest_ind(strata[0], -strata[1], equal_var=False)  # half the sum of two means
    assert stats.standard_error(strata[:2])[1] == pytest.approx(welch.df, rel=1e-9)


def test_equivalence_of_identical_answers_needs_many_samples():
    """When no sample differs, 299 prove a margin of one point and 298 do not; unbounded values prove nothing."""
    assert stats.equivalence([np.zeros(299)], 0.01, bounded=True) == pytest.approx(0.99**299)
    assert (
        stats.equivalence([np.zeros(299)], 0.01, bounded=True)
        < 0.05
        < stats.equivalence([np.zeros(298)], 0.01, bounded=True)
    )
    assert stats.equivalence([np.zeros(20), np.zeros(4)], 0.01, bounded=True) == pytest.approx(0.99**8)
    assert stats.equivalence([np.zeros(299)], 0.01) is None
    assert stats.equivalence([np.full(299, 0.1)], 0.01, bounded=True) is None


def test_sign_flip_is_every_pattern():
    """A few differences: the p value is the share of all sign patterns that are as far from zero; the subsets weigh
    the same."""
    groups = [np.array([0.5, -0.1, 0.0, 0.4]), np.array([0.3, 0.9])]
    weighted = np.concatenate([values / len(values) for values in groups])
    weighted = weighted[weighted != 0]
    patterns = np.array(np.meshgrid(*[[-1, 1]] * len(weighted))).reshape(len(weighted), -1)
    sums = weighted @ patterns
    expected = np.mean(np.abs(sums) >= abs(weighted.sum()) - 1e-12)
    assert stats.sign_flip(groups, seed=0) == pytest.approx(expected, abs=1e-12)
    assert stats.sign_flip([np.zeros(5)], seed=0) == 1.0 == stats.sign_flip([np.array([0.0, 0.3])], seed=0)
    # Yes-or-no values in one subset: the same question as McNemar's.
    many = np.array([-1.0] * 9 + [1.0] * 2 + [0.0] * 30)
    assert stats.sign_flip([many], seed=0) == pytest.approx(stats.mcnemar(9, 2), abs=1e-12)


def test_holm_by_hand():
    """The smallest p value is multiplied by their number, the next by one less, and none falls below one before it."""
    assert stats.holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06])
    assert stats.holm([]) == []


def test_detectable_difference(strata):
    """The smallest difference that would show: statsmodels' power is 80 % at it, and as many samples as it says are
    needed for it."""
    values = strata[1:2]
    smallest = stats.detectable(values)
    effect = smallest / np.std(values[0], ddof=1)
    assert TTestPower().power(effect, len(values[0]), 0.05) == pytest.approx(0.8, abs=1e-6)
    assert stats.samples_needed(values, smallest) == len(values[0])
    assert stats.samples_needed([np.array([0.5, 0.5 + 1e-16, 0.5, 0.5])], 0.3) == 3
    assert stats.detectable([np.zeros(40)]) is None
    loss = stats.detectable([np.zeros(40)], yes_no=True)
    assert scipy.stats.binom.sf(5, 40, loss) == pytest.approx(0.8)
    assert stats.mcnemar(6, 0) < 0.05 < stats.mcnemar(5, 0)
    assert stats.detectable([np.zeros(5)], yes_no=True) is None is stats.detectable([np.zeros(9), np.ones(9)])


@pytest.mark.parametrize("sizes", [(100,), (6, 6, 6, 6), (60, 20, 40)])
def test_same_thing_twice_covers_zero(sizes):
    """The full cache against itself with noise, 1,000 times: the 95 % interval covers zero in 93 to 97 % of them."""
    rng = np.random.default_rng(11)
    covered = 0
    for trial in range(1000):
        # 40 % of the answers change at all; which of the two runs is the better one is chance.
        differences = [(rng.random(size) < 0.4) * (rng.random(size) - rng.random(size)) for size in sizes]
        low, high = stats.bootstrap(differences, resamples=400, seed=trial)
        covered += low <= 0 <= high
    assert 930 <= covered <= 970


def test_same_thing_twice_covers_zero_for_yes_or_no():
    """The same for right and wrong answers of which one in eight changes."""
    rng = np.random.default_rng(12)
    covered = 0
    for trial in range(1000):
        differences = [rng.choice([-1.0, 0.0, 1.0], size=50, p=[1 / 16, 7 / 8, 1 / 16]) for _ in range(4)]
        low, high = stats.bootstrap(differences, resamples=400, seed=trial)
        covered += low <= 0 <= high
    assert 930 <= covered <= 970


def test_both_intervals_of_a_mean_rest_on_one_variance(strata):
    """The t interval of `estimate` is that of `standard_error`, which the sum of the subsets' variances decides; the
    interval of a mean of means reaches as far as its parts together."""
    made = intervals.estimate({str(index): list(values) for index, values in enumerate(strata)})
    error, freedom = stats.standard_error(strata)
    assert (made.high - made.low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, freedom) * error)
    below, above = intervals.mover([(0.5, 0.2, 0.9), (0.1, 0.1, 0.4)], 2)
    assert (below, above) == pytest.approx((0.15, 0.25))
    assert intervals.mover([], 4, 0.8) == pytest.approx((0.2, 0.2))
