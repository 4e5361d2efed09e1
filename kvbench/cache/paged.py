"""Tokens that go straight to pages: how prompts are written, and how a decode step makes room."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows, one_row
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.holding import EvictionDue, Holding
from kvbench.cache.pages import Pages
from kvbench.cache.steps import PagedStep
from kvbench.policy import EVICT, CompactPlan, DecodePlan, DecodeView

SCRATCH_SLOTS = 256  # per list, which kept slots pass through on their way down

Arrivals = tuple[Tensor, Tensor, Tensor, Tensor]  # head and position int64 [M], keys and values [M, D]


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prompt on its way into the cache.

    Its lists int64 [H]; keys and values [H, N, D] from the model, keys in stored form, and fp32 [H, N] initial scores
    of the slots, or None for 0.
    """

    row: int
    layer: int
    lists: Tensor
    k: Tensor
    v: Tensor
    paged_k: Tensor
    score: Tensor | None


@dataclass(frozen=True)
class Kept:
    """Tokens of a prompt layer that go to one tier, in position order.

    Per token, int64 [M], the head, the position in the prompt and the index in the head's list; int64 [H] tokens per
    head. With `in_order` they are all tokens of all heads, one after the other; dropped ones have index -1, which every
    kernel skips. `is_all` says whether all are kept, None where the host has not read it.
    """

    head: Tensor
    token: Tensor
    ordinal: Tensor
    count: Tensor
    in_order: bool = False
    is_all: bool | None = None

    @staticmethod
    def waited(chosen: Tensor) -> "Kept":
        """The tokens that bool [H, N] chooses."""
        count = chosen.sum(1)
        if bool(chosen.all()):  # one synchronisation to ask, many to look for them
            head, token = Kept._each(chosen)
            return Kept(head, token, token, count, in_order=True, is_all=True)
        head, token = chosen.nonzero(as_tuple=True)
        ordinal = torch.arange(len(head), device=chosen.device) - (count.cumsum(0) - count)[head]
        return Kept(head, token, ordinal, count, is_all=False)

    @staticmethod
    def on_device(chosen: Tensor) -> "Kept":
        """Indices of kept tokens made without a wait for the device."""
        ordinal = torch.where(chosen, chosen.cumsum(1) - 1, -1)
        return Kept(*Kept._each(chosen), ordinal.flatten(), chosen.sum(1), in_order=True)

    @staticmethod
    def _each(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The head and the position of all tokens."""
        head, token = (torch.arange(size, device=chosen.device) for size in chosen.shape)
        return head[:, None].expand(chosen.shape).flatten(), token.expand(chosen.shape).flatten()

    def of(self, x: Tensor) -> Tensor:
        """Entries of x [H, N, ...] that belong to kept tokens, [M, ...]."""
        return x.flatten(0, 1).contiguous() if self.in_order else x[self.head, self.token]


class Parts:
    """Parts of a cache that hold the layers of a model, in order: one `Paged`, or several in a `Split`.

    `plans` makes the policy's plans for all of them, and `due` tracks the bulk evictions of their rows.
    """

    parts: "Sequence[Paged]"
    plans: CheckedPlans
    due: EvictionDue

    def part_of(self, layer: int) -> "tuple[int, Paged]":
        """The place that holds a layer of the model, by its number in `parts` and itself."""
        return 0, self.parts[0]

    def view(self, rows: Rows) -> DecodeView:
        raise NotImplementedError

    def compact(self, rows: Rows) -> None:
        raise NotImplementedError

    @property
    def takes_chunks(self) -> bool:
        """True if `Paged.append` may be called; alike in all places."""
        return self.parts[0].takes_chunks

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the allocator holds: pools, tables, counters, rings."""
        return sum(
            part.pages.allocated_bytes + part.counters.allocated_bytes + part.off_page_bytes for part in self.parts
        )

    @property
    def used_bytes(self) -> int:
        return sum(part.pages.pool.num_used * part.pages.pool.page_bytes for part in self.parts)

    def open_row(self, row: int, instruction_tokens: int) -> None:
        self.collect()  # before what it says of the row that was here is forgotten
        for part in self.parts:
            part.counters.open(row, instruction_tokens)
            if part.offsets is not None:
                part.offsets.clear(row)
        self.forget(row)

    def close_row(self, row: int) -> None:
        for part in self.parts:
            part.clear(part.lists(row))

    def fork_row(self, source: int, row: int, share: bool) -> None:
        for part in self.parts:
            part.share(source, row)
            if not share:
                part.pages.table.unshare_all(part.lists(row))
            part.counters.copy(source, row)
            part.pages.host.copy(source, row)

    def hold(self, row: int, tokens: int) -> None:
        for part in self.parts:
            part.counters.hold(row, tokens)

    def forget(self, number: int) -> None:
        """Notes that what the host was told of a row holds no longer."""
        for part in self.parts:
            part.pages.host.forget(number)
        self.due.forget((number,))

    def tell(self, rows: Rows) -> None:
        """Sends the host, after a step and without a wait, the counts that the next step reads."""
        for part in self.parts:
            part.pages.tell(rows.on(part.shape.device))
        self.due.tell(rows.numbers, lambda: self.view(rows))

    def send(self) -> None:
        for part in self.parts:
            part.pages.counts.send()

    def collect(self) -> None:
        for part in self.parts:
            part.pages.counts.collect()

    def drop(self) -> None:
        for part in self.parts:
            part.pages.counts.drop()


class Paged(Holding, Parts):
    """Holds every token in pages, and lets the policy act on them."""

    @property
    def parts(self) -> "Sequence[Paged]":  # type: ignore[override]
        return (self,)

    @property
    def takes_chunks(self) -> bool:
        return not (self.policy.acts_in_decode or self.policy.compaction)

    # Prompts.

    def write_prompt(self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, score: Tensor | None) -> None:
        """Writes the kept tokens of one layer of a prompt, k and v [H, N, D] post-RoPE, per tier in position order.

        The plan is int8 [H, N] (where layers or heads differ, 0 stands for the list's base tier); `score` fp32 [H, N]
        is the initial scores of the slots, None = 0.
        """
        paged_k = self.rope.strip(k, torch.arange(k.shape[1], device=k.device))
        prompt = PromptLayer(row, layer, self.lists_of_layer(row, layer), k, v, paged_k, score)
        tier_of = self.pages.stands_for(tier_of, prompt.lists)
        for tier in self.pages.tiers_in(layer):
            # Slots that share scales lie side by side, and codebooks count what they take: neither passes over any.
            waits = self.pages.formats[tier].slot.channel_keys or self.pages.codebooks is not None
            kept = Kept.waited if waits or not self.pages.on_device else Kept.on_device
            self._write_tier(prompt, tier, kept(tier_of == tier))

    def _reserve(self, prompt: PromptLayer, tier: int, count: Tensor) -> None:
        """Takes the pages of so many slots of each list (int64 [H]), of a prompt's tokens at most."""
        most = -(-prompt.k.shape[1] // self.pages.formats[tier].tokens_per_page) * len(count)
        self.pages.table.reserve(prompt.lists, tier, count, at_most=most)

    def _write_tier(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        self._reserve(prompt, tier, kept.count)
        page, slot = self.pages.table.lookup(prompt.lists[kept.head], tier, kept.ordinal)
        score = 0.0 if prompt.score is None else kept.of(prompt.score)
        k, v, of = kept.of(prompt.paged_k), kept.of(prompt.v), (prompt.layer, kept.head)
        self.pages.put(tier, page, slot, k, v, score=score, pos=kept.token, of=of)

    def extend_prompt(
        self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, pos: list[Tensor], peak: Callable[[], None]
    ) -> None:
        """Carries out the plan for one layer of a prompt that is read in chunks (see `cache.chunks`).

        Args:
            k, v: [H, n, D] the newest chunk, post-RoPE.
            tier_of: int8 [H, N] the planned tier of each position so far; a held one never goes to an earlier tier.
            pos: Per tier, int32 [H, slots] what lies where; is brought up to date.
            peak: Called while most pages are in use.
        """
        position = torch.arange(tier_of.shape[1] - k.shape[1], tier_of.shape[1], device=k.device)
        lists = self.lists_of_layer(row, layer)
        tier_of = self.pages.stands_for(tier_of, lists)
        replan(self.pages, layer, lists, tier_of, pos, self.rope.strip(k, position), v, peak)

    def append(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; see `CompressedStore.append_chunk`."""
        pages, chunk = self.pages, k.shape[1]
        tiers, _ = self.layer(one_row(row, k.device), layer)
        self.rope.attach(tiers, None)
        keys, values, live = pages.gather(layer, tiers, None)
        held = keys[0], values[0], live[0]
        out = pages.backend.chunk_attention(q, k, v, held, scale, self.softmax_of(layer))
        offset = torch.arange(chunk, device=k.device)
        position = self.counters.seen[row] + offset
        stripped = self.rope.strip(k, position)
        less = None if self.offsets is None else self.offsets.of_layer(row, layer, len(k))
        for tier, heads in pages.tiers_of_layer(layer):
            lists = self.lists_of_layer(row, layer)
            head = torch.arange(len(lists), device=k.device)
            lists, new_k, new_v, head = (x if heads is None else x[heads] for x in (lists, stripped, v, head))
            first = pages.table.reserve(lists, tier, torch.full_like(lists, chunk))
            each, ordinal = lists.repeat_interleave(chunk), (first[:, None] + offset).flatten()
            pages.table.unshare([(tier, each, ordinal)])
            pages.put(
                tier,
                *pages.table.lookup(each, tier, ordinal),
                new_k.flatten(0, 1),
                new_v.flatten(0, 1),
                score=self.scores.of_token(k, v, less).flatten() if self.scores.writes_tokens else 0.0,
                pos=position.repeat(len(lists)),
                of=(layer, head.repeat_interleave(chunk)),
            )
        return out

    # Decode steps.

    def open(self, rows: Rows) -> "list[PagedStep]":
        """Plans one decode step for rows and reserves slots for their tokens, one step for each of `parts`.

        Raises the errors of `CompressedStore.begin_step`.
        """
        whose = self.due.whose(rows.numbers, lambda: self.view(rows))
        if whose:
            self.compact(rows if len(whose) == len(rows) else Rows.of(whose, self.shape.device))
        return [self.step(rows)]

    def compact(self, rows: Rows) -> None:
        """Evicts in bulk from rows, by the policy's plan."""
        self.pages.table.unshare_all(
            self.pages.lists_of(rows.tensor)
        )  # before the plan, which could not be carried out
        self.evict(rows, self.plans.compact(self.view(rows, measured=True)))

    def step(self, rows: Rows, plan: DecodePlan | None = None) -> "PagedStep":
        return PagedStep(self, rows, plan)

    def evict(self, rows: Rows, plan: CompactPlan) -> None:
        """Carries out a bulk eviction on all lists of rows, whose pages are shared with no other row."""
        pages, lists = self.pages, self.pages.lists_of(rows.tensor)
        for tier, keep in enumerate(plan.keep):
            if keep is not None:
                pages.compact(tier, lists, keep.flatten(0, 2))
        for tier in range(len(pages.formats)) if plan.restart_scores else ():
            pages.clear_scores(pages.tier(tier, lists, pages.width(rows.numbers, tier)))

    def note_replay(self, numbers: Sequence[int]) -> None:
        """Notes on the host what a replayed step of rows has done."""
        self.due.forget(numbers)
        self.pages.host.advance(numbers, self.most_new_slots)
        self.counters.step_on_host(numbers)


# Prompts that are read in chunks: positions of slots are kept outside the pages meanwhile, int32 [H, slots] per tier
# with -1 past a list's end.


def replan(
    pages: Pages,
    layer: int,
    lists: Tensor,
    tier_of: Tensor,
    pos: list[Tensor],
    k: Tensor,
    v: Tensor,
    peak: Callable[[], None],
) -> None:
    """Carries out a plan for one layer of a prompt; see `Paged.extend_prompt`.

    Dropped tokens are removed, tokens of another tier are encoded again, and the newest chunk is written. Lists int64
    [H] share no page with others.
    """
    first = tier_of.shape[1] - k.shape[1]
    arrivals: list[list[Arrivals]] = [[] for _ in pages.formats]
    stays = [_leaving(pages, tier, lists, tier_of, kept, arrivals) for tier, kept in enumerate(pos)]
    for tier, kept in enumerate(stays):
        if bool((kept != (pos[tier] >= 0)).any()):
            _keep(pages, tier, lists, kept, k.shape[1], peak)
            pos[tier] = _packed(pos[tier], kept)
    for tier in range(len(pages.formats)):
        head, token = (tier_of[:, first:] == tier).nonzero(as_tuple=True)
        chunk = head, first + token, k[head, token], v[head, token]
        pos[tier] = _append(pages, tier, layer, lists, [*arrivals[tier], chunk], pos[tier])


def _keep(pages: Pages, tier: int, lists: Tensor, stays: Tensor, room: int, peak: Callable[[], None]) -> None:
    """Closes the gaps of dropped slots in lists (int64 [H]), in order, and returns emptied pages.

    Bytes are moved unchanged, through up to `room` slots after the list's end, since a move must not write where
    another one reads; `peak` is called while these are allocated. `stays` is bool [H, slots], False past a list's end.
    """
    table, before = pages.table, pages.held(tier, lists)
    slot = torch.arange(stays.shape[1], device=stays.device)
    target = stays.cumsum(1) - 1
    moves = stays & (target != slot)
    if bool(moves.any()):
        rank, width = moves.cumsum(1) - 1, min(SCRATCH_SLOTS, room)
        most = moves.sum(1)
        table.reserve(lists, tier, most.clamp(max=width))
        peak()
        for first in range(0, int(most.max()), width):
            head, source = (moves & (rank >= first) & (rank < first + width)).nonzero(as_tuple=True)
            scratch = before[head] + rank[head, source] - first
            for old, new in ((source, scratch), (scratch, target[head, source])):
                pages.backend.move_slots(
                    pages.pool.pages,
                    pages.formats[tier],
                    *table.lookup(lists[head], tier, old),
                    *table.lookup(lists[head], tier, new),
                )
    table.truncate(lists, tier, stays.sum(1))


def _append(pages: Pages, tier: int, layer: int, lists: Tensor, arrivals: list[Arrivals], pos: Tensor) -> Tensor:
    """Appends tokens to lists in position order.

    `pos` is int32 [H, slots], the positions held; returns them with the new ones.
    """
    head, position, k, v = (torch.cat([part[i] for part in arrivals]) for i in range(4))
    if not head.numel():
        return pos
    order = torch.argsort(head * (int(position.max()) + 1) + position)
    head, position, k, v = head[order], position[order], k[order], v[order]
    count = torch.bincount(head, minlength=len(lists))
    first = pages.table.reserve(lists, tier, count)
    ordinal = first[head] + torch.arange(len(head), device=head.device) - (count.cumsum(0) - count)[head]
    page, slot = pages.table.lookup(lists[head], tier, ordinal)
    pages.put(tier, page, slot, k, v, score=0.0, pos=position, of=(layer, head))
    grown = padded(pos, int((first + count).max()))
    grown[head, ordinal] = position.to(pos.dtype)
    return grown


def _leaving(
    pages: Pages, tier: int, lists: Tensor, goes_to: Tensor, pos: Tensor, arrivals: list[list[Arrivals]]
) -> Tensor:
    """Removes from a tier the tokens that are dropped or go to other tiers, by `goes_to`.

    `goes_to` is int8 [H, N], the new tier of each position. Tokens that change tier are read, into the `arrivals` of
    their tier, before anything moves. Returns bool [H, slots], the slots that stay.
    """
    wanted = goes_to.gather(1, pos.clamp(min=0).long()).masked_fill(pos < 0, EVICT)
    for other in range(len(pages.formats)):
        if other == tier:
            continue
        head, slot = (wanted == other).nonzero(as_tuple=True)
        if head.numel():
            k, v = pages.read(tier, *pages.table.lookup(lists[head], tier, slot))
            arrivals[other].append((head, pos[head, slot].long(), k, v))
    return wanted == tier


def _packed(pos: Tensor, stays: Tensor) -> Tensor:
    """Positions of the slots that stay, in their order."""
    count = stays.sum(1)
    out = pos.new_full((len(pos), int(count.max()) if len(pos) else 0), -1)
    head, slot = stays.nonzero(as_tuple=True)
    out[head, (stays.cumsum(1) - 1)[head, slot]] = pos[head, slot]
    return out


def track(pages: Pages, lists: Tensor, pos: list[Tensor], score: Tensor | None) -> None:
    """Writes the tracked fields of every slot of lists.

    `pos` is per tier; scores are fp32 [H, N] by position, or None for 0.
    """
    for tier, positions in enumerate(pos):
        fmt = pages.formats[tier]
        head, slot = (positions >= 0).nonzero(as_tuple=True)
        if not fmt.slot.track or not head.numel():
            continue
        position = positions[head, slot].long()
        value = 0.0 if score is None else score[head, position]
        page, offset = pages.table.lookup(lists[head], tier, slot)
        pages.backend.write_tracked(pages.pool.pages, fmt, page, offset, value, position)


def padded(pos: Tensor, width: int) -> Tensor:
    """Positions [H, slots] with -1 after them, [H, width]."""
    out = pos.new_full((len(pos), width), -1)
    out[:, : min(width, pos.shape[1])] = pos[:, :width]
    return out
