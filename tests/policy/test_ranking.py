"""Ranks and shared budgets beside plain definitions: ties, remainders, caps, and weights that are no numbers."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import ScoreSpec, largest_remainder, num_blocks, pyramid_budgets, rank_descending, share_with_cap


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3))
def test_ranks_are_places_in_a_sorted_list(rows):
    """Higher scores first, of equal ones the earlier."""
    ranks = rank_descending(torch.tensor(rows, dtype=torch.float32)).tolist()
    for row, rank in zip(rows, ranks, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert [order.index(i) for i in range(len(row))] == rank


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 7), st.integers(0, 8))
def test_what_is_left_goes_to_the_largest_remainders(parts, denominator, more):
    """Each part is rounded down, and so many of them up as are missing: by remainder, of equal ones the first."""
    exact = [Fraction(part, denominator) for part in parts]
    more = min(more, len(parts))
    got = largest_remainder(parts, denominator, sum(math.floor(x) for x in exact) + more)
    raised = sorted(range(len(parts)), key=lambda i: (math.floor(exact[i]) - exact[i], i))[:more]
    assert got == [math.floor(x) + (i in raised) for i, x in enumerate(exact)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_shares_follow_one_level(weights, total, cap, scale):
    """There is a level at which every layer gets its weight times the level, or the cap, to within one token; layers
    without a weight get the one token that everybody has."""
    got = share_with_cap(torch.tensor(weights, dtype=torch.float64) * scale, total, cap)
    assert all(1 <= share <= max(1, cap) for share in got)
    heavy = [w for w in weights if w] or [1] * len(weights)
    wanted = min(total, cap * len(heavy))
    levels = [0.0, float(total)]  # the level is where the sum is what there is
    for _ in range(80):
        middle = sum(levels) / 2
        levels[sum(min(cap, middle * w) for w in heavy) >= wanted] = middle
    ideal = [min(cap, levels[1] * (w if any(weights) else 1)) for w in weights]
    left = min(total, cap * len(weights)) - wanted  # what the others leave is shared evenly by those without a weight
    for share, level, weight in zip(got, ideal, weights, strict=True):
        if weight or not any(weights):
            assert abs(share - level) < 1 or share == 1 > level
        else:
            assert share == 1 or left > 0


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_count_for_nothing(strange):
    """What a spoilt model gives does not end the run; its logits will show it."""
    assert share_with_cap(torch.tensor([strange, 2.0, 2.0]), 10, 8) == [1, 5, 5]
    assert share_with_cap(torch.tensor([strange, strange]), 10, 8) == [5, 5]


def test_capped_shares_go_to_the_others():
    """What a cap cuts off is shared again, a share of exactly the cap is none, and who gets nothing still gets one."""
    assert share_with_cap(torch.tensor([8.0, 1.0, 1.0]), 100, 60) == [60, 20, 20]
    assert share_with_cap(torch.tensor([2.0, 1.0, 1.0]), 40, 20) == [20, 10, 10]
    assert share_with_cap(torch.tensor([1.0, 1.0]), 100, 30) == [30, 30]
    assert share_with_cap(torch.tensor([1.0, 0.0]), 10, 60) == [10, 1]


@given(st.integers(1, 400), st.integers(1, 60), st.integers(2, 2000), st.integers(1, 40))
def test_pyramid_total_is_exact(base, layers, room, beta):
    """The sum over layers is the budget for any shape, no layer gets more than there is, and lower layers never get
    less."""
    got = pyramid_budgets(base, room, room + 8, layers, beta=beta)
    assert sum(got) == min(base, room) * layers
    assert all(0 <= x <= room for x in got) and sorted(got, reverse=True) == got


@pytest.mark.parametrize(
    ("base", "room", "tokens", "layers", "rules", "wanted"),
    [
        (10, 100, 100, 1, {}, [10]),
        (10, 10, 100, 3, {}, [10, 10, 10]),
        (12, 11, 100, 3, {}, [11, 11, 11]),
        (10, 100, 100, 2, {"beta": 2}, [15, 5]),
        (10, 100, 100, 3, {"beta": 2}, [15, 10, 5]),
        (10, 100, 100, 3, {"beta": 4}, [18, 10, 2]),
        (10, 15, 100, 3, {"beta": 2}, [15, 10, 5]),
        (10, 14, 100, 3, {"beta": 2}, [14, 10, 6]),
        (10, 14, 19, 3, {"beta": 2}, [10, 10, 10]),
        (10, 14, 20, 3, {"beta": 2}, [14, 10, 6]),
        (10, 14, 19, 3, {"beta": 2, "uniform_middle": False}, [14, 10, 6]),
        (10, 100, 100, 4, {"beta": 5, "official_rounding": True}, [18, 13, 8, 3]),
        (0, 100, 100, 3, {"beta": 5}, [0, 0, 0]),
        (0, 100, 100, 3, {"beta": 5, "official_rounding": True}, [0, 0, 0]),
    ],
)
def test_pyramids_by_hand(base, room, tokens, layers, rules, wanted):
    """From the top to base / beta, as far as there is room; uniform where the released code is; one layer gets all."""
    assert pyramid_budgets(base, room, tokens, layers, **{"beta": 20} | rules) == wanted


@pytest.mark.parametrize(("held", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_blocks_of_slots(held, blocks):
    """The last block may be part-filled."""
    assert num_blocks(held, 8) == blocks and num_blocks(torch.tensor([held]), 8).tolist() == [blocks]


def test_a_slot_s_sums_are_divided_by_the_queries_since_its_token():
    """Of a prompt those count that the statistic looks at, here its last two; of an answer all since the token."""
    policy = SnapKV(window=2)
    policy.score = ScoreSpec(prefill_queries=2, decode_update=True, track=("score", "pos"))
    slots = SimpleNamespace(score=torch.full((1, 1, 1, 4), 12.0), pos=torch.tensor([[[[0, 8, 9, 11]]]]))
    view = SimpleNamespace(prompt_tokens=torch.tensor([10]), tokens_seen=torch.tensor([12]))
    assert policy._per_query_held(view, slots).flatten().tolist() == [3.0, 3.0, 4.0, 12.0]
