"""The compressed store: rows, equal roads to the same bytes, and what it refuses."""

from dataclasses import dataclass

import pytest
import torch
from store_helpers import held_positions, make_store, plain_attention, step_at

from kvbench.cache.store import CompressedStore
from kvbench.methods.kivi import Kivi
from kvbench.methods.vatp import VATP
from kvbench.policy import Compaction, Policy, Tier

LAYERS, HEADS, GROUP = 2, 2, 3


@dataclass(kw_only=True)
class Keep(Policy):
    """Keeps every token in one tier."""

    tier: Tier = Tier()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """As given."""
        return (self.tier,)


def store_of(policy: Policy, head_dim: int = 64, rows: int = 4, dtype: torch.dtype = torch.float32) -> CompressedStore:
    """A store of 2 layers, 2 KV heads and 6 query heads that keeps positions."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": head_dim}
    return make_store(policy, **shape, rows=rows, dtype=dtype, max_tokens=64, new_tokens=64, track=("pos",))


def tokens(head_dim: int, length: int, seed: int = 0) -> list[tuple]:
    """q, k, v of every layer: [heads, length, D]."""
    make = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(n, length, head_dim, generator=make) for n in (HEADS * GROUP, HEADS, HEADS))
        for _ in range(LAYERS)
    ]


def prefill(store: CompressedStore, layers: list[tuple], length: int) -> int:
    """A row with the first `length` tokens."""
    row = store.open_row()
    for layer, qkv in enumerate(layers):
        store.prefill_layer(row, layer, *(x[:, :length] for x in qkv), 0.2)
    return row


def step(store: CompressedStore, rows: list[int], layers: list[list[tuple]], at: int) -> list[torch.Tensor]:
    """One decode step with token `at` of each row's tokens; the outputs of all layers."""
    store.begin_step(torch.tensor(rows))
    out = [
        store.attend(layer, *(torch.stack([own[layer][part][:, at] for own in layers]) for part in range(3)), 0.2)
        for layer in range(LAYERS)
    ]
    store.end_step()
    return out


def slot_bytes(store: CompressedStore, row: int) -> list[list[int]]:
    """The bytes of every live slot of a row, region by region, in slot order."""
    fmt, lists = store.pages.formats[0], store.pages.lists_of(torch.tensor([row]))
    found = []
    for number in lists.tolist():
        count = int(store.pages.table.num_slots[0, number])
        page, slot = store.pages.table.lookup(torch.full((count,), number), 0, torch.arange(count))
        for name, (_, length) in fmt.regions.items():
            if length:
                view = store.pages.backend.region(store.pages.pool.pages, fmt, name)
                part = view[page, slot] if name in ("v_codes", "pos", "score") else view[page, :, slot]
                found.append(part.contiguous().view(torch.uint8).flatten().tolist())
    return found


TIERS = {
    "fp16": (Tier(), 64),
    "native": (Tier(native=True), 80),
    "k8v4": (Tier(k_bits=8, v_bits=4), 128),
    "k4v2-splits": (Tier(k_bits=4, v_bits=2, k_splits=2, v_splits=4), 64),
    "k1v1-odd": (Tier(k_bits=1, v_bits=1), 80),
    "symmetric": (Tier(k_bits=4, v_bits=4, symmetric=True), 16),
    "fp8": (Tier(k_bits=8, v_bits=8, fp8=True), 64),
}


@pytest.mark.parametrize("case", TIERS.values(), ids=TIERS.keys())
def test_appending_one_by_one_equals_writing_at_once(case: tuple):
    """A prompt of 37, one of 30 and 7 steps, and one of 30, a segment of 4 and 3 steps leave the same bytes."""
    tier, head_dim = case
    store, layers = store_of(Keep(tier=tier), head_dim), tokens(head_dim, 37)
    whole, stepped, chunked = prefill(store, layers, 37), prefill(store, layers, 30), prefill(store, layers, 30)
    for at in range(30, 37):
        step(store, [stepped], [layers], at)
    for layer, qkv in enumerate(layers):
        store.append_chunk(chunked, layer, *(x[:, 30:34] for x in qkv), 0.2)
    for at in range(34, 37):
        step(store, [chunked], [layers], at)
    assert slot_bytes(store, stepped) == slot_bytes(store, whole)
    assert slot_bytes(store, chunked) == slot_bytes(store, whole)
    assert store.counters.tokens_seen.tolist()[:3] == [37, 37, 37]
    assert store.counters.prompt_tokens.tolist()[:3] == [37, 30, 30]


def test_a_row_knows_its_instruction_where_the_method_asks():
    """The number that a row was opened with, in prompts and steps, and of the last who opened it."""

    @dataclass(kw_only=True)
    class Asking(Keep):
        """Wants to know."""

        needs_instruction = True

    store = store_of(Asking(), rows=1)
    for number in (3, 5):
        assert store.open_row(instruction_tokens=number) == 0
        assert store.view(torch.tensor([0])).instruction_tokens.tolist() == [number]
        store.close_row(0)


def test_query_heads_weigh_tokens_by_their_own_copy_of_the_values():
    """Of each query head, by its attention alone, what VATP keeps in loops."""

    class Apart(VATP):
        granularity = "q_head"

    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 20, 16) for n in (HEADS * GROUP, HEADS, HEADS))
    store = store_of(Apart(budget=6, recent_share=0.0, sinks=0, window=0), head_dim=16)
    row = store.open_row()
    for layer in range(LAYERS):
        store.prefill_layer(row, layer, q, k, v, 0.25)
    kept = held_positions(store, row)
    for head in range(HEADS * GROUP):
        logits = q[head] @ k[head // GROUP].T * 0.25
        attention = logits.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1).sum(0)
        worth = attention * v[head // GROUP].abs().sum(-1)
        assert kept[head] == sorted(worth.topk(6).indices.tolist())


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_step_of_query_heads_reads_the_copy_of_its_head(group):
    """Keys and values of a KV head, kept once per query head, are those of plain attention."""

    class Apart(Keep):
        granularity = "q_head"

    torch.manual_seed(group)
    heads = {"num_q_heads": HEADS * group, "num_kv_heads": HEADS, "head_dim": 16}
    store = make_store(Apart(), **heads, max_tokens=16, new_tokens=8)
    q, k, v = (torch.randn(n, 9, 16) for n in (HEADS * group, HEADS, HEADS))
    row = store.open_row()
    store.prefill_layer(row, 0, q[:, :8], k[:, :8], v[:, :8], 0.25)
    (out,) = step_at(store, row, [(q, k, v)], 8, 0.25)
    torch.testing.assert_close(out, plain_attention(q[:, 8], k, v, 0.25), rtol=0, atol=2e-3)  # kept in 16 bits


def test_rows_have_pages_for_a_step_that_writes_several():
    """A full buffer leaves at once, as several pages of every list; a pool that can't grow has them or not."""
    store = make_store(
        Kivi(bits=2, residual_tokens=128, group=32), num_layers=2, num_kv_heads=3, num_q_heads=3, head_dim=32,
        rows=4, page_bytes=768, budget_bytes=768 * 50,
    )  # fmt: skip
    most, free = store.holding.most_new_pages, store.pages.pool.surely_free
    assert most > 1 and 6 * most < free < 24 * most
    assert [store.has_pages_for(rows) for rows in range(1, 5)] == [free >= rows * 6 * most for rows in range(1, 5)]


def test_cache_relative_positions_need_a_plain_rotary_embedding():
    """Without inverse frequencies the store says which setting helps."""

    class Relative(Keep):
        position_mode = "cache_relative"

    with pytest.raises(
        ValueError,
        match="Relative stores keys without their rotary position and rotates them .*, but this model's rotary",
    ):
        store_of(Relative())


def test_bulk_eviction_must_be_defined_where_it_is_announced():
    """A policy with `compaction` but no `plan_compact` says so at the first compaction."""

    class Silent(Keep):
        compaction = Compaction()

    store, layers = store_of(Silent()), tokens(64, 8)
    row = prefill(store, layers, 5)
    step(store, [row], [layers], 5)
    with pytest.raises(NotImplementedError, match="Silent sets compaction but does not define plan_compact"):
        step(store, [row], [layers], 6)
