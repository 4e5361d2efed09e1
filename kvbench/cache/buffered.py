"""Tokens that wait in 16-bit rings before they go to pages: how a residual buffer is filled and flushed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.counters import Counters
from kvbench.cache.layout import ModelShape
from kvbench.cache.offsets import KeyOffsets
from kvbench.cache.paged import Kept, Paged, PromptLayer
from kvbench.cache.pages import Pages
from kvbench.cache.rotation import Rotations
from kvbench.cache.steps import PagedStep
from kvbench.errors import SettingsConflict
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.operands import Ring, StepRing, TierPages
from kvbench.policy import DecodePlan, Policy, Residual

Count = TypeVar("Count", Tensor, int)


class ResidualBuffer:
    """Rings of 16-bit keys and values for all lists, with the counts that say which tokens are still in them.

    Token i of a list is in the key ring while `i >= num_k`, in the value ring while `i >= num_v`; it lies at i modulo
    the ring's length. On the key side a page's format takes `group_tokens` slots together.
    """

    def __init__(
        self,
        spec: Residual,
        lists_shape: tuple[int, int, int],
        head_dim: int,
        dtype: torch.dtype,
        group_tokens: int,
        device: torch.device,
        keys_only: bool = False,
    ) -> None:
        self.spec = spec = replace(spec, v_flush="all") if keys_only else spec  # one ring cannot leave in two ways
        self.group_tokens, self._sides = group_tokens, 1 if keys_only else 2
        # The oldest value leaves when R + 1 are held, and the newest is written before it does: one entry more.
        v_length = spec.num_tokens + (spec.v_flush == "oldest")
        self.k = torch.zeros(*lists_shape, spec.num_tokens, head_dim, dtype=dtype, device=device)
        self.v = self.k if keys_only else torch.zeros(*lists_shape, v_length, head_dim, dtype=dtype, device=device)
        counters = torch.zeros(3, math.prod(lists_shape), dtype=torch.int32, device=device)
        self.num_k, self.num_v, self.num_tokens = counters.unbind(0)

    @property
    def allocated_bytes(self) -> int:
        rings = (self.k, self.v)[: self._sides]
        return sum(t.nbytes for t in (*rings, self.num_k, self.num_v, self.num_tokens))

    @property
    def list_bytes(self) -> int:
        """Bytes of one list's rings, without counters."""
        return sum(ring[0, 0, 0].nbytes for ring in (self.k, self.v)[: self._sides])

    @property
    def most_leaving(self) -> tuple[int, int]:
        """Most keys and values of a list that leave the rings in one step."""
        size = self.spec.num_tokens
        return size, 1 if self.spec.v_flush == "oldest" else size

    def of_layer(self, rows: Tensor, layer: int, numbers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Key and value rings [S, H, R, D] of one layer.

        Views, not copies, when `rows`, whose host `numbers` are passed, are consecutive.
        """
        numbers = rows.tolist() if numbers is None else list(numbers)
        if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            chosen = slice(numbers[0], numbers[0] + len(numbers))
            return self.k[chosen, layer], self.v[chosen, layer]
        return self.k[rows, layer], self.v[rows, layer]

    def split_prompt(self, count: Count) -> tuple[Count, Count]:
        """Number of a prompt's `count` kept tokens that go to the pages at once: keys, values.

        `count` may be int64 [..] for several prompts.
        """
        size = self.spec.num_tokens
        if self.spec.hold_prompt:
            whole = count - count % size
            return whole, whole if self.spec.v_flush == "all" else (count - size) * (count > size)
        whole = count - count % self.group_tokens
        return whole, whole

    def paged_after(self, count: int, new: int) -> tuple[int, int]:
        """Slots in pages of a list that kept `count` tokens of a prompt and took `new` more, and their upper bound.

        The bound, per kept token, is that of a list which kept fewer.
        """
        period = self.spec.num_tokens if self.spec.hold_prompt else self.group_tokens
        prompt = torch.cat([torch.tensor([count]), torch.arange(period)])
        keys, values = self.split_prompt(prompt)
        total, size = prompt + new, self.spec.num_tokens
        keys = keys + (total - keys) // size * size
        if self.spec.v_flush == "oldest":
            keys = torch.maximum(keys, torch.maximum(values, total - size))
        return int(keys[0]), count + int((keys - prompt)[1:].max())

    def after_append(self, lists: Tensor, new: Tensor | int = 1) -> tuple[Tensor, Tensor]:
        """Counts (keys, values in pages) after each of these lists took `new` more tokens; int64 [M].

        `new` is 1, or int64 [M] of 0 and 1.
        """
        total = self.num_tokens[lists].long() + new
        held_k, held_v = self.num_k[lists].long(), self.num_v[lists].long()
        size = self.spec.num_tokens
        full = total - held_k >= size
        new_k = torch.where(full, total, held_k)
        if self.spec.v_flush == "all":
            return new_k, torch.where(full, total, held_v)
        return new_k, torch.where(total - held_v > size, total - size, held_v)

    def hold(self, lists: Tensor, num_k: Tensor, num_v: Tensor, num_tokens: Tensor) -> None:
        """Sets the counts of lists, int64 [M] each."""
        for counter, count in ((self.num_k, num_k), (self.num_v, num_v), (self.num_tokens, num_tokens)):
            counter[lists] = count.to(torch.int32)

    def clear(self, lists: Tensor) -> None:
        nothing = torch.zeros_like(lists)
        self.hold(lists, nothing, nothing, nothing)

    def copy(self, source: int, target: int, old: Tensor, new: Tensor) -> None:
        """Copies a row's rings; `old` and `new` int64 [M] are the lists of the two rows."""
        for counter in (self.num_k, self.num_v, self.num_tokens):
            counter[new] = counter[old]
        self.k[target], self.v[target] = self.k[source], self.v[source]


class Buffered(Paged):
    """Holds the newest tokens of every list in a ring and the others in pages of one tier; no action while decoding."""

    def __init__(
        self,
        policy: Policy,
        shape: ModelShape,
        pages: Pages,
        counters: Counters,
        rotations: Rotations,
        residual: Residual,
        first_layer: int,
        offsets: KeyOffsets | None = None,
    ) -> None:
        super().__init__(policy, shape, pages, counters, rotations, first_layer, offsets)
        # fp16 (bf16 for bf16 models), or the model's own dtype where a tier is native
        widest = max((fmt.slot.dtype for fmt in pages.formats), key=lambda dtype: dtype.itemsize)
        group = max(fmt.slot.group_tokens for fmt in pages.formats)
        self.ring = ResidualBuffer(residual, pages.shape, shape.head_dim, widest, group, shape.device, shape.keys_only)

    @property
    def takes_chunks(self) -> bool:
        return False  # a later segment comes token by token, through the rings

    @property
    def off_page_bytes(self) -> int:
        return super().off_page_bytes + self.ring.allocated_bytes

    @property
    def row_bytes(self) -> tuple[int, int]:
        fixed, rings = super().row_bytes
        lists = self.pages.lists_per_row
        return fixed + 3 * self.ring.num_k.element_size() * lists, rings + self.ring.list_bytes * lists

    @property
    def most_new_slots(self) -> int:
        return max(self.ring.most_leaving)

    @property
    def held_counts(self) -> list[Tensor]:
        return [*super().held_counts, self.ring.num_k, self.ring.num_v, self.ring.num_tokens]

    def sides(self, tier: int, lists: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.ring.num_k[lists].long(), self.ring.num_v[lists].long()
        if (tiers := self.pages.tier_map) is None:
            return keys, values
        in_tier = tiers.of(lists) == tier
        return keys * in_tier, values * in_tier

    def paged_slots(self, kept: int, new: int) -> tuple[int, int]:
        return self.ring.paged_after(kept, new)

    def slots_per_tier(self, lists: Tensor) -> list[Tensor]:
        held = [self.sides(tier, lists)[0] for tier in range(len(self.pages.formats))]
        return [*held, self.ring.num_tokens[lists].long() - self.ring.num_k[lists].long()]

    def ring_bytes(self, lists: Tensor) -> int:
        keys, values = int(self.ring.num_k[lists].sum()), int(self.ring.num_v[lists].sum())
        tokens = int(self.ring.num_tokens[lists].sum())
        buffered = (tokens - keys) + (0 if self.shape.keys_only else tokens - values)
        return buffered * self.shape.head_dim * self.ring.k.element_size()

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
        self.ring.copy(source, target, self.lists(source), self.lists(target))

    def _write_tier(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        """The oldest prompt tokens go to pages, the rest to the rings."""
        ring, table, head, token = self.ring, self.pages.table, kept.head, kept.token
        num_k, num_v = ring.split_prompt(kept.count)
        self._reserve(prompt, tier, torch.maximum(num_k, num_v))
        ring.hold(prompt.lists, num_k, num_v, kept.count)  # heads do not differ, so that a layer comes once
        if bool((kept.ordinal >= 0).all()) if kept.is_all is None else kept.is_all:
            self._write_all(prompt, tier, kept)
            return

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

    def _write_all(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        """Writes a prompt of which all tokens are kept.

        All heads are alike, so that targets are slices known on the host; masks would synchronise.
        """
        heads, length, _ = prompt.k.shape
        head, token = (index.view(heads, length) for index in (kept.head, kept.token))
        rings, sides = (self.ring.k, self.ring.v), ((prompt.paged_k, None), (None, prompt.v))
        for limit, ring, x, paged in zip(
            self.ring.split_prompt(length), rings, (prompt.k, prompt.v), sides, strict=True
        ):
            where = torch.arange(limit, length, device=x.device) % ring.shape[3]
            ring[prompt.row, prompt.layer][:, where] = x[:, limit:].to(ring.dtype)
            lists = prompt.lists[head[:, :limit].flatten()]
            page, slot = self.pages.table.lookup(lists, tier, token[:, :limit].flatten())
            written = (None if side is None else side[:, :limit].flatten(0, 1) for side in paged)
            self.pages.put(tier, page, slot, *written)

    def extend_prompt(
        self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, pos: list[Tensor], peak: Callable[[], None]
    ) -> None:
        if bool((tier_of != 0).any()):
            raise SettingsConflict(
                f"{type(self.policy).__name__} drops tokens of a prompt that is read in chunks, which its residual "
                "buffer does not allow; set prefill.chunk=null",
                setting="prefill.chunk",
            )
        heads, end, device = len(k), tier_of.shape[1], k.device
        first, lists, table = end - k.shape[1], self.lists_of_layer(row, layer), self.pages.table
        (tier,), count = self.pages.tiers_in(layer), torch.full_like(lists, end)
        num_k, num_v = self.ring.split_prompt(count)
        table.reserve(lists, tier, (torch.maximum(num_k, num_v) - self.pages.held(tier, lists)).clamp(min=0))
        for held, limit, new, ring in (
            (self.ring.num_k, num_k, k, self.ring.k),
            (self.ring.num_v, num_v, v, self.ring.v),
        ):
            old, until = int(held[lists[0]]), int(limit[0])  # all heads hold as much
            size = ring.shape[3]
            waited = ring[row, layer][:, torch.arange(old, first, device=device) % size]
            tail = torch.cat([waited.to(new.dtype), new], 1)  # tokens from `old` on
            token = torch.arange(old, until, device=device)
            page, slot = table.lookup(lists.repeat_interleave(len(token)), tier, token.repeat(heads))
            goes = tail[:, : until - old]
            if ring is self.ring.k:
                self.pages.put(tier, page, slot, k=self.rope.strip(goes, token).flatten(0, 1))
            else:
                self.pages.put(tier, page, slot, v=goes.flatten(0, 1))
            rest = torch.arange(until, end, device=device)
            ring[row, layer][:, rest % size] = tail[:, until - old :].to(ring.dtype)
        self.ring.hold(lists, num_k, num_v, count)

    def append(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        raise AssertionError("a residual buffer takes a later segment token by token")

    def step(self, rows: Rows, plan: DecodePlan | None = None) -> "BufferedStep":
        return BufferedStep(self, rows)  # whatever the plan: nothing moves but what the rings let go


class BufferedStep(PagedStep):
    """A decode step with a residual buffer: nothing is evicted, and tokens that leave the rings are quantised."""

    holding: Buffered

    def __init__(self, holding: Buffered, rows: Rows) -> None:
        self.flush_first = holding.ring.spec.when == "before_attention"
        super().__init__(holding, rows)

    def _make_room(self) -> None:
        """Reserves the slots of what leaves the rings in this step: counts before and after, keys and values."""
        ring, pages, lists = self.holding.ring, self.pages, self.lists.flatten()
        new = 1 if self.live is None else self.live
        before, after = (ring.num_k[lists].long(), ring.num_v[lists].long()), ring.after_append(lists, new)
        by_tier = [(tier, chosen, lists[chosen]) for tier, chosen in pages.tiers_of_rows(len(self.rows))]
        pages.host.advance(self.rows.numbers, self.holding.most_new_slots)
        with pages.undone() as done:
            for tier, chosen, named in by_tier:
                grown = torch.maximum(*(x[chosen] for x in after)) - pages.held(tier, named)
                at_most = len(named) * self.holding.most_new_pages
                held = pages.table.reserve(named, tier, grown.clamp(min=0), at_most=at_most)
                done.append((named, tier, held))
            if pages.pool.others is not None:
                for tier, chosen, named in by_tier:
                    self._unshare(tier, chosen, named, before, after)
        ring.num_tokens[lists] += new
        self._before = before[0].view(self.lists.shape), before[1].view(self.lists.shape)
        self._after = after[0].view(self.lists.shape), after[1].view(self.lists.shape)

    def _unshare(
        self,
        tier: int,
        chosen: Tensor | slice,
        lists: Tensor,
        before: tuple[Tensor, Tensor],
        after: tuple[Tensor, Tensor],
    ) -> None:
        """Takes the pages that either side fills out of what lists share: in each, the first slot is named."""
        size = self.pages.formats[tier].tokens_per_page
        for old, new, most in zip(before, after, self.holding.ring.most_leaving, strict=True):
            for page in range(-(-most // size) + 1):
                slot = torch.maximum(old, old // size * size + page * size)
                self.pages.table.unshare([(tier, lists, torch.where(slot < new, slot, -1)[chosen])])

    @property
    def strips(self) -> bool:
        return False  # a ring holds keys as they come; they lose their position on the way to a page

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends to the rings, then attends and flushes in the order that the residual declares."""
        rings, rows = self.holding.ring, self.rows.tensor
        (tier,), _ = Paged.layer(self.holding, rows, layer, self.width[layer])
        lists = self.lists[:, layer]
        tier.num_k, tier.num_v = (count[:, layer] for count in self._before)
        self.holding.rope.attach([tier], None)
        heads, num_tokens = torch.arange(self.pages.shape[2], device=rows.device), rings.num_tokens[lists].long()
        for buffer, x in ((rings.k, k), (rings.v, v)):
            buffer[rows[:, None], layer, heads, (num_tokens - 1) % buffer.shape[3]] = x.to(buffer.dtype)
        numbers = () if self.pages.on_device else self.rows.numbers  # a captured step is replayed for other rows
        ring = Ring(*rings.of_layer(rows, layer, numbers), num_tokens)
        if self.flush_first:
            self._flush(layer, ring)
            tier.num_k, tier.num_v = (count[:, layer] for count in self._after)
        softmax, backend = self.holding.softmax_of(layer), self.pages.backend
        out, _, _ = backend.paged_decode(q, self.pages.pool.pages, [tier], ring, scale, softmax=softmax)
        if not self.flush_first:
            self._flush(layer, ring)
        return out

    def _held(self, layer: int) -> tuple[list[TierPages], Ring | None]:
        (tier,), ring = super()._held(layer)
        tier.num_k, tier.num_v = (count[:, layer] for count in self._after)
        return [tier], ring

    def end(self) -> None:
        super().end()
        lists, ring = self.lists.flatten(), self.holding.ring
        ring.num_k[lists], ring.num_v[lists] = (x.flatten().to(torch.int32) for x in self._after)

    def _flush(self, layer: int, ring: Ring) -> None:
        """Quantises the tokens that leave the rings in this step into their tier's pages."""
        lists, pages = self.lists[:, layer, :, None], self.pages
        (tier,) = pages.tiers_in(layer)
        for side, (buffer, most) in enumerate(zip((ring.k, ring.v), self.holding.ring.most_leaving, strict=True)):
            old, new = self._before[side][:, layer, :, None], self._after[side][:, layer, :, None]
            token = old + torch.arange(most, device=old.device)  # [S, H, most]; those from `new` on stay
            goes = pages.taking_part((token < new).flatten())
            slot = torch.where(token < new, token, -1).flatten()[goes]
            if not slot.numel():
                continue
            page, slot = pages.table.lookup(lists.expand(token.shape).flatten()[goes], tier, slot)
            index = (token % buffer.shape[2])[..., None].expand(*token.shape, buffer.shape[3])
            leaving, token = buffer.gather(2, index).flatten(0, 2)[goes], token.flatten()[goes]
            if side == 0:
                pages.put(tier, page, slot, k=self.holding.rope.strip(leaving, token))
            else:
                pages.put(tier, page, slot, v=leaving)

    def _fuse_tiers(self, numbers: Sequence[int]) -> FusedStep | None:
        (tier,) = numbers
        rings, held = self.holding.ring, self._after if self.flush_first else self._before
        num_tokens = rings.num_tokens[self.lists]
        ring = StepRing(
            k=rings.k,
            v=rings.v,
            rows=self.rows.tensor,
            num_tokens=num_tokens
            if self.live is None
            else num_tokens.clamp(min=1),  # the spare row's ring takes it, too
            before=self._before,
            after=self._after,
            flush_first=self.flush_first,
            most_leaving=rings.most_leaving,
            frequencies=self.holding.rope.leaving,
        )
        if self.pages.on_device:
            return self._open_tables([self._tables[tier]], held=held, ring=ring)
        pages = self._named(tier)
        pages.num_k, pages.num_v = held
        return self._open_layers([pages], ring=ring)

    def _fuse(self) -> FusedStep | None:
        # On a device a step looks up where all layers' rings flush to, in the pages of one format.
        return None if self.pages.on_device and self.pages.tier_map is not None else super()._fuse()
