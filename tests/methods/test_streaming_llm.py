"""StreamingLLM: what stays, where it lies, and the rotary positions it is seen at."""

from functools import partial

import pytest
import store_helpers
import torch
from refusals import refused
from store_helpers import filled, held_positions, make_store, plain_attention, random_layer, step_at

from kvbench.methods.streaming_llm import StreamingLLM

DIM = 16
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM)
rotated = partial(store_helpers.rotated, inv_freq=INV_FREQ)


def filled_store(policy, num_tokens, raw_q, raw_k, v):
    """A store that has read a prompt of `num_tokens`, keys rotated to their true positions as a model does."""
    return filled(
        policy, [(rotated(raw_q, 0), rotated(raw_k, 0), v)], num_tokens, 0.25, inv_freq=INV_FREQ, track=("pos",)
    )


def inputs(num_tokens, seed=0):
    """Queries of four heads, keys and values of two, before any rotation."""
    return random_layer(seed, 2, 2, num_tokens, DIM)


def step(store, row, position, raw_q, raw_k, v):
    """Feeds the token at `position`; returns the attention output [Hq, D]."""
    return step_at(store, row, [(rotated(raw_q, 0), rotated(raw_k, 0), v)], position, 0.25)[0]


@pytest.mark.parametrize(
    ("num_tokens", "after_prompt", "after_step"),
    [
        (12, [0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 2, 3, 9, 10, 11, 12]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7, 8]),
        (7, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [0, 1, 2], [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("position_mode", ["absolute", "cache_relative"])
def test_sinks_and_the_last_tokens_stay(num_tokens, after_prompt, after_step, position_mode):
    """Four sinks and four recent tokens: the worked cases, after the prompt and after one more token."""
    raw_q, raw_k, v = inputs(20)
    policy = StreamingLLM(sinks=4, budget=8, position_mode=position_mode)
    store, row = filled_store(policy, num_tokens, raw_q, raw_k, v)
    assert held_positions(store, row) == [after_prompt] * 2
    step(store, row, num_tokens, raw_q, raw_k, v)
    assert [sorted(held) for held in held_positions(store, row)] == [after_step] * 2


def test_the_new_token_takes_the_slot_of_the_oldest_recent_one():
    """Nothing moves in memory: token 12 lies where token 8 lay, and the pages do not grow."""
    raw_q, raw_k, v = inputs(20)
    store, row = filled_store(StreamingLLM(sinks=4, budget=8), 12, raw_q, raw_k, v)
    pages = store.pages.pool.num_used
    step(store, row, 12, raw_q, raw_k, v)
    assert held_positions(store, row)[0] == [0, 1, 2, 3, 12, 9, 10, 11]
    for position in range(13, 18):
        step(store, row, position, raw_q, raw_k, v)
    assert held_positions(store, row)[0] == [0, 1, 2, 3, 16, 17, 14, 15]
    assert store.pages.pool.num_used == pages


@pytest.mark.parametrize(("num_tokens", "sinks", "budget"), [(12, 4, 8), (3, 4, 9), (1, 1, 4), (30, 0, 5), (30, 5, 40)])
def test_cache_relative_attention_sees_indices_in_the_cache(num_tokens, sinks, budget):
    """Every step equals attention on keys rotated to 0, 1, 2, ... by age, with the query at the last of these."""
    raw_q, raw_k, v = inputs(num_tokens + 20, seed=num_tokens)
    store, row = filled_store(StreamingLLM(sinks=sinks, budget=budget, tier="native"), num_tokens, raw_q, raw_k, v)
    held = list(range(num_tokens))
    held = held if num_tokens <= budget else held[:sinks] + held[num_tokens - budget + sinks :]
    for position in range(num_tokens, num_tokens + 20):
        held.append(position)
        if len(held) > budget:
            del held[sinks]
        out = step(store, row, position, raw_q, raw_k, v)
        assert [sorted(x) for x in held_positions(store, row)] == [held] * 2
        index = list(range(len(held)))
        query = rotated(raw_q[:, position : position + 1], index[-1])[:, 0]
        want = plain_attention(query, rotated(raw_k[:, held], index), v[:, held], 0.25)
        assert (out - want).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("num_tokens", "sinks", "share"), [(12, 4, 50), (3, 4, 50), (1, 1, 30), (30, 0, 20), (9, 2, 90)]
)
def test_a_window_that_grows_has_positions_in_the_cache(num_tokens, sinks, share):
    """With a share of all tokens seen a new token takes the oldest recent one's slot, or a new one where the share has
    grown by a token; indices are by age, wherever the tokens lie."""
    raw_q, raw_k, v = inputs(num_tokens + 25, seed=num_tokens)
    policy = StreamingLLM(sinks=sinks, budget=f"{share}%seen", tier="native")
    store, row = filled_store(policy, num_tokens, raw_q, raw_k, v)
    held = list(range(num_tokens))
    room = max(sinks + 1, share * num_tokens // 100)
    held = held if num_tokens <= room else held[:sinks] + held[num_tokens - room + sinks :]
    assert held_positions(store, row) == [held] * 2
    for position in range(num_tokens, num_tokens + 25):
        held.append(position)
        if len(held) > max(sinks + 1, share * (position + 1) // 100):
            del held[sinks]
        out = step(store, row, position, raw_q, raw_k, v)
        assert [sorted(x) for x in held_positions(store, row)] == [held] * 2
        index = list(range(len(held)))
        query = rotated(raw_q[:, position : position + 1], index[-1])[:, 0]
        want = plain_attention(query, rotated(raw_k[:, held], index), v[:, held], 0.25)
        assert (out - want).abs().max() < 2e-5


def test_absolute_attention_sees_true_positions():
    """With position_mode=absolute the kept keys keep the positions they were read at."""
    raw_q, raw_k, v = inputs(20)
    policy = StreamingLLM(sinks=4, budget=8, tier="native", position_mode="absolute")
    store, row = filled_store(policy, 12, raw_q, raw_k, v)
    out, held = step(store, row, 12, raw_q, raw_k, v), [0, 1, 2, 3, 9, 10, 11, 12]
    want = plain_attention(rotated(raw_q, 0)[:, 12], rotated(raw_k[:, held], held), v[:, held], 0.25)
    assert (out - want).abs().max() < 1e-5


def test_rows_of_different_age_share_a_step():
    """A row that overwrites and a row that still grows are decoded together as they are apart."""
    raw_q, raw_k, v = inputs(40)
    tensors, lengths, outs = (rotated(raw_q, 0), rotated(raw_k, 0), v), [25, 4], []
    for groups in ([[0, 1]], [[0], [1]]):
        store, first = filled(StreamingLLM(sinks=2, budget=10), [tensors], 25, 0.25, rows=2, inv_freq=INV_FREQ)
        rows = [first, store.open_row()]
        store.prefill_layer(rows[1], 0, *(x[:, :4] for x in tensors), 0.25)
        outs.append([])
        for number in range(12):
            for group in groups:
                at = torch.tensor([lengths[i] + number for i in group])
                store.begin_step(torch.tensor([rows[i] for i in group]))
                outs[-1].append(store.attend(0, *(x[:, at].transpose(0, 1) for x in tensors), 0.25))
                store.end_step()
    assert torch.allclose(*map(torch.cat, outs), atol=1e-6)


def test_keys_that_cannot_be_rotated_are_refused():
    """Without plain rotary frequencies the method says what to set instead."""
    with refused("unsupported", None, "method.position_mode=absolute"):
        make_store(StreamingLLM(), inv_freq=None)
