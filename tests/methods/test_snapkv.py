"""SnapKV: the golden numbers through the real kernels, a plain oracle, and budgets."""

import pytest
import torch
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    held_positions,
    held_scores,
    kept_of,
    prefill_view,
    random_layer,
    step_at,
)

from kvbench.kernels.operands import HeadScores
from kvbench.kernels.reference.prompts import reduce_scores
from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.lagkv import LagKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.random_control import RandomControl
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


# Evictions while decoding, by the option `decode_every` ----

METHODS = [SnapKV, PyramidKV, AdaSnapKV, RandomControl]


def run(policy, prompt: int, steps: int):
    """A store of two layers and heads after a prompt and some steps; also the slots per list after the prompt."""
    layers = [random_layer(prompt + layer, 2, 2, prompt + steps, 16) for layer in range(2)]
    layers = [(3 * q, k, v) for q, k, v in layers]
    store, row = filled(policy, layers, prompt, 0.25, track=("pos",))
    first = [len(positions) for positions in held_positions(store, row)]
    for at in range(prompt, prompt + steps):
        step_at(store, row, layers, at, 0.25)
    return store, row, first


@pytest.mark.parametrize("method", METHODS)
def test_lists_return_to_their_prompt_share(method):
    """With a token budget every list is back at its share before each eighth step, and the newest tokens are there."""
    store, row, first = run(method(budget=40, window=8, decode_every=8), 120, 17)
    held = held_positions(store, row)
    assert [len(positions) for positions in held] == [share + 1 for share in first]
    assert all(set(range(129, 137)) <= set(positions) for positions in held)
    assert store.pages.pool.num_used == sum(-(-len(p) // store.pages.formats[0].tokens_per_page) for p in held)


@pytest.mark.parametrize("method", METHODS)
def test_ratio_shares_grow_with_the_sequence(method):
    """With a ratio budget a list may hold that share of everything seen so far."""
    store, row, first = run(method(budget=0.25, window=8, decode_every=8), 120, 65)
    assert [len(p) for p in held_positions(store, row)] == [share * 184 // 120 + 1 for share in first]


def test_the_lightest_go():
    """What stays has the largest scores among what is not in the window."""
    store, row, _ = run(SnapKV(budget=40, window=8, decode_every=8), 120, 8)
    before = held_scores(store, row)
    store.begin_step(torch.tensor([row]))
    for old, positions in zip(before, held_positions(store, row), strict=True):
        free = sorted((p for p in old if p < 120), key=lambda p: (-old[p], p))
        assert sorted(positions) == sorted([*free[:32], *range(120, 129)])


def test_a_short_prompt_grows_up_to_the_budget():
    """A prompt below the budget evicts nothing until the budget is full."""
    store, row, _ = run(SnapKV(budget=40, window=8, decode_every=8), 20, 20)
    assert [len(p) for p in held_positions(store, row)] == [40] * 4
    store, row, _ = run(SnapKV(budget=40, window=8, decode_every=8), 20, 33)
    assert [len(p) for p in held_positions(store, row)] == [41] * 4
