"""Paired statistics over subsets: the mean of the subsets' means, its interval, tests, and what could have been seen.

Everywhere `strata` are the values of each subset, one per sample, and every subset has the same weight. scipy and
statsmodels do the work where they have the case; they have no stratified paired test, so the t statistic is put
together here and compared with theirs in the tests.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvbench.stats.intervals import welch_satterthwaite

LEVEL = 0.95
POWER = 0.8
MIN_DISCORDANT = 6  # fewer than six differing samples, all one way, are no p < 0.05: 2 * 0.5^6 = 0.03
BLOCK = 500  # resamples
LARGE, FEWEST = 10.0, 3  # an effect of ten standard deviations shows in three samples; the solver fails on larger ones
MAX_EXACT = 1 << 14  # sign patterns that are all tried; beyond that as many are drawn

Strata = Sequence[np.ndarray]


@lru_cache(maxsize=4)
def resample_counts(sizes: tuple[int, ...], resamples: int, seed: int) -> np.ndarray:
    """How often each sample is drawn in each bootstrap resample, drawn inside each subset.

    The draws are those of `scipy.stats.bootstrap` with the same generator, so that the two can be compared.

    Args:
        sizes: Samples of each subset.
        resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        uint16 [resamples, sum(sizes)]; no sample is drawn 65,536 times.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for size in sizes:
        drawn = rng.integers(0, size, (resamples, size)) + size * np.arange(resamples)[:, None]
        parts.append(np.bincount(drawn.ravel(), minlength=resamples * size).reshape(resamples, size))
    return np.concatenate(parts, axis=1).astype(np.uint16)


def resampled_sums(sizes: tuple[int, ...], values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """The sum of the drawn values in each bootstrap resample.

    Args:
        sizes: Samples of each subset.
        values: [sum(sizes)] or [sum(sizes), columns].
        resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        [resamples] or [resamples, columns].
    """
    counts = resample_counts(sizes, resamples, seed)
    # In blocks: as float64 all at once, 10,000 resamples of 3,000 samples would be a quarter of a gigabyte.
    return np.concatenate([counts[start : start + BLOCK] @ values for start in range(0, resamples, BLOCK)])


def stretched(strata: Strata) -> np.ndarray:
    """The values with each subset stretched about its mean, one after the other, along the first axis.

    A resample of n values from n has a variance that is too small by (n - 1) / n, which with six samples per subset
    makes a 95 % interval one of 92 %. Stretching by sqrt(n / (n - 1)) puts it right and leaves the mean alone.

    Source: Rao and Wu 1988, JASA 83:231.
    """
    parts = []
    for values in strata:
        values = np.asarray(values, dtype=float)
        mean = values.mean(axis=0)
        parts.append(mean + math.sqrt(len(values) / max(1, len(values) - 1)) * (values - mean))
    return np.concatenate(parts)


def resampled_means(strata: Strata, resamples: int, seed: int) -> np.ndarray:
    """The mean of the subsets' means in each bootstrap resample.

    Args:
        strata: Values of each subset, [n] or [n, columns]; the columns share their draws, so their differences are
            paired.
        resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        [resamples] or [resamples, columns].
    """
    sizes = tuple(len(values) for values in strata)
    weights = np.repeat([1 / (len(sizes) * size) for size in sizes], sizes)
    values = stretched(strata)
    weighted = values * (weights if values.ndim == 1 else weights[:, None])
    return resampled_sums(sizes, weighted, resamples, seed)


def percentiles(draws: np.ndarray, freedom: float = math.inf) -> tuple[float, float]:
    """The two ends of a 95 % percentile interval, expanded for few samples as Student's t expands a normal one.

    Args:
        draws: A statistic in each resample.
        freedom: Degrees of freedom of its standard error.

    Source: Hesterberg 2015, The American Statistician 69:371, section 3.3 (expanded percentile interval).
    """
    low, high = np.percentile(draws, [100 * share for share in tails(freedom)])
    return float(low), float(high)


def tails(freedom: float) -> tuple[float, float]:
    """Shares of the draws below the two ends: 0.025 and 0.975 for very many samples, further out for few."""
    from scipy.stats import norm, t

    below = float(norm.cdf(t.ppf((1 - LEVEL) / 2, freedom)))
    return below, 1 - below


def bootstrap(strata: Strata, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean of the subsets' means.

    Returns:
        None where nothing can be said: a subset has one sample, or no value differs from the others of its subset.
    """
    error = standard_error(strata)
    if error is None:
        return None
    return percentiles(resampled_means(strata, resamples, seed), error[1])


def mean(strata: Strata) -> float:
    """The mean of the subsets' means."""
    return float(np.mean([np.mean(values) for values in strata]))


def standard_error(strata: Strata) -> tuple[float, float] | None:
    """Standard error of the mean of the subsets' means, and its degrees of freedom.

    With one subset this is the paired t test's. With several it is the contrast 1/k of a model with one mean per subset
    and HC2 errors.

    Returns:
        None where a subset has one sample, or where no value differs.
    """
    if not strata or min(map(len, strata)) < 2 or all(np.ptp(values) == 0 for values in strata):
        return None
    total, freedom = welch_satterthwaite(
        [(float(np.var(values, ddof=1)) / len(values) / len(strata) ** 2, len(values) - 1) for values in strata]
    )
    return math.sqrt(total), freedom


def equivalence(strata: Strata, margin: float, *, bounded: bool = False) -> float | None:
    """Two one-sided t tests: is the mean difference inside (-margin, margin)?

    Args:
        strata: Differences of each subset.
        margin: Largest difference that counts as none, in the unit of the values; above 0.
        bounded: No difference can be larger than 1. Then samples of which none differs prove something too: with a
            true share of `margin` that differ, seeing none has the probability (1 - margin)^n.

    Returns:
        The larger of the two p values; below 0.05 the two are equal within the margin. None where nothing can be said.

    Source: Schuirmann 1987, J. Pharmacokin. Biopharm. 15:657.
    """
    from scipy.stats import t

    error = standard_error(strata)
    if error is None:
        identical = bool(strata) and all(not np.any(values) for values in strata)
        count = len(strata) * min(map(len, strata), default=0)  # cautious where the subsets are of unequal size
        return (1 - min(1.0, margin)) ** count if bounded and identical else None
    value = mean(strata)
    return float(max(t.sf((value + margin) / error[0], error[1]), t.sf((margin - value) / error[0], error[1])))


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided McNemar test.

    Args:
        lost: Samples that only the reference got right.
        gained: Samples that only the other got right.

    Returns:
        The p value; 1 when no sample differs.
    """
    from statsmodels.stats.contingency_tables import mcnemar as test

    return float(test([[0, lost], [gained, 0]], exact=True).pvalue) if lost + gained else 1.0


def sign_flip(strata: Strata, *, seed: int) -> float:
    """Two-sided permutation test of a zero difference: under it, each sample's sign might as well be the other.

    All sign patterns of the samples that differ are tried when they are few, else 16,383 are drawn.

    Returns:
        The p value; 1 when no sample differs.
    """
    from scipy.stats import permutation_test

    weighted = np.concatenate([np.asarray(values, dtype=float) / len(values) for values in strata])
    # A zero has no sign, and leaving it out makes the exact test reach further.
    weighted = weighted[weighted != 0]
    if not len(weighted):
        return 1.0
    if len(weighted) == 1:
        return 1.0
    result = permutation_test(
        (weighted,),
        lambda values, axis: np.sum(values, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=MAX_EXACT - 1,
        batch=max(1, 4_000_000 // len(weighted)),
        rng=np.random.default_rng(seed),
    )
    return float(min(1.0, result.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values after Holm's correction for having asked all of them."""
    from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(p_values, method="holm")[1]] if len(p_values) else []


def detectable(strata: Strata, *, yes_no: bool = False) -> float | None:
    """The smallest true difference that these samples would have shown with 80 % probability, at p < 0.05.

    Args:
        strata: Differences of each subset.
        yes_no: The values are 0 or 1. Then there is an answer where no sample differs too: the smallest pure loss of
            which the six samples that McNemar's test needs at least would have been seen.

    Returns:
        In the unit of the values; None where it cannot be known.
    """
    from scipy.optimize import brentq
    from scipy.stats import binom
    from statsmodels.stats.power import TTestPower

    error, count = standard_error(strata), sum(map(len, strata))
    if error is not None:
        effect = TTestPower().solve_power(nobs=count, alpha=1 - LEVEL, power=POWER)
        return float(effect) * math.sqrt(count) * error[0]
    if not yes_no or count < MIN_DISCORDANT or any(np.any(values) for values in strata):
        return None
    return float(brentq(lambda share: binom.sf(MIN_DISCORDANT - 1, count, share) - POWER, 0.0, 1.0))


def samples_needed(strata: Strata, difference: float) -> int | None:
    """How many samples would show a true difference of this size with 80 % probability, at the spread seen here."""
    from statsmodels.stats.power import TTestPower

    error = standard_error(strata)
    if error is None:
        return None
    effect = difference / (error[0] * math.sqrt(sum(map(len, strata))))
    if effect > LARGE:
        return FEWEST
    return max(FEWEST, math.ceil(TTestPower().solve_power(effect_size=effect, alpha=1 - LEVEL, power=POWER)))
