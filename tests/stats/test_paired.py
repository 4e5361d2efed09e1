"""Paired differences against scipy, statsmodels, enumeration and plain loops; one answer to one question."""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from scipy.special import xlogy

from kvbench.stats import binomial
from kvbench.stats import paired as stats
from kvbench.stats.intervals import mover, newcombe
from kvbench.stats.sign_test import sign_flip, sign_flips
from kvbench.stats.strata import standard_error, weighed


def answers(lost, gained, count, right=None):
    """Pairs (mine, theirs) of yes-or-no answers."""
    same = count - lost - gained
    right = same if right is None else right
    return [(0.0, 1.0)] * lost + [(1.0, 0.0)] * gained + [(1.0, 1.0)] * right + [(0.0, 0.0)] * (same - right)


def graded(*groups, weighting="subset", bounded=False, **settings):
    """The statistics of differences."""
    pairs = {str(i): [(float(x), 0.0) for x in values] for i, values in enumerate(groups)}
    return stats.paired(pairs, weighting, bounded=bounded, **settings)


@pytest.fixture
def groups():
    """Differences of three subsets of unequal size and spread."""
    rng = np.random.default_rng(3)
    return [rng.normal(0.02, spread, size) for size, spread in ((11, 0.2), (40, 0.1), (7, 0.5))]


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 1), (3, 3), (17, 4), (0, 6), (150, 201)])
def test_one_subset_of_yes_or_no_is_mcnemars_test(lost, gained):
    """The sign-flip test is then statsmodels' exact test, and scipy's of a fair coin over the samples that differ."""
    from statsmodels.stats.contingency_tables import mcnemar  # a second to import, as all of statsmodels

    found = stats.paired({"a": answers(lost, gained, lost + gained + 16)})
    expected = scipy.stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert found.p == pytest.approx(expected, abs=1e-12) and found.test == "mcnemar"
    if lost + gained:
        assert found.p == pytest.approx(mcnemar([[7, gained], [lost, 9]], exact=True).pvalue, abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_sign_flip_is_every_pattern(seed):
    """With unequal subsets the p value is the share of all sign patterns as far from zero, with the mean's weights."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, rng.integers(1, 4))
    kinds = [rng.choice([-1.0, 0.0, 1.0], size) if seed % 2 else rng.normal(0.3, 1, size) for size in sizes]
    strata = weighed(kinds, "sample" if seed % 3 == 0 else "subset")
    weighted = strata.flat * strata.per_sample
    sums = [abs(float(np.dot(signs, weighted))) for signs in itertools.product((-1, 1), repeat=len(weighted))]
    expected = np.mean([total >= abs(weighted.sum()) - 1e-12 for total in sums])
    assert sign_flip(strata) == pytest.approx(expected, abs=1e-12)
    columns = strata.map(lambda values: np.stack([values, 2 * values], axis=1))
    assert sign_flips(columns, draws=4000) == pytest.approx(expected, abs=0.04)


def test_direction_and_significance_never_disagree():
    """Subsets of unequal size pull in opposite ways: p is never smaller than that of a permutation oracle with the
    mean's weights, the interval excludes zero exactly where p is below 0.05, and on the side of the mean."""
    rng = np.random.default_rng(0)
    significant = 0
    for trial in range(60):
        pairs = {"big": answers(*rng.integers(0, 30, 2), 200), "small": answers(*rng.integers(0, 6, 2), 12)}
        found = stats.paired(pairs, "sample" if trial % 4 == 0 else "subset")
        low, high = found.interval[0]
        assert (found.p < 0.05) == (low > 0 or high < 0) and low <= found.value <= high
        significant += found.p < 0.05
        weighted = found.strata.flat * found.strata.per_sample
        draws = np.abs(np.random.default_rng(trial).choice([-1, 1], (2000, len(weighted))) @ weighted)
        assert found.p >= np.mean(draws >= abs(found.value) - 1e-12) - 0.04
    assert significant > 5


def test_subsets_that_pull_in_opposite_ways_are_no_proof():
    """The big subset truly loses what the small one truly gains, so the weighted mean is zero: a direction is claimed
    in at most 5 % of 400 tables. A pooled McNemar test claims it in half of them."""
    rng = np.random.default_rng(5)
    false = pooled = 0
    for _ in range(400):
        lost, gained = rng.binomial(200, 0.12), rng.binomial(12, 0.12)
        pairs = {"big": answers(lost, 0, 200), "small": answers(0, gained, 12)}
        false += stats.paired(pairs).p < 0.05
        pooled += scipy.stats.binomtest(int(lost), int(lost + gained)).pvalue < 0.05
    assert false <= 20 and pooled > 200


def test_subsets_that_cancel_but_for_rounding_are_no_difference():
    """+2 of 60, +2 of 30 and -1 of 10 leave 1e-17 of a mean, of which no level of an interval can be asked."""
    found = stats.paired({str(n): answers(lost, gained, n) for n, gained, lost in ((60, 6, 4), (30, 5, 3), (10, 0, 1))})
    assert 0 < abs(found.value) < 1e-15 and found.p == 1.0
    (low, high), _ = found.interval
    assert low < 0 < high


def test_better_is_not_said_when_more_was_lost():
    """The audit's case: 34 of 200 lost and 10 gained in one subset, 5 of 10 gained in the other. The mean over subsets
    is +19 points; pooled, significantly more was lost. Neither is shown."""
    pairs = {"big": answers(34, 10, 200), "small": answers(0, 5, 10)}
    found = stats.paired(pairs)
    assert found.value == pytest.approx(0.19) and found.p > 0.05 and found.interval[0][0] <= 0
    pooled = stats.paired(pairs, "sample")
    assert pooled.value < 0 and pooled.test == "mcnemar" and pooled.p == pytest.approx(stats.paired(
        {"all": [pair for group in pairs.values() for pair in group]}).p)  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 17, 100, 1000, 20_000])
def test_power_is_the_whole_sum(count):
    """Leaving out what is next to impossible changes nothing: every number of differing samples, summed up."""
    from scipy.stats import binom

    differ = np.arange(count + 1)
    for level in (0.05, 0.05 / 40):
        most = binom.ppf(level / 2, differ, 0.5)
        most -= binom.cdf(most, differ, 0.5) >= level / 2
        for loss, churn in ((1e-9, 1e-6), (0.01, 0.05), (0.3, 0.97), (1.0, 1.0), (0.4, 0.1)):
            churn = max(loss, churn)
            want = np.sum(binom.pmf(differ, count, churn) * binom.cdf(most, differ, (churn - loss) / (2 * churn)))
            assert binomial.power(loss, churn, count, level) == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "churn", "level"), [(1.0, 1.0, 0.05), (0.2, 0.3, 0.05), (0.05, 0.9, 0.001), (0.003, 0.02, 0.05)]
)
def test_samples_needed_have_the_power_and_fewer_have_not(loss, churn, level):
    """The number that is named shows the loss, one step less does not; a loss too small for a million has none."""
    needed = binomial.samples_needed(loss, churn, level)
    assert binomial.power(loss, churn, needed, level) >= 0.8
    assert binomial.power(loss, churn, needed - max(1, needed // 100), level) < 0.8
    assert binomial.samples_needed(loss / 1000, churn, level) is None


@pytest.mark.parametrize(("count", "lost", "gained"), [(30, 0, 0), (30, 1, 0), (30, 1, 1), (100, 1, 0), (100, 9, 3)])
@pytest.mark.parametrize("rows", [1, 12])
def test_would_show_is_the_power_of_the_test(count, lost, gained, rows):
    """At the printed loss, with the churn allowed for, the corrected exact test shows a loss in 75 to 85 % of
    simulated runs; one lost answer makes no claim better than none."""
    found = stats.paired({"a": answers(lost, gained, count)})
    level = 0.05 / rows
    effect = found.detectable(level)
    churn = max(found.churn, effect)
    rng = np.random.default_rng(1)
    lost_n, gained_n, _ = rng.multinomial(count, [(churn + effect) / 2, max(0, churn - effect) / 2, 1 - churn], 4000).T
    counts = Counter(zip(lost_n.tolist(), gained_n.tolist(), strict=True))
    shown = {(a, b): a > b and scipy.stats.binomtest(a, a + b).pvalue < level for a, b in counts}
    power = sum(counts[pair] for pair in counts if shown[pair]) / 4000
    assert 0.75 <= power <= 0.85
    assert effect >= stats.paired({"a": answers(0, 0, count)}).detectable(level) - 1e-12


@pytest.mark.parametrize(
    ("lost", "margin", "level"), [(60, 0.05, 0.025), (20, 0.1, 0.025), (60, 0.1, 0.025 / 10), (3, 0.1, 0.025)]
)
def test_samples_for_equal_have_the_power(lost, margin, level):
    """Of runs that change as many answers and lose none in sum, 75 to 93 % are found within the margin by the exact
    test, more where next to none change; graded values by their t test: 73 to 87 %."""
    found = stats.paired({"a": answers(lost, lost, 400)})
    count = found.needed_equal(margin, level)
    rng = np.random.default_rng(2)
    changes = rng.multinomial(count, [found.churn / 2, found.churn / 2, 1 - found.churn], 400)
    counts = Counter((a, b) for a, b, _ in changes.tolist())
    shown = sum(
        n
        for (a, b), n in counts.items()
        if max(binomial.within(a, b, count, margin), binomial.within(b, a, count, margin)) < level
    )
    assert 0.75 <= shown / 400 <= 0.93
    values = np.random.default_rng(4).normal(0.0, 0.2, 400)
    count = graded(values).needed_equal(margin, level)
    draws = rng.choice(values - values.mean(), (2000, count))
    error = draws.std(axis=1, ddof=1) / np.sqrt(count)
    reach = scipy.stats.t.isf(level, count - 1) * error
    assert 0.73 <= np.mean(np.abs(draws.mean(axis=1)) + reach < margin) <= 0.87


def test_would_show_of_graded_values():
    """The power of the t test at the spread that was seen: statsmodels' for one test, and less for twelve."""
    from statsmodels.stats.power import TTestPower

    values = np.random.default_rng(4).normal(0.0, 0.2, 40)
    found = graded(values)
    for level in (0.05, 0.05 / 12):
        effect = found.detectable(level) / np.std(values, ddof=1)
        assert TTestPower().power(effect, 40, level) == pytest.approx(0.8, abs=1e-3)
    assert found.needed(found.detectable()) == 40
    assert graded(np.zeros(40)).detectable() is None
    assert graded(values[:1]).needed_equal(0.1, 0.025) is None
    assert graded(values[:8]).detectable(0.005) is None  # 2^-7 is the smallest p of eight samples


def test_unequal_subsets_would_show_what_simulation_shows():
    """If samples weigh unlike, the effective number of samples takes the place of the number."""
    sizes = (60, 30, 10)
    found = stats.paired({str(n): answers(n // 10, n // 20, n) for n in sizes})
    effect, churn = found.detectable(), found.churn
    rng, hits = np.random.default_rng(2), 0
    for _ in range(300):
        values = [rng.choice([-1.0, 1.0, 0.0], n, p=[(churn + effect) / 2, (churn - effect) / 2, 1 - churn])
                  for n in sizes]  # fmt: skip
        pairs = {str(i): answers(int(np.sum(v < 0)), int(np.sum(v > 0)), len(v)) for i, v in enumerate(values)}
        other = stats.paired(pairs, resamples=99)
        hits += other.value < 0 and other.p < 0.05
    assert 0.72 <= hits / 300 <= 0.88


@pytest.mark.parametrize(("lost", "gained", "count"), [(0, 0, 299), (1, 0, 300), (3, 1, 200), (10, 10, 400)])
def test_within_a_margin_is_the_exact_probability(lost, gained, count):
    """The p value is the share of simulated runs that look as good although they lose the margin."""
    margin = 0.03
    rates = np.linspace(0, 0.1, 2001)
    shares = np.array([rates + margin, rates, 1 - 2 * rates - margin])
    rate = rates[np.argmax(xlogy([[lost], [gained], [count - lost - gained]], shares).sum(axis=0))]
    rng = np.random.default_rng(0)
    a, b, _ = rng.multinomial(count, [rate + margin, rate, 1 - 2 * rate - margin], 40_000).T
    assert binomial.within(lost, gained, count, margin) == pytest.approx(np.mean(b - a >= gained - lost), abs=0.01)


def test_equality_of_identical_answers_needs_many_samples():
    """When no sample differs, 299 prove a margin of one point and 298 do not; unbounded values prove nothing."""
    for count in (299, 298):
        found = graded(np.zeros(count), bounded=True)
        assert found.p_within(0.01) == pytest.approx(0.99**count)
        assert stats.paired({"a": answers(0, 0, count)}).p_within(0.01) == pytest.approx(0.99**count)
    assert graded(np.zeros(20), np.zeros(4), bounded=True).p_within(0.01) == pytest.approx(0.99**8)
    assert graded(np.zeros(299)).p_within(0.01) is None
    # One lost answer of 300 is no proof of less than one point: a t test says p = 0.02.
    assert stats.paired({"a": answers(1, 0, 300)}).p_within(0.01) == pytest.approx(scipy.stats.binom.cdf(1, 300, 0.01))


def test_four_lost_and_none_gained_is_no_proof():
    """At every n the interval of 4 lost answers reaches zero, as McNemar's p of 0.125 does."""
    for count in (8, 30, 100, 1000):
        found = stats.paired({"a": answers(4, 0, count)})
        assert found.p == 0.125 and found.interval[0][1] >= 0 > found.value
    assert stats.paired({"a": answers(4, 0, 30)}).interval == (newcombe(26, 0, 4, 0), "newcombe")


def test_few_samples_have_no_interval():
    """Fewer than eight graded samples, a subset of one, or no spread: nothing is said."""
    rng = np.random.default_rng(0)
    assert graded(rng.random(7)).interval == (None, "") == graded(rng.random(20), rng.random(1)).interval
    assert graded(np.full(20, 0.3)).interval == (None, "")
    assert graded(rng.random(7)).p is None is graded(rng.random(20), rng.random(1)).p
    bounded = graded(np.append(np.zeros(20), [0.3, -0.1]), bounded=True)
    (low, high), name = bounded.interval
    assert name == "clopper-pearson" and low < 0 < high and bounded.p == 1.0


def test_standard_error_is_the_contrast_of_subset_means(groups):
    """With several subsets it is the error of the contrast of a model with one mean per subset and HC2 errors."""
    from statsmodels.api import OLS

    values = np.concatenate(groups)
    which = np.repeat(np.arange(3), list(map(len, groups)))
    fitted = OLS(values, (which[:, None] == np.arange(3)).astype(float)).fit(cov_type="HC2")
    for weighting in ("subset", "sample"):
        strata = weighed(groups, weighting)
        contrast = fitted.t_test(np.array([strata.weights]))
        error, freedom = standard_error(strata)
        assert strata.mean() == pytest.approx(contrast.effect[0], abs=1e-12)
        assert error == pytest.approx(contrast.sd[0, 0], rel=1e-9) and 6 < freedom < 58
    welch = scipy.stats.ttest_ind(groups[0], -groups[1], equal_var=False)  # half the sum of two means
    assert standard_error(weighed(groups[:2]))[1] == pytest.approx(welch.df, rel=1e-9)
    assert weighed(groups, "sample").effective_count == pytest.approx(58)
    assert mover([(0.5, 0.2, 0.9), (0.1, 0.1, 0.4)], (0.5, 0.5)) == pytest.approx((0.15, 0.25))


def test_holm_by_hand():
    """The smallest p value is multiplied by their number, the next by one less, and none falls below one before it; an
    unknown one still counts."""
    from statsmodels.stats.multitest import multipletests

    assert stats.holm([0.04, 0.001, 0.03]) == pytest.approx([0.06, 0.003, 0.06])
    assert stats.holm([0.01, None]) == [0.02, None] and stats.holm([]) == []
    many = np.random.default_rng(0).choice([0.001, 0.004, 0.02, 0.2, 0.9], 40).tolist()
    assert stats.holm(many) == pytest.approx(multipletests(many, method="holm")[1])


def test_a_large_family_can_still_be_significant():
    """With 500 rows a difference that every sample has is shown: the resamples grow with the family."""
    values = np.random.default_rng(0).normal(1.0, 0.2, 40)
    alone, among = graded(values), graded(values)
    among.num_tests = 500
    assert 500 * alone.p > 0.05 and stats.holm([among.p] + [1.0] * 499)[0] < 0.05


def test_strata_weights():
    """Weights by sample are the pooled mean; a single subset weighs samples alike."""
    strata = weighed([[1.0, 2.0, 3.0], [], [10.0]], "sample")
    assert strata.mean() == pytest.approx(4.0) and strata.weighs_samples_alike
    assert weighed([[1.0, 2.0, 3.0], [10.0]]).mean() == pytest.approx(6.0)
