"""Key norms as a score: what stays of a prompt, and scores that are stored and moved without any query."""

import pytest
import torch
from refusals import refused
from store_helpers import filled, held_positions, held_scores, random_layer, step_one

from kvbench.methods.knorm import KeyNorm
from kvbench.runs.verdict import complaint

DIM = 16


def keys_of_norm(norms: list[float]) -> torch.Tensor:
    """Keys [n, 16] of exactly the given norms, each along a random channel."""
    return torch.eye(DIM)[torch.randint(DIM, (len(norms),))] * torch.tensor(norms)[:, None]


def after_prompt(policy, norms: list[list[list[float]]]):
    """A store that has read a prompt whose keys have norms[layer][head][token]; queries are huge and random."""
    layers = []
    for layer, own in enumerate(norms):
        q, _, v = random_layer(layer, len(own), 1, len(own[0]), DIM)
        layers.append((50 * q, torch.stack([keys_of_norm(n) for n in own]), v))
    return filled(policy, layers, scale=0.25, track=("pos",))


def test_the_smallest_norms_stay_in_every_head():
    """Whatever the queries look at: per head the three smallest; of equal ones the earlier."""
    norms = [[3.0, 1.0, 4.0, 1.5, 5.0, 0.5], [2.0, 2.0, 2.0, 2.0, 1.0, 2.0]]
    store, row = after_prompt(KeyNorm(budget=3), [norms])
    assert held_positions(store, row) == [[1, 3, 5], [0, 1, 4]]


def test_skipped_layers_are_paid_by_the_others():
    """Half of 8 tokens over 4 layers with one skipped: 8 in the first, then (16 - 8) / 3 = 2 in each other one."""
    norms = [[[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]] * 4
    policy = KeyNorm(budget=0.5, skip_layers=1)
    store, row = after_prompt(policy, norms)
    assert held_positions(store, row) == [list(range(8)), [6, 7], [6, 7], [6, 7]]
    kept = {**store.ledger.meters[row].prompt, "slots_per_tier": [14]}
    assert complaint(policy, {"kept": kept}) is None


def test_a_budget_of_everything_is_met_whatever_is_skipped():
    """Nothing has to be divided, not even where every layer is skipped."""
    store, row = after_prompt(KeyNorm(budget=1.0, skip_layers=4), [[[1.0] * 8]] * 4)
    assert held_positions(store, row) == [list(range(8))] * 4


def test_skipping_more_than_the_budget_holds_is_refused():
    """Two of four layers in full are already half of the cache."""
    with refused("settings-conflict", "method.skip_layers", "skip_layers=2", "budget=0.5"):
        after_prompt(KeyNorm(budget=0.5, skip_layers=2), [[[1.0] * 8]] * 4)


def test_scores_are_kept_for_decoding_and_billed():
    """With decode_every the norms are stored, new tokens bring theirs, and the largest go when the time comes."""
    store, row = after_prompt(KeyNorm(budget=3, decode_every=2), [[[3.0, 1.0, 4.0, 1.5, 5.0, 0.5]]])
    assert held_scores(store, row)[0] == pytest.approx({1: -1.0, 3: -1.5, 5: -0.5}, abs=1e-5)
    assert store.ledger.itemise(row)["track_bytes"] == 3 * 8
    for position, norm in ((6, 0.7), (7, 9.0)):
        step_one(store, row, [(torch.randn(1, DIM), keys_of_norm([norm]), torch.randn(1, DIM))], 0.25)
        assert held_scores(store, row)[0][position] == pytest.approx(-norm, abs=1e-5)
    assert held_positions(store, row) == [[1, 3, 5, 6, 7]]
    store.begin_step(torch.tensor([row]))
    assert sorted(held_positions(store, row)[0]) == [1, 5, 6, 8]


def test_an_appended_segment_brings_its_norms():
    """Tokens of a later segment are stored with their own norms, as prompt tokens are."""
    store, row = after_prompt(KeyNorm(budget=6, decode_every=100), [[[3.0, 1.0, 4.0]]])
    k = keys_of_norm([2.0, 7.0])[None]
    store.append_chunk(row, 0, torch.randn(1, 2, DIM), k, torch.randn(1, 2, DIM), 0.25)
    assert held_scores(store, row)[0] == pytest.approx({0: -3.0, 1: -1.0, 2: -4.0, 3: -2.0, 4: -7.0}, abs=1e-5)
