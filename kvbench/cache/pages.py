"""Pages of all lists of a cache: where slots lie, what is written to them and read from them.

A list is one head of one layer of one row. This file knows no policy: callers say which slots, and it does the rest.
Legend: S rows of a step, L layers, H heads, D head dim, M lists or slots.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.books import Books
from kvbench.cache.homes import Homes
from kvbench.cache.late import Late, Receiver
from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import TierPages
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable
from kvbench.kernels.tier_table import KeyRotation, TierTable

FIRST_PAGES = 64  # what a pool that grows begins with


class Pages:
    """The page pool, the page tables and the formats of all tiers, with the backend that computes on them.

    Args:
        formats: Page format of each tier; all share one page size.
        shape: (rows, layers, heads): the lists there are.
        max_slots: Most slots of one list over all tiers, for sizing the tables.
        backend: The kernels.
        device: Where the pages live.
        budget_bytes: Limit on the pool. None lets it grow in main memory. On a GPU the pool is as large as the lists
            can need, at most `memory_share` of what is free: growing would hold the old pool beside the new one, and
            move the pages under a captured graph.
        memory_share: See `budget_bytes`.
        pool: Class of the pool.
        homes: Where tier 0 of a plan stands for one tier here and another there; None = each is what it is.
    """

    def __init__(
        self,
        formats: tuple[PageFormat, ...],
        shape: tuple[int, int, int],
        max_slots: int,
        backend: Backend,
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        memory_share: float = 0.9,
        pool: type[PagePool] = PagePool,
        homes: Homes | None = None,
    ) -> None:
        self.homes = homes
        self.books: Books | None = None  # what a calibration found, where the method has codes of calibrated tables
        self.formats, self.shape, self.backend = formats, shape, backend
        size, tokens = formats[0].page_bytes, tuple(fmt.tokens_per_page for fmt in formats)
        max_pages = -(-max_slots // min(tokens)) + len(tokens)
        limit, most = budget_bytes // size if budget_bytes is not None else None, math.prod(shape) * max_pages
        if limit is None and (free := memory.free_bytes(device)) is not None:
            limit = max(1, min(most, int(memory_share * free) // size))
        # Lists of the model that are at home in each tier that tier 0 of a plan stands for: those of a row, and more
        # where other layers or heads lie elsewhere.
        self.at_home = [(0, self.lists_per_row)]
        if homes is not None:
            self.at_home = list(zip(homes.tiers, homes.counts, strict=True))
        self.on_device = backend.keeps_tables  # and the host knows only what it was told
        self.late = Late(self.on_device or device.type != "cpu")
        nobody = torch.zeros(0, dtype=torch.int64, device=device)
        self._numbered = self._nobody = nobody, nobody  # the rows asked for last, and their lists
        self._longest: dict[int, list[int]] = {}  # most slots of a list of a row, by tier; what the host knows
        self._grown: Counter[int] = Counter()  # slots that lists of a row may have got, in all
        self.pool: PagePool
        self.table: PageTable
        if self.on_device:
            self.pool, self.table = backend.tables(
                size, most if limit is None else limit, tokens, shape, max_pages, device
            )
        else:
            self.pool = pool(size, FIRST_PAGES if limit is None else limit, device, growable=limit is None)
            self.table = PageTable(self.pool, tokens, *shape, max_pages=max_pages)

    @property
    def lists_per_row(self) -> int:
        """Lists of one row: layers x heads."""
        return self.shape[1] * self.shape[2]

    @property
    def lists_of_model(self) -> int:
        """Lists of one row, wherever they lie."""
        return sum(count for _, count in self.at_home)

    @property
    def allocated_bytes(self) -> int:
        """What the allocator holds: pool, free list, tables and codebooks."""
        return self.pool.allocated_bytes + self.table.allocated_bytes + self.book_bytes

    @property
    def book_bytes(self) -> int:
        """Bytes of the codebooks, which all rows share."""
        return 0 if self.books is None else self.books.nbytes

    @property
    def num_planned(self) -> int:
        """Tiers that a plan may name."""
        return len(self.formats) if self.homes is None else 1

    @property
    def planned_bytes(self) -> tuple[float, ...]:
        """Bytes of one slot in each of them, the mean over lists where these differ."""
        slots = [fmt.slot.slot_bytes for fmt in self.formats]
        if self.homes is None:
            return tuple(slots)
        return (sum(count * slots[tier] for tier, count in self.at_home) / self.lists_of_model,)

    def parts_of(self, layer: int, planned: int = 0) -> list[tuple[int, Tensor | None]]:
        """The tiers that a planned one stands for in a layer, with the heads int64 [h] of each; None = all heads."""
        return [(planned, None)] if self.homes is None else self.homes.in_layer(layer)

    def parts_of_rows(self, num_rows: int, planned: int = 0) -> list[tuple[int, Tensor | slice]]:
        """Likewise, with which of the lists of so many rows are in each."""
        if self.homes is None:
            return [(planned, slice(None))]
        return [(tier, self.homes.where(tier, num_rows)) for tier in self.homes.tiers]

    # Which lists.

    def lists_of(self, rows: Tensor) -> Tensor:
        """List numbers int64 [M] of rows int64 [S], row-major, then layer, then head."""
        if rows is not self._numbered[0]:
            each = torch.arange(self.lists_per_row, device=rows.device)
            self._numbered = rows, (rows[:, None] * self.lists_per_row + each).flatten()
        return self._numbered[1]

    def layer_lists(self, rows: Tensor, layer: int) -> Tensor:
        """List numbers int64 [S, H] of one layer."""
        base = rows * self.lists_per_row + layer * self.shape[2]
        return base[:, None] + torch.arange(self.shape[2], device=rows.device)

    # What lies where.

    def held(self, tier: int, lists: Tensor) -> Tensor:
        """Slots held, int64, in the shape of `lists`."""
        return self.table.num_slots[tier, lists].long()

    def tier(self, tier: int, lists: Tensor, width: int | None = None, known: Tensor | None = None) -> TierPages:
        """The kernels' description of a tier.

        Args:
            tier: Tier index.
            lists: int64 of any shape.
            width: Pages to name per list; None = as many as the longest list has.
            known: What the lists hold, where the caller has asked.
        """
        fmt, held = self.formats[tier], self.held(tier, lists) if known is None else known
        if width is None:
            width = int(-(-held.max() // fmt.tokens_per_page)) if held.numel() else 0
        return TierPages(fmt, self.table.page_ids(lists, tier, width), held, held)

    def width(self, numbers: Sequence[int], tier: int) -> int | None:
        """Pages of a tier that no list of rows has more of, as far as the host knows; None where it has to ask."""
        if self.late.tape is not None:  # a captured step is run again for lists of any length
            return self.table.max_pages
        if not (self.on_device and numbers) or not all(number in self._longest for number in numbers):
            return None
        slots = max((self._longest[number][tier] for number in numbers), default=0)
        return min(-(-slots // self.formats[tier].tokens_per_page), self.table.max_pages)

    def grow(self, numbers: Sequence[int], slots: int) -> None:
        """Notes that every list of rows may have so many slots more, in any tier."""

        def grow() -> None:
            for number in numbers:
                self._grown[number] += slots
                if number in self._longest:
                    self._longest[number] = [held + slots for held in self._longest[number]]

        self.late.also(grow)

    def copy_bounds(self, source: int, number: int) -> None:
        """Notes that a row's lists hold what another one's do."""
        if source in self._longest:
            self._longest[number] = list(self._longest[source])

    def forget(self, number: int) -> None:
        """Notes that the host knows nothing of a row's lists any more."""
        self._longest.pop(number, None)

    def forget_lists(self) -> None:
        """Lets `lists_of` find the lists of the next rows anew, even of a tensor that it knows."""
        self._numbered = self._nobody

    def tell(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Tells the host, later, what lists of rows hold and what is free."""
        if not self.on_device:
            return
        held = self.table.count_rows(rows)[1:]

        def bind() -> Receiver:
            named = {number: self._grown[number] for number in numbers}

            def learn(values: list[int]) -> None:
                for index, (number, grown) in enumerate(named.items()):
                    since = self._grown[number] - grown  # by steps that began meanwhile
                    self._longest[number] = [held + since for held in values[index :: len(named)]]

            return learn

        self.late.post(held, bind)
        self.table.tell(self.late.post)

    def widths(self, lists: Tensor, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Per layer and tier, the pages of the longest list; `lists` int64 [S, L, H] of the rows that the host knows as
        `numbers`."""
        known = [self.width(numbers, tier) for tier in range(len(self.formats))]
        if None not in known:
            return [[width or 0 for width in known]] * lists.shape[1]
        pages = [self.table.num_pages(tier)[lists].amax((0, 2)) for tier in range(len(self.formats))]
        return torch.stack(pages, 1).tolist()

    def num_pages(self, rows: Tensor) -> Tensor:
        """Pages of rows over all lists and tiers, int64 [S]."""
        if self.on_device:
            return self.table.count_rows(rows)[0]
        lists = self.lists_of(rows)
        pages = torch.zeros(len(rows), dtype=torch.int64, device=lists.device)
        for tier, fmt in enumerate(self.formats):
            pages += (-(-self.held(tier, lists) // fmt.tokens_per_page)).view(len(rows), -1).sum(1)
        return pages

    def step_tiers(
        self, numbers: Sequence[int], lists: Tensor, turn_of: Callable[[int], KeyRotation | None]
    ) -> list[TierTable]:
        """The tiers of all lists as a step of rows reads them; only on a device.

        Args:
            numbers: The rows as the host knows them.
            lists: int64 [S, L, H].
            turn_of: How keys of so many slots per list at most are turned.
        """
        found = []
        for tier, fmt in enumerate(self.formats):
            width = self.width(numbers, tier)
            if width is None:
                width = int(-(-self.held(tier, lists).max() // fmt.tokens_per_page))
            found.append(self.table.tier(tier, fmt, width, turn_of(width * fmt.tokens_per_page)))
        return found

    def field(self, tier: int, name: str) -> Tensor:
        """A region of every page as a typed view; `name` as in `PageFormat.regions`."""
        return self.backend.region(self.pool.pages, self.formats[tier], name)

    # Slots in and out.

    def put(
        self,
        tier: int,
        page: Tensor,
        slot: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        distinct: bool = False,
        score: Tensor | float = 0.0,
        pos: Tensor | None = None,
        of: tuple[int, Tensor] | None = None,
    ) -> None:
        """Writes slots: keys with the bounds of their pages, values, tracked fields.

        Args:
            tier: Tier index.
            page: int64 [M] page ids; slot: int64 [M] slots in them.
            k: [M, D], or None to leave the keys.
            v: [M, D], or None to leave the values.
            distinct: No page comes twice, as in a decode step.
            score: fp32 [M] or one number, where the format tracks it.
            pos: int64 [M]; None writes no tracked field.
            of: Whose slots they are: the layer, and the heads int64 [M]; only codebooks ask for it.
        """
        fmt, pages = self.formats[tier], self.pool.pages
        if self.books is not None and (k is not None or v is not None):
            assert of is not None, "tables of codes belong to a layer"
            fmt = self.books.format(tier, of[0])
            k = None if k is None else self.books.levels(tier, *of, k)
        if k is not None:
            self.backend.write_keys(pages, fmt, page, slot, k)
            if fmt.bounds:
                self.backend.widen_bounds(pages, fmt, page, slot, k, distinct=distinct)
        if v is not None:
            self.backend.write_values(pages, fmt, page, slot, v)
        if pos is not None and fmt.slot.track:
            self.backend.write_tracked(pages, fmt, page, slot, score, pos)

    def read(self, tier: int, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Slots int64 [M] as keys and values fp32 [M, D], score fp32 [M] and position int64 [M] (None: not tracked)."""
        fmt, pages = self.formats[tier], self.pool.pages
        return *self.backend.read_slots(pages, fmt, page, slot), *self.backend.read_tracked(pages, fmt, page, slot)

    def demote(self, tier: int, other: int, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Re-quantises slots (page and slot, int64 [M] each) into another tier; a page below 0 is passed over."""
        formats = self.formats
        self.backend.demote(self.pool.pages, formats[tier], formats[other], *source, *target)

    def clear_scores(self, tier: TierPages) -> None:
        """Sets the scores in a tier's live pages to 0."""
        first_slot = torch.arange(tier.ids.shape[-1], device=tier.ids.device) * tier.fmt.tokens_per_page
        scores = self.backend.region(self.pool.pages, tier.fmt, "score")
        ids, live = tier.ids.flatten(), (first_slot < tier.num_k[..., None]).flatten()
        if not self.on_device:
            scores[ids[live]] = 0.0
            return
        # As many pages whatever lists hold: a live one stands for those that are none, if there is one.
        ids = torch.where(live, ids, ids.gather(0, live.long().argmax(0, keepdim=True)))
        scores[ids] = torch.where(live.any(), 0.0, scores[ids])

    def compact(self, tier: int, lists: Tensor, keep: Tensor) -> None:
        """Drops the slots of lists (int64 [M]) that `keep` (bool [M, n]) does not name, closes the gaps, and returns
        the emptied pages. The lists share no page with others (`PageTable.own_all`)."""
        if self.on_device:
            self.table.compact(lists, tier, keep, self.formats[tier])
            return
        owner, source, target, count = self.table.plan_compaction(lists, tier, keep)
        old, new = (self.table.lookup(lists[owner], tier, slot) for slot in (source, target))
        self.backend.move_slots(self.pool.pages, self.formats[tier], *old, *new)
        self.table.truncate(lists, tier, count)

    # Whole rows.

    def clear(self, lists: Tensor) -> None:
        """Returns all pages of lists (int64 [M])."""
        for tier in range(len(self.formats)):
            self.table.truncate(lists, tier, torch.zeros_like(lists))
