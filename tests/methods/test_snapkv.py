"""SnapKV: the golden numbers through the real kernels, a plain oracle, and budgets."""

from fractions import Fraction

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


def pooled_scores(q, k, scale, window, pool, kernel) -> list[list[float]]:
    """SnapKV's scores of the tokens before the window, and behind them the window's own, in loops and float64: the
    mean over a KV head's query heads of what the window's queries give, pooled along the prompt before it."""
    length, heads = k.shape[1], k.shape[0]
    prob, found = causal_probabilities(q, k, scale), []
    for head in range(heads):
        group, end = q.shape[0] // heads, length - window
        raw = prob[head * group : (head + 1) * group, end:].sum(1).mean(0).tolist()
        pooled = []
        for j in range(end):
            inside = [raw[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < end]
            pooled.append(max(inside) if pool == "max" else sum(inside) / kernel)
        found.append([*pooled, *raw[end:]])
    return found


def best(scores: list[float], number: int) -> list[int]:
    """The places of the largest; of equal ones the first."""
    return sorted(range(len(scores)), key=lambda j: (-round(scores[j], 9), j))[:number]


def oracle_kept(q, k, scale, budget, window, pool, kernel) -> list[list[int]]:
    """SnapKV: kept positions per KV head."""
    length, heads = k.shape[1], k.shape[0]
    if budget >= length:
        return [list(range(length))] * heads
    window = min(window, length)
    end = length - min(window, budget)  # behind the prefix only when the budget is smaller than the window
    return [
        sorted([*best(scores[:end], budget - length + end), *range(end, length)])
        for scores in pooled_scores(q, k, scale, window, pool, kernel)
    ]


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("num_tokens", [1, 9, 50, 101, 157])
@pytest.mark.parametrize(("heads", "group"), [(1, 3), (2, 1), (2, 7)])
def test_kept_tokens_equal_the_oracle(pool, num_tokens, heads, group):
    """For odd lengths, groups and both pools, the pages hold what a loop over the attention matrix keeps."""
    q, k, v = random_layer(num_tokens, heads, group, num_tokens, 8)
    policy = SnapKV(budget=24, window=10, pool=pool, pool_kernel=5)
    store, row = filled(policy, [(2 * q, k, v)], scale=0.5, track=("pos",))
    assert held_positions(store, row) == oracle_kept(2 * q, k, 0.5, 24, 10, pool, 5)


def rounded(exact: list[Fraction]) -> list[int]:
    """Whole numbers with the same sum: rounded down, and up where the remainders are largest, the first of equal."""
    found = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for index in order[: int(sum(exact)) - sum(found)]:
        found[index] += 1
    return found


@pytest.mark.parametrize(("num_tokens", "budget"), [(211, 40), (101, 56)])
def test_a_pyramid_of_layers_equals_the_oracle(num_tokens, budget):
    """The last of five layers keeps base / beta prefix tokens, the first as much above the mean, or all there are and
    the last what is left; each layer's tokens are SnapKV's for its budget."""
    window, beta, layers = 7, 20, 5
    tensors = [random_layer(layer, 2, 3, num_tokens, 8) for layer in range(layers)]
    policy = PyramidKV(budget=budget, window=window, pool_kernel=5, beta=beta)
    store, row = filled(policy, [(2 * q, k, v) for q, k, v in tensors], scale=0.5, track=("pos",))
    base, prefix = budget - window, num_tokens - window
    top, low = 2 * base - base // beta, base // beta
    if top >= prefix:
        top, low = prefix, 2 * base - prefix
    assert (top == prefix) == (num_tokens == 101)
    each = rounded([top - Fraction(layer * (top - low), layers - 1) for layer in range(layers)])
    assert sum(each) == base * layers and each[0] > each[-1]
    wanted = []
    for (q, k, _), own in zip(tensors, each, strict=True):
        wanted += oracle_kept(2 * q, k, 0.5, own + window, window, "max", 5)
    assert held_positions(store, row) == wanted


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_heads_that_share_a_layer_s_budget_equal_the_oracle(alpha):
    """Ada-SnapKV: a head has as many tokens as it has among the layer's best, but for a share that each gets alike."""
    window, budget, heads, num_tokens = 7, 33, 4, 133
    tensors = [random_layer(layer, heads, 3, num_tokens, 8) for layer in range(2)]
    policy = AdaSnapKV(budget=budget, window=window, pool_kernel=5, alpha=alpha)
    store, row = filled(policy, [(2 * q, k, v) for q, k, v in tensors], scale=0.5, track=("pos",))
    base, end, wanted = budget - window, num_tokens - window, []
    for q, k, _ in tensors:
        scores = [own[:end] for own in pooled_scores(2 * q, k, 0.5, window, "max", 5)]
        chosen = best([x for own in scores for x in own], base * heads)
        counts = [sum(at // end == head for at in chosen) for head in range(heads)]
        assert len(set(counts)) > 1
        own = rounded([count * (1 - Fraction(str(alpha))) + base * Fraction(str(alpha)) for count in counts])
        wanted += [sorted([*best(scores[h], own[h]), *range(end, num_tokens)]) for h in range(heads)]
    assert held_positions(store, row) == wanted


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
