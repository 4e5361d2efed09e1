"""Agreement of two measures on the order of several runs: Spearman's correlation of their means.

The runs are the ones there are; only the questions are a sample. So questions are resampled inside their subsets, with
all their answers under both measures, where these are of the same questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.stats.strata import Strata, unit_of
from kvbench.stats.studentised import LEVEL, RESAMPLES, SEED

FEWEST_RUNS = 3  # two are always in the same order or in the opposite one
NUM_SPLITS = 500
MOST_UNDEFINED = 0.05  # of the resamples; with more, all runs are nearly alike and have no order


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement of two measures on the order of runs."""

    value: float | None
    """Spearman's rank correlation; None where a measure gives all runs the same mean."""
    interval: tuple[float, float] | None
    """95 % percentile interval over questions; None where there is none."""
    halves: tuple[float | None, float | None]
    """The same of each measure with itself, between two random halves of the questions: what noise leaves of a perfect
    agreement."""


def spearman(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis, runs; ties have their mean rank, NaN where all values are one.

    Source: Spearman 1904, American J. Psychology 15:72.
    """
    from scipy.stats import rankdata

    first, second = (rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (np.asarray(mine), np.asarray(theirs)))
    spread = np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    with np.errstate(invalid="ignore"):
        return np.asarray((first * second).sum(-1) / spread)


def agreement(
    mine: Strata, theirs: Strata, *, resamples: int = RESAMPLES, seed: int = SEED, same_questions: bool = True
) -> Agreement:
    """Compare two measures of the same three runs or more.

    Values are [n, runs] of each subset, larger where better, whose rows are the same questions; or two sets of
    questions, with `same_questions=False`, each resampled by itself.
    """
    num_runs = mine.values[0].shape[1]
    if num_runs < FEWEST_RUNS:
        raise ValueError(f"{num_runs} runs have no order worth a correlation; {FEWEST_RUNS} are needed")
    rng = np.random.default_rng(seed)
    value = float(spearman(_means(mine), _means(theirs)))

    def drawn(sizes: Sequence[int]) -> list[np.ndarray]:
        return [rng.multinomial(size, [1 / size] * size, resamples) / size for size in sizes]

    draws = drawn(mine.sizes)
    correlations = spearman(
        _resampled(mine, draws), _resampled(theirs, draws if same_questions else drawn(theirs.sizes))
    )
    known = correlations[~np.isnan(correlations)]
    interval = None
    if min(*mine.sizes, *theirs.sizes) > 1 and len(known) >= (1 - MOST_UNDEFINED) * resamples and not np.isnan(value):
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        interval = float(low), float(high)
    return Agreement(
        value=None if np.isnan(value) else value,
        interval=interval,
        halves=(_between_halves(mine, rng), _between_halves(theirs, rng)),
    )


def _means(strata: Strata) -> np.ndarray:
    # Two runs that are equal up to rounding share a rank.
    return _rounded(np.asarray(strata.mean()), strata)


def _rounded(means: np.ndarray, strata: Strata) -> np.ndarray:
    return np.round(means / unit_of(strata.flat.ravel()), 12)


def _resampled(strata: Strata, draws: list[np.ndarray]) -> np.ndarray:
    """Weighted means [resamples, runs], given the share of each question in each resample."""
    parts = [
        weight * share @ values for weight, share, values in zip(strata.weights, draws, strata.values, strict=True)
    ]
    return _rounded(sum(parts), strata)


def _between_halves(strata: Strata, rng: np.random.Generator) -> float | None:
    """Mean correlation of the runs' means over two halves of the questions; None where one cannot be halved."""
    if min(strata.sizes) < 2:
        return None
    first, second = [], []
    for size in strata.sizes:
        order = rng.permuted(np.tile(np.arange(size), (NUM_SPLITS, 1)), axis=1)
        half = size // 2
        first.append((order < half) / half)
        second.append((order >= half) / (size - half))
    correlations = spearman(_resampled(strata, first), _resampled(strata, second))
    return None if np.isnan(correlations).all() else float(np.nanmean(correlations))
