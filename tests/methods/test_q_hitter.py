"""Q-Hitter: attention and errors of codes, mixed, against a plain quantiser."""

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, random_layer, step_one

from kvbench.methods.q_hitter import QHitter

HEADS, GROUP, LENGTH, DIM = 2, 2, 30, 8


def read(policy):
    """A store that has read a random prompt, some vectors of which are hard to quantise; also its row and prompt."""
    q, k, v = random_layer(1, HEADS, GROUP, LENGTH, DIM)
    k[:, 3:20:4] *= 0.2
    v[:, ::5, 0] *= 9
    return *filled(policy, [(q, k, v)], scale=0.5, track=("pos",)), (q, k, v)


def error(vector: torch.Tensor, bits: int) -> float:
    """What a vector's codes get wrong, entry by entry in float64."""
    low, high = float(vector.min()), float(vector.max())
    step = (high - low) / (2**bits - 1)
    return sum((round((float(x) - low) / step) * step + low - float(x)) ** 2 for x in vector) ** 0.5


def scaled(x: torch.Tensor) -> torch.Tensor:
    """From 0 to 1 over all heads."""
    return (x - x.min()) / (x.max() - x.min())


def mixed(attention, k, v, bits: int, mix: float) -> torch.Tensor:
    """The original's combined score of a layer, [H, N]."""
    errors = [torch.tensor([[error(x, bits) for x in own] for own in side], dtype=torch.float64) for side in (k, v)]
    return mix * scaled(attention) + (1 - mix) * (2 - scaled(errors[0]) - scaled(errors[1])) / 2


@pytest.mark.parametrize(("bits", "mix", "sure"), [(4, 0.5, 0.3), (2, 0.2, 0.0), (4, 0.0, 0.5), (8, 1.0, 0.2)])
def test_the_surest_by_attention_then_the_best_mixtures(bits, mix, sure):
    """Beside the window, a share of the budget by attention and the rest by the mixture among the others."""
    budget, window = 12, 3
    store, row, (q, k, v) = read(QHitter(budget=budget, window=window, bits=bits, mix=mix, sure_share=sure))
    attention = causal_probabilities(q, k, 0.5).sum(1).view(HEADS, GROUP, LENGTH).sum(1)
    worth = mixed(attention, k, v, bits, mix)
    for head, held in enumerate(held_positions(store, row)):
        first = attention[head, : LENGTH - window].topk(int(sure * budget)).indices.tolist()
        rest = [p for p in range(LENGTH - window) if p not in first]
        rest.sort(key=lambda p: -float(worth[head, p]))
        want = [*first, *rest[: budget - window - len(first)], *range(LENGTH - window, LENGTH)]
        assert sorted(held) == sorted(want)


def test_evictions_while_decoding_mix_tracked_attention_with_errors():
    """Slots track plain attention; at an eviction it is mixed with the errors of what pages hold."""
    policy = QHitter(budget=10, window=2, bits=4, mix=0.4, sure_share=0.0, decode_every=3, tier="native")
    store, row, (_, k, v) = read(policy)
    for index in range(3):
        torch.manual_seed(index)
        q, (new_k, new_v) = torch.randn(HEADS * GROUP, DIM), torch.randn(2, HEADS, DIM)
        k, v = torch.cat([k, new_k[:, None]], 1), torch.cat([v, new_v[:, None]], 1)
        step_one(store, row, [(q, new_k, new_v)], 0.5)
    pages = store.pages
    tier = pages.tier(0, pages.lists_of(torch.tensor([row])))
    pos, score = (pages.field(0, name)[tier.ids].flatten(1) for name in ("pos", "score"))
    stored = [
        dict(zip(p[:n].tolist(), s[:n].tolist(), strict=True)) for p, s, n in zip(pos, score, tier.num_k, strict=True)
    ]
    slots = [sorted(own) for own in stored]
    store.begin_step(torch.tensor([row]))
    attention = torch.tensor([[stored[head][p] for p in slots[head]] for head in range(HEADS)], dtype=torch.float64)
    worth = mixed(attention, *([x[h, slots[h]] for h in range(HEADS)] for x in (k, v)), bits=4, mix=0.4)
    for head, held in enumerate(held_positions(store, row)):
        old = [i for i, p in enumerate(slots[head]) if p < LENGTH + 1]
        best = sorted(old, key=lambda i: -float(worth[head, i]))[:8]
        want = [*(slots[head][i] for i in best), LENGTH + 1, LENGTH + 2]
        assert set(want) <= set(held) and len(held) <= 11
