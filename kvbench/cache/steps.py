"""A decode step over pages: how a token is written, what is read, and what becomes of the scores."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows
from kvbench.cache.holding import Holding, Orders
from kvbench.cache.pages import Pages
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import PageChoice, Ring, ScoreUpdate, StepScores, TierPages, TierTable
from kvbench.policy import DecodePlan, DecodeView, ReadSpec

MAX_SCORE_BYTES = 2**27  # of scores that wait for the other layers'
Attend = Callable[..., Tensor]  # layer, q, k, v, scale; of a step that `turns` also a rotation


class PageSelection:
    """Pages that one decode step reads under a policy's `ReadSpec`, and their bytes.

    Lists hold int64 [S, L, H] slots, the new token's included, in layers from the model's `first_layer` on. `most`
    bounds the pages of a list, where the host must not read the largest count.
    """

    def __init__(
        self, spec: ReadSpec, fmt: PageFormat, view: DecodeView, held: Tensor, first_layer: int, most: int | None
    ) -> None:
        self._fmt, self._held = fmt, held
        count = (view.budget_tokens(spec.budget) // spec.page_tokens).clamp(min=spec.min_pages)
        self.choice = PageChoice(
            count=count,
            width=int(count.max()) if most is None else max(1, most),
            group=spec.group_reduce,
            dense_layers=max(0, spec.dense_layers - first_layer),
        )

    def choose(self, pages: Pages, layer: int, q: Tensor, tier: TierPages) -> TierPages:
        """The part of a layer's tier that the queries [S, Hq, D] of the step read."""
        choice = self.choice
        if layer < choice.dense_layers or tier.ids.shape[-1] == 1:
            return tier
        return pages.backend.choose_pages(q, pages.pool.pages, tier, choice.count, choice.width, choice.group)

    def totals(self) -> Tensor:
        """Bytes per row, fp64 [S, 2], that the step reads, and that it would read without page selection.

        Read are slots, and the bounds of all pages of a list of which some are skipped.
        """
        fmt, held = self._fmt, self._held
        num_pages = (held + fmt.tokens_per_page - 1) // fmt.tokens_per_page
        # Of the others, the last may not be full.
        left_out = (num_pages - self.choice.count[:, None, None]).clamp(min=0)
        left_out = left_out * (torch.arange(held.shape[1], device=held.device) >= self.choice.dense_layers)[:, None]
        looked_at = num_pages * (left_out > 0)
        slots, saved, looked = (x.sum((1, 2)).double() for x in (held, left_out * fmt.tokens_per_page, looked_at))
        read = (slots - saved) * fmt.slot.slot_bytes + looked * fmt.bounds_bytes
        return torch.stack([read, slots * fmt.slot.slot_bytes], 1)


class PagedStep:
    """Decode step over pages, planned (by the policy, unless a plan is passed) and with its slots reserved.

    Nothing has changed when that raises: `PoolExhausted` without a page for a new slot, `ValueError` where the plan
    breaks a rule or a page table is full.
    """

    turns = False  # `door` takes a rotation of queries and keys as well
    reads: PageSelection | None = None  # chooses what to read of each layer, and counts it; None = everything is read

    def __init__(self, holding: Holding, rows: Rows, plan: DecodePlan | None = None) -> None:
        self.holding, self.pages, self.rows, self._plan = holding, holding.pages, rows, plan
        self.view = holding.view(rows)
        self.tokens_seen = self.view.tokens_seen  # looked up here: it grows while the step goes on
        self.queries: list[tuple[Tensor, float]] = []  # of the layers so far, and their scales, where they are kept
        self.lists = self.pages.lists_of(rows.tensor).view(len(rows), *self.pages.shape[1:])  # [S, L, H]
        live = None if rows.padding is None else rows.padding.live
        self.live = None if live is None else live.repeat_interleave(self.pages.lists_per_row)  # int64 [M]
        self._make_room()

    def _make_room(self) -> None:
        """Reserves the slots of the step, takes those it writes to out of shared pages, and moves what it demotes."""
        pages, lists, reading = self.pages, self.lists.flatten(), self.holding.policy.reading
        plan = self.holding.plans.decode(self.view) if self._plan is None else self._plan
        self.tier = plan.tier
        pages.host.advance(self.rows.numbers, self.holding.most_new_slots)
        which = pages.tiers_of_rows(len(self.rows), self.tier)
        page, slot = self._take(lists, plan, which)
        if pages.formats[self.tier].slot.track:
            pos = self.tokens_seen.repeat_interleave(pages.lists_per_row)
            for tier, chosen in which:
                pages.put(tier, page[chosen], slot[chosen], pos=pos[chosen])
        self.page, self.slot = page.view(self.lists.shape), slot.view(self.lists.shape)
        if reading is not None:
            held, most = pages.held(0, self.lists), pages.width(self.rows.numbers, 0)
            self.reads = PageSelection(reading, pages.formats[0], self.view, held, self.holding.first_layer, most)

    def _take(self, lists: Tensor, plan: DecodePlan, which: list[tuple[int, Tensor | slice]]) -> tuple[Tensor, Tensor]:
        """Page and slot of each list's incoming token, int64 [M], after the displaced one was removed.

        `which` are the tiers that take it, each with the indices of its lists.
        """
        pages, policy = self.pages, self.holding.policy
        page, slot = torch.empty_like(lists), torch.empty_like(lists)
        with pages.undone() as done:
            for tier, chosen in which:
                named = (x if x is None else x.flatten()[chosen] for x in (plan.slot, plan.demote_to, plan.demote_slot))
                taken, inside, broken = pages.table.take(
                    lists[chosen],
                    tier,
                    *named,
                    acts=policy.acts_in_decode,
                    unshare_all=policy.score.decode_update,  # scores are added to all slots
                    done=done,
                    live=self.live if self.live is None else self.live[chosen],
                )
                if isinstance(chosen, slice):  # all lists
                    page, slot = taken[tier], inside[tier]
                else:
                    page[chosen], slot[chosen] = taken[tier], inside[tier]
        if broken is not None:
            self.holding.plans.judge_step(self.view)(broken)
        if plan.slot is not None and plan.demote_to is not None:
            for other in range(pages.num_planned):
                if other != tier:
                    pages.demote(tier, other, (taken[tier], inside[tier]), (taken[other], inside[other]))
        return page, slot

    def end(self) -> None:
        """Settles what the step changed."""
        if self.queries:
            kept = self.holding.scores.queries
            assert kept is not None, "only these are noted"
            kept.hold_step(self.rows.tensor, self.tokens_seen, self.queries)

    # How a layer is attended to: as the model gives it, then as pages take it, all at once or operation by operation.

    def door(self) -> Attend:
        """Attention function of a layer: q [S, Hq, D], k and v [S, KV heads, D], post-RoPE, to [S, Hq, D].

        Writes the new token, attends over everything held, adds to the scores, and returns fp32 or the dtype of `q`.
        """
        fused = self.fused()
        inner = self.attend if fused is None else fused.attend
        strips = self.strips and not (fused is not None and fused.strips)
        if self.holding.takes_all_as_it_comes and not strips:
            self.turns = fused is not None and fused.turns
            return inner
        return partial(self._through, inner, strips)

    def _through(
        self, inner: Attend, strips: bool, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        holding = self.holding
        if holding.scores.queries is not None:
            self.queries.append((q, scale))
        q, k, v = holding.to_pages(layer, q, k, v, self.orders, self.offsets)
        if strips:
            k = holding.rope.strip(k, self.tokens_seen[:, None])
        return holding.rotations.values.back(inner(layer, q, k, v, scale))

    @cached_property
    def orders(self) -> Orders | None:
        return None if self.holding.channels is None else self.holding.channels.of(self.rows.tensor)

    @cached_property
    def offsets(self) -> Tensor | None:
        return None if self.holding.offsets is None else self.holding.offsets.of(self.rows.tensor)

    @property
    def strips(self) -> bool:
        """True if `attend` takes keys without their positions."""
        return self.holding.rope.mode != "absolute"

    @cached_property
    def width(self) -> list[list[int]]:
        """Pages to read per layer and tier; computed only by a step that goes layer by layer."""
        return self.pages.widths(self.lists, self.rows.numbers)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """A layer, operation by operation; q [S, Hq, D], k and v [S, H, D], keys without positions where `strips`."""
        pages, scores, spec = self.pages, self.holding.scores, self.holding.policy.score
        for tier, heads in pages.tiers_of_layer(layer, self.tier):
            chosen = (self.page[:, layer], self.slot[:, layer], k, v)
            page, slot, keys, values = (x.flatten(0, 1) if heads is None else x[:, heads].flatten(0, 1) for x in chosen)
            of = None
            if pages.codebooks is not None:
                indices = torch.arange(k.shape[1], device=k.device) if heads is None else heads
                of = layer, indices.repeat(len(k))
            pages.put(tier, page, slot, keys, values, distinct=True, of=of)
            if scores.writes_tokens:
                pos = self.tokens_seen.repeat_interleave(len(page) // len(self.rows))
                less = None
                if self.offsets is not None:
                    less = self.holding.copied(self.offsets[:, layer], 1).expand_as(k)
                    less = less.flatten(0, 1) if heads is None else less[:, heads].flatten(0, 1)
                pages.put(tier, page, slot, score=scores.of_token(keys, values, less), pos=pos)
        tiers, _ = self.holding.layer(self.rows.tensor, layer, self.width[layer])
        if self.reads is not None:
            tiers = [self.reads.choose(pages, layer, q, tiers[0])]
        self.holding.rope.attach(tiers, self.view)
        group = spec.group_reduce if spec.decode_update else None
        softmax = self.holding.softmax_of(layer)
        out, _, reduced = pages.attend(layer, q, tiers, None, scale, power=spec.power, group=group, softmax=softmax)
        scores.add_step(self.tokens_seen, self.view.prompt_tokens, tiers, reduced)
        return out

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of other queries [S, Hq, D] over a layer whose token is written by `door`; [S, Hq, D]."""
        holding, pages = self.holding, self.pages
        q, _, _ = holding.to_pages(layer, q, k, v, self.orders, self.offsets)
        tiers, ring = self._held(layer)
        if self.reads is not None:
            tiers = [self.reads.choose(pages, layer, q, tiers[0])]
        holding.rope.attach(tiers, self.view)
        out, _, _ = pages.attend(layer, q, tiers, ring, scale, softmax=holding.softmax_of(layer))
        return holding.rotations.values.back(out)

    def _held(self, layer: int) -> tuple[list[TierPages], Ring | None]:
        """Pages and residual buffer of a layer that has its token."""
        return self.holding.layer(self.rows.tensor, layer, self.width[layer])

    # Whole layers in one call.

    def fused(self) -> FusedStep | None:
        """Step that does a whole layer in one call, with the same `attend`; None where the backend has none."""
        pages, scores = self.pages, self.holding.scores
        if scores.writes_tokens or pages.codebooks is not None:  # no such operation supports tables of a layer
            return None
        if not pages.on_device:
            # In main memory none settles scores, chooses the pages that it reads, or rotates keys that leave a buffer.
            looks = scores.settles or self.reads is not None or self.holding.rope.mode == "pre_rope"
            if looks or not pages.backend.fuses_layers:
                return None
        return self._fuse()

    def _fuse(self) -> FusedStep | None:
        if (tiers := self.pages.tier_map) is None:
            return self._fuse_tiers(range(len(self.pages.formats)))
        if tiers.by_head:  # a call writes in one format
            return None
        steps = {tier: self._fuse_tiers([tier]) for tier in tiers.tiers}
        by_layer = [step for row in tiers.table if (step := steps[row[0]]) is not None]
        return MappedStep(by_layer) if len(by_layer) == len(tiers.table) else None

    def _fuse_tiers(self, numbers: Sequence[int]) -> FusedStep | None:
        """A fused step of layers whose tokens are in these tiers only."""
        spec, target = self.holding.policy.score, (self.tier, self.page, self.slot)
        update: ScoreUpdate | None = None
        if spec.decode_update:
            update = "replace" if spec.decode_replace else "add"
        if not self.pages.on_device:
            named = [self._named(tier) for tier in numbers]
            attached = self.holding.rope.attach_all_layers(named, self.view)
            return self._open_layers(named, target=target, update=update) if attached else None
        tables = [self._tables[tier] for tier in numbers]
        if not self.holding.scores.settles:
            choice = None if self.reads is None else self.reads.choice
            return self._open_tables(tables, target=target, update=update, strip=self._stripping, choice=choice)
        opened = self._open_tables(tables, target=target, gives=True, strip=self._stripping)
        return None if opened is None else SettledStep(opened, self.pages.shape[1], self._settle)

    def _named(self, tier: int) -> TierPages:
        return self.pages.tier(tier, self.lists, self.pages.width(self.rows.numbers, tier))

    @cached_property
    def _tables(self) -> list[TierTable]:
        """The tiers as the step reads them from tables on a device."""
        return self.pages.step_tiers(self.rows, self.lists, partial(self.holding.rope.rotation_of, self.view))

    @cached_property
    def _stripping(self) -> tuple[Tensor, Tensor] | None:
        """The angles that take the position out of the new token's key."""
        return self.holding.rope.stripping(self.tokens_seen)

    def _open_layers(self, tiers: list[TierPages], **operands: Any) -> FusedStep | None:
        """Asks the backend for the step; `tiers` describe all layers, ids [S, L, H, m]."""
        return self.pages.backend.open_step(self.pages.pool.pages, tiers, **self._opened(**operands))

    def _open_tables(self, tiers: list[TierTable], **operands: Any) -> FusedStep | None:
        pages = self.pages
        return pages.backend.open_tables(
            pages.pool.pages, tiers, pages.shape[1:], self.rows.tensor, **self._opened(**operands)
        )

    def _opened(self, update: ScoreUpdate | None = None, gives: bool = False, **operands: Any) -> dict[str, Any]:
        """Operands that both take: scores that are added, replaced, or returned (`gives`), and further `operands`."""
        spec = self.holding.policy.score
        near = 0 if gives else spec.skip_near
        scores = StepScores(power=spec.power, group=spec.group_reduce, update=update, gives=gives, skip_near=near)
        model = {"num_q_heads": self.holding.shape.num_q_heads, "softmax": self.holding.shape.softmax}
        return model | {"seen": self.tokens_seen, "target": None, "scores": scores} | operands

    def _settle(self, first: int, by_layer: list[Sequence[Tensor]]) -> None:
        """Brings the scores of some layers up to date, from the first of them on; of each, per tier, [S, H, n]."""
        lists, pages = self.lists[:, first : first + len(by_layer)].flatten(1), self.pages
        reduced = [torch.stack(scores, 1).flatten(1, 2) for scores in zip(*by_layer, strict=True)]
        tiers = [
            pages.tier(tier, lists, scores.shape[-1] // pages.formats[tier].tokens_per_page)
            for tier, scores in enumerate(reduced)
        ]
        self.holding.scores.add_step(self.tokens_seen, self.view.prompt_tokens, tiers, reduced)


class MappedStep(FusedStep):
    """Steps of several formats, of which each layer has its own."""

    def __init__(self, steps: Sequence[FusedStep]) -> None:
        self._steps = steps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._steps[layer].attend(layer, q, k, v, scale)


class SettledStep(FusedStep):
    """Step whose layers return their scores.

    `settle` takes the first of some layers and the scores of each; the statistic processes many layers at once.
    """

    def __init__(self, step: FusedStep, num_layers: int, settle: Callable[[int, list[Sequence[Tensor]]], None]) -> None:
        self._step, self._num_layers, self._settle, self.strips = step, num_layers, settle, step.strips
        self._scores: list[Sequence[Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = self._step.attend(layer, q, k, v, scale)
        self._scores.append(self._step.layer_scores)
        score_bytes = sum(scores.nbytes for scores in self._step.layer_scores) * len(self._scores)
        if layer + 1 == self._num_layers or score_bytes > MAX_SCORE_BYTES:
            self._settle(layer + 1 - len(self._scores), self._scores)
            self._scores = []
        return out
