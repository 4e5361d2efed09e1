"""The studentised bootstrap: one mechanism for the interval of a mean and for the test of what the mean is.

Each resample yields a t statistic, its own mean minus the true one over its own standard error. The distribution of
these shows how skewed the t statistic is, which an ordinary t or percentile interval takes for symmetric.

Source: Efron 1981, Canadian J. Statistics 9:139; Hall 1988, Annals of Statistics 16:927.
Differs: subsets of fewer than eight samples lend each other their residuals, because a resample of two values has no
    spread half of the time.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from kvbench.stats.strata import FEWEST_SAMPLES, Strata, standard_error, unit_of

LEVEL = 0.95
RESAMPLES, SEED = 9999, 0  # of every table, picture and run.json: one number has one interval
MOST_RESAMPLES = 99_999
BLOCK = 500  # resamples at a time: all at once, 10,000 of 3,000 samples would be a quarter of a gigabyte
KEPT_BYTES = 1 << 28  # of counts that are remembered, the last ones used
SMALL = 8  # samples of a subset below which its spread is not known well enough to resample it by itself


def resamples_for(num_tests: int, least: int = RESAMPLES) -> int:
    """Number of resamples that a family of tests needs: the smallest p value must survive Holm's correction."""
    return min(MOST_RESAMPLES, max(least, 200 * num_tests))


def _pools(sizes: tuple[int, ...]) -> list[list[int]]:
    """Subset -> the subsets whose residuals it draws from: itself, or all small ones together."""
    small = [index for index, size in enumerate(sizes) if size < SMALL]
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        if not small or sum(sizes[group] for group in small) >= SMALL:
            break
        if index not in small:
            small.append(index)
    small.sort()
    return [small if size < SMALL else [index] for index, size in enumerate(sizes)]


_kept: OrderedDict[tuple[int, int, int, int], np.ndarray] = OrderedDict()


def _counts(size: int, pool: int, resamples: int, seed: int) -> np.ndarray:
    """Gives `_drawn` of the same arguments, which is remembered: a table has many rows of the same samples."""
    key = size, pool, resamples, seed
    if key not in _kept:
        _kept[key] = _drawn(*key)
    _kept.move_to_end(key)
    while len(_kept) > 1 and sum(counts.nbytes for counts in _kept.values()) > KEPT_BYTES:
        _kept.popitem(last=False)
    return _kept[key]


def _drawn(size: int, pool: int, resamples: int, seed: int) -> np.ndarray:
    """Counts how often each of `pool` residuals is drawn when `size` are, uint16 [resamples, pool]."""
    rng = np.random.default_rng(seed)
    counts = np.empty((resamples, pool), dtype=np.uint16)
    for start in range(0, resamples, BLOCK):
        count = min(BLOCK, resamples - start)
        drawn = rng.integers(0, pool, (count, size)) + pool * np.arange(count)[:, None]
        counts[start : start + count] = np.bincount(drawn.ravel(), minlength=count * pool).reshape(count, pool)
    return counts


def _stretched(values: np.ndarray) -> np.ndarray:
    """Residuals about the subset's mean, whose mean square is the subset's variance."""
    return math.sqrt(len(values) / max(1, len(values) - 1)) * (values - values.mean(axis=0))


def t_blocks(strata: Strata, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """The t statistic [up to BLOCK, columns] of each resample of values [n, columns], a block at a time.

    Columns share their draws. Infinite where a resample has no spread and another mean. Every subset has at least two
    samples.
    """
    sizes, pools = strata.sizes, _pools(strata.sizes)
    residuals = [_stretched(values) for values in strata.values]
    unit = unit_of(*residuals)  # in which t is the same
    residuals = [values / unit for values in residuals]
    parts = []
    for index, pool in enumerate(pools):
        pooled = np.concatenate([residuals[stratum] for stratum in pool])
        # Another seed for each subset, or two subsets of one size would draw alike.
        counts = _counts(sizes[index], len(pooled), resamples, seed * 1009 + index)
        parts.append((counts, pooled, pooled**2, strata.weights[index], sizes[index]))
    for start in range(0, resamples, BLOCK):
        mean = variance = np.zeros(())
        for counts, pooled, squares, weight, size in parts:
            drawn = counts[start : start + BLOCK].astype(float)
            middle = drawn @ pooled / size
            spread = np.maximum(drawn @ squares / size - middle**2, 0.0) / (size - 1)
            mean = mean + weight * middle
            variance = variance + weight**2 * spread
        scale = np.sqrt(variance)
        largest = np.max(np.abs(mean), axis=0, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(scale > 1e-9 * largest, mean / scale, np.sign(mean) * np.inf)
        yield np.where(np.abs(mean) <= 1e-12 * largest, 0.0, t)


def t_statistics(strata: Strata, resamples: int, seed: int) -> np.ndarray:
    """All of `t_blocks`, for one column, whatever the order of samples and subsets."""
    parts = [(len(v), w, tuple(np.sort(v).tolist())) for v, w in zip(strata.values, strata.weights, strict=True)]
    parts.sort()
    columns = Strata(tuple(np.array(v)[:, None] for _, _, v in parts), tuple(weight for _, weight, _ in parts))
    return np.concatenate([block[:, 0] for block in t_blocks(columns, resamples, seed)])


def interval(
    strata: Strata, *, resamples: int = RESAMPLES, seed: int = SEED, within: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float] | None:
    """95 % interval of the weighted mean of values [n] of each subset; None where nothing can be said.

    That is with fewer than eight samples, a subset with one, no value that differs, or too few that differ for a finite
    end.

    No end leaves the range `within`: a ratio of sums lies among the ratios of its samples, which a t statistic of few
        of them with one outlier does not respect.
    """
    error = standard_error(strata)
    if error is None or strata.count < FEWEST_SAMPLES:
        return None
    result = ends(np.sort(t_statistics(strata, resamples, seed)), float(strata.mean()), error[0])
    return result and (max(result[0], within[0]), min(result[1], within[1]))


def quantiles(t: np.ndarray) -> tuple[float, float]:
    """The t statistics, of some in order, beyond which 2.5 % lie below and above."""
    # The last resample, from the outside, whose p value is too large.
    rank = max(1, math.ceil((1 - LEVEL) / 2 * (len(t) + 1) - 1e-9) - 1)
    return float(t[rank - 1]), float(t[-rank])


def ends(t: np.ndarray, middle: float, error: float) -> tuple[float, float] | None:
    """The interval that t statistics in order give; None where an end is not finite."""
    below, above = quantiles(t)
    low, high = middle - above * error, middle - below * error
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def p_values(
    strata: Strata, *, null: float | np.ndarray = 0.0, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[np.ndarray, np.ndarray]:
    """One-sided p values of every column [n, columns], against a null for all columns or one for each.

    Small in the first array [columns] where the mean is above the null, in the second where it is below; NaN where
    nothing can be said.
    """
    num_columns = strata.values[0].shape[1]
    columns = (tuple(values[:, n] for values in strata.values) for n in range(num_columns))
    errors = [standard_error(Strata(column, strata.weights)) for column in columns]
    known = np.array([error is not None for error in errors])
    above, below = np.full(num_columns, np.nan), np.full(num_columns, np.nan)
    if not known.any() or strata.count < FEWEST_SAMPLES:
        return above, below
    scale = np.array([error[0] for error in errors if error is not None])
    chosen = strata.map(lambda values: values[:, known])
    t = (np.asarray(chosen.mean()) - np.broadcast_to(null, (num_columns,))[known]) / scale
    larger = smaller = np.zeros(len(t), dtype=int)
    for block in t_blocks(chosen, resamples, seed):
        larger = larger + np.sum(block >= t, axis=0)
        smaller = smaller + np.sum(block <= t, axis=0)
    above[known], below[known] = (1 + larger) / (resamples + 1), (1 + smaller) / (resamples + 1)
    return above, below
