"""PyramidKV and Ada-SnapKV: golden budgets, exact totals, and the released code's rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import golden, prefill_view

from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.policy import PrefillView, largest_remainder, pyramid_budgets, shares_by_score


def layer_budgets(policy, num_tokens: int, num_layers: int) -> list[int]:
    """Tokens that a plan keeps in each layer of a model with two heads; both heads keep the same number."""
    kept = []
    for layer in range(num_layers):
        view = PrefillView(
            num_tokens=num_tokens,
            num_layers=num_layers,
            num_kv_heads=2,
            layers=torch.tensor([layer]),
            score=torch.rand(1, 2, num_tokens),
            token_bytes=(1.0,),
        )
        counts = (policy.plan_prefill(view).tier_of >= 0).sum(-1)[0]
        assert counts[0] == counts[1]
        kept.append(int(counts[0]))
    return kept


@pytest.mark.parametrize(
    ("case", "capacity", "layers", "tokens"),
    [
        ("cap72_w8_L4_q1000", 72, 4, 1000),
        ("cap72_w8_L4_q130", 72, 4, 130),
        ("cap72_w8_L4_q100", 72, 4, 100),
        ("cap72_w8_L4_q60", 72, 4, 60),
        ("cap128_w8_L32_q8000", 128, 32, 8000),
        ("cap2048_w8_L32_q8000", 2048, 32, 8000),
    ],
)
def test_golden_pyramid(case, capacity, layers, tokens):
    """With the released rounding every layer keeps the golden number, window included; without it the total is the
    budget."""
    want = golden("pyramid")[case]
    got = layer_budgets(PyramidKV(budget=capacity, window=8, official_rounding=True), tokens, layers)
    assert sum(got) == want["total"]
    assert got[:4] == want["budgets"][:4] and got[-1] == want["budgets"][-1]
    exact = layer_budgets(PyramidKV(budget=capacity, window=8), tokens, layers)
    assert sum(exact) == min(want["nominal"], tokens * layers)
    assert all(a >= b for a, b in zip(exact, exact[1:], strict=False))


def test_one_layer():
    """A model of one layer gets the base budget, where the released code divides by zero."""
    assert layer_budgets(PyramidKV(budget=72, window=8), 1000, 1) == [72]


@given(st.integers(1, 400), st.integers(1, 60), st.integers(2, 2000), st.integers(1, 40))
def test_pyramid_total_is_exact(base, layers, room, beta):
    """The sum over layers is the budget for any shape, no layer gets more than there is, and lower layers never get
    less."""
    got = pyramid_budgets(base, room, room + 8, layers, beta=beta)
    assert sum(got) == min(base, room) * layers
    assert all(0 <= x <= room for x in got) and sorted(got, reverse=True) == got


def head_budgets(score, base: int, alpha: float, **rounding) -> list[int]:
    """Ada-KV's budgets of the heads of one layer."""
    return shares_by_score(score[None], torch.tensor([base]), alpha, **rounding)[0].tolist()


@pytest.mark.parametrize(("case", "alphas"), [("ada_a", (0.0, 0.2, 0.5)), ("ada_b", (0.0, 0.2))])
def test_golden_ada(case, alphas):
    """With the released rounding the heads get the golden budgets; with largest remainders the total is exact."""
    data = golden(case)
    score = torch.tensor(data["s"])
    for alpha in alphas:
        want = data[f"alpha{str(alpha).replace('.', '').removesuffix('0') or '0'}" if alpha else "alpha0"][1]
        assert head_budgets(score, data["B"], alpha, official_rounding=True) == want
        exact = head_budgets(score, data["B"], alpha)
        assert sum(exact) == data["B"] * len(score)
        assert all(abs(a - b) <= 1 for a, b in zip(exact, want, strict=True))


def test_ada_keeps_each_heads_own_best():
    """Every head keeps its own best tokens, as many as its budget, and the window."""
    score = torch.tensor([[0.5, 0.3, 0.15, 0.05, 9.0, 9.0], [0.1, 0.08, 0.06, 0.04, 9.0, 9.0]])
    plan = AdaSnapKV(budget=4, window=2, alpha=0.0).plan_prefill(prefill_view(score, 6, num_heads=2))
    kept = [(row >= 0).nonzero()[:, 0].tolist() for row in plan.tier_of[0]]
    assert kept == [[0, 1, 2, 4, 5], [0, 4, 5]]


def test_ties_go_to_the_lower_head():
    """Equal scores fill head 0 first, lower positions first."""
    assert head_budgets(torch.ones(3, 4), 2, 0.0) == [4, 2, 0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 7))
def test_largest_remainder(parts, denominator):
    """The rounded parts sum to the exact total, each within one of its exact value, larger remainders first."""
    total = round(sum(parts) / denominator)
    got = largest_remainder(parts, denominator, max(total, sum(p // denominator for p in parts)))
    assert all(0 <= g - p // denominator <= 1 for g, p in zip(got, parts, strict=True))


def test_ada_pyramid_uses_layer_budgets():
    """In the pyramid form the first layer keeps more than the last, and the mean over layers is the budget."""
    kept = []
    for layer in range(4):
        view = PrefillView(
            num_tokens=1000,
            num_layers=4,
            num_kv_heads=3,
            layers=torch.tensor([layer]),
            score=torch.rand(1, 3, 1000),
            token_bytes=(1.0,),
        )
        plan = AdaSnapKV(budget=72, window=8, allocation="ada_pyramid").plan_prefill(view)
        kept.append(int((plan.tier_of >= 0).sum()))
    assert kept[0] > kept[-1] and sum(kept) == 72 * 4 * 3
