"""LagKV against a plain loop over partitions, and its edges: short prompts, small budgets, channels without a range."""

import pytest
import torch
from store_helpers import filled, held_positions

from kvbench.methods.lagkv import LagKV

DIM = 8


def kept(policy, k, v):
    """The positions that stay of one head's prompt."""
    return held_positions(*filled(policy, [(k[None], k[None], v[None])], track=("pos",)))[0]


def plain_ranks(k, v, sinks, lag):
    """Position -> rank in its partition, by plain loops in float64, for the positions that have a next partition."""
    ranks = {}
    for begin in range(sinks, len(k) - 2 * lag + 1, lag):
        total = torch.zeros(lag, dtype=torch.float64)
        for x in (k.double(), v.double()):
            after = x[begin + lag : begin + 2 * lag]
            low, high = after.min(0).values, after.max(0).values
            spread = [((x[begin + i] - low) / (high - low)).std() for i in range(lag)]
            total += torch.stack(spread).softmax(0)
        for rank, i in enumerate(sorted(range(lag), key=lambda i: float(total[i]))):
            ranks[begin + i] = rank
    return ranks


@pytest.mark.parametrize(("length", "sinks", "lag", "budget"), [(60, 4, 8, 40), (61, 0, 8, 30), (50, 3, 5, 20)])
def test_the_highest_ranks_stay_beside_sinks_and_the_end(length, sinks, lag, budget):
    """Sinks, what is not ranked, and then the tokens of the highest ranks; of equal ranks the earlier partition's."""
    torch.manual_seed(length)
    k, v = torch.randn(2, length, DIM)
    ranks = plain_ranks(k, v, sinks, lag)
    sure = [p for p in range(length) if p not in ranks]
    rest = sorted(ranks, key=lambda p: (-ranks[p], p))[: budget - len(sure)]
    assert ranks and len(sure) < budget
    assert kept(LagKV(budget=budget, sinks=sinks, lag=lag), k, v) == sorted([*sure, *rest])


@pytest.mark.parametrize("length", [20, 60])
def test_a_small_budget_keeps_sinks_and_the_newest(length):
    """Below sinks and window, and in prompts without two partitions, the method is a window."""
    k, v = torch.randn(2, length, DIM)
    assert kept(LagKV(budget=7, sinks=4, lag=16), k, v) == [0, 1, 2, 3, length - 3, length - 2, length - 1]


def test_a_channel_without_a_range_says_nothing():
    """A constant channel changes no rank, where a quotient by its range would be no number."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 48, DIM)
    k[:, 2], v[:, 5] = 1.5, 0.0
    positions = kept(LagKV(budget=30, sinks=0, lag=8), k, v)
    assert len(positions) == 30 and set(range(40, 48)) <= set(positions)
