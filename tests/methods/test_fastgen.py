"""FastGen's profile against masks over a whole attention matrix."""

import math

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, random_layer

from kvbench.methods import fastgen
from kvbench.methods.fastgen import FastGen
from kvbench.runs.verdict import complaint

HEADS, GROUP, LENGTH, DIM = 4, 2, 40, 8


def prompt():
    """Queries, keys and values of four KV heads: even attention, to the first token, to near ones, and to some."""
    q, k, v = (0.2 * x for x in random_layer(2, HEADS, GROUP, LENGTH, DIM))
    q[2:4, :, 0], k[1, 0, 0] = 9.0, 2.0
    turn = torch.arange(LENGTH) * 0.25
    q[4:6, :, :2] = k[2, :, :2] = torch.stack([turn.cos(), turn.sin()], -1) * 4
    q[6:8, :, 0], k[3, 7:17:3, 0] = 9.0, 2.0
    return q, k, v


def plain(attention, recovery: float, sinks: int, frequent: float, local: float) -> list[int]:
    """What one head keeps, from its attention matrix [N, N]: each set as a mask over queries and keys."""
    near = max(1, int(local * LENGTH))
    for often, nearby in ((False, False), (True, False), (True, True)):
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        mask[:, :sinks] = True
        if nearby:
            for query in range(LENGTH):
                mask[query, max(0, query - near + 1) : query + 1] = True
        if often:
            open_keys = [key for key in range(LENGTH) if not mask[-1, key]]
            total = attention.sum(0)
            open_keys.sort(key=lambda key: (-float(total[key]), key))
            mask[:, open_keys[: math.ceil(frequent * LENGTH)]] = True
        if float((attention * mask).sum(-1).mean()) >= recovery:
            return mask[-1].nonzero()[:, 0].tolist()
    return list(range(LENGTH))


@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize("recovery", [0.3, 0.6, 0.8, 0.9, 0.97])
def test_each_head_keeps_the_first_set_that_suffices(recovery, rows, monkeypatch):
    """The kept tokens of four different heads, whose attention is summed in blocks of queries."""
    monkeypatch.setattr(fastgen, "ROWS", rows)
    q, k, v = prompt()
    policy = FastGen(recovery=recovery, sinks=2, frequent=0.1, local=0.2)
    store, row = filled(policy, [(q, k, v)], scale=0.5, track=("pos",))
    matrix = causal_probabilities(q, k, 0.5).view(HEADS, GROUP, LENGTH, LENGTH).mean(1)
    want = [plain(own, recovery, 2, 0.1, 0.2) for own in matrix]
    assert held_positions(store, row) == want
    lengths = {len(own) for own in want}
    assert lengths >= {2, 6, 14} if recovery == 0.6 else LENGTH in lengths or recovery < 0.97
    report = store.ledger.report(row)[1]
    assert complaint(policy, {"kept": report}) is None
    assert "its sets and all of the answer have" in complaint(policy, {"kept": report | {"prompt_slots_min": 3}})
