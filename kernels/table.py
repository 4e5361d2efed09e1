"""Page tables of all lists, and slot allocation on them.

A *list* is the cache of one (row, layer, KV head); its number is (row * layers + layer) * heads + head. Tier 0 grows
from the left of the list's table row, tier 1 from the right. Tiers 2 and 3 share a second table in the same way.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import KeyRotation, SlotSearch, TierTable
from kvbench.kernels.pool import PagePool

Move = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class PageTable:
    """Map of slot i of tier t of every list to its page.

    Args:
        pool: Source of the pages.
        tokens_per_page: Slots per page of each tier.
        rows: Sequences that can be held at once.
        layers: Layers.
        heads: KV heads per layer.
        max_pages: Table entries per list, shared by tiers 0 and 1, and again by tiers 2 and 3.

    Source: DiffKV cache.h (bidirectional rows).
    """

    def __init__(
        self, pool: PagePool, tokens_per_page: tuple[int, ...], rows: int, layers: int, heads: int, max_pages: int
    ) -> None:
        device = pool.pages.device
        self.pool = pool
        self.tokens_per_page = tokens_per_page
        self.shape = (rows, layers, heads)
        self.num_lists = rows * layers * heads
        self.max_pages = max_pages
        self.num_tiers = len(tokens_per_page)
        self.entries = torch.zeros(self.num_lists, max_pages, dtype=torch.int32, device=device)
        further = self.num_lists if self.num_tiers > 2 else 0
        self.further = torch.zeros(further, max_pages, dtype=torch.int32, device=device)
        self.num_slots = torch.zeros(self.num_tiers, self.num_lists, dtype=torch.int32, device=device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors of tables and counters."""
        return self.entries.nbytes + self.further.nbytes + self.num_slots.nbytes

    def row_bytes(self, max_slots: int | None = None) -> int:
        """Bytes of the tables and counters of one row whose lists hold up to `max_slots` slots.

        None = as each row is allocated, for the longest lists.
        """
        if max_slots is None:
            return self.allocated_bytes // self.shape[0]
        entries = most_pages(max_slots, self.tokens_per_page) * (2 if len(self.further) else 1)
        each = entries * self.entries.element_size() + self.num_tiers * self.num_slots.element_size()
        return self.shape[1] * self.shape[2] * each

    def num_pages(self, tier: int) -> Tensor:
        """Pages in use per list, int64 [lists]."""
        return -(-self.num_slots[tier].long() // self.tokens_per_page[tier])

    def lookup(self, lists: Tensor, tier: int, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Page id and slot within the page, int64, for slot numbers of the given lists (same shape)."""
        index = slot // self.tokens_per_page[tier]
        return self._table(tier)[lists, self._column(tier, index)].long(), slot % self.tokens_per_page[tier]

    def page_ids(self, lists: Tensor, tier: int, width: int) -> Tensor:
        """The first `width` page ids of each list in slot order, int64 [..., width].

        Entries past a list's pages are some valid id.
        """
        columns = self._column(tier, torch.arange(width, device=lists.device))
        return self._table(tier)[lists[..., None], columns].long()

    def reserve(self, lists: Tensor, tier: int, count: Tensor, *, at_most: int | None = None) -> Tensor:
        """Appends `count[m]` slots to list `lists[m]`, taking pages as needed.

        Args:
            lists: int64 [M], distinct.
            tier: Tier index.
            count: int64 [M], >= 0.
            at_most: Pages that the call takes at most, if known; tables on a device then need no synchronisation.

        Returns:
            First new slot of each list, int64 [M].

        Raises:
            PoolExhausted: The pool is exhausted; nothing was changed.
            ValueError: A table row is full; nothing was changed.
        """
        before = self.num_slots[tier, lists].long()
        pages_before = -(-before // self.tokens_per_page[tier])
        pages_after = -(-(before + count) // self.tokens_per_page[tier])
        self._check_room(lists, tier, pages_after)
        need = pages_after - pages_before
        ids, _ = self.pool.allocate(need)
        try:
            if ids.numel():
                owner, index = _spread(need)
                entry = self._entry(lists, owner, tier, pages_before[owner] + index)
                self._table(tier).view(-1)[entry] = ids.to(torch.int32)
            self.num_slots[tier, lists] = (before + count).to(torch.int32)
        except BaseException:  # allocated pages in no table would leak
            self.pool.undo_allocate(ids.numel())
            raise
        return before

    def truncate(self, lists: Tensor, tier: int, count: Tensor) -> None:
        """Drops slots from the end so that list `lists[m]` keeps `count[m]`, and returns the emptied pages."""
        before = self.num_slots[tier, lists].long()
        if bool((count > before).any()):
            raise AssertionError("truncate would grow a list")
        size = self.tokens_per_page[tier]
        pages_before, pages_after = -(-before // size), -(-count // size)
        surplus = pages_before - pages_after
        owner, index = _spread(surplus)
        entry = self._entry(lists, owner, tier, pages_after[owner] + index)
        self.pool.release(self._table(tier).view(-1)[entry])
        try:
            self.num_slots[tier, lists] = count.to(torch.int32)
        except BaseException:  # a page in a table must not be free
            self.pool.undo()
            raise

    def share(self, old: Tensor, new: Tensor) -> None:
        """Shares the pages of lists with empty lists; a page is copied before one of its holders writes (`unshare`).

        Args:
            old, new: int64 [M] lists.
        """
        if bool(self.num_slots[:, new].any()):
            raise AssertionError("only an empty list can share what another one holds")
        self.pool.share(self._pages_of(old))
        try:
            self._copy_entries(old, new)
        except BaseException:
            self.pool.undo()
            raise

    def _copy_entries(self, old: Tensor, new: Tensor) -> None:
        """Copies table entries and slot counts of lists to other lists."""
        self.entries[new] = self.entries[old]
        if len(self.further):
            self.further[new] = self.further[old]
        self.num_slots[:, new] = self.num_slots[:, old]  # last: until then the new lists are empty

    def unshare(self, slots: list[tuple[int, Tensor, Tensor]]) -> None:
        """Copies shared pages for lists that will write to the given slots (copy-on-write).

        Call it before these slots are written. If all holders of a page write in the same call, one page more than
        necessary is copied.

        Args:
            slots: (tier, lists int64 [M], held slots int64 [M]) per tier; a slot may occur twice, and one below 0 is
                skipped.

        Raises:
            PoolExhausted: The pool is exhausted; nothing was changed.
        """
        if self.pool.others is None:
            return
        shared = []
        for table in (self.entries, self.further):
            entries = [
                (lists * self.max_pages + self._column(tier, slot // self.tokens_per_page[tier]))[slot >= 0]
                for tier, lists, slot in slots
                if self._table(tier) is table
            ]
            nothing = torch.empty(0, dtype=torch.int64, device=table.device)
            where = torch.cat(entries).unique() if entries else nothing
            old = table.view(-1)[where].long()
            is_shared = self.pool.others[old] > 0
            shared.append((table.view(-1), where[is_shared], old[is_shared]))
        old = torch.cat([pages for _, _, pages in shared])
        if not old.numel():
            return
        new, _ = self.pool.allocate(torch.tensor([old.numel()], device=old.device))
        try:
            self.pool.pages[new] = self.pool.pages[old]
            parts = new.to(torch.int32).split([len(where) for _, where, _ in shared])
            self.pool.release(old)
        except BaseException:
            self.pool.undo_allocate(old.numel())
            raise
        for (table, where, _), ids in zip(shared, parts, strict=True):
            table.scatter_(0, where, ids)  # needs no memory

    def unshare_all(self, lists: Tensor) -> None:
        """Calls `unshare` for all slots of lists (int64 [M])."""
        if self.pool.others is None:
            return
        slots = []
        for tier, size in enumerate(self.tokens_per_page):
            owner, index = _spread(self.num_pages(tier)[lists])
            slots.append((tier, lists[owner], index * size))
        self.unshare(slots)

    def plan_compaction(self, lists: Tensor, tier: int, keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Plans moves that bring the kept slots to the front; kept slots from the end fill the lowest holes first.

        Args:
            lists: int64 [M].
            keep: bool [M, n] over slot numbers; slots past a list's end are ignored.

        Returns:
            owner (index into `lists`), source slot, target slot of every move, int64 [moves]; and the new slot counts
            int64 [M].

        Source: KV-Compress kvcompress_eviction_kernels.cu (same moves: golden `kvc.moves_E2_head0`).
        """
        width = keep.shape[1]
        slot = torch.arange(width, device=keep.device)
        held = slot < self.num_slots[tier, lists].long()[:, None]
        keep = keep & held
        count = keep.sum(1)
        holes = (~keep & (slot < count[:, None])).nonzero()
        movers = (keep & (slot >= count[:, None])).flip(1).nonzero()
        return holes[:, 0], width - 1 - movers[:, 1], holes[:, 1], count

    def compact(self, lists: Tensor, tier: int, keep: Tensor, fmt: PageFormat, move: Move) -> None:
        """Moves the kept slots of lists to their front and returns the emptied pages.

        Args:
            lists: int64 [M], distinct; they share no page with others.
            tier: Tier index; fmt: its page format.
            keep: bool [M, n] over slot numbers.
            move: Moves slots (page and slot of the source, page and slot of the target, int64 [moves] each); unused by
                tables on a device.
        """
        owner, source, target, count = self.plan_compaction(lists, tier, keep)
        move(*self.lookup(lists[owner], tier, source), *self.lookup(lists[owner], tier, target))
        self.truncate(lists, tier, count)

    def count_rows(self, rows: Tensor) -> Tensor:
        """Pages and slots of rows (int64 [S]): int64 [1 + tiers, S].

        Pages, then per tier the slots of the longest list.
        """
        held = self.num_slots.view(self.num_tiers, self.shape[0], -1)[:, rows].long()
        pages = held.clone()
        for tier, size in enumerate(self.tokens_per_page):
            pages[tier] = -(-held[tier] // size)
        return torch.cat([pages.sum((0, 2))[None], held.amax(2)])

    def take(
        self,
        lists: Tensor,
        tier: int,
        slot: Tensor | None,
        goes_to: Tensor | None,
        goes_at: Tensor | None,
        *,
        acts: bool,
        unshare_all: bool,
        done: list[tuple[Tensor, int, Tensor]],
        live: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Checks a step's plan against its lists, and reserves its slots.

        Args:
            lists: int64 [M].
            tier: Tier of new tokens.
            slot, goes_to, goes_at: The plan, integers [M] or of a shape with M entries; None as in `DecodePlan`.
            acts: True if slots may be overwritten.
            unshare_all: Copy all shared pages of the lists, not only those that are written.
            done: Output list of reservations (lists, tier, slots before).
            live: int64 [M], 0 for lists that are skipped, whatever their plan; only on a device.

        Returns:
            Page and slot within it, int64 [tiers, M]: in `tier` of the incoming token, in the others of a demoted one,
            page -1 for none; and int32 [3], 1 where a slot, a tier, or a slot in it is invalid, or None if the plan was
            checked before.

        Raises:
            PoolExhausted: Too few pages; `done` has the reservations so far.
        """

        def reserved(which: int, wanted: Tensor) -> Tensor:
            before = self.reserve(lists, which, wanted.long())
            done.append((lists, which, before))
            return before

        assert live is None, "in main memory all lists take part"
        slot = torch.full_like(lists, -1) if slot is None else slot.reshape(-1).long()
        fresh = slot < 0
        at = {tier: torch.where(fresh, reserved(tier, fresh), slot)}
        for other in range(self.num_tiers) if goes_to is not None else ():
            assert goes_to is not None, "the loop is of those that go"
            moved = (goes_to.reshape(-1) == other) & ~fresh
            if other == tier or not bool(moved.any()):
                continue
            target = torch.full_like(lists, -1) if goes_at is None else goes_at.reshape(-1).long()
            appended = moved & (target < 0)
            target = torch.where(appended, reserved(other, appended), target)
            at[other] = torch.where(moved, target, -1)
        if unshare_all:
            self.unshare_all(lists)
        else:
            self.unshare([(which, lists, target) for which, target in at.items()])
        page, inside = lists.new_full((self.num_tiers, len(lists)), -1), lists.new_zeros(self.num_tiers, len(lists))
        for which, target in at.items():
            page_ids, inside[which] = self.lookup(lists, which, target.clamp(min=0))
            page[which] = torch.where(target < 0, -1, page_ids)
        return page, inside, None

    # Operations that tables on a device do in a launch or two (`kernels.gpu.table`); tables in main memory do them in
    # Python.

    def tier(self, tier: int, fmt: PageFormat, width: int, rotation: KeyRotation | None) -> TierTable:
        """Kernel operand of a tier of all lists, at most `width` pages per list."""
        raise NotImplementedError("tables in main memory name the pages of a step")

    def find_extreme(
        self, rows: Tensor, tier: int, fmt: PageFormat, search: SlotSearch, *, over_layer: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Value, slot and position, [S, L, H] each, of the smallest value in every list of rows (int64 [S])."""
        raise NotImplementedError("in main memory a backend searches slots, or their fields are gathered")

    def tracked_slots(
        self, lists: Tensor, tier: int, fmt: PageFormat, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tracked fields of the first `width` slots of lists (int64 [M]).

        Score fp32, position int64 and a bool mask of held slots, [M, width] each, and int64 [M] slots held.
        """
        raise NotImplementedError("in main memory the fields of pages are gathered")

    def tell(self, post: Callable[[Tensor, Callable[[], Callable[[list[int]], None]]], None]) -> None:
        """Posts the pool's state to the host; only tables on a device need it."""

    def used_page_ids(self) -> Tensor:
        """All page ids in the tables, int64, one per holder; walks every list. For checks and recounts."""
        return self._pages_of(torch.arange(self.num_lists, device=self.entries.device))

    def _pages_of(self, lists: Tensor) -> Tensor:
        """Page ids of lists (int64 [M]), tier by tier."""
        ids = []
        for tier in range(self.num_tiers):
            owner, index = _spread(self.num_pages(tier)[lists])
            ids.append(self._table(tier)[lists[owner], self._column(tier, index)].long())
        return torch.cat(ids)

    def _table(self, tier: int) -> Tensor:
        return self.further if tier >= 2 else self.entries

    def _entry(self, lists: Tensor, owner: Tensor, tier: int, index: Tensor) -> Tensor:
        """Index of page `index` of list `lists[owner]` in a table read as one row."""
        return (lists * self.max_pages)[owner] + self._column(tier, index)

    def _column(self, tier: int, index: Tensor) -> Tensor:
        return self.max_pages - 1 - index if tier % 2 else index

    def _check_room(self, lists: Tensor, tier: int, pages_after: Tensor) -> None:
        """Raises ValueError if two tiers would overlap in a table row, before anything is written."""
        used = pages_after
        if (other := tier ^ 1) < self.num_tiers:
            used = used + -(-self.num_slots[other, lists].long() // self.tokens_per_page[other])
        if lists.numel() and int(used.max()) > self.max_pages:
            raise ValueError(
                f"a list needs {int(used.max())} page-table entries but max_pages={self.max_pages}; "
                "the sequence is longer than the store was sized for"
            )


def most_pages(max_slots: int, tokens_per_page: tuple[int, ...]) -> int:
    """Most table entries of a list that holds up to `max_slots` slots over all tiers, partial last pages included."""
    return -(-max_slots // min(tokens_per_page)) + len(tokens_per_page)


def _spread(count: Tensor) -> tuple[Tensor, Tensor]:
    """Expand `count[m]` (int64 [M]) entries of every list m: each entry's list, and its index within it."""
    end = count.cumsum(0)
    index = torch.arange(int(count.sum()), device=count.device)
    # Not repeat_interleave, which wakes other threads on a CPU even for two numbers.
    owner = torch.searchsorted(end, index, right=True)
    return owner, index - (end - count)[owner]
