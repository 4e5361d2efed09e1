"""The byte ledger against closed formulas and against what the tensors hold."""

from math import ceil

import pytest
import torch
from store_helpers import make_store, read_random, step_random

from kvbench.cache.buffered import Buffered
from kvbench.cache.store import CompressedStore
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from kvbench.policy import Policy

LAYERS, HEADS, GROUP = 2, 3, 2
LISTS = LAYERS * HEADS
MAX_PROMPT, MAX_NEW, ROWS = 320, 64, 2


def store_of(policy: Policy, head_dim: int, dtype: torch.dtype = torch.float32, **options) -> CompressedStore:
    """A store of 2 layers, 3 KV heads, 6 query heads and 2 rows."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": head_dim}
    options["dtype"] = dtype
    return make_store(policy, **shape, rows=ROWS, max_tokens=MAX_PROMPT, new_tokens=MAX_NEW, **options)


def run(store: CompressedStore, length: int, steps: int) -> int:
    """A row with a prompt and some decode steps."""
    make = torch.Generator().manual_seed(0)
    row = read_random(store, length, make)
    for _ in range(steps):
        step_random(store, [row], make)
    return row


def check_total(store: CompressedStore, row: int, items: dict, pages: int, prompt: int) -> None:
    """Slack, tables and free list by other means; the items sum to the resident bytes, and those to the allocation."""
    size = store.pages.pool.page_bytes
    filled = items["payload_bytes"] + items["quant_meta_bytes"] + items["track_bytes"]
    assert items["slack_bytes"] == pages * size - filled >= 0
    assert items["free_list_bytes"] == 4 * pages
    per_page = [fmt.tokens_per_page for fmt in store.pages.formats]
    entries, widest = (ceil((tokens + MAX_NEW) / min(per_page)) + len(per_page) for tokens in (prompt, MAX_PROMPT))
    rings = 3 if isinstance(store.holding, Buffered) else 0  # three int32 counters per list
    assert items["table_bytes"] == LISTS * 4 * (entries + len(per_page) + rings) + 2 * 8
    assert store.ledger.table_slack_bytes == LISTS * 4 * (widest - entries)
    parts = [value for name, value in items.items() if name != "resident_bytes"]
    assert items["resident_bytes"] == sum(parts)
    assert int(store.ledger.resident_bytes(torch.tensor([row]))[0]) == sum(parts)
    other = store.ledger.itemise(1 - row)["resident_bytes"]  # the row that nobody opened: tables and empty rings
    spare = store.pages.pool.num_free * (size + 4) + store.ledger.table_slack_bytes
    assert sum(parts) + other + spare == store.allocated_bytes


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_bytes_are_the_closed_formula(bits: int, head_dim: int):
    """Per token and head d * bits / 8 + 4 d / g a side in pages, 2 d a side in the ring; g = 32, R = 128."""
    store = store_of(Kivi(bits=bits, group=32, residual_tokens=128), head_dim)
    row = run(store, 300, 5)
    keys, values = 305 // 128 * 128, 305 - 128
    items = store.ledger.itemise(row)
    assert items["payload_bytes"] == LISTS * (keys + values) * head_dim * bits / 8
    assert items["quant_meta_bytes"] == LISTS * (keys + values) * 4 * head_dim / 32
    side = head_dim * bits / 8 + 4 * head_dim / 32
    assert {(2, 64): 48, (4, 64): 80, (2, 128): 96, (4, 128): 160}[bits, head_dim] == 2 * side
    assert items["payload_bytes"] + items["quant_meta_bytes"] == LISTS * (keys + values) * side
    assert items["residual_bytes"] == LISTS * ((305 - keys) + (305 - values)) * 2 * head_dim
    ring = LISTS * (128 + 129) * 2 * head_dim
    assert items["residual_slack_bytes"] == ring - items["residual_bytes"]
    assert store.holding.ring.k.nbytes + store.holding.ring.v.nbytes == ROWS * ring
    assert items["track_bytes"] == 0
    pages = LISTS * ceil(max(keys, values) / store.pages.formats[0].tokens_per_page)
    check_total(store, row, items, pages, prompt=300)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("tier", "per_token"),
    [
        ("k8v4", {64: 104, 128: 200}),
        ("k4v2", {64: 56, 128: 104}),
        ("int8", {64: 136, 128: 264}),
        ("int4", {64: 72, 128: 136}),
        ("fp16", {64: 256, 128: 512}),
        ("k2v2", {64: 40, 128: 72}),
    ],
)
@pytest.mark.parametrize("track", [(), ("score", "pos")])
def test_token_tier_bytes_are_the_closed_formula(tier: str, per_token: dict, head_dim: int, track: tuple):
    """Payload d * (kb + vb) / 8 and 4 bytes of metadata per quantised side; 4 bytes per tracked field."""
    store = store_of(Full(tier=tier), head_dim, track=track)
    row = run(store, 157, 4)
    items = store.ledger.itemise(row)
    assert items["payload_bytes"] + items["quant_meta_bytes"] == LISTS * 161 * per_token[head_dim]
    assert items["quant_meta_bytes"] == (0 if tier == "fp16" else LISTS * 161 * 8)
    assert items["track_bytes"] == LISTS * 161 * 4 * len(track)
    assert items["residual_bytes"] == items["residual_slack_bytes"] == 0
    pages = LISTS * ceil(161 / store.pages.formats[0].tokens_per_page)
    check_total(store, row, items, pages, prompt=157)


@pytest.mark.parametrize(
    ("tier", "dtype", "ratio"),
    [
        ("fp16", torch.float32, 1.0),
        ("fp16", torch.bfloat16, 1.0),
        ("native", torch.float16, 1.0),
        ("native", torch.float32, 2.0),
        ("int8", torch.float16, 0.5),
        ("k4v2", torch.float32, 6 / 32),
    ],
)
def test_payload_ratio_of_the_full_cache_is_exactly_one(tier: str, dtype: torch.dtype, ratio: float):
    """Sixteen bits are 100 %; everything else is in proportion to its bits, exactly."""
    store = store_of(Full(tier=tier), 64, dtype)
    found, kept = store.ledger.report(run(store, 41, 3))
    assert found["payload_ratio"] == ratio
    assert found["fp16_bytes"] == 44 * LISTS * 64 * 4
    assert found["ratio"] == found["resident_bytes"] / found["fp16_bytes"] > ratio
    assert kept["slot_ratio"] == 1.0
    assert kept["slots_per_tier"] == [44 * LISTS]
    assert kept["tokens_seen"] == 44


def test_averages_and_peaks_follow_the_steps():
    """The average runs over decode steps, the peak holds the staged prompt, and a fork starts its averages anew."""
    store = store_of(Full(), 64, page_bytes=4096)  # 16 slots a page
    row = run(store, 16, 0)
    meter = store.ledger.meters[row]
    staged = 2 * HEADS * 16 * 64 * 4  # one layer's keys and values in fp32
    assert meter.staging_peak_bytes == staged
    fixed = sum(store.ledger.fixed_row_bytes(16, MAX_NEW))
    page = LISTS * (4096 + 4)
    assert meter.peak_bytes == fixed + page + staged
    assert store.ledger.report(row)[0]["average_bytes"] == fixed + page  # no step yet: what is held
    make, copy = torch.Generator().manual_seed(1), store.fork_row(row)
    for _ in range(17):
        step_random(store, [row], make)
    found, _ = store.ledger.report(row)
    held = [fixed + 2 * page] * 16 + [fixed + 3 * page]
    assert found["average_bytes"] == sum(held) / 17
    tokens = [LISTS * 64 * 4 * n for n in range(17, 34)]
    assert found["average_ratio"] == pytest.approx(sum(h / t for h, t in zip(held, tokens, strict=True)) / 17)
    assert found["peak_bytes"] == max(fixed + page + staged, held[-1])
    assert found["staging_peak_bytes"] == staged
    assert store.ledger.meters[copy].steps == 0
    assert store.ledger.meters[copy].peak_bytes == fixed + page + staged


def test_prompt_summary_counts_slots_of_all_lists():
    """Smallest, largest and total number of slots after the prompt, and the slots that a page holds."""
    store = store_of(Full(tier="k8v4"), 64)
    _, kept = store.ledger.report(run(store, 23, 2))
    assert kept["prompt_tokens"] == kept["prompt_slots_min"] == kept["prompt_slots_max"] == 23
    assert kept["prompt_slots"] == 23 * LISTS
    assert kept["lists"] == LISTS
    assert kept["page_tokens"] == store.pages.formats[0].tokens_per_page


def test_a_later_segment_is_part_of_the_peak():
    """Nothing of it is staged: the peak is what the row holds then, to the byte."""
    store = store_of(Full(), 64, page_bytes=4096)  # 16 slots a page
    row, make = run(store, 16, 0), torch.Generator().manual_seed(1)
    staged = store.ledger.meters[row].staging_peak_bytes
    for layer in range(LAYERS):
        store.append_chunk(row, layer, *(torch.randn(n, 90, 64, generator=make) for n in (6, 3, 3)), 0.1)
    meter = store.ledger.meters[row]
    assert meter.peak_bytes == sum(store.ledger.fixed_row_bytes(16, MAX_NEW)) + 7 * LISTS * (4096 + 4)
    assert meter.staging_peak_bytes == staged == 2 * HEADS * 16 * 64 * 4


def test_what_is_read_between_two_answers_leaves_the_averages_alone():
    """Steps before count though the host hears of them late, and steps between two answers do not, however late."""
    store = store_of(Full(), 32)
    row, late = run(store, 40, 0), store.pages.counts
    late.is_late = True

    def step() -> None:
        def receive(values: list[int]) -> None:
            store.ledger.meters[row].steps += values[0]

        late.post(torch.tensor([1]), lambda: receive)
        late.send()

    step()
    with store.ledger.aside(row):
        step()
    late.collect()
    assert store.ledger.meters[row].steps == 1
