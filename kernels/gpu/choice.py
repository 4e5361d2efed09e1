"""GPU backend: the pages of each list that a decode step reads, by their bounds; one launch, whatever their number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.attend import row_number, table_page
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.gpu.parts import launch, power_of_two

_AT_ONCE = 8192  # pages whose bounds a program keeps in registers; of longer lists it reads them again
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def _ranks_of(bounds, pid, columns, begin, last, BLOCK: tl.constexpr):
    """Whole numbers in the order of a list's bounds, int32 [BLOCK]: the largest for what is no number, the smallest for
    pages behind the last one."""
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
    """How many ranks of a list are at least so large; `first` are those of its first block."""
    found = tl.sum((first >= least).to(tl.int32), 0)
    for block in range(1, BLOCKS):
        rank = _ranks_of(bounds, pid, columns, block * BLOCK, last, BLOCK)
        found += tl.sum((rank >= least).to(tl.int32), 0)
    return found


@triton.jit
def _choose_pages(
    bounds, table, num_k, rows, count, ids, held, columns, width, entries, heads, per_row, offset,
    T: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, REVERSED: tl.constexpr, TABLED: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """The pages of one list with the largest bounds, in slot order, and the slots that they hold: the smallest bound
    that is read is found bit by bit, and of pages with that one the first are read."""
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
            found = _count_from(first, bounds, pid, columns, last, least ^ step, BLOCK, BLOCKS)
            least = tl.where(found >= most, least ^ step, least)
            step = (step >> 1) & 0x7FFFFFFF
        if least < 0x7FFFFFFF:
            above = _count_from(first, bounds, pid, columns, last, least + 1, BLOCK, BLOCKS)
    ties, place = most.to(tl.int32) - above, tl.zeros([], tl.int32)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        rank = _ranks_of(bounds, pid, columns, block * BLOCK, last, BLOCK)
        equal = ((rank == least) & (column <= last)).to(tl.int32)
        number = (rank > least).to(tl.int32) + equal * (tl.cumsum(equal, 0) <= ties).to(tl.int32)
        number = tl.where(column <= last, tl.where(pages <= most, 1, number), 0)
        chosen = number > 0
        target = place + tl.cumsum(number, 0) - 1
        page = table_page(table, which, entries, column, chosen, REVERSED)
        tl.store(ids + pid * width + target, page, mask=chosen & (target < width))
        place += tl.sum(number, 0)
        ties -= tl.sum(equal, 0)
    tl.store(held + pid, slots - (pages - most) * T)


def choose(bounds: Tensor, tier: ListTier, lists: Lists, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The pages of each list with the largest bounds; see `Backend.choose_pages`. Capture-safe.

    Args:
        bounds: fp32 [S, H, m].
        tier: The lists' pages, m per list at most.
        lists: Which lists they are.
        count: int64 [S] pages to choose per list.
        width: Room for each list's.

    Returns:
        Page ids int64 [S, H, width], and the slots that they hold, int64 [S, H].
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
