"""GPU backend: the pool and the page tables of a cache as `PagePool` and `PageTable` are used, on the device.

The meaning is theirs, page by page: the same ids in the same order, in a fixed number of pages, because growing would
need the host. The free list and the tables of all layers, heads and requests change in one launch where they are few,
and in three whatever their number (`exchange`). Nothing is read back: a request that cannot be met changes nothing and
leaves a code in `DevicePool.status`. The host keeps a lower bound on the free pages, so that a call which cannot fail
needs no synchronisation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.exchange import _assign, _change_at_once, _commit, _move_listed, _pair_moves, _sum_pages_needed
from kvbench.kernels.gpu.lookup import _count_rows, _find_extreme, _lookup, _tracked_slots
from kvbench.kernels.gpu.pages import byte_map, copy_pages
from kvbench.kernels.gpu.parts import launch, power_of_two
from kvbench.kernels.gpu.slot_plan import locate, settle
from kvbench.kernels.operands import ExtremeOf, KeyRotation, SlotSearch, TierTable
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.table import Move, PageTable

BLOCK = 256  # lists, or slots, per program
MAX_BLOCKS = 8192
AT_ONCE = 4096  # lists for which one program takes as long as three launches
EXHAUSTED, ROW_FULL, GROWN = 1, 2, 3  # codes in `status`
_BY: dict[ExtremeOf, int] = {"mean": 0, "score": 1, "pos": 2}


class DevicePool(PagePool):
    """Pages on a device, with the host's lower bound of the free ones.

    Args:
        page_bytes, num_pages, device: As for `PagePool`.

    Attributes:
        state: int64 [3]: the next page to hand out, where the next returned page goes, and free pages; the first two
            only rise.
        status: int32 [1]: why a call was refused, the first reason until `check`; 0 for none.
    """

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device | str) -> None:
        self.page_bytes, self.growable = page_bytes, False
        self.pages = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)
        self.free_list = torch.arange(num_pages, dtype=torch.int32, device=device)
        self.state = torch.tensor([0, num_pages, num_pages], dtype=torch.int64, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.others: Tensor | None = None
        self._surely_free, self.taken = num_pages, 0

    @property
    def num_free(self) -> int:  # type: ignore[override]
        """Free pages; waits for the device."""
        return int(self.state[2])

    def free_ids(self) -> Tensor:
        start, _, free = self.state.tolist()
        where = (start + torch.arange(free, device=self.free_list.device)) % max(1, self.num_pages)
        return self.free_list[where].long()

    @property
    def surely_free(self) -> int:
        return self._surely_free

    def takes(self, most: int) -> bool:
        self.taken += most
        if self._surely_free < most:
            return False
        self._surely_free -= most
        return True

    def check(self) -> None:
        """Raises what the device noted since the last check; waits for it.

        Raises:
            PoolExhausted: A call requested more pages than were free; it changed nothing.
            ValueError: A list needs more table entries than a row has; the call changed nothing.
        """
        code = int(self.status)
        self.status.zero_()
        if code == EXHAUSTED:
            raise PoolExhausted(
                f"a step needed more pages of {self.page_bytes} B than were free of {self.num_pages}; raise "
                "store.budget_bytes, lower batch_size, or choose a smaller method budget"
            )
        if code == ROW_FULL:
            raise ValueError(
                "a list needs more page-table entries than a row has (max_pages); the sequence is longer than the "
                "store was sized for"
            )
        if code == GROWN:
            raise AssertionError("truncate would have grown a list")

    def look(self) -> None:
        """Asks how many pages are free, and raises what `check` does."""
        self._surely_free = self.num_free
        self.check()

    def require(self, count: int) -> None:
        """Notes pages as taken, once `look` has said what is free.

        Raises:
            PoolExhausted: So many are not free.
        """
        if count > self._surely_free:
            raise self.exhausted(count, self._surely_free)
        self._surely_free -= count

    def learn(self, free: int, taken: int) -> None:
        """Takes in how many pages were free when the host had noted so many as `taken`."""
        self._surely_free = max(self._surely_free, free - (self.taken - taken))

    def look_at(self, status: list[int]) -> None:
        """Raises what `check` does where the device noted something."""
        if any(status):
            self.check()


class DeviceTable(PageTable):
    """The tables of a `DevicePool`; the arguments are those of `PageTable`.

    Raises:
        ValueError: More lists than one call can take.

    Source: DiffKV mem_mgt_kernels.cu (circular list, prefix-summed offsets, bidirectional rows).
    Differs: an explicit count of free pages, and block sums instead of one thread block that scans everything.
    """

    pool: DevicePool

    def __init__(
        self, pool: DevicePool, tokens_per_page: tuple[int, ...], rows: int, layers: int, heads: int, max_pages: int
    ) -> None:
        super().__init__(pool, tokens_per_page, rows, layers, heads, max_pages)
        if self.num_lists > BLOCK * MAX_BLOCKS:
            raise ValueError(
                f"{self.num_lists} lists are more than the {BLOCK * MAX_BLOCKS} that one call takes; use fewer rows"
            )
        blocks = -(-self.num_lists // BLOCK)
        self._sums = torch.zeros(2, blocks, dtype=torch.int32, device=self.entries.device)

    def lookup(self, lists: Tensor, tier: int, slot: Tensor) -> tuple[Tensor, Tensor]:
        """See `PageTable.lookup`; -1 for slot numbers below 0, which every kernel skips."""
        lists, slot = lists.contiguous(), slot.contiguous()
        page, inside = (torch.empty(slot.shape, dtype=torch.int64, device=slot.device) for _ in range(2))
        launch(
            _lookup, (-(-slot.numel() // BLOCK),), lists, slot, self._table(tier), page, inside, slot.numel(),
            self.max_pages, T=self.tokens_per_page[tier], REVERSED=tier % 2 == 1, BLOCK=BLOCK,
        )  # fmt: skip
        return page, inside

    def tier(self, tier: int, fmt: PageFormat, width: int, rotation: KeyRotation | None) -> TierTable:
        return TierTable(
            fmt=fmt, entries=self._table(tier), is_reversed=tier % 2 == 1, num_slots=self.num_slots[tier], width=width,
            rotation=rotation,
        )  # fmt: skip

    def count_rows(self, rows: Tensor) -> Tensor:
        per_row, sizes = self.shape[1] * self.shape[2], [*self.tokens_per_page, 1, 1, 1]
        out = torch.empty(1 + self.num_tiers, len(rows), dtype=torch.int64, device=rows.device)
        launch(
            _count_rows, (len(rows),), rows, self.num_slots, out, len(rows), per_row, self.num_lists, T0=sizes[0],
            T1=sizes[1], T2=sizes[2], T3=sizes[3], TIERS=self.num_tiers, BLOCK=min(1024, power_of_two(per_row)),
        )  # fmt: skip
        return out

    def find_extreme(
        self, rows: Tensor, tier: int, fmt: PageFormat, search: SlotSearch, *, over_layer: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PageTable.find_extreme`, with one number per sequence; `over_layer` compares means over a layer."""
        shape, first = (len(rows), *self.shape[1:]), search.first
        value = torch.empty(shape, dtype=torch.float32, device=rows.device)
        slot, pos = (torch.empty(shape, dtype=torch.int64, device=rows.device) for _ in range(2))
        sought = (search.floor, search.before, search.exact, first if isinstance(first, Tensor) else None)
        operands, per_row = [search.seen if x is None else x for x in sought], shape[1] * shape[2]
        fields = _tracked_at(fmt)
        if fields["SCORE"] < 0 and search.by != "pos":
            raise AssertionError(f"the format tracks {fmt.slot.track}, and a search by {search.by} needs scores")
        launch(
            _find_extreme, (len(rows) * per_row,), self.pool.pages, self._table(tier), rows, self.num_slots[tier],
            search.seen, *operands, value, slot, pos, self.pool.page_bytes, per_row, self.max_pages,
            0 if isinstance(first, Tensor) else first, T=fmt.tokens_per_page, BY=_BY[search.by], **fields,
            FLOOR=search.floor is not None, BEFORE=search.before is not None, EXACT=search.exact is not None,
            LOWEST=isinstance(first, Tensor), HEADS=shape[2] if over_layer else 1, REVERSED=tier % 2 == 1, BLOCK=BLOCK,
        )  # fmt: skip
        return value, slot, pos

    def tracked_slots(
        self, lists: Tensor, tier: int, fmt: PageFormat, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `PageTable.tracked_slots`; a score that is not tracked is 0, a position -1."""
        held, kinds = torch.empty_like(lists), (torch.float32, torch.int64, torch.bool)
        score, pos, there = (torch.empty(len(lists), width, dtype=kind, device=lists.device) for kind in kinds)
        launch(
            _tracked_slots, (len(lists), -(-width // BLOCK)), self.pool.pages, lists, self._table(tier),
            self.num_slots[tier], score, pos, there, held, self.pool.page_bytes, self.max_pages, width,
            T=fmt.tokens_per_page, **_tracked_at(fmt), REVERSED=tier % 2 == 1, BLOCK=BLOCK,
        )  # fmt: skip
        return score, pos, there, held

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
        if live is not None and slot is not None:
            slot, goes_to = (None if x is None else torch.where(live > 0, x.reshape(-1), -1) for x in (slot, goes_to))
        plan = None if slot is None else settle(lists, self.num_slots, tier, slot, goes_to, goes_at, acts=acts)
        wanted = torch.ones_like(lists).expand(1, -1) if plan is None else plan.wanted
        first = torch.empty(self.num_tiers, len(lists), dtype=torch.int64, device=lists.device)
        others = [
            other for other in range(self.num_tiers) if other != tier and goes_to is not None and plan is not None
        ]
        # A list takes one slot, in whichever tier: for the incoming token, or for the one that it displaces.
        free_bound = 0 if self.pool.surely_free >= len(lists) else None
        for which in (tier, *others):
            need = wanted[which if plan is not None else 0]
            need = need if live is None else need * live
            self.reserve(lists, which, need, at_most=len(lists) if which == tier else free_bound, out=first[which])
            done.append((lists, which, first[which]))
        if live is not None:
            first = torch.where(live > 0, first, -1)
        if self.pool.others is not None:
            if unshare_all:
                self.unshare_all(lists)
            else:
                targets = (
                    [first[tier]] if plan is None else [plan.target(each, first[each]) for each in (tier, *others)]
                )
                self.unshare([(which, lists, target) for which, target in zip((tier, *others), targets, strict=True)])
        if plan is not None:
            return *locate(plan, first, self.entries, self.further, self.tokens_per_page), plan.broken
        page, inside = self.lookup(lists, tier, first[tier])
        return page.expand(self.num_tiers, -1), inside.expand(self.num_tiers, -1), None

    def reserve(
        self, lists: Tensor, tier: int, count: Tensor, *, at_most: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `PageTable.reserve`; writes to `out` if passed, all -1 when refused.

        If enough pages are free for certain there is no synchronisation, and a full table row is reported later.
        """
        knows = at_most is not None and self.pool.takes(at_most)
        first = torch.empty(len(lists), dtype=torch.int64, device=lists.device) if out is None else out
        self._change(lists, tier, count, first, release=False)
        if not knows:
            self.pool.look()
        return first

    def truncate(self, lists: Tensor, tier: int, count: Tensor) -> None:
        """See `PageTable.truncate`; a list that would grow is unchanged, which is reported later."""
        if self.pool.others is None:
            self._change(lists, tier, count, lists, release=True)
            return
        size, width = self.tokens_per_page[tier], self.max_pages
        before, after = (-(-x.long() // size) for x in (self.num_slots[tier, lists], count))
        index = torch.arange(width, device=lists.device)
        dropped = (index >= after[:, None]) & (index < before[:, None])
        self._give_up(self.page_ids(lists, tier, width), dropped)
        self.num_slots[tier, lists] = count.to(torch.int32)
        self._forget_holders()

    def _change(self, lists: Tensor, tier: int, count: Tensor, first: Tensor, *, release: bool) -> None:
        """The launches of taking or returning pages; of taken ones, `first` gets the first new slot of each list."""
        num, blocks, pool, (sums, faults) = len(lists), -(-len(lists) // BLOCK), self.pool, self._sums
        other = tier ^ 1 if tier ^ 1 < self.num_tiers else -1
        operands = lists.contiguous(), count.contiguous(), self.num_slots
        stores = self._table(tier), pool.free_list, pool.state
        sizes, padded = (num, self.num_lists, self.max_pages), power_of_two(blocks)
        constants = {"TIER": tier, "T": self.tokens_per_page[tier], "RELEASE": release}
        other_constants: dict[str, Any] = {"OTHER": other, "T_OTHER": self.tokens_per_page[max(other, 0)]}
        if 0 < num <= AT_ONCE:
            launch(
                _change_at_once, (1,), *operands, *stores, pool.status, first, *sizes, pool.num_pages, **constants,
                **other_constants, BLOCK=min(1024, power_of_two(num)),
            )  # fmt: skip
        elif num:
            launch(
                _sum_pages_needed,
                (blocks,),
                *operands,
                sums,
                faults,
                *sizes,
                **constants,
                **other_constants,
                BLOCK=BLOCK,
            )
            launch(
                _assign, (blocks,), *operands, *stores, sums, faults, first, *sizes, pool.num_pages, blocks,
                **constants, BLOCK=BLOCK, BP=padded,
            )  # fmt: skip
            launch(_commit, (1,), pool.state, pool.status, sums, faults, blocks, RELEASE=release, BP=padded)

    def plan_compaction(self, lists: Tensor, tier: int, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Moves of `PageTable.plan_compaction` by list: source and target slots int32 [M, n], -1 after the last move.

        Also the new slot counts, int64 [M]. Nothing is moved yet.
        """
        width, keep = keep.shape[1], keep.contiguous().view(torch.uint8)
        sources, targets = (torch.empty(len(lists), width, dtype=torch.int32, device=lists.device) for _ in range(2))
        counts = torch.empty(len(lists), dtype=torch.int64, device=lists.device)
        launch(
            _pair_moves, (len(lists),), lists, keep, self.num_slots, sources, targets, counts, self.num_lists, width,
            TIER=tier, BLOCK=min(1024, power_of_two(width)),
        )  # fmt: skip
        return sources, targets, counts

    def compact(self, lists: Tensor, tier: int, keep: Tensor, fmt: PageFormat, move: Move | None = None) -> None:
        """See `PageTable.compact`; slots that `keep` has no column for are dropped.

        Raises:
            ValueError: See `checks.movable`.

        Source: KV-Compress kvcompress_eviction_kernels.cu (the same moves), DiffKV (all lists in one launch).
        """
        checks.movable(fmt)
        sources, targets, counts = self.plan_compaction(lists, tier, keep)
        width, byte_offsets = keep.shape[1], byte_map(fmt, tuple(fmt.regions), self.pool.pages.device)
        moves = min(32, power_of_two(width))
        launch(
            _move_listed, (len(lists), -(-width // moves)), self.pool.pages, lists, self._table(tier), sources, targets,
            byte_offsets, width, len(byte_offsets), self.pool.page_bytes, self.max_pages, TIER=tier,
            T=self.tokens_per_page[tier], BM=moves, BB=32,
        )  # fmt: skip
        self.truncate(lists, tier, counts)

    def tell(self, post: Callable[[Tensor, Callable[[], Callable[[list[int]], None]]], None]) -> None:
        def bind() -> Callable[[list[int]], None]:
            taken = self.pool.taken
            return lambda state: self.pool.learn(state[2], taken)

        post(self.pool.state, bind)
        post(self.pool.status, lambda: self.pool.look_at)

    # Pages with several holders.

    def share(self, old: Tensor, new: Tensor) -> None:
        pool, others = self.pool, self.pool.others
        others = torch.zeros_like(pool.free_list) if others is None else others.clone()
        for tier in range(self.num_tiers):
            pages, there = self._named(old, tier)
            others.scatter_add_(0, pages.flatten(), there.flatten().to(torch.int32))
        self._copy_entries(old, new)
        pool.others = others

    def unshare(self, slots: list[tuple[int, Tensor, Tensor]]) -> None:
        """See `PageTable.unshare`, for slots of different pages."""
        for tier, lists, slot in slots:
            index = slot.clamp(min=0) // self.tokens_per_page[tier]
            self._unshare(lists, tier, index[:, None], (slot >= 0)[:, None])

    def unshare_all(self, lists: Tensor) -> None:
        if self.pool.others is None:
            return
        for tier in range(self.num_tiers):
            _, there = self._named(lists, tier)
            index = torch.arange(self.max_pages, device=lists.device).expand(len(lists), -1)
            self._unshare(lists, tier, index, there)
        self._forget_holders()

    def _forget_holders(self) -> None:
        """Counts no holders any more where no page has several; waits for the device."""
        if self.pool.others is not None and not bool(self.pool.others.any()):
            self.pool.others = None

    def _named(self, lists: Tensor, tier: int) -> tuple[Tensor, Tensor]:
        """Page ids of lists, int64 [M, max_pages], and bool: the list holds the page."""
        held = -(-self.num_slots[tier, lists].long() // self.tokens_per_page[tier])
        index = torch.arange(self.max_pages, device=lists.device)
        return self.page_ids(lists, tier, self.max_pages), index < held[:, None]

    def _unshare(self, lists: Tensor, tier: int, index: Tensor, wanted: Tensor) -> None:
        """Copies the wanted pages (bool [M, n]) number `index` [M, n] of lists that others hold, too."""
        pool, table = self.pool, self._table(tier).view(-1)
        if pool.others is None:
            return
        entry = (lists * self.max_pages)[:, None] + self._column(tier, index)
        old = table[entry].long()
        copied = wanted & (pool.others[old] > 0)
        if not pool.takes(copied.numel()):
            pool.look()
            pool.require(int(copied.sum()))
        rank = copied.flatten().long().cumsum(0)
        free_index, count = (pool.state[0] + rank - 1) % max(1, pool.num_pages), rank[-1:].sum()
        pool.state += torch.stack([count, count * 0, -count])
        new = pool.free_list[free_index].long().view(copied.shape)  # anything where nothing is copied
        copy_pages(pool.pages, old.flatten(), torch.where(copied, new, -1).flatten())
        table.scatter_(0, entry.flatten(), torch.where(copied, new, old).flatten().to(torch.int32))
        self._give_up(old, copied)

    def _give_up(self, pages: Tensor, wanted: Tensor) -> None:
        """Takes a holder off the wanted pages; those without a holder are free."""
        pool, total = self.pool, self.pool.num_pages
        assert pool.others is not None
        gone = torch.zeros_like(pool.others).scatter_add_(0, pages.flatten(), wanted.flatten().to(torch.int32))
        left = pool.others - gone
        free = (gone > 0) & (left < 0)
        rank = free.long().cumsum(0)
        target = torch.where(free, (pool.state[1] + rank - 1) % total, total)
        spare = torch.cat([pool.free_list, pool.free_list[:1]])  # its last entry takes what is not freed
        spare.scatter_(0, target, torch.arange(total, dtype=torch.int32, device=pages.device))
        pool.free_list.copy_(spare[:-1])
        count = rank[-1]
        pool.state += torch.stack([count * 0, count, count])
        pool.others = left.clamp(min=0)


def _tracked_at(fmt: PageFormat) -> dict[str, int]:
    """Byte offsets of score and position in a page, -1 where they are not tracked."""
    return {name.upper(): fmt.regions[name][0] if name in fmt.slot.track else -1 for name in ("score", "pos")}
