"""Prompts whose attention is what a test wants, for stores without a model.

Keys are unit vectors, and queries the logarithms of the wanted probabilities.
"""

import torch
from store_helpers import make_store, step_one

HIDDEN = -60.0  # a logit that leaves nothing of a probability in fp32


def query_for(row: list[float] | dict[int, float], head_dim: int = 8) -> torch.Tensor:
    """A query [D] whose softmax over the unit vectors that are there is the given probabilities, in order or by
    position."""
    wanted = row if isinstance(row, dict) else dict(enumerate(row))
    assert abs(sum(wanted.values()) - 1) < 1e-6, f"{row} of the wanted attention does not sum to 1"
    query = torch.full((head_dim,), HIDDEN)
    for key, probability in wanted.items():
        if probability > 0:
            query[key] = torch.tensor(probability, dtype=torch.float64).log().float()
    return query


def read_prompt(store, heads: list[list[list[float]]], num_kv_heads: int = 1):
    """Gives a store a prompt that every query head attends to as its matrix says; returns the row.

    Args:
        heads: Per query head, rows of probabilities: row i over the tokens 0 .. i.
        num_kv_heads: KV heads; all have the same keys.
    """
    head_dim, length, row = store.shape.head_dim, len(heads[0]), store.open_row()
    q = torch.stack([torch.stack([query_for(own, head_dim) for own in matrix]) for matrix in heads])
    k = torch.eye(head_dim)[None, :length].expand(num_kv_heads, -1, -1)
    store.prefill_layer(row, 0, q, k, k, 1.0)
    return row


def attend_as(store, row: int, position: int, heads: list[list[float] | dict[int, float]]) -> None:
    """One decode step of the token at a position, whose key is that unit vector; each query head attends as given."""
    head_dim, kv_heads = store.shape.head_dim, store.shape.num_kv_heads
    key = torch.eye(head_dim)[position].expand(kv_heads, -1)
    step_one(store, row, [(torch.stack([query_for(own, head_dim) for own in heads]), key, key)])


def own_rows(length: int) -> list[list[float]]:
    """Queries that each attend to themselves alone."""
    return [[0.0] * index + [1.0] for index in range(length)]


def store_holding(policy, states, tokens_seen: int):
    """A store of two tiers whose lists hold the given states, as if it had read so many tokens; also the row.

    Args:
        states: Per list, ({position: stored score} high, {position: score} low), in the order of the slots. Keys hold
            the position in every channel and values minus that, so that they can be told.
    """
    store = make_store(policy, num_q_heads=len(states), num_kv_heads=len(states))
    row, pages = store.open_row(), store.pages
    lists = pages.lists_of(torch.tensor([row]))
    for tier in range(2):
        count = torch.tensor([len(state[tier]) for state in states])
        pages.table.reserve(lists, tier, count)
        slot = torch.tensor([slot for state in states for slot in range(len(state[tier]))], dtype=torch.int64)
        pos = torch.tensor([pos for state in states for pos in state[tier]], dtype=torch.int64)
        score = torch.tensor([score for state in states for score in state[tier].values()])
        where = (pages.pool.pages, pages.formats[tier], *pages.table.lookup(lists.repeat_interleave(count), tier, slot))
        label = pos.float()[:, None].expand(-1, 8)
        pages.backend.write_keys(*where, label)
        pages.backend.write_values(*where, -label)
        pages.backend.write_tracked(*where, score, pos)
    store.counters.tokens_seen[row] = store.counters.prompt_tokens[row] = tokens_seen
    return store, row
