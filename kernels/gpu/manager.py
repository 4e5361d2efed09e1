"""GPU backend: pages of all lists taken, returned, looked up and compacted on the device.

The store uses this through `table` beside this file, which adds what the host knows without asking.

The pool's free list and the page tables of all layers, heads and requests change in one launch where they are few, and
in three whatever their number: block sums of what every list needs, the assignment from an exclusive prefix sum over
them, and the counters. Nothing is read back: a request that cannot be met changes nothing and leaves a code in
`status`, which the host may look at when it likes. All functions but `check`, `stats` and `free_ids` are capture-safe
(`compact` once it was called for its format).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.exchange import _assign, _change_at_once, _commit, _sum_needs
from kvbench.kernels.gpu.lookup import lookup
from kvbench.kernels.gpu.moves import byte_map
from kvbench.kernels.gpu.parts import launch, power_of_two
from kvbench.kernels.pool import PoolExhausted

_BLOCK = 256  # lists per program
_MAX_BLOCKS = 8192
AT_ONCE = 4096  # lists for which one program takes as long as three launches
EXHAUSTED, ROW_FULL, GROWN = 1, 2, 3  # codes in `status`


@triton.jit
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


@triton.jit
def _move_listed(
    pages, lists, table, sources, targets, byte_places, width, num_bytes, page_bytes, max_pages, TIER: tl.constexpr,
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
            offset = tl.load(byte_places + 2 * j, mask=wanted, other=0)
            step = tl.load(byte_places + 2 * j + 1, mask=wanted, other=0)
            mask = live[:, None] & wanted[None, :]
            origin = source_page[:, None] * page_bytes + offset[None, :] + (source % T)[:, None] * step[None, :]
            place = to_page[:, None] * page_bytes + offset[None, :] + (to % T)[:, None] * step[None, :]
            tl.store(pages + place, tl.load(pages + origin, mask=mask, other=0), mask=mask)


class DevicePages:
    """A pool of pages and the tables of all lists, kept and changed on the device.

    The meaning is that of `PagePool` and `PageTable`, page by page: the same ids in the same order. A fixed number of
    pages; nothing grows, because growing would need the host.

    Args:
        page_bytes: Bytes per page.
        num_pages: Pages.
        tokens_per_page: Slots per page of each tier, one to four.
        num_lists: Lists: sequences x layers x KV heads.
        max_pages: Table entries per list, shared by tiers 0 (from the left) and 1 (from the right), and again by tiers
            2 and 3.
        device: Where everything lives.

    Raises:
        ValueError: More lists than one call can take.

    Source: DiffKV mem_mgt_kernels.cu (circular list, prefix-summed offsets, bidirectional rows).
    Differs: an explicit count of free pages, and block sums instead of one thread block that scans everything.
    """

    def __init__(
        self, page_bytes: int, num_pages: int, tokens_per_page: tuple[int, ...], num_lists: int, max_pages: int,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        if num_lists > _BLOCK * _MAX_BLOCKS:
            raise ValueError(
                f"{num_lists} lists are more than the {_BLOCK * _MAX_BLOCKS} that one call takes; use fewer rows"
            )
        self.tokens_per_page, self.num_lists, self.max_pages = tokens_per_page, num_lists, max_pages
        self.pages = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)
        self.free_list = torch.arange(num_pages, dtype=torch.int32, device=device)
        # Next page to hand out, where the next returned page goes, free pages: the first two only rise.
        self.state = torch.tensor([0, num_pages, num_pages], dtype=torch.int64, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.entries = torch.zeros(num_lists, max_pages, dtype=torch.int32, device=device)
        further = num_lists if len(tokens_per_page) > 2 else 0
        self.further = torch.zeros(further, max_pages, dtype=torch.int32, device=device)
        self.num_slots = torch.zeros(len(tokens_per_page), num_lists, dtype=torch.int32, device=device)
        self._sums = torch.zeros(2, -(-num_lists // _BLOCK), dtype=torch.int32, device=device)

    @property
    def num_pages(self) -> int:
        """All pages, free or used."""
        return self.pages.shape[0]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything held on the device, as the tensors hold them."""
        held = (self.pages, self.free_list, self.state, self.status, self.entries, self.further, self.num_slots)
        return sum(x.nbytes for x in (*held, self._sums))

    def reserve(self, lists: Tensor, tier: int, count: Tensor, out: Tensor | None = None) -> Tensor:
        """Appends `count[m]` slots to list `lists[m]`, taking pages as needed; all of them, or none.

        Args:
            lists: int64 [M], distinct.
            tier: Tier index.
            count: int64 or int32 [M], >= 0.
            out: int64 [M] that takes the result, or None.

        Returns:
            First new slot of each list, int64 [M]; all -1 when refused: pages or a table row were too few.
        """
        first = torch.empty(len(lists), dtype=torch.int64, device=lists.device) if out is None else out
        self._change(lists, tier, count, first, release=False)
        return first

    def truncate(self, lists: Tensor, tier: int, count: Tensor) -> None:
        """Drops slots from the end so that list `lists[m]` keeps `count[m]`, and returns the emptied pages.

        Nothing happens when one of them would grow.
        """
        self._change(lists, tier, count, lists, release=True)

    def lookup(self, lists: Tensor, tier: int, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Page id and slot within the page, int64, for slot numbers of the given lists; -1 for slot numbers below 0."""
        return lookup(self._table(tier), self.tokens_per_page[tier], tier % 2 == 1, lists, slot)

    def page_ids(self, lists: Tensor, tier: int, width: int) -> Tensor:
        """The first `width` page ids of each list in slot order, int64 [..., width]; entries past a list's pages are
        some valid id."""
        columns = self._column(tier, torch.arange(width, device=lists.device))
        return self._table(tier)[lists[..., None], columns].long()

    def compact(self, lists: Tensor, tier: int, keep: Tensor, fmt: PageFormat) -> Tensor:
        """Moves the kept slots of every list to its front and returns the emptied pages.

        Survivors from the end fill the lowest holes first, as in `PageTable.plan_compaction`.

        Args:
            lists: int64 [M], distinct.
            tier: Tier index; fmt: its page format.
            keep: bool [M, n] over slot numbers; slots from n on are dropped, slots past a list's end are ignored.

        Returns:
            The new slot counts, int64 [M].

        Raises:
            ValueError: See `checks.movable`.

        Source: KV-Compress kvcompress_eviction_kernels.cu (the same moves), DiffKV (all lists in one launch).
        """
        checks.movable(fmt)
        sources, targets, counts = self.plan_compaction(lists, tier, keep)
        width, places = keep.shape[1], byte_map(fmt, tuple(fmt.regions), self.pages.device)
        moves = min(32, power_of_two(width))
        launch(
            _move_listed, (len(lists), -(-width // moves)), self.pages, lists, self._table(tier), sources, targets,
            places, width, len(places), self.pages.shape[1], self.max_pages, TIER=tier, T=self.tokens_per_page[tier],
            BM=moves, BB=32,
        )  # fmt: skip
        self.truncate(lists, tier, counts)
        return counts

    def plan_compaction(self, lists: Tensor, tier: int, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which slots move so that the kept ones become the first ones; nothing is moved yet.

        Args:
            lists, tier, keep: As in `compact`.

        Returns:
            source and target slot of every move, int32 [M, n], -1 after the last; the new slot counts, int64 [M].
        """
        width, keep = keep.shape[1], keep.contiguous().view(torch.uint8)
        sources, targets = (torch.empty(len(lists), width, dtype=torch.int32, device=lists.device) for _ in range(2))
        counts = torch.empty(len(lists), dtype=torch.int64, device=lists.device)
        launch(
            _pair_moves, (len(lists),), lists, keep, self.num_slots, sources, targets, counts, self.num_lists, width,
            TIER=tier, BLOCK=min(1024, power_of_two(width)),
        )  # fmt: skip
        return sources, targets, counts

    def check(self) -> None:
        """Raises what the device noted since the last check; waits for the device.

        Raises:
            PoolExhausted: A call asked for more pages than were free; it changed nothing.
            ValueError: A list needs more table entries than a row has; the call changed nothing.
        """
        code = int(self.status)
        self.status.zero_()
        if code == EXHAUSTED:
            raise PoolExhausted(
                f"a step needed more pages of {self.pages.shape[1]} B than were free of {self.num_pages}; raise "
                "store.budget_bytes, lower batch_size, or choose a smaller method budget"
            )
        if code == ROW_FULL:
            raise ValueError(
                f"a list needs more than max_pages={self.max_pages} page-table entries; the sequence is longer than "
                "the store was sized for"
            )
        if code == GROWN:
            raise AssertionError("truncate would have grown a list")

    def stats(self) -> dict[str, int]:
        """Pages in all, free and used; waits for the device."""
        free = int(self.state[2])
        return {"num_pages": self.num_pages, "num_free": free, "num_used": self.num_pages - free}

    def free_ids(self) -> Tensor:
        """The free pages in the order they will be handed out; int64. For checks; waits for the device."""
        start, _, free = self.state.tolist()
        where = (start + torch.arange(free, device=self.free_list.device)) % max(1, self.num_pages)
        return self.free_list[where].long()

    def _change(self, lists: Tensor, tier: int, count: Tensor, first: Tensor, *, release: bool) -> None:
        """The launches of taking or returning pages."""
        num, blocks = len(lists), -(-len(lists) // _BLOCK)
        lists, count = lists.contiguous(), count.contiguous()
        other = tier ^ 1 if tier ^ 1 < len(self.tokens_per_page) else -1
        slots, padded = self.tokens_per_page[tier], power_of_two(blocks)
        size = {"TIER": tier, "T": slots, "RELEASE": release}
        beside = {"OTHER": other, "T_OTHER": self.tokens_per_page[max(other, 0)]}
        if not num:
            return
        if num <= AT_ONCE:
            launch(
                _change_at_once, (1,), lists, count, self.num_slots, self._table(tier), self.free_list, self.state,
                self.status, first, num, self.num_lists, self.max_pages, self.num_pages, **size, **beside,
                BLOCK=min(1024, power_of_two(num)),
            )  # fmt: skip
            return
        sums, faults = self._sums
        launch(
            _sum_needs, (blocks,), lists, count, self.num_slots, sums, faults, num, self.num_lists, self.max_pages,
            **size, **beside, BLOCK=_BLOCK,
        )  # fmt: skip
        launch(
            _assign, (blocks,), lists, count, self.num_slots, self._table(tier), self.free_list, self.state, sums,
            faults, first, num, self.num_lists, self.max_pages, self.num_pages, blocks, **size, BLOCK=_BLOCK,
            BP=padded,
        )  # fmt: skip
        launch(_commit, (1,), self.state, self.status, sums, faults, blocks, RELEASE=release, BP=padded)

    def _table(self, tier: int) -> Tensor:
        return self.further if tier >= 2 else self.entries

    def _column(self, tier: int, index: Tensor) -> Tensor:
        return self.max_pages - 1 - index if tier % 2 else index
