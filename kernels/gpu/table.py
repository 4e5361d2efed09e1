"""GPU backend: the pool and the page tables of a cache as `PagePool` and `PageTable` are used, on the device.

`DevicePages` moves the pages. This file adds what the host knows without asking: fewest pages that are free, so that a
call which cannot fail is not waited for; and pages with several holders.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.fields import copy_pages
from kvbench.kernels.gpu.lookup import count_rows, find_extreme, tracked_slots
from kvbench.kernels.gpu.manager import DevicePages
from kvbench.kernels.gpu.placing import place, settle
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.table import Move, PageTable
from kvbench.kernels.tier_table import KeyRotation, SlotSearch, TierTable


class DevicePool(PagePool):
    """The pages of a `DevicePages`, and what the host knows of how many are free.

    Args:
        held: The manager.
    """

    def __init__(self, held: DevicePages) -> None:
        self.held, self.page_bytes, self.growable = held, held.pages.shape[1], False
        self.pages, self.free_list = held.pages, held.free_list
        self.others: Tensor | None = None
        self._surely_free, self._taken = held.num_pages, 0

    @property
    def num_free(self) -> int:  # type: ignore[override]
        """Free pages; waits for the device."""
        return self.held.stats()["num_free"]

    def free_ids(self) -> Tensor:
        return self.held.free_ids()

    # What the host knows.

    @property
    def surely_free(self) -> int:
        return self._surely_free

    def takes(self, most: int) -> bool:
        """Whether so many pages are free for sure; notes them as taken where they are."""
        self._taken += most
        if self._surely_free < most:
            return False
        self._surely_free -= most
        return True

    def look(self) -> None:
        """Asks the device how many pages are free, and raises what it noted; waits for it.

        Raises:
            PoolExhausted: A call asked for more pages than were free; it changed nothing.
            ValueError: A list needs more table entries than a row has; the call changed nothing.
        """
        self._surely_free = self.num_free
        self.held.check()

    def require(self, count: int) -> None:
        """Notes pages as taken, once `look` has said what is free.

        Raises:
            PoolExhausted: So many are not free.
        """
        if count > self._surely_free:
            raise PoolExhausted(
                f"{count} pages of {self.page_bytes} B are needed but {self._surely_free} of {self.num_pages} are "
                "free; raise store.budget_bytes, lower batch_size, or choose a smaller method budget"
            )
        self._surely_free -= count

    def learn(self, free: int, taken: int) -> None:
        """Takes in how many pages were free when the host had noted so many as `taken`."""
        self._surely_free = max(self._surely_free, free - (self._taken - taken))

    def look_at(self, status: list[int]) -> None:
        """Raises what `look` does where the device noted something."""
        if any(status):
            self.held.check()

    @property
    def taken(self) -> int:
        """Pages that calls which were not waited for have taken at most, so far."""
        return self._taken


class DeviceTable(PageTable):
    """The tables of a `DevicePages`.

    Args:
        pool: Its pages.
        rows, layers, heads: As for `PageTable`.
    """

    pool: DevicePool

    def __init__(self, pool: DevicePool, rows: int, layers: int, heads: int) -> None:
        held = pool.held
        self.pool, self.held, self.tokens_per_page = pool, held, held.tokens_per_page
        self.shape, self.num_lists, self.max_pages = (rows, layers, heads), held.num_lists, held.max_pages
        self.num_tiers = len(held.tokens_per_page)
        self.entries, self.further, self.num_slots = held.entries, held.further, held.num_slots

    def lookup(self, lists: Tensor, tier: int, slot: Tensor) -> tuple[Tensor, Tensor]:
        """As `PageTable.lookup`; -1 for slot numbers below 0, which every kernel passes over."""
        return self.held.lookup(lists, tier, slot)

    def tier(self, tier: int, fmt: PageFormat, width: int, rotation: KeyRotation | None) -> TierTable:
        """A tier of all lists as a step reads it."""
        return TierTable(
            fmt=fmt,
            entries=self._table(tier),
            is_reversed=tier % 2 == 1,
            num_slots=self.num_slots[tier],
            width=width,
            rotation=rotation,
        )

    def count_rows(self, rows: Tensor) -> Tensor:
        """What rows (int64 [S]) hold, int64 [1 + tiers, S]: their pages, and by tier the slots of the longest list."""
        return count_rows(self.num_slots, rows, self.shape[1] * self.shape[2], self.tokens_per_page)

    def find_extreme(
        self, rows: Tensor, tier: int, fmt: PageFormat, search: SlotSearch, *, over_layer: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of every list of rows (int64 [S]) with the smallest value; see `lookup.find_extreme`."""
        return find_extreme(
            self.held.pages,
            fmt,
            self._table(tier),
            tier % 2 == 1,
            self.num_slots[tier],
            rows,
            (len(rows), *self.shape[1:]),
            search,
            over_layer,
        )

    def tracked_slots(
        self, lists: Tensor, tier: int, fmt: PageFormat, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `PageTable.tracked_slots`, in one launch."""
        return tracked_slots(self.held.pages, fmt, self._table(tier), tier % 2 == 1, self.num_slots[tier], lists, width)

    def take(
        self,
        lists: Tensor,
        tier: int,
        slot: Tensor | None,
        goes_to: Tensor | None,
        goes_at: Tensor | None,
        *,
        acts: bool,
        own_all: bool,
        done: list[tuple[Tensor, int, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        plan = None if slot is None else settle(lists, self.num_slots, tier, slot, goes_to, goes_at, acts=acts)
        wanted = torch.ones_like(lists).expand(1, -1) if plan is None else plan.wanted
        first = torch.empty(self.num_tiers, len(lists), dtype=torch.int64, device=lists.device)
        others = [
            other for other in range(self.num_tiers) if other != tier and goes_to is not None and plan is not None
        ]
        # A list takes one slot, in whichever tier: for the incoming token, or for the one that it displaces.
        beside = 0 if self.pool.surely_free >= len(lists) else None
        for which in (tier, *others):
            need = wanted[which if plan is not None else 0]
            self.reserve(lists, which, need, at_most=len(lists) if which == tier else beside, out=first[which])
            done.append((lists, which, first[which]))
        if self.pool.others is not None:
            if own_all:
                self.own_all(lists)
            else:
                targets = (
                    [first[tier]] if plan is None else [plan.target(each, first[each]) for each in (tier, *others)]
                )
                self.own([(which, lists, target) for which, target in zip((tier, *others), targets, strict=True)])
        if plan is not None:
            return *place(plan, first, self.entries, self.further, self.tokens_per_page), plan.broken
        page, inside = self.lookup(lists, tier, first[tier])
        return page.expand(self.num_tiers, -1), inside.expand(self.num_tiers, -1), None

    def reserve(
        self, lists: Tensor, tier: int, count: Tensor, *, at_most: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """As `PageTable.reserve`, into `out` where it is given. Where so many pages are free for sure, nothing is
        waited for, and a table row that is full is learnt of later."""
        knows = at_most is not None and self.pool.takes(at_most)
        before = self.held.reserve(lists, tier, count, out)
        if not knows:
            self.pool.look()
        return before

    def truncate(self, lists: Tensor, tier: int, count: Tensor) -> None:
        """As `PageTable.truncate`; a list that would grow is learnt of later."""
        if self.pool.others is None:
            self.held.truncate(lists, tier, count)
            return
        size, width = self.tokens_per_page[tier], self.max_pages
        before, after = (-(-x.long() // size) for x in (self.num_slots[tier, lists], count))
        index = torch.arange(width, device=lists.device)
        dropped = (index >= after[:, None]) & (index < before[:, None])
        self._give_up(self.page_ids(lists, tier, width), dropped)
        self.num_slots[tier, lists] = count.to(torch.int32)
        if not bool(self.pool.others.any()):
            self.pool.others = None

    def compact(self, lists: Tensor, tier: int, keep: Tensor, fmt: PageFormat, move: Move) -> None:
        """Drops the slots that `keep` (bool [M, n]) does not name; see `DevicePages.compact`."""
        self.held.compact(lists, tier, keep, fmt)

    def tell(self, post: Callable[[Tensor, Callable[[], Callable[[list[int]], None]]], None]) -> None:
        def bind() -> Callable[[list[int]], None]:
            taken = self.pool.taken
            return lambda state: self.pool.learn(state[2], taken)

        post(self.held.state, bind)
        post(self.held.status, lambda: self.pool.look_at)

    # Pages with several holders.

    def share(self, old: Tensor, new: Tensor) -> None:
        pool, others = self.pool, self.pool.others
        others = torch.zeros_like(pool.free_list) if others is None else others.clone()
        for tier in range(self.num_tiers):
            pages, there = self._named(old, tier)
            others.scatter_add_(0, pages.flatten(), there.flatten().to(torch.int32))
        self.entries[new] = self.entries[old]
        if len(self.further):
            self.further[new] = self.further[old]
        self.num_slots[:, new] = self.num_slots[:, old]
        pool.others = others

    def own(self, slots: list[tuple[int, Tensor, Tensor]]) -> None:
        """As `PageTable.own`, for slots of different pages; slot numbers below 0 are passed over."""
        for tier, lists, slot in slots:
            index = slot.clamp(min=0) // self.tokens_per_page[tier]
            self._own(lists, tier, index[:, None], (slot >= 0)[:, None])

    def own_all(self, lists: Tensor) -> None:
        if self.pool.others is None:
            return
        for tier in range(self.num_tiers):
            _, there = self._named(lists, tier)
            index = torch.arange(self.max_pages, device=lists.device).expand(len(lists), -1)
            self._own(lists, tier, index, there)
        if not bool(self.pool.others.any()):
            self.pool.others = None

    def _named(self, lists: Tensor, tier: int) -> tuple[Tensor, Tensor]:
        """Page ids of lists, int64 [M, max_pages], and bool: the list holds the page."""
        held = -(-self.num_slots[tier, lists].long() // self.tokens_per_page[tier])
        index = torch.arange(self.max_pages, device=lists.device)
        return self.page_ids(lists, tier, self.max_pages), index < held[:, None]

    def _own(self, lists: Tensor, tier: int, index: Tensor, wanted: Tensor) -> None:
        """Copies the wanted pages (bool [M, n]) number `index` [M, n] of lists that others hold, too."""
        if self.pool.others is None:
            return
        table, held = self._table(tier).view(-1), self.held
        entry = (lists * self.max_pages)[:, None] + self._column(tier, index)
        old = table[entry].long()
        copied = wanted & (self.pool.others[old] > 0)
        if not self.pool.takes(copied.numel()):
            self.pool.look()
            self.pool.require(int(copied.sum()))
        new = self._taken_pages(copied)
        copy_pages(held.pages, old.flatten(), torch.where(copied, new, -1).flatten())
        table.scatter_(0, entry.flatten(), torch.where(copied, new, old).flatten().to(torch.int32))
        self._give_up(old, copied)

    def _taken_pages(self, wanted: Tensor) -> Tensor:
        """A free page for every wanted entry (bool [M, n]); anything for the others."""
        held = self.held
        rank = wanted.flatten().long().cumsum(0)
        place = (held.state[0] + rank - 1) % max(1, held.num_pages)
        count = rank[-1:].sum()
        held.state += torch.stack([count, count * 0, -count])
        return held.free_list[place].long().view(wanted.shape)

    def _give_up(self, pages: Tensor, wanted: Tensor) -> None:
        """Takes a holder off the wanted pages; those that nobody holds any more are free."""
        pool, held = self.pool, self.held
        assert pool.others is not None
        gone = torch.zeros_like(pool.others).scatter_add_(0, pages.flatten(), wanted.flatten().to(torch.int32))
        left = pool.others - gone
        free = (gone > 0) & (left < 0)
        rank = free.long().cumsum(0)
        place = torch.where(free, (held.state[1] + rank - 1) % held.num_pages, held.num_pages)
        spare = torch.cat([held.free_list, held.free_list[:1]])  # its last entry takes what is not freed
        spare.scatter_(0, place, torch.arange(held.num_pages, dtype=torch.int32, device=pages.device))
        held.free_list.copy_(spare[:-1])
        count = rank[-1]
        held.state += torch.stack([count * 0, count, count])
        pool.others = left.clamp(min=0)
