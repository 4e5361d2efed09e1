"""The byte ledger: what a row of the store really holds, item by item."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore

ITEMS = (
    "payload_bytes",
    "quant_meta_bytes",
    "track_bytes",
    "slack_bytes",
    "residual_bytes",
    "residual_slack_bytes",
    "table_bytes",
    "free_list_bytes",
)


@dataclass
class RowMeter:
    """Bytes of one row over time.

    Args:
        peak_bytes: Largest resident plus staging bytes so far.
        staging_peak_bytes: Largest amount of uncompressed prompt keys and values held while planning.
        sum_bytes: Sum of resident bytes over decode steps.
        sum_ratio: Sum over decode steps of resident bytes over the fp16 bytes of the same tokens.
        steps: Decode steps.
        read_bytes: Where steps choose what to read: bytes that attention read, the bounds included.
        readable_bytes: Bytes that it would have read of everything.
    """

    peak_bytes: int = 0
    staging_peak_bytes: int = 0
    sum_bytes: float = 0.0
    sum_ratio: float = 0.0
    steps: int = 0
    read_bytes: float = 0.0
    readable_bytes: float = 0.0
    prompt_slots: dict = field(default_factory=dict)


def fixed_row_bytes(store: "CompressedStore") -> tuple[int, int]:
    """Bytes of one row that do not depend on its tokens: (tables and counters, residual rings)."""
    rows = store.table.shape[0]
    table = (
        store.table.allocated_bytes // rows + 2 * store.tokens_seen.element_size() + store.prompt_slots.nbytes // rows
    )
    ring = 0
    if store.residual is not None:
        counters = 3 * store.residual.num_k.element_size() * store.lists_per_row
        ring = store.residual.list_bytes * store.lists_per_row
        table += counters
    return table, ring


def resident_bytes(store: "CompressedStore", rows: Tensor) -> Tensor:
    """Resident bytes of rows, int64 [S]: pages with their free-list entries, tables, counters and rings."""
    lists = store.lists_of(rows)
    pages = torch.zeros(len(rows), dtype=torch.int64, device=lists.device)
    for tier, fmt in enumerate(store.formats):
        held = store.table.num_slots[tier, lists].long()
        pages += (-(-held // fmt.tokens_per_page)).view(len(rows), -1).sum(1)
    table, ring = fixed_row_bytes(store)
    return pages * (store.pool.page_bytes + store.pool.free_list.element_size()) + table + ring


def itemise(store: "CompressedStore", row: int) -> dict[str, int]:
    """The ledger of one row; the items sum to `resident_bytes`.

    Returns:
        `payload_bytes` codes and 16-bit elements in pages; `quant_meta_bytes` scales and zeros; `track_bytes` scores,
        positions and bounds of pages; `slack_bytes` unused bytes of the row's pages; `residual_bytes` tokens in the
        rings; `residual_slack_bytes` empty ring entries; `table_bytes` page tables and counters; `free_list_bytes` one
        free-list entry per page; `resident_bytes` their sum.
    """
    lists = store.lists_of(torch.tensor([row], device=store.tokens_seen.device))
    total = dict.fromkeys(ITEMS, 0)
    num_pages = 0
    for tier, fmt in enumerate(store.formats):
        held = store.table.num_slots[tier, lists].long()
        pages = int((-(-held // fmt.tokens_per_page)).sum())
        num_pages += pages
        keys = values = int(held.sum())
        if store.residual is not None:
            keys, values = int(store.residual.num_k[lists].sum()), int(store.residual.num_v[lists].sum())
        slot = fmt.slot
        total["payload_bytes"] += keys * slot.k_code_bytes + values * slot.v_code_bytes
        total["quant_meta_bytes"] += round(keys * slot.k_meta_bytes + values * slot.v_meta_bytes)
        total["track_bytes"] += int(held.sum()) * slot.track_bytes + pages * fmt.bounds_bytes
    filled = total["payload_bytes"] + total["quant_meta_bytes"] + total["track_bytes"]
    total["slack_bytes"] = num_pages * store.pool.page_bytes - filled
    total["free_list_bytes"] = num_pages * store.pool.free_list.element_size()
    total["table_bytes"], ring = fixed_row_bytes(store)
    if store.residual is not None:
        tokens = int(store.residual.num_tokens[lists].sum())
        in_ring = (tokens - keys) + (tokens - values)
        total["residual_bytes"] = in_ring * store.shape.head_dim * store.residual.k.element_size()
        total["residual_slack_bytes"] = ring - total["residual_bytes"]
    total["resident_bytes"] = sum(total[name] for name in ITEMS)
    return total


def report(store: "CompressedStore", row: int) -> tuple[dict, dict]:
    """The ledger and the kept-token summary of a finished row, as they go into the journal.

    Returns:
        ledger: items, `average_bytes` and `average_ratio` over decode steps, `peak_bytes`, `staging_peak_bytes`,
            `fp16_bytes` of the
        same tokens, `ratio` = resident / fp16, `payload_ratio` = payload / fp16.
        kept: `tokens_seen`, slots per tier summed over lists, `slot_ratio` = slots / (tokens x lists), the prompt's
            slots, and `read_ratio` = bytes read / bytes held over decode steps where steps choose what to read.
    """
    items, meter = itemise(store, row), store.meters[row]
    seen = int(store.tokens_seen[row])
    fp16 = store.shape.fp16_bytes(seen)
    resident = items["resident_bytes"]
    ledger = {
        **items,
        "average_bytes": meter.sum_bytes / meter.steps if meter.steps else float(resident),
        "average_ratio": meter.sum_ratio / meter.steps if meter.steps else resident / fp16,
        "peak_bytes": max(meter.peak_bytes, resident),
        "staging_peak_bytes": meter.staging_peak_bytes,
        "fp16_bytes": fp16,
        "ratio": resident / fp16,
        "payload_ratio": items["payload_bytes"] / fp16,
        "page_bytes": store.pool.page_bytes,
    }
    lists = store.lists_of(torch.tensor([row], device=store.tokens_seen.device))
    counts = store.slots_per_tier(lists)
    kept = {
        "tokens_seen": seen,
        "slots_per_tier": [int(c.sum()) for c in counts],
        "slot_ratio": int(sum(c.sum() for c in counts)) / (seen * store.lists_per_row),
        **meter.prompt_slots,
    }
    if meter.readable_bytes:
        kept["read_ratio"] = meter.read_bytes / meter.readable_bytes
    return ledger, kept
