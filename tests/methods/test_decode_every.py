"""Prompt-only methods that also compress while decoding, by the option `decode_every`."""

import pytest
import torch
from store_helpers import filled, held_positions, held_scores, random_layer, step_at

from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.random_control import RandomControl
from kvbench.methods.snapkv import SnapKV

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
