"""ZipCache: which tokens get more bits, of the prompt and as they leave the window."""

import pytest
import torch
from store_helpers import causal_probabilities, filled, held_positions, make_store, random_layer, step_one

from kvbench.methods.zipcache import ZipCache
from kvbench.policy import Extent

HEADS, GROUP, LENGTH, DIM = 2, 2, 30, 8
FLAT = {"tier": "native", "high": "native", "low": "native"}  # exact, so that attention can be followed by hand


def read(policy):
    """A store of one layer that has read a random prompt; also its row and the prompt."""
    prompt = random_layer(0, HEADS, GROUP, LENGTH, DIM)
    return *filled(policy, [prompt], scale=0.5), prompt


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


@pytest.mark.parametrize(("share", "newest", "others"), [(0.1, 3, 3), (0.05, 2, 1), (0.04, 2, 1), (0.02, 1, 0)])
def test_the_newest_probes_are_rounded_up_and_the_random_ones_down(share, newest, others):
    """Of 30 queries, as the original counts them: it takes those from int(30 - share x 30) on, and int(share x 30)
    random ones before. Each attends to its own token alone, so that saliency shows who was asked."""
    lines = torch.eye(LENGTH)
    store = make_store(ZipCache(probes=share, seed=1), head_dim=LENGTH + 2)
    asked, plan = [], store.policy.plan_prefill
    store.policy.plan_prefill = lambda view: asked.append(view.score[0, 0]) or plan(view)
    k = torch.nn.functional.pad(lines, (0, 2))[None]
    store.prefill_layer(store.open_row(), 0, k * 200, k, k, 1.0)
    heard = asked[0] * torch.arange(LENGTH, 0, -1)
    assert heard[-newest:].tolist() == pytest.approx([1.0] * newest)
    assert float(heard[:-newest].sum()) == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize(("window", "salient"), [(5, 0.5), (4, 0.25), (1, 0.6), (7, 1.0), (7, 0.0)])
def test_tokens_go_where_they_belong_when_they_leave_the_window(window, salient):
    """Each step's tiers in a loop over attention: as the original, the last query of every `window` tokens ranks them,
    and the share that it attends to least gets fewer bits; they leave one by one."""
    steps, lower = 18, int((1 - salient) * window)
    store, row, (_, k, _) = read(ZipCache(window=window, salient=salient, **FLAT))
    tiers = [{tier: set(held_positions(store, row, tier)[head]) for tier in (0, 1, 2)} for head in range(HEADS)]
    low = [set[int]() for _ in range(HEADS)]
    for index in range(steps):
        torch.manual_seed(index)
        q, (new_k, new_v), seen = torch.randn(HEADS * GROUP, DIM), torch.randn(2, HEADS, DIM), LENGTH + index
        k = torch.cat([k, new_k[:, None]], 1)
        step_one(store, row, [(q, new_k, new_v)], 0.5)
        for head in range(HEADS):
            leaving = seen - window
            if leaving >= LENGTH:
                tiers[head][0].remove(leaving)
                tiers[head][2 if leaving in low[head] else 1].add(leaving)
            tiers[head][0].add(seen)
            if (index + 1) % window == 0:
                logits = torch.einsum("gd,nd->gn", q.view(HEADS, GROUP, DIM)[head], k[head]).double() * 0.5
                shares = logits.softmax(-1).sum(0)
                low[head].update(sorted(range(seen + 1 - window, seen + 1), key=lambda p: float(shares[p]))[:lower])
        assert [{t: set(held_positions(store, row, t)[head]) for t in (0, 1, 2)} for head in range(HEADS)] == tiers
    counts = [[sum(p >= LENGTH for p in own[tier]) for tier in (1, 2)] for own in tiers]
    whole = (steps - window) // window  # lots that have left altogether: each has its share
    assert all(high >= whole * (window - lower) and low >= whole * lower for high, low in counts)


@pytest.mark.parametrize(("new", "waits"), [(0, 0), (5, 5), (8, 8), (30, 8)])
def test_new_tokens_wait_in_the_window_alone(new, waits):
    """A verdict counts them in the first tier: all that are new, and no more than a window of them."""
    bounds = ZipCache(window=8).bounds(Extent(prompt_tokens=20, tokens_seen=20 + new, lists=2, prompt_slots=40))
    assert (bounds.tiers, bounds.in_tiers) == ((0,), (waits, waits))
