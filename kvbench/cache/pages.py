"""Pages of all lists of a cache: where slots lie, what is written to them and read from them.

A list is one head of one layer of one row. This file is independent of policies: callers name the slots. Tables lie in
main memory, or a backend keeps them on its device; the differences are handled here and in the table's class, not by
callers. Legend: S rows of a step, L layers, H heads, D head dim, M lists or slots.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.async_counts import AsyncCounts, HostCounts, Rows
from kvbench.cache.codebooks import Codebooks
from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import KeyRotation, Ring, SlotSearch, TierPages, TierTable
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable, most_pages

FIRST_PAGES = 64  # what a pool that grows begins with
# A run of steps goes on while the pool surely has what two steps may take, one of them under way, and each may begin a
# page in every list: with less, the last page of every list would be filled by steps that wait for each other.
SPARE_PAGES = 2  # of a list, on a device


class TierMap:
    """Tier that a plan's tier 0 stands for in every list of a row, where formats differ by layer or head.

    It is kept on the host, so that sizes of work per tier need no synchronisation.
    """

    def __init__(self, table: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.table, self._device = table, device
        self.tiers = sorted({tier for row in table for tier in row})
        """Those that some list has."""
        self.by_head = any(len(set(row)) > 1 for row in table)
        """The heads of a layer differ."""
        flat = [tier for row in table for tier in row]
        self._flat = torch.tensor(flat, device=device)
        self._within = {tier: _indices_of(tier, flat, device) for tier in self.tiers}
        self.in_layer = [
            [(tier, None if len(set(row)) == 1 else _indices_of(tier, row, device)) for tier in sorted(set(row))]
            for row in table
        ]
        """By layer, its tiers with the heads int64 [h] of each; None = all heads."""

    def of(self, lists: Tensor) -> Tensor:
        """Tier of each list, int64 in the shape of `lists`."""
        return self._flat[lists % len(self._flat)]

    def where(self, tier: int, num_rows: int) -> Tensor:
        """Indices int64 [M] of the lists of so many rows, row-major, that have a tier."""
        within = self._within.get(tier, self._flat[:0])
        rows = torch.arange(num_rows, device=self._device)[:, None] * len(self._flat)
        return (rows + within).flatten()


def _indices_of(tier: int, tiers: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([index for index, other in enumerate(tiers) if other == tier], dtype=torch.int64, device=device)


class Pages:
    """Page pool, page tables and formats of all tiers, which share one page size, with their backend.

    For lists of the shape (rows, layers, heads) of at most `max_slots` slots over all tiers.

    Args:
        budget_bytes: Limit on the pool. None lets it grow in main memory. On a GPU the pool is as large as the lists
            can need, at most `memory_share` of what is free: growing would hold the old and the new pool at once, and
            move the pages under a captured graph.
        tier_map: Tier that tier 0 of a plan stands for, list by list; None = tier 0 everywhere.
        codebooks: Calibrated tables of codes, and scales of key channels or of heads; None without any.
        lists_by_tier: Lists of a row of the whole model that have each of the tiers that tier 0 of a plan stands for;
            None = those of this part.
        counts: Asynchronous counts by device, shared with other pages; gets an entry for this device if there is none.
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
        tier_map: TierMap | None = None,
        codebooks: Codebooks | None = None,
        lists_by_tier: dict[int, int] | None = None,
        counts: dict[torch.device, AsyncCounts] | None = None,
    ) -> None:
        self.formats, self.shape, self.backend = formats, shape, backend
        self.tier_map, self.codebooks = tier_map, codebooks
        self.lists_by_tier = lists_by_tier or {0: shape[1] * shape[2]}
        size, tokens = formats[0].page_bytes, tuple(fmt.tokens_per_page for fmt in formats)
        max_pages = most_pages(max_slots, tokens)
        limit = budget_bytes // size if budget_bytes is not None else None
        most = math.prod(shape) * max_pages
        if backend.keeps_tables:  # whose last row is spare
            most = math.prod((shape[0] - 1, *shape[1:])) * (max_pages + SPARE_PAGES)
        if limit is None and (free := memory.free_bytes(device)) is not None:
            limit = max(1, min(most, int(memory_share * free) // size))
        self.on_device = backend.keeps_tables  # and the host has only the counts it received
        fresh = AsyncCounts(self.on_device or device.type != "cpu")
        self.counts = fresh if counts is None else counts.setdefault(device, fresh)
        self.host = HostCounts()
        nobody = torch.zeros(0, dtype=torch.int64, device=device)
        self._of_row = torch.arange(self.lists_per_row, device=device)  # the lists of the first row
        self._numbered = self._nobody = nobody, nobody  # the last rows looked up, and their lists
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
        return self.shape[1] * self.shape[2]

    @property
    def lists_of_model(self) -> int:
        """Lists of one row, wherever they lie."""
        return sum(self.lists_by_tier.values())

    @property
    def allocated_bytes(self) -> int:
        books = 0 if self.codebooks is None else self.codebooks.nbytes
        return self.pool.allocated_bytes + self.table.allocated_bytes + books

    @property
    def num_planned(self) -> int:
        """Tiers that a plan may name."""
        return len(self.formats) if self.tier_map is None else 1

    @property
    def planned_bytes(self) -> tuple[float, ...]:
        """Bytes of one slot in each of them, the mean over lists where these differ."""
        slots = [fmt.slot.slot_bytes for fmt in self.formats]
        if self.tier_map is None:
            return tuple(slots)
        return (sum(count * slots[tier] for tier, count in self.lists_by_tier.items()) / self.lists_of_model,)

    def tiers_of_layer(self, layer: int, planned: int = 0) -> list[tuple[int, Tensor | None]]:
        """The tiers that a planned one stands for in a layer, with the heads int64 [h] of each; None = all heads."""
        return [(planned, None)] if self.tier_map is None else self.tier_map.in_layer[layer]

    def tiers_in(self, layer: int) -> Sequence[int]:
        """The tiers in which lists of a layer may hold tokens."""
        return range(len(self.formats)) if self.tier_map is None else [tier for tier, _ in self.tiers_of_layer(layer)]

    def stands_for(self, planned: Tensor, lists: Tensor) -> Tensor:
        """The tiers that those of a plan stand for, whole numbers [M, n] of lists int64 [M]; below 0 they stay."""
        if self.tier_map is None:
            return planned
        return torch.where(planned < 0, planned, self.tier_map.of(lists)[:, None].to(planned.dtype))

    def tiers_of_rows(self, num_rows: int, planned: int = 0) -> list[tuple[int, Tensor | slice]]:
        """The tiers that a planned one stands for, with the indices of each among the lists of so many rows."""
        if self.tier_map is None:
            return [(planned, slice(None))]
        return [(tier, self.tier_map.where(tier, num_rows)) for tier in self.tier_map.tiers]

    # Which lists.

    def lists_of(self, rows: Tensor) -> Tensor:
        """List numbers int64 [M] of rows int64 [S], row-major, then layer, then head."""
        if rows is not self._numbered[0]:
            numbers = torch.add(self._of_row, rows[:, None], alpha=self.lists_per_row)
            self._numbered = rows, numbers.flatten()
        return self._numbered[1]

    def forget_lists(self) -> None:
        """Makes `lists_of` compute the lists of the next rows anew, even of a cached tensor."""
        self._numbered = self._nobody

    def layer_lists(self, rows: Tensor, layer: int) -> Tensor:
        """List numbers int64 [S, H] of one layer."""
        base = rows * self.lists_per_row + layer * self.shape[2]
        return base[:, None] + torch.arange(self.shape[2], device=rows.device)

    def taking_part(self, wanted: Tensor) -> Tensor | slice:
        """Indices of True in bool [n]; on a device all indices, since no size may depend on content.

        There an entry that is not `wanted` has slot or page -1, which every kernel skips.
        """
        return slice(None) if self.on_device else wanted.nonzero()[:, 0]

    # Layout.

    def held(self, tier: int, lists: Tensor) -> Tensor:
        """Slots held, int64, in the shape of `lists`."""
        return self.table.num_slots[tier, lists].long()

    def tier(self, tier: int, lists: Tensor, width: int | None = None, known: Tensor | None = None) -> TierPages:
        """Kernel operand of a tier of lists (int64 of any shape).

        `width` pages are named per list, None = as many as the longest has; `known` are the slots that they hold, if
        the caller has read them.
        """
        held = self.held(tier, lists) if known is None else known
        if width is None:
            width = self.widest(tier, held)
        return TierPages(self.formats[tier], self.table.page_ids(lists, tier, width), held, held)

    def widest(self, tier: int, held: Tensor) -> int:
        """Pages of the longest of the lists that hold so many slots."""
        return int(-(-held.max() // self.formats[tier].tokens_per_page)) if held.numel() else 0

    def width(self, numbers: Sequence[int], tier: int) -> int | None:
        """Upper bound of the pages that a list of these rows has in a tier, from host counts; None if unknown."""
        if self.counts.at_full_width or self.counts.log is not None:  # a captured step runs again for longer lists
            return self.table.max_pages
        slots = self.host.longest(numbers, tier) if self.on_device else None
        if slots is None:
            return None
        return min(-(-slots // self.formats[tier].tokens_per_page), self.table.max_pages)

    def widths(self, lists: Tensor, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Pages of the longest list per layer and tier; `lists` int64 [S, L, H] of the rows `numbers`."""
        known = [self.width(numbers, tier) for tier in range(len(self.formats))]
        if None not in known:
            return [[width or 0 for width in known]] * lists.shape[1]
        pages = [self.table.num_pages(tier)[lists].amax((0, 2)) for tier in range(len(self.formats))]
        return torch.stack(pages, 1).tolist()

    def tell(self, rows: Rows) -> None:
        """Tells the host, later, the slots that lists of rows hold and the pages that are free."""
        if self.on_device:
            self.counts.post(self.table.count_rows(rows.tensor)[1:], lambda: self.host.learner(rows))
            self.table.tell(self.counts.post)

    def num_pages(self, rows: Tensor) -> Tensor:
        """Pages of rows over all lists and tiers, int64 [S]."""
        return self.table.count_rows(rows)[0]

    def step_tiers(
        self, rows: Rows, lists: Tensor, rotation_of: Callable[[int], KeyRotation | None]
    ) -> list[TierTable]:
        """Tiers of all lists (int64 [S, L, H]) for a step of rows; only on a device.

        `rotation_of` maps the most slots per list to the rotation of its keys.
        """
        tables = []
        for tier, fmt in enumerate(self.formats):
            width = self.width(rows.numbers, tier)
            width = self.widest(tier, self.held(tier, lists)) if width is None else width
            tables.append(self.table.tier(tier, fmt, width, rotation_of(width * fmt.tokens_per_page)))
        return tables

    def field(self, tier: int, name: str) -> Tensor:
        """A region of every page as a typed view; `name` as in `PageFormat.regions`."""
        return self.backend.region(self.pool.pages, self.formats[tier], name)

    def tracked(
        self, tier: int, rows: Rows, lists: Tensor, known: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Score fp32, position int64 and held mask bool of every slot, [M, n] each, and int64 [M] slots held.

        Untracked fields are 0 and -1; `known` is as for `tier`.
        """
        fmt, pages = self.formats[tier], self.width(rows.numbers, tier)
        if self.on_device and pages is not None:
            return self.table.tracked_slots(lists, tier, fmt, pages * fmt.tokens_per_page)
        tier_pages = self.tier(tier, lists, pages, known)
        slot = torch.arange(tier_pages.ids.shape[-1] * fmt.tokens_per_page, device=tier_pages.ids.device)

        def field(name: str, missing: float) -> Tensor:
            if name not in fmt.slot.track:
                return torch.full((len(lists), len(slot)), missing, device=tier_pages.ids.device)
            return self.field(tier, name)[tier_pages.ids].flatten(1)

        held = tier_pages.num_k
        return field("score", 0.0).float(), field("pos", -1).long(), slot < held[:, None], held

    def find_extreme(
        self, tier: int, rows: Rows, known: Tensor | None, search: SlotSearch, over_layer: bool
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Value, slot and position [S, L, H] of the smallest value in every list of rows; None without in-place search.

        One search per row over the slots in their pages. `known` is as for `tier`, `over_layer` as for
        `DecodeView.argmin`.
        """
        fmt = self.formats[tier]
        if self.on_device:
            return self.table.find_extreme(rows.tensor, tier, fmt, search, over_layer=over_layer)
        if over_layer or isinstance(search.first, Tensor) or not self.backend.searches_slots:
            return None
        pages = self.tier(tier, self.lists_of(rows.tensor), self.width(rows.numbers, tier), known)
        by_list = search.per_list(self.lists_per_row)
        extreme = self.backend.slot_extreme(self.pool.pages, fmt, pages.ids, pages.num_k, by_list)
        value, slot, pos = (x.view(len(rows), *self.shape[1:]) for x in extreme)
        return value, slot, pos

    # Slots in and out.

    @contextmanager
    def undone(self) -> Iterator[list[tuple[Tensor, int, Tensor]]]:
        """Releases the reservations noted here (lists, tier, slots before) when anything fails."""
        done: list[tuple[Tensor, int, Tensor]] = []
        try:
            yield done
        except BaseException:
            for lists, tier, before in reversed(done):
                self.table.truncate(lists, tier, before)
            raise

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
        """Writes slots: keys [M, D] with the bounds of their pages, values [M, D], tracked fields; None leaves each.

        Args:
            page: int64 [M] page ids; slot: int64 [M] slots in them.
            distinct: No page comes twice, as in a decode step.
            score: fp32 [M] or one number, where the format tracks it and `pos` int64 [M] is given.
            of: Owners of the slots: the layer, and the heads int64 [M]; only codebooks read it, and need `k` and `v`.
        """
        fmt, pages = self.formats[tier], self.pool.pages
        if self.codebooks is not None:
            assert of is not None and k is not None and v is not None, "tables of codes belong to a layer"
            fmt = self.codebooks.format(tier, of[0])
            k, v = self.codebooks.levels(tier, *of, k), self.codebooks.values(*of, v)
        if k is not None:
            self.backend.write_keys(pages, fmt, page, slot, k)
            if fmt.bounds:
                self.backend.widen_bounds(pages, fmt, page, slot, k, distinct=distinct)
        if v is not None:
            self.backend.write_values(pages, fmt, page, slot, v)
        if pos is not None and fmt.slot.track:
            self.backend.write_tracked(pages, fmt, page, slot, score, pos)

    def attend(
        self, layer: int, q: Tensor, tiers: list[TierPages], ring: Ring | None, scale: float, **more: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`Backend.paged_decode` of a layer, with residual buffers and calibration tables; `more` is passed on."""
        books = self.codebooks
        q = q if books is None else books.queries(layer, q)
        out, lse, scores = self.backend.paged_decode(q, self.pool.pages, tiers, ring, scale, **more)
        return out if books is None else books.outputs(layer, out), lse, scores

    def gather(self, layer: int, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.gather_dense` of a layer, with residual buffers and calibration tables."""
        k, v, live = self.backend.gather_dense(self.pool.pages, tiers, ring)
        return (k, v, live) if self.codebooks is None else (*self.codebooks.read(layer, k, v), live)

    def read(self, tier: int, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Slots int64 [M] as keys and values fp32 [M, D]."""
        return self.backend.read_slots(self.pool.pages, self.formats[tier], page, slot)

    def demote(self, tier: int, other: int, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Re-quantises slots (page and slot, int64 [M] each) into another tier, score and position included.

        Entries with a page below 0 are skipped.
        """
        pages, formats = self.pool.pages, self.formats
        if self.on_device:
            self.backend.demote(pages, formats[tier], formats[other], *source, *target)
            return
        moved = self.taking_part(target[0] >= 0)
        old, new = ((page[moved], slot[moved]) for page, slot in (source, target))
        if new[0].numel():
            score, pos = self.backend.read_tracked(pages, formats[tier], *old)
            self.put(other, *new, *self.read(tier, *old), score=0.0 if score is None else score, pos=pos)

    def clear_scores(self, tier: TierPages) -> None:
        """Sets the scores in a tier's live pages to 0."""
        if not tier.ids.numel():
            return
        first_slot = torch.arange(tier.ids.shape[-1], device=tier.ids.device) * tier.fmt.tokens_per_page
        scores = self.backend.region(self.pool.pages, tier.fmt, "score")
        ids, live = tier.ids.flatten(), (first_slot < tier.num_k[..., None]).flatten()
        # As many pages whatever lists hold: a live one stands for those that are none, if there is one.
        ids = torch.where(live, ids, ids.gather(0, live.long().argmax(0, keepdim=True)))
        scores[ids] = torch.where(live.any(), 0.0, scores[ids])

    def compact(self, tier: int, lists: Tensor, keep: Tensor) -> None:
        """Drops slots of lists (int64 [M]) outside `keep` (bool [M, n]), closes the gaps, returns emptied pages.

        The lists share no page with others (`PageTable.unshare_all`).
        """
        fmt = self.formats[tier]
        self.table.compact(lists, tier, keep, fmt, partial(self.backend.move_slots, self.pool.pages, fmt))

    # Whole rows.

    def clear(self, lists: Tensor) -> None:
        for tier in range(len(self.formats)):
            self.table.truncate(lists, tier, torch.zeros_like(lists))
