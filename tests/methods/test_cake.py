"""CAKE against its formulas in float64: what a layer gets, and which tokens stay in it."""

import math
from types import SimpleNamespace

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, random_layer, step_one

from kvbench.methods.cake import CAKE

LAYERS, HEADS, GROUP, LENGTH, DIM = 3, 2, 2, 40, 8
SHARPNESS = (0.3, 1.0, 2.5)  # of each layer's attention, so that layers differ


def prompt(layer: int):
    """Queries, keys and values of a layer."""
    q, k, v = random_layer(layer, HEADS, GROUP, LENGTH, DIM)
    return q * SHARPNESS[layer], k, v


def read(policy):
    """A store that has read the prompt; also its row."""
    return filled(policy, [prompt(layer) for layer in range(LAYERS)], track=("pos",))


def preference(attention, window: int, tau1: float, tau2: float) -> float:
    """The paper's P of one layer, in loops over the window's attention [Hq, w, N] to what is before it."""
    entropy = shift = 0.0
    for head in attention.tolist():
        for column in range(LENGTH - window):
            seen = [query[column] for query in head]
            entropy -= sum(p * math.log(p) for p in seen)
            mean = sum(seen) / window
            shift += sum((p - mean) ** 2 for p in seen) / window
    return entropy ** (1 / tau1) * shift ** (1 / tau2)


def kept_by_hand(layer: int, window: int, gamma: float, pool: int, budget: int) -> list[list[int]]:
    """What stays in the heads of a layer that may keep `budget` tokens beside its window."""
    q, k, _ = prompt(layer)
    attention = causal_probabilities(q, k, 1.0)[:, -window:]
    worth = attention.mean(1) + gamma * attention.var(1, unbiased=False)
    found = []
    for own in worth.view(HEADS, GROUP, LENGTH).mean(1).tolist():
        prefix = own[: LENGTH - window]
        near = [max(prefix[max(0, p - pool // 2) : p + pool // 2 + 1]) for p in range(len(prefix))]
        best = sorted(range(len(prefix)), key=lambda p: (-near[p], p))[:budget]
        found.append(sorted([*best, *range(LENGTH - window, LENGTH)]))
    return found


@pytest.mark.parametrize(("gamma", "tau1", "tau2"), [(0.0, 1.0, 1.0), (200.0, 1.0, 1.0), (5.0, 2.0, 0.7)])
def test_layers_share_by_preference_and_tokens_by_mean_and_variance(gamma, tau1, tau2):
    """The budgets of the layers are in proportion to P, and each head keeps its tokens of largest mean + gamma x
    variance."""
    window, pool, budget = 5, 3, 13
    store, row = read(CAKE(budget=budget, window=window, pool_kernel=pool, gamma=gamma, tau1=tau1, tau2=tau2))
    lists = held_positions(store, row)
    weights = []
    for layer in range(LAYERS):
        q, k, _ = prompt(layer)
        weights.append(preference(causal_probabilities(q, k, 1.0)[:, -window:], window, tau1, tau2))
    total = (budget - window) * LAYERS
    exact = [weight * total / sum(weights) for weight in weights]
    assert max(exact) < LENGTH - window  # so that no layer's share is cut
    shares = [math.floor(x) for x in exact]
    for layer in sorted(range(LAYERS), key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
        shares[layer] += 1
    assert len(set(shares)) > 1
    for layer in range(LAYERS):
        own = lists[layer * HEADS : (layer + 1) * HEADS]
        assert [sorted(p) for p in own] == kept_by_hand(layer, window, gamma, pool, shares[layer])


def test_the_window_s_own_tokens_do_not_count_in_what_a_layer_gets():
    """Only those before it; of a prompt no longer than the window nothing counts."""
    entropy, variance = torch.arange(1.0, 21).view(1, 2, 10), torch.arange(2.0, 22).view(1, 2, 10)
    view = SimpleNamespace(num_tokens=10, extra={"entropy": entropy, "variance": variance})
    found = CAKE(budget=8, window=3, tau1=2.0, tau2=1.0).layer_weights(view)
    want = float(entropy[..., :7].sum()) ** 0.5 * float(variance[..., :7].sum())
    assert found.tolist() == pytest.approx([want])
    assert CAKE(budget=30, window=20).layer_weights(view).tolist() == [0.0]


def test_variance_changes_what_stays():
    """The indicator is not the mean alone, and with allocation=uniform only it differs from SnapKV's score."""
    kept = [
        held_positions(*read(CAKE(budget=13, window=5, gamma=gamma, allocation="uniform"))) for gamma in (0.0, 200.0)
    ]
    assert kept[0] != kept[1] and all(len(positions) == 13 for positions in kept[0])


def test_slots_are_ranked_by_the_queries_since(monkeypatch):
    """At an eviction while decoding, mean and variance are over the ring's last queries."""
    policy = CAKE(budget=10, window=3, pool_kernel=1, gamma=50.0, allocation="uniform", decode_every=3)
    store, row = read(policy)
    queries, keys = [], [prompt(layer)[1] for layer in range(LAYERS)]
    before = held_positions(store, row)
    for index in range(3):
        torch.manual_seed(index)
        q, k, v = torch.randn(HEADS * GROUP, DIM), torch.randn(HEADS, DIM), torch.randn(HEADS, DIM)
        step_one(store, row, [(q, k, v)] * LAYERS)
        queries.append(q)
        keys = [torch.cat([own, k[:, None]], 1) for own in keys]
    store.begin_step(torch.tensor([row]))
    for index, (held, now) in enumerate(zip(before, held_positions(store, row), strict=True)):
        layer, head = divmod(index, HEADS)
        slots = sorted([*held, *range(LENGTH, LENGTH + 3)])
        own_keys = keys[layer][head, slots].double()
        attention = torch.zeros(GROUP, 3, len(slots), dtype=torch.float64)
        for member in range(GROUP):
            for i, q in enumerate(queries):
                logits = own_keys @ q[head * GROUP + member].half().double()
                logits[torch.tensor(slots) > LENGTH + i] = -math.inf
                attention[member, i] = logits.softmax(0)
        worth = (attention.mean(1) + 50.0 * attention.var(1, unbiased=False)).mean(0).tolist()
        free = [i for i, p in enumerate(slots) if p < LENGTH]
        best = sorted(free, key=lambda i: -worth[i])[:7]
        assert sorted(now)[:10] == sorted([slots[i] for i in best] + [LENGTH, LENGTH + 1, LENGTH + 2])
