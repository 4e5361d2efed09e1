"""The studentised bootstrap against a plain loop, and how it covers."""

import numpy as np
import pytest

from kvbench.stats import studentised
from kvbench.stats.sign_test import sign_flips
from kvbench.stats.strata import Strata, standard_error, weighed


def test_interval_is_that_of_a_plain_loop():
    """Resample each subset, studentise each resample by its own error, and turn the quantiles round."""
    rng = np.random.default_rng(3)
    groups = [rng.lognormal(0, 1, 12), rng.normal(0, 1, 30)]
    strata = weighed(groups)
    low, high = studentised.interval(strata, resamples=3999, seed=1)
    t = []
    for _ in range(3000):
        drawn = weighed([rng.choice(values, len(values)) for values in groups])
        t.append((drawn.mean() - strata.mean()) / standard_error(drawn)[0])
    error = standard_error(strata)[0]
    ends = strata.mean() - np.quantile(t, [0.975, 0.025]) * error
    # The loop leaves out the factor of the stretched residuals, which studentising takes away again.
    assert (low, high) == pytest.approx(tuple(ends), abs=0.12 * (high - low))


def test_ends_stay_within_a_range():
    """Of ratios of which one is apart the t statistic goes far beyond all of them; an end within is as it was."""
    values = np.array([0.5, 0.5, 0.5, 0.5, 0.501, 0.499, 0.5, 0.53])
    low, high = studentised.interval(weighed([values]))
    assert high > 0.6
    assert studentised.interval(weighed([values]), within=(0.49, 0.53)) == (max(low, 0.49), 0.53)


def test_p_values_turn_the_interval_round():
    """A null just inside the interval is not refused at 2.5 %, one just outside is; columns share their draws.

    The interval draws from sorted values, so that it does not depend on their order; so do these columns.
    """
    values = np.sort(np.random.default_rng(0).normal(0.3, 1, 20))
    strata = weighed([values])
    low, high = studentised.interval(strata, resamples=999, seed=5)
    columns = strata.map(lambda v: np.stack([v, v, v, v], axis=1))
    step = 1e-9
    nulls = np.array([low + step, low - step, high - step, high + step])
    above, below = studentised.p_values(columns, null=nulls, resamples=999, seed=5)
    assert above[0] >= 0.025 > above[1] and below[2] >= 0.025 > below[3]


def test_small_subsets_lend_each_other_residuals():
    """Twelve subsets of two have an interval, as wide as the spread asks; each by itself could be resampled to no
    spread."""
    rng = np.random.default_rng(0)
    found = studentised.interval(weighed(list(rng.normal(0, 1, (12, 2)))), resamples=999)
    assert found is not None and 0.5 < found[1] - found[0] < 2
    assert studentised._pools((2, 3, 40, 9)) == [[0, 1, 3], [0, 1, 3], [2], [3]]
    assert studentised.interval(weighed([[0.3], list(rng.random(9))])) is None


def test_same_thing_twice_covers_zero():
    """Two runs of the same thing with noise: the interval covers zero in 93 to 97 % of 2,000 tables, for normal noise,
    for noise with long tails, and with unequal subsets."""
    rng = np.random.default_rng(11)
    for draw in (lambda s: rng.normal(size=s), lambda s: rng.lognormal(0, 1, s) - rng.lognormal(0, 1, s)):
        columns = Strata((draw((14, 2000)), draw((10, 2000))), (0.5, 0.5))
        above, below = studentised.p_values(columns, resamples=399)
        # The interval reaches zero where the larger p value of the two tests is not below 0.05.
        p = np.maximum(2 * np.minimum(above, below), sign_flips(columns, draws=999))
        assert 0.93 <= np.mean(p >= 0.05) <= 0.97


def test_skewed_losses_are_covered_better_than_by_t():
    """The mean of 24 losses of which few are large: the t interval misses it in 13 % of tables, this one in 8 %."""
    rng = np.random.default_rng(1)
    truth = np.exp(0.5)
    columns = weighed([np.zeros(24)]).map(lambda _: rng.lognormal(0, 1, (24, 1500)))
    above, below = studentised.p_values(columns, null=truth, resamples=399)
    assert np.mean(2 * np.minimum(above, below) < 0.05) < 0.1


def test_draws_that_are_remembered_have_a_bound_in_bytes(monkeypatch):
    """The last ones used stay, however many there are; a larger one than all are allowed is used all the same."""
    monkeypatch.setattr(studentised, "_kept", type(studentised._kept)())
    monkeypatch.setattr(studentised, "KEPT_BYTES", 3 * 600 * 10 * 2)
    first = [studentised._counts(10, 10, 600, seed) for seed in range(3)]
    assert studentised._counts(10, 10, 600, 0) is first[0]
    studentised._counts(10, 10, 600, 3)
    assert [key[-1] for key in studentised._kept] == [2, 0, 3]
    assert np.array_equal(studentised._counts(10, 10, 600, 1), first[1])
    large = studentised._counts(100, 100, 600, 0)
    assert [*studentised._kept.values()] == [large] and (large.sum(1) == 100).all()
