"""HeadKV: the paper's division of a budget, and SnapKV's choice within it."""

import pytest
import torch
from store_helpers import prefill_view

from kvbench.methods.headkv import HeadKV
from kvbench.methods.snapkv import SnapKV

TABLE = [[0.5, 0.1], [0.02, 0.2], [0.13, 0.05]]


@pytest.mark.parametrize("beta", [1.005, 1.2, 2.0, 5.0])
def test_heads_get_the_paper_s_budgets_and_snapkv_s_tokens(beta):
    """Each head keeps base - base / beta, and its share of the pool of base / beta from every head; which tokens, is
    SnapKV's choice at that budget."""
    torch.manual_seed(0)
    window, budget, length = 4, 64, 400
    score = torch.rand(3, 2, length)
    policy = HeadKV(budget=budget, window=window, alpha=1 - 1 / beta, table=TABLE)
    base, pool = budget - window, (budget - window) / beta * 6
    total = sum(map(sum, TABLE))
    counts = []
    for layer in range(3):
        view = prefill_view(score[layer], length, 2, layers=[layer], num_layers=3)
        keep = policy.plan_prefill(view).tier_of[0] >= 0
        for head in range(2):
            exact = base - base / beta + pool * TABLE[layer][head] / total
            count = int(keep[head].sum())
            assert abs(count - window - exact) < 1
            counts.append(count)
            plain = SnapKV(budget=count, window=window).plan_prefill(prefill_view(score[layer, head], length))
            assert torch.equal(plain.tier_of[0, 0] >= 0, keep[head])
    assert sum(counts) == 6 * budget and len(set(counts)) > 3
