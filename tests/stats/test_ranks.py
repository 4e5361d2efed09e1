"""Agreement of two measures on an order, against plain code, and how often the interval covers the truth."""

import itertools

import numpy as np
import pytest
import scipy.stats

from kvbench.stats.ranks import agreement, spearman
from kvbench.stats.strata import Strata, weighed


def oracle(a, b):
    """Scipy's correlation of one pair."""
    return scipy.stats.spearmanr(a, b).statistic


def test_spearman_is_the_correlation_of_ranks():
    """Every order of four runs, and values with ties; constants have no order."""
    for order in itertools.permutations([0.1, 0.2, 0.2, 0.9]):
        assert spearman([1, 2, 3, 4], order) == pytest.approx(oracle([1, 2, 3, 4], order))
    both = np.array([[1.0, 2, 3], [3.0, 1, 2]])
    assert spearman(both, [5, 6, 7]).tolist() == [1.0, -0.5]
    assert np.isnan(spearman([1, 2, 3], [4, 4, 4]))


def test_agreement_weighs_subsets_alike():
    """With six questions in one subset and two in the other, the means are those of the subsets' means."""
    mine = weighed([[[1, 0, 0]] * 6, [[0, 1, 0.5]] * 2])  # 0.5, 0.5, 0.25; pooled they would be 0.75, 0.25, 0.125
    theirs = weighed([[[3, 2, 1]] * 6, [[3, 2, 1]] * 2])
    found = agreement(mine, theirs, resamples=200)
    assert found.value == pytest.approx(oracle([0.5, 0.5, 0.25], [3, 2, 1]))
    assert found.interval == pytest.approx((found.value, found.value))  # the questions of a subset are all alike
    assert found.halves == pytest.approx((1.0, 1.0))


def test_nothing_is_said_without_an_order():
    """A measure that is the same for all runs ranks nothing; a subset with one question gives no interval."""
    rng = np.random.default_rng(0)
    flat = weighed([np.zeros((9, 4))])
    graded = weighed([rng.normal(size=(9, 4))])
    found = agreement(flat, graded, resamples=200)
    assert found.value is None and found.interval is None and found.halves[0] is None
    single = weighed([rng.normal(size=(9, 3)), rng.normal(size=(1, 3))])
    found = agreement(single, single, resamples=200)
    assert found.value == 1 and found.interval is None and found.halves == (None, None)
    with pytest.raises(ValueError, match="2 runs have no order worth a correlation; 3 are needed"):
        agreement(weighed([np.zeros((9, 2))]), weighed([np.zeros((9, 2))]))


def test_the_interval_covers_the_true_correlation():
    """Twelve runs whose means are known, answers with noise that both measures share: where the halves agree and
    the truth is far from 1, about 19 of 20 intervals hold the correlation of the true means."""
    rng = np.random.default_rng(1)
    covered, halves, num_trials = 0, [], 100
    for _ in range(num_trials):
        truth = rng.normal(size=(2, 12))
        truth[1] += 0.7 * truth[0]
        shared = rng.normal(size=(100, 1))
        mine, theirs = (Strata((own + shared + rng.normal(size=(100, 12)),), (1.0,)) for own in truth)
        found = agreement(mine, theirs, resamples=400)
        true = oracle(*truth)
        covered += found.interval[0] - 1e-9 <= true <= found.interval[1] + 1e-9
        halves += found.halves
    assert np.mean(halves) > 0.9
    assert covered >= 86  # 95 of 100 are expected; fewer than 86 come once in 10,000 times


def test_halves_tell_noise_from_contradiction():
    """Two measures that contradict each other agree with themselves; noise does not."""
    rng = np.random.default_rng(2)
    order = np.linspace(0, 3, 8)
    mine, theirs = (weighed([own + 0.5 * rng.normal(size=(60, 8))]) for own in (order, -order))
    found = agreement(mine, theirs, resamples=300)
    assert found.value < -0.9 and min(found.halves) > 0.9 and found.interval[1] < -0.8
    noise = weighed([rng.normal(size=(60, 8))])
    assert agreement(noise, theirs, resamples=300).halves[0] < 0.6
