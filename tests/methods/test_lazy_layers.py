"""SimLayerKV's lazy layers and DMS's delayed evictions, against plain choices of positions."""

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, random_layer, step_one

from kvbench.methods.dms import DMS
from kvbench.methods.simlayerkv import SimLayerKV
from kvbench.runs.verdict import complaint

HEADS, GROUP, LENGTH, DIM = 2, 3, 30, 8


def read(policy, layers: int):
    """A store with tracked positions that has read the prompt; also its row."""
    return filled(policy, [prompt(layer) for layer in range(layers)], scale=0.5, track=("pos",))


def prompt(layer: int):
    """Random queries, keys and values; layer 1 attends to the first two tokens."""
    q, k, v = random_layer(layer, HEADS, GROUP, LENGTH, DIM)
    if layer == 1:
        q[..., 0], k[..., 0] = 6.0, 0.0
        k[:, :2, 0] = 2.0
    return q, k, v


@pytest.mark.parametrize("queries", [1, 4])
def test_a_layer_is_lazy_by_the_share_of_its_last_queries(queries):
    """A threshold just below a layer's share of attention on first and last tokens makes it lazy, one just above does
    not; its heads keep these tokens and no others, all the others keep everything."""
    sinks, recent = 2, 5
    shares = []
    for layer in range(3):
        q, k, _ = prompt(layer)
        rows = causal_probabilities(q, k, 0.5)[:, -queries:].mean((0, 1))
        shares.append(float(rows[:sinks].sum() + rows[-recent:].sum()))
    assert 0.7 < shares[1] < 1 and max(shares[0], shares[2]) < 0.6
    for share in shares:
        for shift in (-1e-4, 1e-4):
            policy = SimLayerKV(threshold=share + shift, sinks=sinks, recent=recent, queries=queries)
            store, row = read(policy, layers=3)
            for layer, own in enumerate(shares):
                lazy = [0, 1, *range(LENGTH - recent, LENGTH)]
                want = lazy if own > share + shift else list(range(LENGTH))
                assert held_positions(store, row)[layer * HEADS : (layer + 1) * HEADS] == [want] * HEADS


@pytest.mark.parametrize(("threshold", "kept"), [(0.5, LENGTH), (0.499, 15)])
def test_a_share_that_equals_the_threshold_is_not_lazy(threshold, kept):
    """Keys of 0 are attended to alike, so that 2 first and 13 last tokens of 30 have exactly half."""
    q, k, v = prompt(0)
    policy = SimLayerKV(threshold=threshold, sinks=2, recent=13, queries=1)
    store, row = filled(policy, [(q, 0 * k, v)], scale=0.5, track=("pos",))
    assert [len(own) for own in held_positions(store, row)] == [kept] * HEADS


def test_lazy_layers_stay_at_first_and_newest_tokens():
    """Twelve steps on, more than a turn of the window: lazy layers hold sinks and the newest, the others all."""
    store, row = read(SimLayerKV(threshold=0.7, sinks=2, recent=5), layers=3)
    for index in range(12):
        torch.manual_seed(index)
        step_one(store, row, [(torch.randn(HEADS * GROUP, DIM), *torch.randn(2, HEADS, DIM))] * 3)
    everything = list(range(LENGTH + 12))
    for index, held in enumerate(held_positions(store, row)):
        assert sorted(held) == ([0, 1, *range(LENGTH + 7, LENGTH + 12)] if index // HEADS == 1 else everything)


def test_at_a_threshold_of_one_nothing_is_lazy():
    """Even where all attention is on the first tokens and rounding makes its sum more than 1."""
    k = torch.zeros(HEADS, LENGTH, DIM)
    k[:, 0] = 90.0
    policy = SimLayerKV(threshold=1.0, sinks=1, recent=1)
    store, row = filled(policy, [(torch.ones(HEADS * GROUP, LENGTH, DIM), k, k)], track=("pos",))
    assert held_positions(store, row) == [list(range(LENGTH))] * HEADS


@pytest.mark.parametrize(
    ("slots", "last", "message"),
    [(2 * 60 + 2 * 7, 2 * 72 + 2 * 7, None), (2 * 60 + 2 * 8, 2 * 72 + 2 * 7, "1 lazy lists of 7 make"),
     (2 * 60 + 2 * 7, 4 * 72, "2 lazy lists of 7 make 39.5")],
)  # fmt: skip
def test_what_was_kept_is_checked(slots, last, message):
    """Lists of other lengths than all or first and last tokens fail a run, and lazy ones that grow."""
    kept = {"prompt_tokens": 60, "tokens_seen": 72, "lists": 4, "prompt_slots": slots, "prompt_slots_min": 7}
    found = complaint(SimLayerKV(sinks=2, recent=5), {"kept": kept | {"slots_per_tier": [last]}})
    assert found is None if message is None else message in found


def test_of_a_prompt_that_a_lazy_layer_would_hold_none_is_lazy():
    """Its lists hold all of the answer."""
    kept = {"prompt_tokens": 7, "tokens_seen": 12, "lists": 4, "prompt_slots": 28, "prompt_slots_min": 7}
    assert complaint(SimLayerKV(sinks=2, recent=5), {"kept": kept | {"slots_per_tier": [4 * 12]}}) is None


@pytest.mark.parametrize(("threshold", "window"), [(0.8, 6), (1.3, 6), (0.9, 1), (1.0, 50)])
def test_dms_decides_when_a_token_leaves_the_window(threshold, window):
    """Prompt and answer as one loop over tokens: the largest head's attention from the window's queries, per query,
    decides once; kept tokens stay for good."""
    steps = 9
    q, k, v = prompt(0)
    store, row = read(DMS(threshold=threshold, window=window), layers=1)
    first = causal_probabilities(q, k, 0.5)[:, -window:].sum(1).view(HEADS, GROUP, LENGTH).amax(1)
    counted = min(window, LENGTH)
    held, received = [], []
    for head in range(HEADS):
        shares = first[head] / counted * LENGTH
        held.append([p for p in range(LENGTH) if p >= LENGTH - window or shares[p] >= threshold])
        received.append({p: float(first[head, p]) for p in held[head]})
    assert held_positions(store, row) == held
    for index in range(steps):
        torch.manual_seed(index)
        new_q, (new_k, new_v) = torch.randn(HEADS * GROUP, DIM), torch.randn(2, HEADS, DIM)
        seen = LENGTH + index
        k = torch.cat([k, new_k[:, None]], 1)
        for head in range(HEADS):
            leaving = seen - window
            if leaving in held[head]:
                since = seen - max(leaving, LENGTH - window)
                if received[head][leaving] / since * seen < threshold:
                    held[head].remove(leaving)
            held[head].append(seen)
            received[head][seen] = 0.0
            logits = torch.einsum("gd,nd->gn", new_q.view(HEADS, GROUP, DIM)[head], k[head, held[head]]).double() * 0.5
            for p, share in zip(held[head], logits.softmax(-1).amax(0).tolist(), strict=True):
                received[head][p] += share
        step_one(store, row, [(new_q, new_k, new_v)], 0.5)
        assert [sorted(p) for p in held_positions(store, row)] == [sorted(p) for p in held]
    if window == 6:
        assert len(held[0]) != len(held[1]) and min(map(len, held)) < LENGTH + steps
