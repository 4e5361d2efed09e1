"""GPU kernels that move page ids between free list and page tables, and slots as lists are compacted.

`table` launches them.
"""

import triton
import triton.language as tl

_START, _END, _FREE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _pages(slots, T: tl.constexpr):
    return (slots + T - 1) // T


@triton.jit
def _pages_needed(
    lists, count, num_slots, row, num, num_lists, max_pages, TIER: tl.constexpr, OTHER: tl.constexpr, T: tl.constexpr,
    T_OTHER: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """Index, slots before, requested slots, pages taken or returned, and refusals of a block of lists."""
    mask = row < num
    which = tl.load(lists + row, mask=mask, other=0).to(tl.int64)
    before = tl.load(num_slots + TIER * num_lists + which, mask=mask, other=0)
    wanted = tl.load(count + row, mask=mask, other=0).to(tl.int32)
    if RELEASE:
        need = tl.where(mask, _pages(before, T) - _pages(wanted, T), 0)
        fault = mask & (wanted > before)
    else:
        need = tl.where(mask, _pages(before + wanted, T) - _pages(before, T), 0)
        used = _pages(before + wanted, T)
        if OTHER >= 0:
            used += _pages(tl.load(num_slots + OTHER * num_lists + which, mask=mask, other=0), T_OTHER)
        fault = mask & (used > max_pages)
    return which, before, wanted, need, fault


@triton.jit
def _exchange(
    table, free_list, num_slots, first, row, mask, which, before, wanted, need, offset, num_lists, max_pages, num_pages,
    TIER: tl.constexpr, T: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """Moves the pages of a block of lists, from place `offset` of the free list on, and sets their counts."""
    if RELEASE:
        after, low = wanted, _pages(wanted, T)
    else:
        after, low = before + wanted, _pages(before, T)
    for j in range(tl.max(need, 0)):
        column = low + j
        if TIER % 2 == 1:
            column = max_pages - 1 - column
        entry = table + which * max_pages + column
        free_entry = free_list + (offset + j) % num_pages
        if RELEASE:
            tl.store(free_entry, tl.load(entry, mask=j < need, other=0), mask=j < need)
        else:
            tl.store(entry, tl.load(free_entry, mask=j < need, other=0), mask=j < need)
    tl.store(num_slots + TIER * num_lists + which, after, mask=mask)
    if not RELEASE:
        tl.store(first + row, before.to(tl.int64), mask=mask)


@triton.jit
def _close(state, status, total, fault, RELEASE: tl.constexpr):
    """Moves the counters on, or notes why the call was refused; the first refusal stays until it is cleared."""
    free = tl.load(state + _FREE)
    noted = tl.load(status)
    if RELEASE:
        if fault > 0:
            tl.store(status, tl.where(noted == 0, 3, noted))
        else:
            tl.store(state + _END, tl.load(state + _END) + total)
            tl.store(state + _FREE, free + total)
    else:
        if fault > 0:
            tl.store(status, tl.where(noted == 0, 2, noted))
        elif total > free:
            tl.store(status, tl.where(noted == 0, 1, noted))
        else:
            tl.store(state + _START, tl.load(state + _START) + total)
            tl.store(state + _FREE, free - total)


@triton.jit(do_not_specialize=["num", "num_lists", "max_pages"])
def _sum_pages_needed(
    lists, count, num_slots, sums, faults, num, num_lists, max_pages, TIER: tl.constexpr, OTHER: tl.constexpr,
    T: tl.constexpr, T_OTHER: tl.constexpr, RELEASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the pages that a block of lists takes or returns, and notes whether one of the lists must not."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, need, fault = _pages_needed(
        lists, count, num_slots, row, num, num_lists, max_pages, TIER, OTHER, T, T_OTHER, RELEASE
    )
    tl.store(sums + tl.program_id(0), tl.sum(need, 0))
    tl.store(faults + tl.program_id(0), tl.max(fault.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num", "num_lists", "max_pages", "num_pages", "blocks"])
def _assign(
    lists, count, num_slots, table, free_list, state, sums, faults, first, num, num_lists, max_pages, num_pages, blocks,
    TIER: tl.constexpr, T: tl.constexpr, RELEASE: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Moves page ids between the free list and the table rows of a block of lists, unless the whole call is refused."""
    pid = tl.program_id(0)
    row = pid * BLOCK + tl.arange(0, BLOCK)
    which, before, wanted, need, _ = _pages_needed(
        lists, count, num_slots, row, num, num_lists, max_pages, TIER, -1, T, T, RELEASE
    )
    b = tl.arange(0, BP)
    partial_sums = tl.load(sums + b, mask=b < blocks, other=0)
    base = tl.sum(tl.where(b < pid, partial_sums, 0).to(tl.int64), 0)
    total = tl.sum(partial_sums.to(tl.int64), 0)
    fault = tl.max(tl.load(faults + b, mask=b < blocks, other=0), 0)
    if RELEASE:
        begin, refused = tl.load(state + _END), fault > 0
    else:
        begin, refused = tl.load(state + _START), (fault > 0) | (total > tl.load(state + _FREE))
    if refused:
        if not RELEASE:
            tl.store(first + row, tl.zeros([BLOCK], tl.int64) - 1, mask=row < num)
    else:
        _exchange(
            table, free_list, num_slots, first, row, row < num, which, before, wanted, need,
            begin + base + tl.cumsum(need, 0) - need, num_lists, max_pages, num_pages, TIER, T, RELEASE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def _commit(state, status, sums, faults, blocks, RELEASE: tl.constexpr, BP: tl.constexpr):
    """The counters, once all blocks are through."""
    b = tl.arange(0, BP)
    total = tl.sum(tl.load(sums + b, mask=b < blocks, other=0).to(tl.int64), 0)
    _close(state, status, total, tl.max(tl.load(faults + b, mask=b < blocks, other=0), 0), RELEASE)


@triton.jit(do_not_specialize=["num", "num_lists", "max_pages", "num_pages"])
def _change_at_once(
    lists, count, num_slots, table, free_list, state, status, first, num, num_lists, max_pages, num_pages,
    TIER: tl.constexpr, T: tl.constexpr, RELEASE: tl.constexpr, OTHER: tl.constexpr, T_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All of it by one program that walks over the lists twice."""
    total = tl.full([], 0, tl.int64)
    fault = tl.full([], 0, tl.int32)
    for begin in range(0, num, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        _, _, _, need, wrong = _pages_needed(
            lists, count, num_slots, row, num, num_lists, max_pages, TIER, OTHER, T, T_OTHER, RELEASE
        )
        total += tl.sum(need.to(tl.int64), 0)
        fault = tl.maximum(fault, tl.max(wrong.to(tl.int32), 0))
    if RELEASE:
        offset, refused = tl.load(state + _END), fault > 0
    else:
        offset, refused = tl.load(state + _START), (fault > 0) | (total > tl.load(state + _FREE))
    tl.debug_barrier()  # every warp has read the counters before one of them changes
    for begin in range(0, num, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        if refused:
            if not RELEASE:
                tl.store(first + row, tl.zeros([BLOCK], tl.int64) - 1, mask=row < num)
        else:
            which, before, wanted, need, _ = _pages_needed(
                lists, count, num_slots, row, num, num_lists, max_pages, TIER, -1, T, T, RELEASE
            )
            _exchange(
                table, free_list, num_slots, first, row, row < num, which, before, wanted, need,
                offset + tl.cumsum(need, 0) - need, num_lists, max_pages, num_pages, TIER, T, RELEASE,
            )  # fmt: skip
            offset += tl.sum(need.to(tl.int64), 0)
    _close(state, status, total, fault, RELEASE)


@triton.jit(do_not_specialize=["num_lists", "width"])
def _pair_moves(
    lists, keep, num_slots, sources, targets, counts, num_lists, width, TIER: tl.constexpr, BLOCK: tl.constexpr
):
    """Pairs the holes of one list, lowest first, with its kept slots from the end; unused entries become -1."""
    pid = tl.program_id(0).to(tl.int64)
    held = tl.minimum(tl.load(num_slots + TIER * num_lists + tl.load(lists + pid)), width)
    count = tl.full([], 0, tl.int32)
    for begin in range(0, width, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        kept = tl.load(keep + pid * width + i, mask=i < held, other=0) != 0
        count += tl.sum(kept.to(tl.int32), 0)
        tl.store(sources + pid * width + i, tl.zeros([BLOCK], tl.int32) - 1, mask=i < width)
        tl.store(targets + pid * width + i, tl.zeros([BLOCK], tl.int32) - 1, mask=i < width)
    tl.store(counts + pid, count.to(tl.int64))
    movers = tl.full([], 0, tl.int32)
    for begin in range(0, width, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        kept = tl.load(keep + pid * width + i, mask=i < held, other=0) != 0
        movers += tl.sum((kept & (i >= count)).to(tl.int32), 0)
    tl.debug_barrier()  # the entries below were cleared by other threads
    holes = tl.full([], 0, tl.int32)
    left = movers
    for begin in range(0, width, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        kept = tl.load(keep + pid * width + i, mask=i < held, other=0) != 0
        hole = ((kept == 0) & (i < count)).to(tl.int32)
        mover = (kept & (i >= count)).to(tl.int32)
        tl.store(targets + pid * width + holes + tl.cumsum(hole, 0) - 1, i, mask=hole > 0)
        tl.store(sources + pid * width + left - tl.cumsum(mover, 0), i, mask=mover > 0)
        holes += tl.sum(hole, 0)
        left -= tl.sum(mover, 0)


@triton.jit(do_not_specialize=["width", "num_bytes", "max_pages"])
def _move_listed(
    pages, lists, table, sources, targets, byte_offsets, width, num_bytes, page_bytes, max_pages, TIER: tl.constexpr,
    T: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Carries out a chunk of one list's moves, until an entry is -1; bytes of a slot as in `byte_map`."""
    pid, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BM
    if tl.load(targets + pid * width + begin) >= 0:
        i = begin + tl.arange(0, BM)
        to = tl.load(targets + pid * width + i, mask=i < width, other=-1)
        source = tl.load(sources + pid * width + i, mask=i < width, other=-1)
        live = (to >= 0) & (source >= 0)
        row = table + tl.load(lists + pid).to(tl.int64) * max_pages
        to, source = tl.maximum(to, 0), tl.maximum(source, 0)
        if TIER % 2 == 1:
            to_column, source_column = max_pages - 1 - to // T, max_pages - 1 - source // T
        else:
            to_column, source_column = to // T, source // T
        to_page = tl.load(row + to_column, mask=live, other=0).to(tl.int64)
        source_page = tl.load(row + source_column, mask=live, other=0).to(tl.int64)
        for start in range(0, num_bytes, BB):
            j = start + tl.arange(0, BB)
            wanted = j < num_bytes
            offset = tl.load(byte_offsets + 2 * j, mask=wanted, other=0)
            step = tl.load(byte_offsets + 2 * j + 1, mask=wanted, other=0)
            mask = live[:, None] & wanted[None, :]
            origin = source_page[:, None] * page_bytes + offset[None, :] + (source % T)[:, None] * step[None, :]
            target = to_page[:, None] * page_bytes + offset[None, :] + (to % T)[:, None] * step[None, :]
            tl.store(pages + target, tl.load(pages + origin, mask=mask, other=0), mask=mask)
