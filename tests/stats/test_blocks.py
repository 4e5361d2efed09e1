"""The block bootstrap: what blocks are, and that its intervals are those of texts whose tokens are alike."""

import numpy as np
import pytest

from kvbench.stats.blocks import over_tokens


def test_value_and_blocks() -> None:
    """The statistic is of all tokens; a rest joins the block before it; texts are never mixed in a block."""
    texts = [list(range(300)), [1000.0] * 100, [], [5.0] * 256]
    found = over_tokens(texts, np.median)
    assert found.value == float(np.median(np.concatenate([np.asarray(t, dtype=float) for t in texts])))
    assert found.num_samples == 2 + 1 + 2 and found.low is None  # 128 and 172, 100, 128 and 128: fewer than eight
    assert over_tokens([]).value is None


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    """Of 64 stretches of 128 equal numbers, the interval is that of 64 numbers: about 2 standard errors each way."""
    means = np.random.default_rng(3).normal(10, 1, 64)
    texts = [np.repeat(means, 128).tolist()]
    found = over_tokens(texts)
    half = 1.96 * means.std(ddof=1) / np.sqrt(64)
    assert found.value == pytest.approx(means.mean()) and found.num_samples == 64
    assert found.high - found.low == pytest.approx(2 * half, rel=0.15)
    alone = over_tokens([np.random.default_rng(4).permutation(np.repeat(means, 128)).tolist()])
    assert alone.high - alone.low < 0.2 * (found.high - found.low)


def test_intervals_cover(rounds: int = 150) -> None:
    """Of texts with tokens that depend on the one before, nearly 95 % of the intervals cover the true mean."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(rounds):
        noise = random.normal(size=(4, 700))
        for place in range(1, 700):
            noise[:, place] += 0.7 * noise[:, place - 1]
        found = over_tokens(noise[:, 60:].tolist())
        hits += found.low <= 0 <= found.high
    assert 0.86 <= hits / rounds <= 0.99
