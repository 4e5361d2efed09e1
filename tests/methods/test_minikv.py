"""MiniKV: golden heavy-hitter counts and buffer states, the variance allocations, and the choice of tokens."""

import pytest
import torch
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    kept_of,
    plain_attention,
    prefill_view,
    random_layer,
    step_at,
)

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


def coded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """2 bits for groups of 16 numbers along a dimension: minimum and step in fp16, codes from the rounded values."""
    parts = x.movedim(dim, -1).unflatten(-1, (-1, 16))
    low = parts.amin(-1, keepdim=True)
    step = ((parts.amax(-1, keepdim=True) - low) / 3).half().float()
    low = low.half().float()
    codes = torch.where(step > 0, (parts - low) / step, 0.0).round().clamp(0, 3)
    return (codes * step + low).flatten(-2).movedim(-1, dim)


@pytest.mark.parametrize("allocation", ["uniform", "pyramid"])
@pytest.mark.parametrize("num_tokens", [128, 101])
def test_algorithm_1(allocation, num_tokens):
    """Heavy hitters by the sums over all queries, more of them in lower layers, and the recent tokens, at 2 bits; a
    token of the answer joins the buffer, which is coded before attention once it is full. Outputs of 80 steps."""
    layers, heads, group, scale, buffer, steps = 4, 2, 2, 0.25, 32, 80
    tensors = [random_layer(7 * layer, heads, group, num_tokens + steps, 16) for layer in range(layers)]
    # Numbers that fp16 holds: the buffer has them before they are coded.
    tensors = [tuple(x.half().float() for x in (2 * q, k, v)) for q, k, v in tensors]
    policy = MiniKV(heavy=0.25, recent=0.25, allocation=allocation, depth=7, group=16, residual_tokens=buffer)
    store, row = filled(policy, tensors, num_tokens, scale)
    recent, mean = num_tokens // 4, num_tokens / 4
    first, last = (mean, mean) if allocation == "uniform" else (2 * mean - mean / 7, mean / 7)
    held = []  # per layer and head: keys and values at 2 bits, and those of the buffer
    for layer, (q, k, v) in enumerate(tensors):
        heavy = int(first + (last - first) * layer / (layers - 1))
        prob = causal_probabilities(q[:, :num_tokens], k[:, :num_tokens], scale)
        sums = prob.sum(1).unflatten(0, (heads, group)).sum(1)[:, : num_tokens - recent]
        for head in range(heads):
            kept = [*sums[head].topk(heavy).indices.sort().values.tolist(), *range(num_tokens - recent, num_tokens)]
            whole = len(kept) // 16 * 16  # what is beyond waits in the buffer
            keys, values = k[head, kept], v[head, kept]
            held.append([coded(keys[:whole], 0), coded(values[:whole], 1), keys[whole:], values[whole:]])
    for at in range(num_tokens, num_tokens + steps):
        outs = step_at(store, row, tensors, at, scale)
        for index, parts in enumerate(held):
            (layer, head), (q, k, v) = divmod(index, heads), tensors[index // heads]
            parts[2:] = torch.cat([parts[2], k[head, at][None]]), torch.cat([parts[3], v[head, at][None]])
            if len(parts[2]) == buffer:
                full = coded(parts[2], 0), coded(parts[3], 1)
                parts[:] = *(torch.cat(pair) for pair in zip(parts[:2], full, strict=True)), parts[2][:0], parts[3][:0]
            members = slice(group * head, group * (head + 1))
            seen = (torch.cat([parts[side], parts[side + 2]])[None] for side in (0, 1))
            want = plain_attention(q[members, at], *seen, scale)
            assert (outs[layer][members] - want).abs().max() < 1e-4  # sums in fp32
