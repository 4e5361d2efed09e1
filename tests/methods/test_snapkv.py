"""SnapKV: the golden numbers through the real kernels, a plain oracle, and budgets."""

import pytest
import torch
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    held_positions,
    kept_of,
    prefill_view,
    random_layer,
    step_at,
)

from kvbench.kernels.operands import HeadScores
from kvbench.kernels.reference.prompts import reduce_scores
from kvbench.methods.lagkv import LagKV
from kvbench.methods.snapkv import SnapKV


@pytest.mark.parametrize(
    ("pool", "pooled", "keep", "num_kept"),
    [("none", "s", "none", 2), ("avg", "avg3", "avg_keep", 2), ("max", "max3", "max_keep", 2)]
    + [("max", "max3", "max_keep4", 4)],
)
def test_golden_pool_and_ties(pool, pooled, keep, num_kept):
    """The pooled scores are the golden ones, and of equal scores the earlier position is kept."""
    case = golden("snapkv_pool")
    policy = SnapKV(budget=num_kept + 2, window=2, pool=pool, pool_kernel=3 if pool != "none" else 1)
    spec = policy.score
    columns = torch.tensor([[*case["s"], 7.0, 7.0]])  # the window's own must neither count nor leak into the pool
    how = {name: getattr(spec, name) for name in ("pool", "pool_kernel", "pool_stage", "pool_region")}
    score = reduce_scores(columns, 1, spec.prefill_queries, HeadScores(**how, group=spec.group_reduce))
    assert score[0, :6].tolist() == pytest.approx(case[pooled], abs=1e-6)
    assert kept_of(policy.plan_prefill(prefill_view(score, 8))) == [*case[keep], 6, 7]


def oracle_kept(q, k, scale, budget, window, pool, kernel) -> list[list[int]]:
    """SnapKV in loops, in float64: kept positions per KV head."""
    length, heads = k.shape[1], k.shape[0]
    if budget >= length:
        return [list(range(length))] * heads
    window = min(window, length)
    kept_window = min(window, budget)
    prob = causal_probabilities(q, k, scale)
    kept = []
    for head in range(heads):
        group = q.shape[0] // heads
        rows = prob[head * group : (head + 1) * group, length - window :]
        raw = rows.sum(1).mean(0).tolist()
        end = length - window
        pooled = []
        for j in range(end):
            around = [raw[i] if 0 <= i < end else None for i in range(j - kernel // 2, j + kernel // 2 + 1)]
            inside = [x for x in around if x is not None]
            pooled.append(max(inside) if pool == "max" else sum(inside) / kernel)
        pooled += raw[end : length - kept_window]  # only when the budget is smaller than the window
        order = sorted(range(length - kept_window), key=lambda j: (-round(pooled[j], 9), j))
        kept.append(sorted([*order[: budget - kept_window], *range(length - kept_window, length)]))
    return kept


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("num_tokens", [1, 9, 50, 101, 157])
@pytest.mark.parametrize(("heads", "group"), [(1, 3), (2, 1), (2, 7)])
def test_kept_tokens_equal_the_oracle(pool, num_tokens, heads, group):
    """For odd lengths, groups and both pools, the pages hold what a loop over the attention matrix keeps."""
    q, k, v = random_layer(num_tokens, heads, group, num_tokens, 8)
    policy = SnapKV(budget=24, window=10, pool=pool, pool_kernel=5)
    store, row = filled(policy, [(2 * q, k, v)], scale=0.5, track=("pos",))
    assert held_positions(store, row) == oracle_kept(2 * q, k, 0.5, 24, 10, pool, 5)


def test_decode_only_appends():
    """After the prompt nothing is evicted, and nothing is scored."""
    prompt = random_layer(0, 1, 1, 30, 8)
    store, row = filled(SnapKV(budget=6, window=2), [prompt], 20, track=("pos",))
    kept = held_positions(store, row)[0]
    for at in range(20, 30):
        step_at(store, row, [prompt], at)
    assert len(kept) == 6
    assert held_positions(store, row)[0] == [*kept, *range(20, 30)]


def test_a_protected_prompt_leaves_no_smaller_budget_than_itself_and_the_window():
    """The window is of the answer then, and holds a token of it at least; without a window that evicts, one token."""
    for window in (1, 8):
        policy = SnapKV(budget=40, window=window, protect="prompt", decode_every=4)
        assert policy.least_tokens(100) == 100 + window
    assert LagKV(budget=40, protect="prompt", decode_every=4).least_tokens(100) == 101
