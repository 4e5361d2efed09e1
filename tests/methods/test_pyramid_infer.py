"""PyramidInfer against loops over layers: how much each keeps, and that it keeps some of what lies below."""

import math

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, random_layer

from kvbench.methods.pyramid_infer import PyramidInfer

LAYERS, HEADS, GROUP, LENGTH, DIM = 4, 2, 2, 50, 8


@pytest.mark.parametrize(
    ("budget", "decay", "sinks", "window"), [(20, 0.5, 2, 3), (30, 0.3, 0, 5), (14, 0.9, 4, 6), (9, 0.2, 0, 0)]
)
def test_each_layer_keeps_the_best_of_the_layer_below(budget, decay, sinks, window):
    """Counts fall by the cosine schedule, their mean is the budget; tokens go by weighted recent attention in the layer
    below, the mean of all heads, among those that it kept: as the original, where a layer says what the next one reads,
    so that the first two hold as many. The first layer, which nothing lies below, goes by its own."""
    policy = PyramidInfer(budget=budget, decay=decay, sinks=sinks, window=window, recent_share=0.3, distance_weight=1.5)
    layers = [random_layer(layer, HEADS, GROUP, LENGTH, DIM) for layer in range(LAYERS)]
    store, row = filled(policy, layers, scale=0.6, track=("pos",))
    lists = [sorted(positions) for positions in held_positions(store, row)]
    held = [lists[layer * HEADS] for layer in range(LAYERS)]
    assert all(lists[layer * HEADS + 1] == held[layer] for layer in range(LAYERS))
    assert sum(map(len, held)) == budget * LAYERS

    size, exact = 1.0, []
    for layer in range(LAYERS):  # what a layer holds comes before what it leaves to the next one
        exact.append(size)
        size *= (1 - decay) * (math.cos(math.pi * layer / LAYERS) + 1) / 2 + decay
    assert exact[0] == exact[1]
    own = sinks + window or 1
    for count, part in zip(map(len, held), exact, strict=True):
        assert abs(count - own - part * (budget - own) * LAYERS / sum(exact)) < 1

    free = list(range(sinks, LENGTH - window))
    for layer in range(LAYERS):
        q, k, _ = layers[max(0, layer - 1)]
        rows = causal_probabilities(q, k, 0.6).mean(0)[-16:]
        weights = torch.linspace(1.0, 1.5, 16, dtype=torch.float64)
        worth = (rows * weights[:, None]).mean(0)
        best = sorted(free, key=lambda p: -float(worth[p]))[: len(held[layer]) - sinks - window]
        assert held[layer] == sorted([*range(sinks), *best, *range(LENGTH - window, LENGTH)])
        free = sorted(best)
