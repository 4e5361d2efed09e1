"""The sign-flip test: if two runs are alike, each sample's difference might as well have the other sign."""

import math

import numpy as np

from kvbench.stats.strata import ROUNDING, Strata

MOST_EXACT = 1 << 16  # patterns that are all counted
DRAWS = 16_383  # of patterns where they are too many to count
BLOCK_VALUES = 4_000_000


def sign_flip(strata: Strata, *, draws: int = DRAWS, seed: int = 0) -> float:
    """Two-sided permutation test of a zero difference [n] of each subset, with the weights of the mean.

    Samples that weigh and differ alike are counted together, so all patterns are tried up to many samples, and `draws`
    of them beyond. For yes-or-no values that weigh alike there is one count, and the test is McNemar's exact one.

    Returns:
        The p value; 1 when no sample differs. Its direction is that of the weighted mean.
    """
    weighted = strata.flat * strata.per_sample
    weighted = weighted[weighted != 0]  # a zero has no sign
    if not len(weighted):
        return 1.0
    total = abs(float(weighted.sum()))
    sizes = np.sort(np.abs(weighted))
    new = np.concatenate([[True], np.diff(sizes) > ROUNDING * sizes[-1]])
    units, counts = sizes[new], np.diff(np.append(np.flatnonzero(new), len(sizes)))
    reach = total - 1e-9 * float(sizes.sum())  # a sum in another order is the same sum
    if math.prod((counts + 1).tolist()) <= MOST_EXACT:
        return min(1.0, _exact(units, counts, reach))
    rng = np.random.default_rng(seed)
    reached, block = 0, max(1, BLOCK_VALUES // len(units))
    for start in range(0, draws, block):
        flipped = 2.0 * rng.binomial(counts, 0.5, (min(block, draws - start), len(units))) - counts
        reached += int(np.sum(np.abs(flipped @ units) >= reach))
    return (1 + reached) / (1 + draws)


def _exact(units: np.ndarray, counts: np.ndarray, reach: float) -> float:
    """Share of all sign patterns that are as far from zero as the one seen."""
    from scipy.stats import binom

    sums, shares = np.zeros(1), np.ones(1)
    for unit, count in zip(units, counts, strict=True):
        ups = np.arange(count + 1)
        sums = (sums[:, None] + unit * (2 * ups - count)).ravel()
        shares = (shares[:, None] * binom.pmf(ups, count, 0.5)).ravel()
    return float(shares[np.abs(sums) >= reach].sum())


def sign_flips(strata: Strata, *, draws: int, seed: int = 0) -> np.ndarray:
    """`sign_flip` of many columns [n, columns] of each subset by drawn patterns, the same ones for all: p values."""
    weighted = strata.flat * strata.per_sample[:, None]
    reach = np.abs(weighted.sum(axis=0)) - 1e-9 * np.abs(weighted).sum(axis=0)
    rng = np.random.default_rng(seed)
    reached, block = np.zeros(weighted.shape[1], dtype=int), max(1, BLOCK_VALUES // max(weighted.shape))
    for start in range(0, draws, block):
        flips = 2.0 * rng.integers(0, 2, (min(block, draws - start), len(weighted))) - 1
        reached += np.sum(np.abs(flips @ weighted) >= reach, axis=0)
    return (1 + reached) / (1 + draws)
