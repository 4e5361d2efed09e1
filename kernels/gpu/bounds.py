"""GPU backend: the bounds of pages: updated as keys are written, and read by a decode step that selects pages.

Each of the three is one launch, whatever the number of lists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.attend import row_number, table_page
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.gpu.parts import ELEMENT, MIN_DOT, elements, launch, power_of_two
from kvbench.kernels.operands import Reduce

_REDUCE: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}
_PAGES = 32  # of a list that one program bounds
KEYS = 16  # of a page that one program takes at a time
_AT_ONCE = 8192  # pages whose bounds a program keeps in registers; of longer lists it reads them again
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["num_columns", "entries", "per_row", "offset"])
def _bound_pages(
    q, pages, table, num_k, rows, bounds, page_bytes, num_columns, entries, heads, per_row, offset, T: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BP: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, ELEM: tl.constexpr, RULE: tl.constexpr, REVERSED: tl.constexpr, TABLED: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """The bounds of one block of a list's pages, the query heads of the group reduced; of no page, any number."""
    pid = tl.program_id(0).to(tl.int64)
    g, d, column = tl.arange(0, GP), tl.arange(0, DP), tl.program_id(1) * BP + tl.arange(0, BP)
    which = pid
    if TABLED:
        which = row_number(rows, pid, heads, NAMED) * per_row + offset + pid % heads
    there = (column < num_columns) & (column.to(tl.int64) * T < tl.load(num_k + which).to(tl.int64))
    page = table_page(table, which, entries, column, there, REVERSED)
    cells = there[:, None] & (d < D)[None, :]
    base = pages + page * page_bytes
    low = tl.load((base + LOW).to(tl.pointer_type(ELEM))[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
    high = tl.load((base + HIGH).to(tl.pointer_type(ELEM))[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
    mask = (g < G)[:, None] & (d < D)[None, :]
    query = tl.load(q + pid * G * D + g[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    bound = tl.dot(tl.maximum(query, 0.0), tl.trans(high), input_precision="ieee")
    bound += tl.dot(tl.minimum(query, 0.0), tl.trans(low), input_precision="ieee")
    if RULE == 2:
        reduced = tl.max(tl.where((g < G)[:, None], bound, float("-inf")), 0)
    else:
        reduced = tl.sum(tl.where((g < G)[:, None], bound, 0.0), 0)
        if RULE == 1:
            reduced = reduced / G
    tl.store(bounds + pid * num_columns + column, reduced, mask=there)


def page_bounds(q: Tensor, pages: Tensor, tier: ListTier, lists: Lists, group: Reduce) -> Tensor:
    """Upper bound of the logits in a page, fp32 [S, H, m], as `reference.attention.page_bounds`.

    Arbitrary past a list's end. Capture-safe.
    """
    num_seq, heads, columns = lists.num_seq, lists.heads, tier.columns
    head_dim, group_size = q.shape[-1], q.shape[1] // heads
    bounds = torch.empty(num_seq, heads, columns, device=q.device)
    low, high = (tier.fmt.regions[name][0] for name in ("k_low", "k_high"))
    launch(
        _bound_pages, (num_seq * heads, -(-columns // _PAGES)), q.contiguous(), pages, tier.table, tier.num_k,
        bounds if lists.rows is None else lists.rows, bounds, pages.shape[1], columns, tier.entries, heads,
        lists.per_row, lists.offset, T=tier.fmt.tokens_per_page, G=group_size, GP=power_of_two(group_size, MIN_DOT),
        D=head_dim, DP=power_of_two(head_dim, MIN_DOT), BP=_PAGES, LOW=low, HIGH=high,
        ELEM=ELEMENT[tier.fmt.slot.dtype], RULE=_REDUCE[group], REVERSED=tier.is_reversed, TABLED=lists.in_table,
        NAMED=lists.rows is not None,
    )  # fmt: skip
    return bounds


@triton.jit
def store_bounds(base, low, high, broken, fresh, D: tl.constexpr, DP: tl.constexpr, LOW: tl.constexpr,
                 HIGH: tl.constexpr, ELEM: tl.constexpr):  # fmt: skip
    """Widens a page's bounds by new keys' smallest and largest values, or makes them these where a page is `fresh`."""
    d = tl.arange(0, DP)
    to_low, to_high = (base + LOW).to(tl.pointer_type(ELEM)) + d, (base + HIGH).to(tl.pointer_type(ELEM)) + d
    older = (d < D) & (fresh == 0)
    old_low = tl.load(to_low, mask=older, other=float("inf")).to(tl.float32)
    old_high = tl.load(to_high, mask=older, other=float("-inf")).to(tl.float32)
    # A bound that is no number stays none, as torch's smallest and largest have it.
    low = tl.where((broken > 0) | (old_low != old_low), float("nan"), tl.minimum(low, old_low))
    high = tl.where((broken > 0) | (old_high != old_high), float("nan"), tl.maximum(high, old_high))
    tl.store(to_low, elements(low, ELEM), mask=d < D)
    tl.store(to_high, elements(high, ELEM), mask=d < D)


@triton.jit
def widen_by_one(k, pages, page, slot, at, flat, page_bytes, D: tl.constexpr, DP: tl.constexpr, LOW: tl.constexpr,
                 HIGH: tl.constexpr, ELEM: tl.constexpr):  # fmt: skip
    """The bounds of the page that `page` has at `flat`, by the key in row `at`."""
    target = tl.load(page + flat).to(tl.int64)
    if target >= 0:
        d = tl.arange(0, DP)
        x = elements(tl.load(k + at * D + d, mask=d < D, other=0.0).to(tl.float32), ELEM).to(tl.float32)
        fresh = tl.zeros([DP], tl.int32) + (tl.load(slot + flat) == 0).to(tl.int32)
        store_bounds(pages + target * page_bytes, x, x, (x != x).to(tl.int32), fresh, D, DP, LOW, HIGH, ELEM)


@triton.jit(do_not_specialize=["count"])
def _widen_pages(
    k, page, slot, order, pages, count, page_bytes, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
    MOST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ELEM: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Updates the bounds of one page from its keys, at most MOST of them, which are consecutive in `page`.

    The program of the first of them does the whole page; after a sort, `order` maps entries to keys.
    """
    at = tl.program_id(0)
    target = tl.load(page + at).to(tl.int64)
    mine = target >= 0
    if SORTED:
        mine = mine & ((at == 0) | (tl.load(page + tl.maximum(at - 1, 0)).to(tl.int64) != target))
    if mine:
        d = tl.arange(0, DP)
        low, high = tl.full([DP], float("inf"), tl.float32), tl.full([DP], float("-inf"), tl.float32)
        broken, fresh = tl.zeros([DP], tl.int32), tl.zeros([DP], tl.int32)
        for first in range(0, MOST, BT):
            i = at + first + tl.arange(0, BT)
            live = (i < count) & (first + tl.arange(0, BT) < MOST)
            live = live & (tl.load(page + i, mask=live, other=-1).to(tl.int64) == target)
            whose = i.to(tl.int64)
            if SORTED:
                whose = tl.load(order + i, mask=live, other=0).to(tl.int64)
            fresh = tl.maximum(fresh, tl.max((live & (tl.load(slot + whose, mask=live, other=1) == 0)).to(tl.int32), 0))
            held = live[:, None] & (d < D)[None, :]
            x = tl.load(k + whose[:, None] * D + d[None, :], mask=held, other=0.0).to(tl.float32)
            x = elements(x, ELEM).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(held, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(held, x, float("-inf")), 0))
            broken = tl.maximum(broken, tl.max((held & (x != x)).to(tl.int32), 0))
        store_bounds(pages + target * page_bytes, low, high, broken, fresh, D, DP, LOW, HIGH, ELEM)


@triton.jit
def _ranks_of(bounds, pid, columns, begin, last, BLOCK: tl.constexpr):
    """Order-preserving int32 [BLOCK] keys of a list's bounds.

    NaN maps to the largest, pages past the last one to the smallest.
    """
    column = begin + tl.arange(0, BLOCK)
    bound = tl.load(bounds + pid * columns + column, mask=column < last, other=0.0)
    bound = tl.where(bound == 0, 0.0, bound)  # the two zeros are equal
    bits = bound.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(bound != bound, 0x7FFFFFFF, rank)
    rank = tl.where(column == last, 0x7F800000, rank)  # the newest page's bound is infinite: it is always read
    return tl.where(column > last, _LOWEST, rank)


@triton.jit
def _count_from(first, bounds, pid, columns, last, least, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Number of ranks of a list that are at least so large; `first` are those of its first block."""
    count = tl.sum((first >= least).to(tl.int32), 0)
    for block in range(1, BLOCKS):
        rank = _ranks_of(bounds, pid, columns, block * BLOCK, last, BLOCK)
        count += tl.sum((rank >= least).to(tl.int32), 0)
    return count


@triton.jit(do_not_specialize=["columns", "width", "entries", "per_row", "offset"])
def _choose_pages(
    bounds, table, num_k, rows, count, ids, held, columns, width, entries, heads, per_row, offset,
    T: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, REVERSED: tl.constexpr, TABLED: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """Pages of one list with the largest bounds, in slot order, and the slots that they hold.

    The threshold is found bit by bit; among pages at the threshold the first ones are read.
    """
    pid = tl.program_id(0).to(tl.int64)
    which = pid
    if TABLED:
        which = row_number(rows, pid, heads, NAMED) * per_row + offset + pid % heads
    slots = tl.load(num_k + which).to(tl.int64)
    pages = (slots + T - 1) // T
    last = pages - 1
    most = tl.minimum(tl.load(count + pid // heads).to(tl.int64), pages)
    least = tl.full([], _LOWEST, tl.int32)
    above = tl.zeros([], tl.int32)
    if pages > most:
        first, step = _ranks_of(bounds, pid, columns, 0, last, BLOCK), least
        for _ in range(32):  # the sign first, whose absence is more; then as of any number
            passing = _count_from(first, bounds, pid, columns, last, least ^ step, BLOCK, BLOCKS)
            least = tl.where(passing >= most, least ^ step, least)
            step = (step >> 1) & 0x7FFFFFFF
        if least < 0x7FFFFFFF:
            above = _count_from(first, bounds, pid, columns, last, least + 1, BLOCK, BLOCKS)
    ties, base = most.to(tl.int32) - above, tl.zeros([], tl.int32)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        rank = _ranks_of(bounds, pid, columns, block * BLOCK, last, BLOCK)
        equal = ((rank == least) & (column <= last)).to(tl.int32)
        number = (rank > least).to(tl.int32) + equal * (tl.cumsum(equal, 0) <= ties).to(tl.int32)
        number = tl.where(column <= last, tl.where(pages <= most, 1, number), 0)
        chosen = number > 0
        target = base + tl.cumsum(number, 0) - 1
        page = table_page(table, which, entries, column, chosen, REVERSED)
        tl.store(ids + pid * width + target, page, mask=chosen & (target < width))
        base += tl.sum(number, 0)
        ties -= tl.sum(equal, 0)
    tl.store(held + pid, slots - (pages - most) * T)


def choose(bounds: Tensor, tier: ListTier, lists: Lists, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The at most `count` pages of each list with the largest bounds: page ids, and the slots that they hold.

    `bounds` is fp32 [S, H, m], `count` int64 [S]; returns int64 [S, H, width] and int64 [S, H]. See
    `Backend.choose_pages`. Capture-safe.
    """
    num_lists, columns = lists.num_seq * lists.heads, bounds.shape[-1]
    ids = torch.empty(lists.num_seq, lists.heads, width, dtype=torch.int64, device=bounds.device)
    held = torch.empty(lists.num_seq, lists.heads, dtype=torch.int64, device=bounds.device)
    block = min(_AT_ONCE, power_of_two(columns))
    launch(
        _choose_pages, (num_lists,), bounds, tier.table, tier.num_k, bounds if lists.rows is None else lists.rows,
        count.contiguous(), ids, held, columns, width, tier.entries, lists.heads, lists.per_row, lists.offset,
        T=tier.fmt.tokens_per_page, BLOCK=block, BLOCKS=-(-columns // block), REVERSED=tier.is_reversed,
        TABLED=lists.in_table, NAMED=lists.rows is not None, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return ids, held
