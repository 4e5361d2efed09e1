"""Attention over pages against dense attention on what the pages hold."""

import pytest
import torch
from oracles import slow_attention
from page_helpers import DTYPES, Cache, tier_format

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.operands import Ring, TierPages
from kvbench.kernels.reference.attention import rotate
from kvbench.kernels.reference.pages import region


def check(cache: Cache, num_seq: int, heads: int, group_size: int, head_dim: int, rule: str, power: int) -> None:
    """Compares output, log-sum-exp and scores of all tiers with the oracle; 1e-5 is the rounding of fp32 sums."""
    q = torch.randn(num_seq, heads * group_size, head_dim, generator=torch.Generator().manual_seed(9))
    scale = head_dim**-0.5
    out, lse, scores = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, scale, power=power, group=rule)
    assert len(scores) == len(cache.tiers)
    for s in range(num_seq):
        for h in range(heads):
            k, v = cache.dense(s, h)
            probabilities = []
            for g in range(group_size):
                want, want_lse, p = slow_attention.attend_one(q[s, h * group_size + g], k, v, scale)
                assert torch.allclose(out[s, h * group_size + g].double(), want, rtol=0, atol=1e-5)
                assert float(lse[s, h * group_size + g]) == pytest.approx(want_lse, abs=1e-5)
                probabilities.append(p**power)
            want = slow_attention.reduce(torch.stack(probabilities), rule)
            at = 0
            for tier, score in zip(cache.tiers, scores, strict=True):
                held = int(tier.num_k[s, h])
                assert torch.allclose(score[s, h, :held].double(), want[at : at + held], rtol=0, atol=1e-5)
                assert not score[s, h, held:].any()
                at += held


CASES = {  # formats, head dim, query heads per KV head
    "k16": (["16,16"], 64, 3, {}),
    "k8v4-k4v2": (["8,4", "4,2"], 64, 3, {}),
    "three": (["8,8", "4,2", "16,16"], 128, 1, {}),
    "low-bits": (["2,1", "1,1"], 80, 7, {}),
    "splits": (["8,4", "4,2"], 64, 3, {"k_groups": 2, "v_groups": 4}),
    "symmetric": (["4,4"], 64, 3, {"symmetric": True}),
    "fp8": (["8,8"], 64, 1, {"fp8": True}),
    "channel": (["2,2"], 64, 3, {"k_channel_group": 32, "v_groups": 2}),
    "few-channels": (["16,16", "16,16"], 64, 3, {"k_channels": 39}),
    "dim16": (["4,4", "8,2"], 16, 7, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_paged_decode_equals_dense_attention_on_ragged_lists(case: tuple):
    """Lists of one token, of an exactly full page, of many pages in shuffled order, and with an empty tier."""
    names, head_dim, group_size, extra = case
    formats = [tier_format(name, head_dim, **extra) for name in names]
    counts = []
    for t, fmt in enumerate(formats):
        full = fmt.tokens_per_page
        ragged = [[1, full], [2 * full + 3, full - 1], [5, 2 * full]]
        counts.append(ragged if t == 0 else [[0, full], [full + 1, 1], [0, 0]] if t == 1 else [[3, 0], [0, 2], [1, 0]])
    for rule, power in (("max", 1), ("sum", 2), ("mean", 1)):
        check(Cache(formats, counts, head_dim), 3, 2, group_size, head_dim, rule, power)


def test_first_tier_may_be_empty_everywhere():
    """All tokens in the second tier, none in the first."""
    formats = [tier_format("8,4", 64), tier_format("4,2", 64)]
    check(Cache(formats, [[[0], [0]], [[4], [formats[1].tokens_per_page + 1]]], 64), 2, 1, 3, 64, "max", 1)


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_native_tiers_and_queries_of_every_dtype(kind: str):
    """bf16 and fp32 models: pages hold their elements, queries come in their dtype, the sum runs in fp32."""
    bits = "32,32" if kind == "fp32" else "16,16"
    cache = Cache([tier_format(bits, 64, kind)], [[[11, 2]]], 64)
    check(cache, 1, 2, 3, 64, "max", 1)
    q = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(DTYPES[kind])
    out, _, scores = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, 0.125)
    same, _, _ = REFERENCE.paged_decode(q.float(), cache.pages, cache.tiers, None, 0.125)
    assert out.dtype is torch.float32
    assert torch.equal(out, same)
    assert scores == []


@pytest.mark.parametrize("rule", ["sum", "mean", "max"])
def test_scores_of_a_query_head_sum_to_one(rule: str):
    """Over all tiers the mean over the group sums to 1, the sum to the group size, and no maximum exceeds 1."""
    formats = [tier_format("8,4", 64), tier_format("4,2", 64)]
    cache = Cache(formats, [[[9, 30]], [[40, 1]]], 64)
    q = 3 * torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    _, _, scores = REFERENCE.paged_decode(q, cache.pages, cache.tiers, None, 0.125, group=rule)
    total = sum(score.sum(-1) for score in scores)
    if rule == "max":
        assert (total >= 1 - 1e-5).all()
        assert (total <= 3).all()
        assert all((score <= 1 + 1e-6).all() for score in scores)
    else:
        assert torch.allclose(total, torch.full_like(total, 3.0 if rule == "sum" else 1.0), atol=1e-5)


def test_order_of_pages_and_of_tokens_does_not_matter():
    """Renumbering pages changes nothing at all; reordering the tokens of a list permutes its scores."""
    fmt = tier_format("8,4", 64)
    cache = Cache([fmt], [[[2 * fmt.tokens_per_page, 7]]], 64)
    tier, q = cache.tiers[0], torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    out, lse, (score,) = REFERENCE.paged_decode(q, cache.pages, [tier], None, 0.125, group="max")
    order = torch.randperm(len(cache.pages), generator=torch.Generator().manual_seed(2))
    renumbered = TierPages(fmt, order.argsort()[tier.ids], tier.num_k, tier.num_v)
    again = REFERENCE.paged_decode(q, cache.pages[order], [renumbered], None, 0.125, group="max")
    assert torch.equal(again[0], out)
    assert torch.equal(again[2][0], score)
    swapped = TierPages(fmt, tier.ids.flip(-1), tier.num_k, tier.num_v)  # the two full pages of list 0 change places
    out_swapped, lse_swapped, (score_swapped,) = REFERENCE.paged_decode(
        q, cache.pages, [swapped], None, 0.125, group="max"
    )
    assert torch.allclose(out_swapped[:, :3], out[:, :3], atol=1e-6)
    assert torch.allclose(lse_swapped[:, :3], lse[:, :3], atol=1e-6)
    assert torch.allclose(score_swapped[0, 0].roll(fmt.tokens_per_page), score[0, 0], atol=1e-6)


def test_scores_are_added_to_live_slots_only():
    """Adding twice doubles the scores of held slots; bytes of empty slots and of other pages stay as they were."""
    fmt = tier_format("8,4", 64, track=("score", "pos"))
    full = fmt.tokens_per_page
    cache = Cache([fmt], [[[full + 3, 2], [full, 1]]], 64)
    tier = cache.tiers[0]
    region(cache.pages, fmt, "score")[:] = 0.25
    before = cache.pages.clone()
    scores = torch.rand(2, 2, tier.ids.shape[-1] * full, generator=torch.Generator().manual_seed(1))
    REFERENCE.add_scores(cache.pages, tier, scores)
    REFERENCE.add_scores(cache.pages, tier, scores)
    want = torch.full((len(before), full), 0.25)
    for s in range(2):
        for h in range(2):
            for i in range(int(tier.num_k[s, h])):
                want[tier.ids[s, h, i // full], i % full] += 2 * scores[s, h, i]
    assert torch.allclose(region(cache.pages, fmt, "score"), want, atol=1e-6)
    region(cache.pages, fmt, "score")[:] = 0.25
    assert torch.equal(cache.pages, before)


RINGS = [  # ring length, keys in pages, values in pages, tokens; the value ring has one entry more
    (size, num_k, num_v, total)
    for size in (8, 32)
    for total in (1, size - 1, size, size + 1, 2 * size + 3, 4 * size)
    for num_k in {0, total - total % size, max(0, total - size)}
    if num_k % 8 == 0 and total - num_k <= size
    for num_v in {0, max(0, total - size), max(0, total - size - 1), total - total % size}
    if total - num_v <= size + 1
]


@pytest.mark.parametrize("channel", [False, True])
def test_attention_behind_a_residual_ring_equals_attention_in_token_order(channel: bool):
    """Over many states (keys in pages, values in pages, tokens), unequal ones in one batch; `gather_dense` too."""
    extra = {"k_channel_group": 8, "v_groups": 2} if channel else {}
    fmt, head_dim = tier_format("4,4", 64, **extra), 64
    assert len(RINGS) > 30
    for size in (8, 32):
        states = [state for state in RINGS if state[0] == size]
        counts = [[[max(nk, nv), max(nk, nv)] for _, nk, nv, _ in states]]
        cache = Cache([fmt], counts, head_dim)
        make = torch.Generator().manual_seed(3)
        num = len(states)
        ring_k = torch.randn(num, 2, size, head_dim, generator=make).half()
        ring_v = torch.randn(num, 2, size + 1, head_dim, generator=make).half()
        num_k = torch.tensor([[nk, nk] for _, nk, _, _ in states])
        num_v = torch.tensor([[nv, nv] for _, _, nv, _ in states])
        total = torch.tensor([[n, n] for *_, n in states])
        tier = TierPages(fmt, cache.tiers[0].ids, num_k, num_v)
        q = torch.randn(num, 6, head_dim, generator=make)
        ring = Ring(ring_k, ring_v, total)
        out, lse, _ = REFERENCE.paged_decode(q, cache.pages, [tier], ring, 0.125)
        dense_k, dense_v, live = REFERENCE.gather_dense(cache.pages, [tier], ring)
        for s, (_, nk, nv, n) in enumerate(states):
            for h in range(2):
                paged_k, paged_v = cache.slots[0][s][h]
                k = torch.stack([paged_k[i] if i < nk else ring_k[s, h, i % size].float() for i in range(n)])
                v = torch.stack([paged_v[i] if i < nv else ring_v[s, h, i % (size + 1)].float() for i in range(n)])
                assert torch.equal(dense_k[s, h, :n], k)
                assert torch.equal(dense_v[s, h, :n], v)
                assert live[s, h].tolist() == [i < n for i in range(live.shape[-1])]
                for g in range(3):
                    want, want_lse, _ = slow_attention.attend_one(q[s, 3 * h + g], k, v, 0.125)
                    assert torch.allclose(out[s, 3 * h + g].double(), want, rtol=0, atol=1e-5), states[s]
                    assert float(lse[s, 3 * h + g]) == pytest.approx(want_lse, abs=1e-5)


def test_gathered_tiers_hold_every_live_slot():
    """Without a ring, gathering concatenates the tiers, zeroes what is not live and says which entries are."""
    formats = [tier_format("8,4", 64), tier_format("4,2", 64)]
    cache = Cache(formats, [[[3, 20]], [[0, 5]]], 64)
    k, v, live = REFERENCE.gather_dense(cache.pages, cache.tiers, None)
    for h in range(2):
        want_k, want_v = cache.dense(0, h)
        assert torch.equal(k[0, h, live[0, h]], want_k)
        assert torch.equal(v[0, h, live[0, h]], want_v)
        assert not k[0, h, ~live[0, h]].any()
        assert not v[0, h, ~live[0, h]].any()


def test_rotation_of_stored_keys_equals_rotating_them_before():
    """Keys rotated on reading act as keys that were rotated before; channels beyond a partial rotation stay."""
    fmt = tier_format("32,32", 64, "fp32")
    cache = Cache([fmt], [[[6, 6]]], 64)
    angle = torch.rand(
        1, cache.tiers[0].ids.shape[-1] * fmt.tokens_per_page, 20, generator=torch.Generator().manual_seed(1)
    )
    tier = TierPages(fmt, cache.tiers[0].ids, cache.tiers[0].num_k, cache.tiers[0].num_v, rotation=angle)
    q = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    out, _, _ = REFERENCE.paged_decode(q, cache.pages, [tier], None, 0.125)
    dense_k, _, _ = REFERENCE.gather_dense(cache.pages, [tier], None)
    for h in range(2):
        k, v = (x.clone() for x in cache.dense(0, h))
        for i in range(6):
            for c in range(20):  # the rotary pair of channel c is c + 20; channels from 40 on do not turn
                z = torch.complex(k[i, c], k[i, c + 20]) * torch.polar(torch.tensor(1.0), angle[0, i, c])
                k[i, c], k[i, c + 20] = z.real, z.imag
        assert torch.allclose(dense_k[0, h, :6], k, atol=1e-6)
        for g in range(3):
            want, _, _ = slow_attention.attend_one(q[0, 3 * h + g], k, v, 0.125)
            assert torch.allclose(out[0, 3 * h + g].double(), want, rtol=0, atol=1e-5)
    assert torch.allclose(rotate(rotate(q, angle[:, :6]), -angle[:, :6]), q, atol=1e-6)


@pytest.mark.parametrize("history", [0, 5])
def test_chunks_attend_causally_over_history_and_themselves(history: int):
    """Token i of a chunk sees the live history and tokens 0..i of it; without history it is prefill attention."""
    make = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(h, 7, 16, generator=make) for h in (6, 2, 2))
    past_k, past_v = (torch.randn(2, history, 16, generator=make) for _ in range(2))
    live = torch.rand(2, history, generator=make) < 0.6
    out = REFERENCE.chunk_attention(q, k, v, (past_k, past_v, live), 0.25)
    for h in range(6):
        for i in range(7):
            keys = torch.cat([past_k[h // 3][live[h // 3]], k[h // 3, : i + 1]])
            values = torch.cat([past_v[h // 3][live[h // 3]], v[h // 3, : i + 1]])
            want, _, _ = slow_attention.attend_one(q[h, i], keys, values, 0.25)
            assert torch.allclose(out[h, i].double(), want, rtol=0, atol=1e-5)
    if not history:
        assert torch.allclose(REFERENCE.prefill_attention(q, k, v, 0.25), out, atol=1e-5)
