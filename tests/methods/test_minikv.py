"""MiniKV: golden heavy-hitter counts and buffer states, the variance allocations, and the choice of tokens."""

import pytest
import torch
from store_helpers import golden, kept_of, prefill_view

from kvbench.methods.minikv import MiniKV


def test_golden_pyramid_ratios():
    """The heavy share per layer of 32 is the golden one, read off a very long prompt."""
    view = prefill_view(None, 1_000_000, layers=[0, 1, 15, 16, 30, 31], num_layers=32)
    got = [count / 1_000_000 for count in MiniKV().heavy_counts(view)]
    assert got == pytest.approx(golden("minikv_pyramid"), abs=2e-6)


def test_selection_is_h2os_first_case():
    """Heavy 2 and recent 2 of the golden column sums keep the golden tokens."""
    case = golden("h2o")
    policy = MiniKV(heavy=2 / 6, recent=2 / 6, allocation="uniform", group=8, residual_tokens=8)
    plan = policy.plan_prefill(prefill_view(torch.tensor(case["colsum"]), 6))
    assert kept_of(plan) == case["kept"]


def test_three_tokens_keep_at_least_two():
    """Where the released code keeps nothing of a three-token prompt, one heavy and one recent token stay."""
    plan = MiniKV(allocation="uniform").plan_prefill(prefill_view(torch.tensor([0.1, 0.9, 0.3]), 3))
    assert kept_of(plan) == [1, 2]


def test_uniform_layers_have_alike_many():
    """However their scores vary."""
    score = torch.rand(3, 1, 400) * torch.tensor([3.0, 2.0, 1.0])[:, None, None]
    policy = MiniKV(allocation="uniform", heavy=0.2, recent=0.1)
    assert policy.heavy_counts(prefill_view(score, 400, layers=range(3))) == [80, 80, 80]


@pytest.mark.parametrize(("allocation", "order"), [("var_prop", [0, 1, 2]), ("var_inv", [2, 1, 0])])
def test_variance_allocations(allocation, order):
    """Layers are ranked by the variance of their accumulated attention, and the mean heavy share is the one asked
    for."""
    torch.manual_seed(1)
    score = torch.rand(3, 1, 400) * torch.tensor([3.0, 2.0, 1.0])[:, None, None]
    policy = MiniKV(allocation=allocation, heavy=0.2, recent=0.1)
    assert policy.scope == "model"
    counts = policy.heavy_counts(prefill_view(score, 400, layers=range(3)))
    assert sum(counts) == 3 * 80
    assert sorted(range(3), key=lambda layer: -counts[layer]) == order
    variance = score.var(-1, unbiased=False)[:, 0]
    weight = variance if allocation == "var_prop" else 1 / variance
    assert counts == pytest.approx((weight / weight.sum() * 240).tolist(), abs=1)
