"""Quantiles of the tail, as llama.cpp takes them."""

import random

import pytest

from kvbench.stats.tails import KL_TAILS, fewest, quantile


def percentile(values: list[float], share: float) -> float:
    """llama.cpp's: a line between the two order statistics nearest to share * (n - 1)."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return (1 - (place - low)) * sorted(values)[low] + (place - low) * sorted(values)[high]


@pytest.mark.parametrize("share", KL_TAILS.values())
def test_a_tail_is_llama_cpps_and_needs_enough_values(share) -> None:
    """Of 100 values at least for 99 %, 1,000 for 99.9 %; fewer have none, rather than their largest."""
    rng = random.Random(0)
    least = {0.99: 100, 0.999: 1000}[share]
    assert fewest(share) == least
    for count in (least, least + 1, 3 * least + 7):
        values = [rng.expovariate(1.0) for _ in range(count)]
        assert quantile(values, share) == pytest.approx(percentile(values, share))
    assert quantile([1.0] * (least - 1), share) is None
