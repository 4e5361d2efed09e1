"""GPU kernels that read the page tables, and search every list's smallest tracked number in its pages.

`table` launches them, one launch whatever the number of lists.
"""

import triton
import triton.language as tl

from kvbench.kernels.gpu.attend import table_page


@triton.jit(do_not_specialize=["count", "entries"])
def _lookup(lists, slot, table, page, inside, count, entries, T: tl.constexpr, REVERSED: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Page and slot within the page of one slot of each list; -1 for slot numbers below 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(slot + i, mask=mask, other=-1).to(tl.int64)
    there = at >= 0
    at = tl.maximum(at, 0)
    which = tl.load(lists + i, mask=mask, other=0).to(tl.int64)
    page_id = table_page(table, which, entries, at // T, there & (at // T < entries), REVERSED)
    tl.store(page + i, tl.where(there, page_id, -1), mask=mask)
    tl.store(inside + i, at % T, mask=mask)


@triton.jit
def _count_tier(num_slots, out, seq, row, num_seq, per_row, num_lists, tier: tl.constexpr, T: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Pages that the lists of a row hold in one tier; notes the slots of the longest."""
    pages = tl.zeros([BLOCK], tl.int64)
    most = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, per_row, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        held = tl.load(num_slots + tier * num_lists + row + i, mask=i < per_row, other=0)
        pages += (held + T - 1) // T
        most = tl.maximum(most, held)
    tl.store(out + (1 + tier) * num_seq + seq, tl.max(most, 0).to(tl.int64))
    return tl.sum(pages, 0)


@triton.jit(do_not_specialize=["num_seq", "per_row", "num_lists"])
def _count_rows(rows, num_slots, out, num_seq, per_row, num_lists, T0: tl.constexpr, T1: tl.constexpr,
                T2: tl.constexpr, T3: tl.constexpr, TIERS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Pages of all lists of a row, and by tier the slots of its longest list."""
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64) * per_row
    pages = _count_tier(num_slots, out, seq, row, num_seq, per_row, num_lists, 0, T0, BLOCK)
    if TIERS > 1:
        pages += _count_tier(num_slots, out, seq, row, num_seq, per_row, num_lists, 1, T1, BLOCK)
    if TIERS > 2:
        pages += _count_tier(num_slots, out, seq, row, num_seq, per_row, num_lists, 2, T2, BLOCK)
    if TIERS > 3:
        pages += _count_tier(num_slots, out, seq, row, num_seq, per_row, num_lists, 3, T3, BLOCK)
    tl.store(out + seq, pages)


@triton.jit
def _tracked(
    pages, table, which, slot, live, now, floor, page_bytes, entries, T: tl.constexpr, BY: tl.constexpr,
    SCORE: tl.constexpr, POS: tl.constexpr, FLOOR: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Value and position of slots of a list; see `_find_extreme`."""
    base = pages + table_page(table, which, entries, slot // T, live, REVERSED) * page_bytes
    pos = tl.zeros_like(slot)
    if POS >= 0:
        pos = tl.load((base + POS).to(tl.pointer_type(tl.int32)) + slot % T, mask=live, other=0)
    if BY == 2:
        value = pos.to(tl.float32)
    else:
        value = tl.load((base + SCORE).to(tl.pointer_type(tl.float32)) + slot % T, mask=live, other=0.0)
        if BY == 0:
            origin = pos.to(tl.int64)
            if FLOOR:
                origin = tl.maximum(origin, floor)
            value = tl.div_rn(value, tl.maximum(now - origin, 1).to(tl.float32))
    return value, pos


@triton.jit(do_not_specialize=["per_row", "entries"])
def _find_extreme(
    pages, table, rows, num_slots, seen, floor, before, exact, lowest, value, slot_of, pos_of, page_bytes, per_row,
    entries, first, T: tl.constexpr, BY: tl.constexpr, SCORE: tl.constexpr, POS: tl.constexpr, FLOOR: tl.constexpr,
    BEFORE: tl.constexpr, EXACT: tl.constexpr, LOWEST: tl.constexpr, HEADS: tl.constexpr, REVERSED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The slot of one list with the smallest value; of equals that with the lowest position, then the lowest slot.

    Values are positions (BY = 2), scores (1), or scores by the queries since `floor` or their token (0); the mean over
    HEADS lists of a layer where that is more than 1. `floor`, `before`, `exact` and `lowest` are numbers per sequence.
    """
    pid = tl.program_id(0).to(tl.int64)
    seq = pid // per_row
    which = tl.load(rows + seq).to(tl.int64) * per_row + pid % per_row
    held = tl.load(num_slots + which)
    now = tl.load(seen + seq).to(tl.int64)
    since = now
    if FLOOR:
        since = tl.load(floor + seq).to(tl.int64)
    best = tl.full([], float("inf"), tl.float32)
    best_pos = tl.full([], 1 << 62, tl.int64)
    best_slot = tl.full([], -1, tl.int64)
    for begin in range(0, held, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        live = slot < held
        its, pos = _tracked(
            pages, table, which, slot, live, now, since, page_bytes, entries, T, BY, SCORE, POS, FLOOR, REVERSED
        )
        if HEADS > 1:
            its = tl.zeros_like(its)
            for head in range(HEADS):
                other = which - pid % HEADS + head
                there = slot < tl.load(num_slots + other)
                more, _ = _tracked(
                    pages, table, other, slot, there, now, since, page_bytes, entries, T, BY, SCORE, POS, FLOOR,
                    REVERSED,
                )  # fmt: skip
                its += more
            its = tl.div_rn(its, tl.zeros_like(its) + HEADS)
        pos = pos.to(tl.int64)
        ok = live & (pos >= first)
        if BEFORE:
            ok = ok & (pos < tl.load(before + seq))
        if EXACT:
            ok = ok & (pos == tl.load(exact + seq))
        if LOWEST:
            ok = ok & (pos >= tl.load(lowest + seq))
        its = tl.where(ok, its, float("inf"))
        low = tl.min(its, 0)
        at = ok & (its == low)
        low_pos = tl.min(tl.where(at, pos, 1 << 62), 0)
        low_slot = tl.min(tl.where(at & (pos == low_pos), slot.to(tl.int64), 1 << 62), 0)
        better = (low_pos < (1 << 62)) & ((low < best) | ((low == best) & (low_pos < best_pos)))
        best = tl.where(better, low, best)
        best_pos = tl.where(better, low_pos, best_pos)
        best_slot = tl.where(better, low_slot, best_slot)
    tl.store(value + pid, best)
    tl.store(slot_of + pid, best_slot)
    tl.store(pos_of + pid, tl.where(best_slot < 0, -1, best_pos))


@triton.jit(do_not_specialize=["entries", "width"])
def _tracked_slots(
    pages, lists, table, num_slots, score, pos, there, held, page_bytes, entries, width, T: tl.constexpr,
    SCORE: tl.constexpr, POS: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score, position and held mask of a block of slots of one list; 0 and -1 for slots it does not hold.

    The first block writes the number of slots.
    """
    pid = tl.program_id(0)
    which = tl.load(lists + pid).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(num_slots + which)
    if tl.program_id(1) == 0:
        tl.store(held + pid, count.to(tl.int64))
    live = slot < tl.minimum(count, width)
    base = pages + table_page(table, which, entries, slot // T, live, REVERSED) * page_bytes
    to = pid.to(tl.int64) * width + slot
    value, where = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], -1, tl.int32)
    if SCORE >= 0:
        value = tl.load((base + SCORE).to(tl.pointer_type(tl.float32)) + slot % T, mask=live, other=0.0)
    if POS >= 0:
        where = tl.load((base + POS).to(tl.pointer_type(tl.int32)) + slot % T, mask=live, other=-1)
    tl.store(score + to, value, mask=slot < width)
    tl.store(pos + to, where.to(tl.int64), mask=slot < width)
    tl.store(there + to, live, mask=slot < width)
