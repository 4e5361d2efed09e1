"""Right and wrong answers, paired: exact power, and an exact test that two rates differ by less than a margin."""

import math
from functools import lru_cache

import numpy as np

POWER = 0.8
MOST_SAMPLES = 1 << 20
# Tail mass that a sum over a binomial distribution leaves out at each end: less than rounding does.
_TAIL = 1e-20
_BLOCK = 4096


def within(lost: int, gained: int, count: int, margin: float) -> float:
    """One-sided test: is the share gained less the share lost above -margin?

    The share gained that the margin makes most likely is put in for the unknown one; the rest is exact.

    Of `count` samples `lost` are those that only the other run got right, `gained` those that only this run did. Gives
    the probability of a difference at least this good if the true loss is the margin, in (0, 1).

    Raises:
        ValueError: The margin is not above 0, or the counts are none.

    Source: Tango 1998, Statistics in Medicine 17:891, for the restricted estimate; Lloyd 2008, Australian & New Zealand
        J. Statistics 50:329, for the exact probability at it.
    """
    from scipy.stats import binom

    if not margin > 0:
        raise ValueError(f"margin={margin} must be above 0: no number of samples shows a loss of less than none")
    if min(lost, gained, count - lost - gained) < 0:
        raise ValueError(f"lost={lost} and gained={gained} are no counts of {count} samples")
    if not count:
        return 1.0
    if margin >= 1:
        return 0.0
    linear = (lost + gained) * (1 - margin) - 2 * gained * margin - 2 * (count - lost - gained) * margin
    better = (linear + math.sqrt(linear**2 + 8 * count * gained * margin * (1 - margin))) / (4 * count)
    better = min(max(better, 0.0), (1 - margin) / 2)
    differ = np.arange(count + 1)
    shares = binom.pmf(differ, count, 2 * better + margin)
    # Of `differ` answers at least this many must be gained: gained - lost >= what was seen.
    least = np.ceil((differ + gained - lost) / 2)
    return float(np.sum(shares * binom.sf(least - 1, differ, better / (2 * better + margin))))


def restricted_churn(churn: float, margin: float) -> float:
    """Most likely share of differing samples if the true loss is the margin.

    Observed are a share `churn` that differs, with as many gained as lost. `within` has the same estimate for counts.
    """
    linear = churn - 2 * margin
    return margin + (linear + math.sqrt(linear**2 + 4 * churn * margin * (1 - margin))) / 2


def power(loss: float, churn: float, count: int, level: float) -> float:
    """Probability that McNemar's exact test shows a true loss, with the right sign: p values below the level show.

    The loss is the share lost less the share gained, in (0, 1], the churn the share of the `count` samples that differ
    at all; at least the loss is taken.
    """
    from scipy.stats import binom

    churn = min(1.0, max(churn, loss))
    # Nearly all numbers of differing samples are next to impossible: of a million, some thousands matter.
    first, last = int(binom.ppf(_TAIL, count, churn)), int(binom.isf(_TAIL, count, churn))
    blocks = range(first // _BLOCK, last // _BLOCK + 1)
    most = np.concatenate([_most_gained(level, block) for block in blocks])
    most = most[first - blocks[0] * _BLOCK :][: last - first + 1]
    differ = np.arange(first, last + 1)
    gained = (churn - loss) / (2 * churn)
    return float(np.sum(binom.pmf(differ, count, churn) * binom.cdf(most, differ, gained)))


@lru_cache(maxsize=256)
def _most_gained(level: float, block: int) -> np.ndarray:
    """The most gained answers that still show a loss, -1 where none do.

    For each number of differing samples of a block.
    """
    from scipy.stats import binom

    differ = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    most = binom.ppf(level / 2, differ, 0.5)
    return most - (binom.cdf(most, differ, 0.5) >= level / 2)


def detectable(churn: float, count: int, level: float) -> float | None:
    """Smallest loss that McNemar's exact test shows with 80 % probability, at a churn as in `power`.

    None where no loss would.
    """
    from scipy.optimize import brentq

    if count < 1 or power(1.0, 1.0, count, level) < POWER:
        return None
    return float(brentq(lambda loss: power(loss, churn, count, level) - POWER, 1e-9, 1.0))


def samples_needed(loss: float, churn: float, level: float) -> int | None:
    """Number of samples that show a loss with 80 % probability, to 0.5 %.

    None for more than a million, and for a loss outside (0, 1]. Arguments are those of `power`.
    """
    from scipy.stats import norm

    # The normal approximation is a starting point; the exact power decides.
    if not 0 < loss <= 1:
        return None
    differ = min(1.0, max(churn, loss))
    spread = norm.isf(level / 2) * math.sqrt(differ) + norm.isf(1 - POWER) * math.sqrt(max(0.0, differ - loss**2))
    if spread / loss > math.sqrt(1.1 * MOST_SAMPLES):
        return None
    guess = (spread / loss) ** 2
    many = max(2, math.ceil(min(MOST_SAMPLES, guess)))
    while power(loss, churn, many, level) < POWER:
        many += max(1, many // 32)
        if many > MOST_SAMPLES:
            return None
    few = many - max(1, many // 32)
    while few > 0 and power(loss, churn, few, level) >= POWER:
        many, few = few, few - max(1, few // 32)
    while many - few > max(1, few // 200):
        middle = (few + many) // 2
        few, many = (few, middle) if power(loss, churn, middle, level) >= POWER else (middle, many)
    return many
