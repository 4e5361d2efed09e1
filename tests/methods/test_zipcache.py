"""ZipCache: which tokens get more bits, of the prompt and as they leave the window."""

import pytest
import torch
from store_helpers import causal_probabilities, held_positions, make_store, step_one

from kvbench.methods.zipcache import ZipCache

HEADS, GROUP, LENGTH, DIM = 2, 2, 30, 8
FLAT = {"tier": "native", "high": "native", "low": "native"}  # exact, so that attention can be followed by hand


def read(policy, seed: int = 0):
    """A store of one layer that has read a random prompt; also its row and the prompt."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, LENGTH, DIM, generator=make) for n in (HEADS * GROUP, HEADS, HEADS))
    store = make_store(policy, num_q_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM)
    row = store.open_row()
    store.prefill_layer(row, 0, q, k, v, 0.5)
    return store, row, (q, k, v)


@pytest.mark.parametrize("salient", [0.0, 0.3, 0.6, 1.0])
def test_the_prompt_s_salient_tokens_get_more_bits(salient):
    """With every query a probe, saliency is the mean attention over the queries that can see a token."""
    store, row, (q, k, _) = read(ZipCache(salient=salient, probes=1.0))
    matrix = causal_probabilities(q, k, 0.5).view(HEADS, GROUP, LENGTH, LENGTH).sum(1)
    lower = int((1 - salient) * LENGTH + 1e-9)
    for head in range(HEADS):
        mean = [float(matrix[head, p:, p].mean()) for p in range(LENGTH)]
        order = sorted(range(LENGTH), key=lambda p: (mean[p], -p))
        assert [sorted(held_positions(store, row, tier)[head]) for tier in (0, 1, 2)] == [
            [],
            sorted(order[lower:]),
            sorted(order[:lower]),
        ]


def test_probes_are_the_newest_and_random_queries():
    """A tenth of the newest and as many others: the newest always count, the others by the seed."""
    one, again, other = (held_positions(*read(ZipCache(probes=0.1, seed=seed))[:2], tier=1) for seed in (0, 0, 1))
    assert one == again != other
    q, k, _ = read(ZipCache())[2]
    newest = causal_probabilities(q, k, 0.5)[:, -3:].reshape(HEADS, -1, LENGTH).sum(1)
    seen = torch.arange(LENGTH, 0, -1)
    plain = [sorted((own / seen).topk(18).indices.tolist()) for own in newest]
    assert plain != one  # random ones had a say


def test_tokens_go_where_they_belong_when_they_leave_the_window():
    """Each step's tiers in a loop over attention: the leaving token is salient when few in the window got more."""
    window, salient, steps = 4, 0.5, 12
    store, row, (_, k, _) = read(ZipCache(window=window, salient=salient, **FLAT))
    received = [dict[int, float]() for _ in range(HEADS)]
    tiers = [{tier: set(held_positions(store, row, tier)[head]) for tier in (0, 1, 2)} for head in range(HEADS)]
    for index in range(steps):
        torch.manual_seed(index)
        q, (new_k, new_v), seen = torch.randn(HEADS * GROUP, DIM), torch.randn(2, HEADS, DIM), LENGTH + index
        k = torch.cat([k, new_k[:, None]], 1)
        step_one(store, row, [(q, new_k, new_v)], 0.5)
        for head in range(HEADS):
            leaving, mean = seen - window, {p: received[head][p] / (seen - p) for p in tiers[head][0]}
            if leaving in mean:
                above = sum(value > mean[leaving] for value in mean.values())
                tiers[head][0].remove(leaving)
                tiers[head][1 if above < salient * window else 2].add(leaving)
            tiers[head][0].add(seen)
            received[head][seen] = 0.0
            logits = torch.einsum("gd,nd->gn", q.view(HEADS, GROUP, DIM)[head], k[head]).double() * 0.5
            shares = logits.softmax(-1).mean(0)
            for p in tiers[head][0]:
                received[head][p] += float(shares[p])
        assert [{t: set(held_positions(store, row, t)[head]) for t in (0, 1, 2)} for head in range(HEADS)] == tiers
    gone = [{p for p in own[tier] if p >= LENGTH} for own in tiers for tier in (1, 2)]
    assert all(gone)
