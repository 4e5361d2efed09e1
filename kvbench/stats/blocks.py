"""Errors of what is measured on every token of a text: neighbouring tokens are correlated, so blocks are resampled."""

from collections.abc import Callable, Sequence

import numpy as np

from kvbench.stats.intervals import Estimate
from kvbench.stats.strata import FEWEST_SAMPLES
from kvbench.stats.studentised import SEED

BLOCK_TOKENS = 128
RESAMPLES = 999
BLOCKS = "block bootstrap"


def over_tokens(
    texts: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], float] = np.mean, block: int = BLOCK_TOKENS
) -> Estimate:
    """A statistic of all tokens of some texts, with the 95 % interval of the block bootstrap.

    Blocks never reach over the end of a text, where a rest joins the block before it. The estimate's `num_samples` are
    blocks, and fewer than eight of them give no interval.

    Source: Künsch 1989, Annals of Statistics 17:1217, with blocks that do not overlap (Carlstein 1986).
    """
    arrays = [np.asarray(text, dtype=float) for text in texts if len(text)]
    if not arrays:
        return Estimate()
    blocks = [
        part for array in arrays for part in np.split(array, range(block, len(array) - len(array) % block, block))
    ]
    blocks = [part for part in blocks if len(part)]
    result = Estimate(value=float(statistic(np.concatenate(blocks))), num_samples=len(blocks))
    if len(blocks) >= FEWEST_SAMPLES:
        random = np.random.default_rng(SEED)
        draws = random.integers(len(blocks), size=(RESAMPLES, len(blocks)))
        values = [statistic(np.concatenate([blocks[index] for index in draw])) for draw in draws]
        result.low, result.high = (float(end) for end in np.quantile(values, (0.025, 0.975)))
        result.interval = BLOCKS
    return result
