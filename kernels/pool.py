"""The page pool: one flat array of pages and a circular list of the free ones.

A page may have several holders. Before a page is written to, it is made sure that it has one (`PageTable.unshare`);
holders are counted only while there is a page with more than one.
"""

import torch
from torch import Tensor

from kvbench.kernels.memory import empty, is_out_of_memory

GROWTH_FACTOR = 8  # times the pages that a growing pool needs, which it reserves from the operating system at once


class PoolExhausted(MemoryError):
    """More pages were requested than are free in the pool; nothing was changed."""


class PagePool:
    """Fixed-size pages, handed out and taken back for many lists at once.

    The free list is a circular array of page ids between two counters that only rise, taken modulo its length. The
    number of free pages is kept explicitly, because equal counters are ambiguous between full and empty. `others`
    counts the holders of every page beyond the first, int32 [num_pages]; it is None, and costs nothing, while no page
    is shared. `taken` counts pages that calls which were not waited for have taken at most; on a device alone.

    Args:
        page_bytes: Bytes per page.
        num_pages: Pages at the start.
        device: Device of the pages.
        growable: Grow in chunks when exhausted; otherwise `num_pages` is the limit.

    Source: DiffKV mem_mgt_kernels.cu (circular list, prefix-sum offsets).
    Differs: explicit free count; the released code's two counters read "all free" when nothing is.
    """

    def __init__(
        self, page_bytes: int, num_pages: int, device: torch.device | str = "cpu", *, growable: bool = True
    ) -> None:
        self.page_bytes = page_bytes
        self.growable = growable
        self.pages = self._room = self._make_pages(num_pages, device)
        self.free_list = torch.arange(num_pages, dtype=torch.int32, device=device)
        self.start = 0  # next free page to hand out
        self.end = num_pages  # where the next returned page goes
        self.num_free = num_pages
        self.others: Tensor | None = None
        self.taken = 0
        self._before: tuple[int, int, Tensor | None] = (self.end, self.num_free, None)

    @property
    def num_pages(self) -> int:
        """All pages, free or used."""
        return self.pages.shape[0]

    @property
    def num_used(self) -> int:
        """Pages handed out."""
        return self.num_pages - self.num_free

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the page array, the free list and the holders' counts, as the tensors hold them."""
        return self.pages.nbytes + self.free_list.nbytes + (0 if self.others is None else self.others.nbytes)

    def allocate(self, need: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `need[n]` pages for every list n in one go.

        Args:
            need: int64 [N], >= 0.

        Returns:
            page ids int64 [sum(need)], grouped by list in order; and the exclusive prefix sum of `need`, int64 [N].

        Raises:
            PoolExhausted: Not enough free pages and the pool may not grow; the state is unchanged.
        """
        offsets = need.cumsum(0) - need
        total = int(need.sum())
        if total > self.num_free:
            if not self.growable:
                raise self.exhausted(total, self.num_free)
            self._grow(total - self.num_free)
        ids = torch.cat([self.free_list[part] for part in self._parts(self.start, total)]).long()
        self.start += total
        self.num_free -= total
        return ids, offsets

    def exhausted(self, needed: int, free: int) -> PoolExhausted:
        """The error where fewer pages are free than needed."""
        return PoolExhausted(
            f"{needed} pages of {self.page_bytes} B are needed but {free} of {self.num_pages} are free; raise "
            "store.budget_bytes, lower batch_size, or choose a smaller method budget"
        )

    def undo_allocate(self, count: int) -> None:
        """Undoes the last `allocate`, of `count` pages; needs no memory."""
        self.start -= count
        self.num_free += count

    def release(self, ids: Tensor) -> None:
        """Releases pages; those without another holder are free again.

        Args:
            ids: int64 [M] in use, each listed once for every holder that gives it up.
        """
        others = self.others
        if others is not None:
            ids, others = self._released(ids, others)
        count = ids.numel()
        if count > self.num_used:
            raise AssertionError(f"{count} pages returned but only {self.num_used} are in use: a page was freed twice")
        first, second = self._parts(self.end, count)
        until = first.stop - first.start
        self.free_list[first], self.free_list[second] = ids[:until].to(torch.int32), ids[until:].to(torch.int32)
        self._before = self.end, self.num_free, self.others
        self.others = others
        self.end += count
        self.num_free += count

    def share(self, ids: Tensor) -> None:
        """Adds a holder to pages; `ids` int64 [M], each of them in use and listed once."""
        others = torch.zeros_like(self.free_list) if self.others is None else self.others.clone()
        others[ids] += 1
        self._before = self.end, self.num_free, self.others
        self.others = others if ids.numel() else self.others

    def undo(self) -> None:
        """Undoes the last `release` or `share`; needs no memory."""
        self.end, self.num_free, self.others = self._before

    def _released(self, ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pages without a holder after a release, and the holders beyond the first of all pages then."""
        pages, holders = ids.unique(return_counts=True)
        left = others[pages] - holders
        if bool((left < -1).any()):
            raise AssertionError("a page is given up by more lists than hold it: a page was freed twice")
        after = others.clone()
        after[pages] = left.clamp(min=0).to(torch.int32)
        return pages[left < 0], after if bool(after.any()) else None

    # Host-side counts of pages that are kept on a device (`kernels.gpu.table`).

    @property
    def surely_free(self) -> int:
        """Pages that are free whatever the device has not told yet."""
        return self.num_free

    def takes(self, most: int) -> bool:
        """True if so many pages are free for sure; counts them as taken then."""
        return self.surely_free >= most

    def free_ids(self) -> Tensor:
        """The free pages in the order they will be handed out; int64 [num_free]. For checks."""
        return torch.cat([self.free_list[part] for part in self._parts(self.start, self.num_free)]).long()

    def _parts(self, counter: int, count: int) -> tuple[slice, slice]:
        """The `count` entries from a counter on: up to the end of the circular list, and from its beginning."""
        begin = counter % max(1, self.num_pages)
        until = min(begin + count, self.num_pages)
        return slice(begin, until), slice(0, begin + count - until)

    def _grow(self, shortfall: int) -> None:
        """Adds at least `shortfall` pages and at least half of the current number: copying stays linear in total."""
        old = self.num_pages
        extra = max(shortfall, old // 2, 64)
        free = torch.cat([self.free_ids(), torch.arange(old, old + extra, device=self.pages.device)])
        room = self._room
        if len(room) < old + extra:
            room = self._make_room(old + extra)
            self._copy_pages(room)
        free_list = torch.zeros(old + extra, dtype=torch.int32, device=room.device)
        free_list[: free.numel()] = free.to(torch.int32)
        others = self.others
        if others is not None:
            others = torch.cat([others, others.new_zeros(extra)])
        # Only now, when nothing can fail any more: pages and free list never disagree.
        self._room, self.pages = room, room[: old + extra]
        self.free_list, self.others = free_list, others
        self.num_free += extra
        self.start, self.end = 0, self.num_free

    def _make_room(self, num_pages: int) -> Tensor:
        """Allocates `num_pages` pages and, where possible, reserves address space for more.

        Reserved memory is untouched until it is written, so that the pool can grow without a copy.
        """
        try:
            return self._make_pages(GROWTH_FACTOR * num_pages, self.pages.device)
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
        return self._make_pages(num_pages, self.pages.device)

    def _make_pages(self, num_pages: int, device: torch.device | str) -> Tensor:
        """Memory for pages, uint8 [num_pages, page_bytes]."""
        return empty(num_pages, self.page_bytes, dtype=torch.uint8, device=device)

    def _copy_pages(self, pages: Tensor) -> None:
        """Copies what the pages hold into larger memory."""
        pages[: self.num_pages] = self.pages
