"""A decode step over pages: how a token is written, what is read, and what becomes of the scores."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvbench.cache import moves
from kvbench.cache.channels import Orders
from kvbench.cache.holding import Holding
from kvbench.cache.homes import HomedStep
from kvbench.cache.reads import StepReads
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.operands import PageChoice, ScoreUpdate, StepRing, StepScores, StepTarget, TierPages
from kvbench.kernels.tier_table import TierTable
from kvbench.policy import DecodePlan

MOST_GIVEN_BYTES = 2**27  # of scores that wait for the other layers'


class PagedStep:
    """A decode step over pages, planned and with its slots reserved.

    Args:
        holding: What holds the tokens.
        rows: int64 [S] live rows.
        numbers: The same as the host knows them.
        plan: What the policy decided; None = it is asked.
    """

    reads: StepReads | None = None  # chooses what to read of each layer, and counts it; None = everything is read

    def __init__(self, holding: Holding, rows: Tensor, numbers: Sequence[int], plan: DecodePlan | None = None) -> None:
        self._given = plan
        self.holding, self.pages, self.rows, self.numbers = holding, holding.pages, rows, numbers
        self.view = holding.view(rows, numbers)
        self.tokens_seen = self.view.tokens_seen  # looked up here: it grows while the step goes on
        self.queries: list[tuple[Tensor, float]] = []  # of the layers so far, and their scales, where they are kept
        self.lists = self.pages.lists_of(rows).view(len(rows), *self.pages.shape[1:])  # [S, L, H]
        self._plan()

    def _plan(self) -> None:
        policy, pages, lists = self.holding.policy, self.pages, self.lists.flatten()
        plan = self.holding.plans.decode(self.view) if self._given is None else self._given
        self.tier = plan.tier
        pages.grow(self.numbers, 1)
        if pages.homes is None:
            page, slot = moves.make_room(
                pages,
                lists,
                plan,
                own_all=policy.score.decode_update,
                acts=policy.acts_in_decode,
                judge=self.holding.plans.judge_step(self.view),
            )
        else:
            page, slot = moves.make_room_at_home(pages, lists, len(self.rows))
        if pages.formats[self.tier].slot.track:
            pos = self.tokens_seen.repeat_interleave(pages.lists_per_row)
            for tier, own in pages.parts_of_rows(len(self.rows), self.tier):
                pages.put(tier, page[own], slot[own], pos=pos[own])
        self.page, self.slot = page.view(self.lists.shape), slot.view(self.lists.shape)
        if policy.reading is not None:
            held = pages.held(0, self.lists)
            self.reads = StepReads(
                policy.reading,
                pages.formats[0],
                self.view,
                held,
                self.holding.first_layer,
                pages.width(self.numbers, 0),
            )

    @cached_property
    def width(self) -> list[list[int]]:
        """Per layer and tier, the pages to read; only a step that goes layer by layer asks."""
        return self.pages.widths(self.lists, self.numbers)

    @property
    def strips(self) -> bool:
        """Whether `strip` changes keys."""
        return self.holding.rope.mode != "absolute"

    def strip(self, k: Tensor) -> Tensor:
        """The step's keys [S, H, D] as this holding takes them."""
        return self.holding.rope.strip(k, self.tokens_seen[:, None])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes the new token of one layer, attends over everything held, and adds to the scores.

        Args:
            q: [S, Hq, D]; k: [S, H, D] as `strip` gives them; v: [S, H, D].

        Returns:
            fp32 [S, Hq, D].
        """
        pages, scores = self.pages, self.holding.scores
        for tier, heads in pages.parts_of(layer, self.tier):
            chosen = (self.page[:, layer], self.slot[:, layer], k, v)
            page, slot, keys, values = (x.flatten(0, 1) if heads is None else x[:, heads].flatten(0, 1) for x in chosen)
            of = None if pages.books is None else (layer, torch.arange(k.shape[1], device=k.device).repeat(len(k)))
            pages.put(tier, page, slot, keys, values, distinct=True, of=of)
            if scores.writes_tokens:
                pages.field(tier, "score")[page, slot] = scores.of_token(keys, values)
        tiers, _ = self.holding.layer(self.rows, layer, self.width[layer])
        if self.reads is not None:
            tiers = [self.reads.choose(pages, layer, q, tiers[0])]
        self.holding.rope.turn(tiers, self.view)
        spec = scores.spec
        out, _, reduced = pages.backend.paged_decode(
            q,
            pages.pool.pages,
            tiers,
            None,
            scale,
            power=spec.power,
            group=spec.group_reduce if spec.decode_update else None,
        )
        scores.add_step(self.tokens_seen, self.view.prompt_tokens, tiers, reduced)
        return out

    @cached_property
    def orders(self) -> Orders | None:
        """The orders of the rows' key channels, in all layers."""
        return None if self.holding.channels is None else self.holding.channels.of(self.rows)

    def end(self) -> None:
        """Settles what the step changed."""
        if self.queries:
            kept = self.holding.scores.queries
            assert kept is not None, "only these are noted"
            kept.hold_step(self.rows, self.tokens_seen, self.queries)

    # Whole layers in one call.

    def fused(self) -> FusedStep | None:
        """What does a whole layer in one call, with the same `attend`; None where the backend does not cover the
        step."""
        if not (self.pages.backend.fuses_layers or self.pages.on_device) or self.holding.scores.writes_tokens:
            return None
        if self.holding.scores.settles and not self.pages.on_device:
            return None
        # In main memory no such operation chooses the pages that it reads, or keeps bounds.
        if self.reads is not None and not self.pages.on_device:
            return None
        if self.pages.books is not None:  # or knows of tables that belong to a layer
            return None
        if self.holding.rope.mode == "pre_rope" and not self.pages.on_device:  # or rotates keys as they leave a buffer
            return None
        return self._fuse()

    def _fuse(self) -> FusedStep | None:
        if (homes := self.pages.homes) is not None:
            if homes.by_head:  # a layer's call knows one format to write in
                return None
            return HomedStep.of(homes, {tier: self._fuse_at(tier) for tier in homes.tiers})
        spec = self.holding.policy.score
        update: ScoreUpdate | None = None
        if spec.decode_update:
            update = "replace" if spec.decode_replace else "add"
        target = self.tier, self.page, self.slot
        if self.pages.on_device:
            if not self.holding.scores.settles:
                choice = None if self.reads is None else self.reads.choice
                return self._open_tables(self._tables, target=target, update=update, strip=self._turn, choice=choice)
            opened = self._open_tables(self._tables, target=target, gives=True, strip=self._turn)
            return None if opened is None else SettledStep(opened, self.pages.shape[1], self._settle)
        tiers = [
            self.pages.tier(tier, self.lists, self.pages.width(self.numbers, tier))
            for tier in range(len(self.pages.formats))
        ]
        if not self.holding.rope.turn_all_layers(tiers, self.view):
            return None
        return self._open_layers(tiers, target=target, update=update)

    def _fuse_at(self, tier: int) -> FusedStep | None:
        """The same for the layers that are at home in a tier; the others have no slots in it."""
        target = 0, self.page, self.slot
        if self.pages.on_device:
            return self._open_tables([self._tables[tier]], target=target, strip=self._turn)
        own = self.pages.tier(tier, self.lists, self.pages.width(self.numbers, tier))
        if not self.holding.rope.turn_all_layers([own], self.view):
            return None
        return self._open_layers([own], target=target)

    @cached_property
    def _tables(self) -> list[TierTable]:
        """The tiers as the step reads them from tables on a device."""
        return self.pages.step_tiers(self.numbers, self.lists, partial(self.holding.rope.turn_of, self.view))

    @cached_property
    def _turn(self) -> tuple[Tensor, Tensor] | None:
        """What takes the position out of the new token's key."""
        return self.holding.rope.stripping(self.tokens_seen)

    def _open_layers(
        self,
        tiers: list[TierPages],
        *,
        ring: StepRing | None = None,
        target: StepTarget | None = None,
        update: ScoreUpdate | None = None,
    ) -> FusedStep | None:
        """Asks the backend for the step; `tiers` describe all layers, ids [S, L, H, m]."""
        spec = self.holding.policy.score
        return self.pages.backend.open_step(
            self.pages.pool.pages,
            tiers,
            num_q_heads=self.holding.shape.num_q_heads,
            seen=self.tokens_seen,
            ring=ring,
            target=target,
            scores=StepScores(power=spec.power, group=spec.group_reduce, update=update, skip_near=spec.skip_near),
        )

    def _open_tables(
        self,
        tiers: list[TierTable],
        *,
        held: tuple[Tensor, Tensor] | None = None,
        ring: StepRing | None = None,
        target: StepTarget | None = None,
        update: ScoreUpdate | None = None,
        gives: bool = False,
        strip: tuple[Tensor, Tensor] | None = None,
        choice: PageChoice | None = None,
    ) -> FusedStep | None:
        """Asks a backend that keeps its own tables for the step."""
        spec = self.holding.policy.score
        return self.pages.backend.open_tables(
            self.pages.pool.pages,
            tiers,
            self.pages.shape[1:],
            self.rows,
            num_q_heads=self.holding.shape.num_q_heads,
            seen=self.tokens_seen,
            held=held,
            ring=ring,
            target=target,
            scores=StepScores(
                power=spec.power,
                group=spec.group_reduce,
                update=update,
                gives=gives,
                skip_near=0 if gives else spec.skip_near,
            ),
            strip=strip,
            choice=choice,
        )

    def _settle(self, first: int, given: list[Sequence[Tensor]]) -> None:
        """Brings the scores of some layers up to date, from the first of them on; of each, per tier, [S, H, n]."""
        lists, pages = self.lists[:, first : first + len(given)].flatten(1), self.pages
        reduced = [torch.stack(scores, 1).flatten(1, 2) for scores in zip(*given, strict=True)]
        tiers = [
            pages.tier(tier, lists, scores.shape[-1] // pages.formats[tier].tokens_per_page)
            for tier, scores in enumerate(reduced)
        ]
        self.holding.scores.add_step(self.tokens_seen, self.view.prompt_tokens, tiers, reduced)


class SettledStep(FusedStep):
    """A step whose layers give their scores away; of many layers at once, the statistic makes what is stored.

    Args:
        step: Attends, and gives.
        num_layers: Layers of the step.
        settle: Takes the first of some layers, and the scores of each.
    """

    def __init__(self, step: FusedStep, num_layers: int, settle: Callable[[int, list[Sequence[Tensor]]], None]) -> None:
        self._step, self._num_layers, self._settle, self.strips = step, num_layers, settle, step.strips
        self._given: list[Sequence[Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = self._step.attend(layer, q, k, v, scale)
        self._given.append(self._step.given)
        given_bytes = sum(scores.nbytes for scores in self._step.given) * len(self._given)
        if layer + 1 == self._num_layers or given_bytes > MOST_GIVEN_BYTES:
            self._settle(layer + 1 - len(self._given), self._given)
            self._given = []
        return out
