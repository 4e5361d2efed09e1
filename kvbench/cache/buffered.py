"""Tokens that wait in 16-bit rings before they go to pages: how a residual buffer is filled and flushed."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.counters import Counters
from kvbench.cache.kept import Kept, PromptLayer
from kvbench.cache.layout import ModelShape
from kvbench.cache.paged import Paged
from kvbench.cache.pages import Pages
from kvbench.cache.ring import ResidualBuffer
from kvbench.cache.rotation import Turns
from kvbench.cache.steps import PagedStep
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.operands import Ring, StepRing, TierPages
from kvbench.policy import DecodePlan, Policy, Residual


class Buffered(Paged):
    """Holds the newest tokens of every list in a ring and the others in the pages of its one tier.

    Args:
        policy: Decides; it has one tier and does not act while decoding.
        shape: The model's shape.
        pages: The pages.
        counters: What the rows have seen.
        turns, first_layer: See `Holding`.
        residual: The policy's residual buffer.
    """

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        pages: Pages,
        counters: Counters,
        turns: Turns,
        residual: Residual,
        first_layer: int = 0,
    ) -> None:
        super().__init__(policy, shape, pages, counters, turns, first_layer)
        # fp16 (bf16 for bf16 models), or the model's own dtype where a tier is native
        widest = max((fmt.slot.dtype for fmt in pages.formats), key=lambda dtype: dtype.itemsize)
        group = max(fmt.slot.group_tokens for fmt in pages.formats)
        self.ring = ResidualBuffer(residual, pages.shape, shape.head_dim, widest, group, shape.device)

    @property
    def takes_chunks(self) -> bool:
        return False  # a later segment comes token by token, through the rings

    @property
    def allocated_bytes(self) -> int:
        return self.ring.allocated_bytes

    @property
    def row_bytes(self) -> tuple[int, int]:
        lists = self.pages.lists_per_row
        return 3 * self.ring.num_k.element_size() * lists, self.ring.list_bytes * lists

    @property
    def most_new_pages(self) -> int:
        smallest = min(fmt.tokens_per_page for fmt in self.pages.formats)
        return -(-max(self.ring.most_leaving) // smallest)

    @property
    def held_counts(self) -> list[Tensor]:
        return [*super().held_counts, self.ring.num_k, self.ring.num_v, self.ring.num_tokens]

    def sides(self, tier: int, lists: Tensor) -> tuple[Tensor, Tensor]:
        counts = self.ring.num_k[lists].long(), self.ring.num_v[lists].long()
        if (homes := self.pages.homes) is None:
            return counts
        at_home = homes.of(lists) == tier
        return counts[0] * at_home, counts[1] * at_home

    def paged_slots(self, kept: int, new: int) -> tuple[int, int]:
        return self.ring.paged_after(kept, new)

    def slots_per_tier(self, lists: Tensor) -> list[Tensor]:
        held = [self.sides(tier, lists)[0] for tier in range(len(self.pages.formats))]
        return [*held, self.ring.num_tokens[lists].long() - self.ring.num_k[lists].long()]

    def ring_bytes(self, lists: Tensor) -> int:
        keys, values = int(self.ring.num_k[lists].sum()), int(self.ring.num_v[lists].sum())
        tokens = int(self.ring.num_tokens[lists].sum())
        return ((tokens - keys) + (tokens - values)) * self.shape.head_dim * self.ring.k.element_size()

    def layer(self, rows: Tensor, layer: int, width: list[int] | None = None) -> tuple[list[TierPages], Ring | None]:
        (tier,), _ = super().layer(rows, layer, width)
        lists = self.pages.layer_lists(rows, layer)
        tier.num_k, tier.num_v = self.ring.num_k[lists].long(), self.ring.num_v[lists].long()
        return [tier], Ring(*self.ring.of_layer(rows, layer), self.ring.num_tokens[lists].long())

    def clear(self, lists: Tensor) -> None:
        super().clear(lists)
        self.ring.clear(lists)

    def share(self, source: int, target: int) -> None:
        super().share(source, target)
        rows = torch.tensor([source, target], device=self.shape.device)
        self.ring.copy(source, target, *(self.pages.lists_of(row[None]) for row in rows))

    def _write_tier(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        """The oldest prompt tokens go to pages, the rest to the rings."""
        ring, table, head, token = self.ring, self.pages.table, kept.head, kept.token
        num_k, num_v = ring.split_prompt(kept.count)
        table.reserve(prompt.lists, tier, torch.maximum(num_k, num_v))

        def split(limit: Tensor, x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Puts the newest into the ring; page, slot and index of the others."""
            paged = kept.ordinal < limit[head]
            rest = ~paged
            where = kept.ordinal[rest] % buffer.shape[3]
            buffer[prompt.row, prompt.layer, head[rest], where] = x[head[rest], token[rest]].to(buffer.dtype)
            return *table.lookup(prompt.lists[head[paged]], tier, kept.ordinal[paged]), paged

        page, slot, paged = split(num_k, prompt.k, ring.k)
        self.pages.put(tier, page, slot, k=prompt.paged_k[head[paged], token[paged]])
        page, slot, paged = split(num_v, prompt.v, ring.v)
        self.pages.put(tier, page, slot, v=prompt.v[head[paged], token[paged]])
        ring.hold(prompt.lists, num_k, num_v, kept.count)  # heads do not differ, so that a layer comes once

    def extend_prompt(
        self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, pos: list[Tensor], peak: Callable[[], None]
    ) -> None:
        """As there, but nothing may be dropped: what leaves the rings goes to pages, as of a prompt read at once."""
        if bool((tier_of != 0).any()):
            raise ValueError(
                f"{type(self.policy).__name__} drops tokens of a prompt that is read in chunks, which its residual "
                "buffer does not allow; set prefill.chunk=null"
            )
        heads, end = len(k), tier_of.shape[1]
        first = end - k.shape[1]
        lists = self.pages.layer_lists(torch.tensor([row], device=k.device), layer).flatten()
        count = torch.full_like(lists, end)
        num_k, num_v = self.ring.split_prompt(count)
        table, before = self.pages.table, self.pages.held(0, lists)
        most = torch.maximum(num_k, num_v)
        table.reserve(lists, 0, (most - before).clamp(min=0))
        for held, limit, new, ring, is_key in (
            (self.ring.num_k, num_k, k, self.ring.k, True),
            (self.ring.num_v, num_v, v, self.ring.v, False),
        ):
            old, until = int(held[lists[0]]), int(limit[0])  # all heads hold as much
            size = ring.shape[3]
            waited = ring[row, layer][:, torch.arange(old, first, device=k.device) % size]
            tail = torch.cat([waited.to(new.dtype), new], 1)  # tokens from `old` on
            token = torch.arange(old, until, device=k.device)
            page, slot = table.lookup(lists.repeat_interleave(len(token)), 0, token.repeat(heads))
            goes = tail[:, : until - old]
            if is_key:
                self.pages.put(0, page, slot, k=self.rope.strip(goes, token).flatten(0, 1))
            else:
                self.pages.put(0, page, slot, v=goes.flatten(0, 1))
            rest = torch.arange(until, end, device=k.device)
            ring[row, layer][:, rest % size] = tail[:, until - old :].to(ring.dtype)
        self.ring.hold(lists, num_k, num_v, count)

    def append(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        raise AssertionError("a residual buffer takes a later segment token by token")

    def _compact(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Nothing: tokens behind rings are not evicted."""

    def step(self, rows: Tensor, numbers: Sequence[int], plan: DecodePlan | None = None) -> "BufferedStep":
        return BufferedStep(self, rows, numbers)  # whatever the plan: nothing moves but what the rings let go


class BufferedStep(PagedStep):
    """A decode step behind a residual buffer: nothing is evicted, and tokens that leave the rings are quantised.

    Args:
        holding: What holds the tokens.
        rows: int64 [S] live rows.
        numbers: The same as the host knows them.
    """

    holding: Buffered

    def __init__(self, holding: Buffered, rows: Tensor, numbers: Sequence[int]) -> None:
        super().__init__(holding, rows, numbers)
        self.flush_first = holding.ring.spec.when == "before_attention"

    def _plan(self) -> None:
        """Reserves the slots of what leaves the rings in this step: counts before and after, keys and values."""
        ring, lists = self.holding.ring, self.lists.flatten()
        self._before = ring.num_k[lists].long(), ring.num_v[lists].long()
        self._after = ring.after_append(lists)
        table, most = self.pages.table, max(ring.most_leaving)
        self.pages.grow(self.numbers, most)
        done: list[tuple[Tensor, int, Tensor]] = []
        try:
            for tier, chosen in self.pages.parts_of_rows(len(self.rows)):
                own = lists[chosen]
                grown = torch.maximum(*(after[chosen] for after in self._after)) - self.pages.held(tier, own)
                at_most = len(own) * self.holding.most_new_pages
                held = table.reserve(own, tier, grown.clamp(min=0), at_most=at_most)
                done.append((own, tier, held))
            if self.pages.pool.others is not None:
                if self.pages.on_device:
                    for tier, chosen in self.pages.parts_of_rows(len(self.rows)):
                        self._own_by_masks(tier, lists, chosen)
                else:
                    table.own(self._written(lists))
        except BaseException:
            for own, tier, held in done:
                table.truncate(own, tier, held)
            raise
        ring.num_tokens[lists] += 1

    def _written(self, lists: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """The slots that the keys and the values of the lists fill in this step, by tier."""
        found = []
        for tier, chosen in self.pages.parts_of_rows(len(self.rows)):
            own = lists[chosen]
            for before, after in zip(self._before, self._after, strict=True):
                old, leaving = before[chosen], after[chosen] - before[chosen]
                owner = torch.repeat_interleave(torch.arange(len(own), device=lists.device), leaving)
                first = leaving.cumsum(0) - leaving
                slot = old[owner] + torch.arange(owner.numel(), device=lists.device) - first[owner]
                found.append((tier, own[owner], slot))
        return found

    def _own_by_masks(self, tier: int, lists: Tensor, chosen: Tensor | slice) -> None:
        """Takes the pages that either side fills out of what the lists share: in each, the first slot is named."""
        size = self.pages.formats[tier].tokens_per_page
        for before, after, most in zip(self._before, self._after, self.holding.ring.most_leaving, strict=True):
            for page in range(-(-most // size) + 1):
                slot = torch.maximum(before, before // size * size + page * size)
                self.pages.table.own([(tier, lists[chosen], torch.where(slot < after, slot, -1)[chosen])])

    @property
    def strips(self) -> bool:
        return False

    def strip(self, k: Tensor) -> Tensor:
        return k  # a ring holds keys as they come; they lose their position on the way to a page

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends to the rings, then attends and flushes in the order that the residual asks for."""
        rings, rows = self.holding.ring, self.rows
        (tier,), _ = Paged.layer(self.holding, rows, layer, self.width[layer])
        lists, tiers = self.lists[:, layer], [tier]
        tier.num_k, tier.num_v = (count.view(self.lists.shape)[:, layer] for count in self._before)
        self.holding.rope.turn(tiers, None)
        heads, num_tokens = torch.arange(self.pages.shape[2], device=rows.device), rings.num_tokens[lists].long()
        for buffer, x in ((rings.k, k), (rings.v, v)):
            buffer[rows[:, None], layer, heads, (num_tokens - 1) % buffer.shape[3]] = x.to(buffer.dtype)
        ring = Ring(*rings.of_layer(rows, layer, self.numbers), num_tokens)
        if self.flush_first:
            self._flush(layer, ring)
            tiers[0].num_k, tiers[0].num_v = (count.view(self.lists.shape)[:, layer] for count in self._after)
        out, _, _ = self.pages.backend.paged_decode(q, self.pages.pool.pages, tiers, ring, scale)
        if not self.flush_first:
            self._flush(layer, ring)
        return out

    def end(self) -> None:
        super().end()
        lists = self.lists.flatten()
        self.holding.ring.num_k[lists], self.holding.ring.num_v[lists] = (x.to(torch.int32) for x in self._after)

    def _flush(self, layer: int, ring: Ring) -> None:
        """Quantises the tokens that leave the rings in this step into their tier's pages."""
        if self.pages.on_device:
            self._flush_by_masks(layer, ring)
            return
        tier = self._tier(layer)
        page, slot, leaving, ordinal = self._leaving(layer, 0, ring.k)
        if ordinal.numel():
            self.pages.put(tier, page, slot, k=self.holding.rope.strip(leaving, ordinal))
        page, slot, leaving, ordinal = self._leaving(layer, 1, ring.v)
        if ordinal.numel():
            self.pages.put(tier, page, slot, v=leaving)

    def _tier(self, layer: int) -> int:
        """Where the tokens of a layer go."""
        return 0 if self.pages.homes is None else self.pages.homes.of_layer(layer)

    def _flush_by_masks(self, layer: int, ring: Ring) -> None:
        """The same without a size that depends on content: what stays has slot -1, which is passed over."""
        lists, rope, tier = self.lists[:, layer], self.holding.rope, self._tier(layer)
        for side, (buffer, most) in enumerate(zip((ring.k, ring.v), self.holding.ring.most_leaving, strict=True)):
            old, new = (
                counts[side].view(self.lists.shape)[:, layer, :, None] for counts in (self._before, self._after)
            )
            token = old + torch.arange(most, device=old.device)
            each = lists[..., None].expand(token.shape).flatten()
            page, slot = self.pages.table.lookup(each, tier, torch.where(token < new, token, -1).flatten())
            place = (token % buffer.shape[2])[..., None].expand(*token.shape, buffer.shape[3])
            leaving = buffer.gather(2, place).flatten(0, 2)
            if side == 0:
                self.pages.put(tier, page, slot, k=rope.strip(leaving, token.flatten()))
            else:
                self.pages.put(tier, page, slot, v=leaving)

    def _leaving(self, layer: int, side: int, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What leaves one side (0 keys, 1 values) of a layer: page and slot to write to, vectors, ordinals."""
        lists = self.lists[:, layer]
        old, new = (counts[side].view(self.lists.shape)[:, layer] for counts in (self._before, self._after))
        token = old[..., None] + torch.arange(buffer.shape[2], device=old.device)
        row, head, index = (token < new[..., None]).nonzero(as_tuple=True)
        ordinal = token[row, head, index]
        page, slot = self.pages.table.lookup(lists[row, head], self._tier(layer), ordinal)
        return page, slot, buffer[row, head, ordinal % buffer.shape[2]], ordinal

    def _fuse_at(self, tier: int) -> FusedStep | None:
        rings = self.holding.ring
        before, after = (
            (keys.view(self.lists.shape), values.view(self.lists.shape)) for keys, values in (self._before, self._after)
        )
        held = after if self.flush_first else before
        ring = StepRing(
            k=rings.k,
            v=rings.v,
            rows=self.rows,
            num_tokens=rings.num_tokens[self.lists],
            before=before,
            after=after,
            flush_first=self.flush_first,
            most_leaving=rings.most_leaving,
            frequencies=self.holding.rope.leaving,
        )
        if self.pages.on_device:
            table = self.pages.step_tiers(self.numbers, self.lists, partial(self.holding.rope.turn_of, self.view))[tier]
            return self._open_tables([table], held=held, ring=ring)
        own = self.pages.tier(tier, self.lists, self.pages.width(self.numbers, tier))
        own.num_k, own.num_v = held
        return self._open_layers([own], ring=ring)

    def _fuse(self) -> FusedStep | None:
        if self.pages.homes is None:
            return self._fuse_at(0)
        # On a device a step looks up where all layers' rings flush to, in the pages of one format.
        return None if self.pages.on_device else super()._fuse()
