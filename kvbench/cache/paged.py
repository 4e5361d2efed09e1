"""Tokens that go straight to pages: how prompts are written, and how a decode step writes, reads and scores."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvbench.cache import moves, reslot
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.counters import Counters
from kvbench.cache.fit import Fit
from kvbench.cache.homes import HomedStep
from kvbench.cache.kept import Kept, PromptLayer
from kvbench.cache.late import Receiver, to_device
from kvbench.cache.layout import ModelShape
from kvbench.cache.pages import Pages
from kvbench.cache.reads import StepReads
from kvbench.cache.rope import Rope
from kvbench.cache.rotation import Turns
from kvbench.cache.scores import Scores
from kvbench.cache.view import PagesView
from kvbench.kernels.backend import FusedStep, Ring, ScoreUpdate, StepRing, StepTarget, TierPages
from kvbench.kernels.tier_table import TierTable
from kvbench.policy import Policy


class Paged:
    """Holds every token in pages, and lets the policy act on them.

    Args:
        policy: Decides.
        shape: The model's shape.
        pages: The pages.
        counters: What the rows have seen.
        turns: What keys and values took before they come here; statistics see them without.
    """

    def __init__(self, policy: Policy, shape: ModelShape, pages: Pages, counters: Counters, turns: Turns) -> None:
        self.policy, self.shape, self.pages, self.counters = policy, shape, pages, counters
        self.rope, self.scores = Rope(policy, shape), Scores(policy, shape, pages, turns)
        self.plans = CheckedPlans(policy, pages)
        self._due: dict[int, int] = {}  # row -> whether its bulk eviction is due, where the host was told
        self.fit: Fit | None = None  # what a budget in bytes buys; the store's, which knows what else a row holds

    @property
    def takes_chunks(self) -> bool:
        """Whether `append` may be called: the policy leaves the tokens of a later segment where they are written."""
        return not (self.policy.acts_in_decode or self.policy.compact_every)

    @property
    def allocated_bytes(self) -> int:
        """What is held beside the pages."""
        return 0 if self.scores.queries is None else self.scores.queries.allocated_bytes

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row beside its pages, whatever it holds: (counters, rings)."""
        return 0, 0 if self.scores.queries is None else self.scores.queries.row_bytes

    # What is held.

    @property
    def most_new_pages(self) -> int:
        """Pages that a list takes in a step at most."""
        return 1

    def sides(self, tier: int, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that pages hold, int64 in the shape of `lists`."""
        held = self.pages.held(tier, lists)
        return held, held

    def paged_slots(self, kept: int, new: int) -> tuple[int, int]:
        """Slots that a list has in pages once it kept so many tokens of a prompt and took so many more: exactly, and at
        most where that many are the mean of lists."""
        return kept + new, kept + new

    def slots_per_tier(self, lists: Tensor) -> list[Tensor]:
        """Tokens held per list and tier, int64 [M] each; those outside of pages are one more entry."""
        return [self.pages.held(tier, lists) for tier in range(len(self.pages.formats))]

    def ring_bytes(self, lists: Tensor) -> int:
        """Bytes of what the lists of one row have in rings."""
        if self.scores.queries is None:
            return 0
        row = int(lists[0]) // self.pages.lists_per_row
        return self.scores.queries.held_bytes(self.counters.seen[row])

    def layer(self, rows: Tensor, layer: int, width: list[int] | None = None) -> tuple[list[TierPages], Ring | None]:
        """The kernels' description of one layer of rows; `width` is the pages to read per tier, found when absent."""
        lists, homes = self.pages.layer_lists(rows, layer), self.pages.homes
        present = range(len(self.pages.formats)) if homes is None else [tier for tier, _ in homes.in_layer(layer)]
        tiers = [self.pages.tier(tier, lists, width[tier] if width else None) for tier in present]
        return tiers, None

    def view(self, rows: Tensor, numbers: Sequence[int] = ()) -> PagesView:
        """What the policy may see of rows, which the host knows as `numbers`."""
        return PagesView(
            self.pages, self.counters, rows, self.policy.score, self.plans.find, fit=self.fit, numbers=numbers
        )

    def measured_view(self, rows: Tensor, numbers: Sequence[int]) -> PagesView:
        """The same for a bulk eviction, with the scores that the policy's statistic gives the slots now."""
        measure = self.scores.of_slots if self.scores.measures_slots else None
        return PagesView(
            self.pages, self.counters, rows, self.policy.score, self.plans.find, measure, self.fit, numbers
        )

    # Rows.

    def forget(self, number: int) -> None:
        """Notes that what the host was told of a row holds no longer."""
        self.pages.forget(number)
        self._due.pop(number, None)

    def clear(self, lists: Tensor) -> None:
        """Forgets lists."""
        self.pages.clear(lists)

    def share(self, source: int, target: int) -> None:
        """Lets an empty row hold what another one holds: its pages until one of them writes to one, and copies of
        whatever lies beside the pages."""
        rows = torch.tensor([source, target], device=self.shape.device)
        self.pages.table.share(*(self.pages.lists_of(row[None]) for row in rows))
        if self.scores.queries is not None:
            self.scores.queries.copy(source, target)

    # Prompts.

    def write_prompt(self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, score: Tensor | None) -> None:
        """Writes the kept tokens of one layer of a prompt, per tier in position order.

        Args:
            k, v: [H, N, D] post-RoPE.
            tier_of: int8 [H, N], the plan; where layers or heads differ, 0 stands for each one's own.
            score: fp32 [H, N] what the slots' scores begin with, or None for 0.
        """
        paged_k = self.rope.strip(k, torch.arange(k.shape[1], device=k.device))
        lists = self.pages.layer_lists(torch.tensor([row], device=k.device), layer).flatten()
        prompt = PromptLayer(row, layer, lists, k, v, paged_k, score)
        if (homes := self.pages.homes) is None:
            for tier in range(len(self.pages.formats)):
                self._write_tier(prompt, tier, Kept.of(tier_of == tier))
            return
        for tier, heads in homes.in_layer(layer):
            kept = tier_of == 0
            if heads is not None:
                kept = torch.zeros_like(kept).index_copy_(0, heads, kept[heads])
            self._write_tier(prompt, tier, Kept.of(kept))

    def _write_tier(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        head, token = kept.head, kept.token
        self.pages.table.reserve(prompt.lists, tier, kept.count)
        page, slot = self.pages.table.lookup(prompt.lists[head], tier, kept.ordinal)
        score = 0.0 if prompt.score is None else prompt.score[head, token]
        self.pages.put(tier, page, slot, prompt.paged_k[head, token], prompt.v[head, token], score=score, pos=token)

    def extend_prompt(
        self, row: int, layer: int, k: Tensor, v: Tensor, tier_of: Tensor, pos: list[Tensor], peak: Callable[[], None]
    ) -> None:
        """Carries out the plan for one layer of a prompt that is read in chunks; see `cache.chunks`.

        Args:
            k, v: [H, n, D] the newest chunk, post-RoPE.
            tier_of: int8 [H, N] the tier of each position so far; a held one never goes to an earlier tier.
            pos: Per tier, int32 [H, slots] what lies where; is brought up to date.
            peak: Called while most pages are in use.
        """
        lists = self.pages.layer_lists(torch.tensor([row], device=k.device), layer).flatten()
        position = torch.arange(tier_of.shape[1] - k.shape[1], tier_of.shape[1], device=k.device)
        reslot.replan(self.pages, lists, tier_of, pos, self.rope.strip(k, position), v, peak)

    def append(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; see `CompressedStore.append_chunk`."""
        pages, chunk = self.pages, k.shape[1]
        rows = torch.tensor([row], device=k.device)
        tiers, _ = self.layer(rows, layer)
        self.rope.turn(tiers, None)
        keys, values, live = pages.backend.gather_dense(pages.pool.pages, tiers, None)
        out = pages.backend.chunk_attention(q, k, v, (keys[0], values[0], live[0]), scale)
        offset = torch.arange(chunk, device=k.device)
        position = self.counters.seen[row] + offset
        stripped = self.rope.strip(k, position)
        for tier, heads in pages.parts_of(layer):
            own_k, own_v = (stripped, v) if heads is None else (stripped[heads], v[heads])
            lists = pages.layer_lists(rows, layer).flatten()
            lists = lists if heads is None else lists[heads]
            first = pages.table.reserve(lists, tier, torch.full_like(lists, chunk))
            each, ordinal = lists.repeat_interleave(chunk), (first[:, None] + offset).flatten()
            pages.table.own([(tier, each, ordinal)])
            page, slot = pages.table.lookup(each, tier, ordinal)
            pages.put(
                tier,
                page,
                slot,
                own_k.flatten(0, 1),
                own_v.flatten(0, 1),
                score=self.scores.of_token(k, v).flatten() if self.scores.writes_tokens else 0.0,
                pos=position.repeat(len(lists)),
            )
        return out

    # Decode steps.

    def open(self, rows: Tensor, numbers: Sequence[int]) -> "PagedStep":
        """Plans one decode step for rows (int64 [S]), which the host knows as `numbers`, and makes room for their
        tokens.

        Raises:
            PoolExhausted: No page for a new slot; nothing was changed, except that a bulk eviction that was due has
                taken place.
            ValueError: The plan breaks a rule; the same holds.
        """
        self._compact(rows, numbers)
        return PagedStep(self, rows, numbers)

    def tell(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Tells the host, once a step has ended and later where it does not wait, what the next one has to know."""
        self.pages.tell(rows, numbers)
        if not (self.policy.compact_every and self.pages.on_device):
            return

        def bind() -> Receiver:
            return partial(self.learn_due, tuple(numbers))

        self.pages.late.post(self.plans.due(self.view(rows, numbers)), bind)

    def learn_due(self, numbers: Sequence[int], due: Sequence[int]) -> None:
        """Takes in whether the bulk eviction of rows is due."""
        self._due |= zip(numbers, due, strict=True)

    def is_eviction_due(self, numbers: Sequence[int]) -> bool:
        """Whether a bulk eviction of rows is due before the next step, or the host was not told that it is not."""
        return self.policy.compact_every > 0 and any(self._due.get(number) != 0 for number in numbers)

    def _compact(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Bulk eviction for the rows whose turn it is."""
        if not self.policy.compact_every:
            return
        told = [self._due.get(number) for number in numbers]

        def forget() -> None:
            for number in numbers:
                self._due.pop(number, None)

        self.pages.late.also(forget)
        if None in told:
            told = self.plans.due(self.view(rows)).tolist()
        whose = [number for number, is_due in zip(numbers, told, strict=True) if is_due]
        if not whose:
            return
        due = rows if len(whose) == len(numbers) else to_device(whose, rows.device)
        lists = self.pages.lists_of(due)
        self.pages.table.own_all(lists)  # before the plan: what cannot be carried out is not asked for
        plan = self.plans.compact(self.measured_view(due, whose))
        moves.evict(self.pages, lists, plan)
        if plan.restart_scores:
            self.scores.restart(lists, [self.pages.width(whose, tier) for tier in range(len(self.pages.formats))])


class PagedStep:
    """A decode step over pages, planned and with its slots reserved.

    Args:
        holding: What holds the tokens.
        rows: int64 [S] live rows.
        numbers: The same as the host knows them.
    """

    reads: StepReads | None = None  # chooses what to read of each layer, and counts it; None = everything is read

    def __init__(self, holding: Paged, rows: Tensor, numbers: Sequence[int]) -> None:
        self.holding, self.pages, self.rows, self.numbers = holding, holding.pages, rows, numbers
        self.view = holding.view(rows, numbers)
        self.tokens_seen = self.view.tokens_seen
        self.lists = self.pages.lists_of(rows).view(len(rows), *self.pages.shape[1:])  # [S, L, H]
        self._plan()

    def _plan(self) -> None:
        policy, pages, lists = self.holding.policy, self.pages, self.lists.flatten()
        plan = self.holding.plans.decode(self.view)
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
            self.reads = StepReads.begin(policy.reading, self.view, pages.width(self.numbers, 0))

    @cached_property
    def width(self) -> list[list[int]]:
        """Per layer and tier, the pages to read; only a step that goes layer by layer asks."""
        return self.pages.widths(self.lists, self.numbers)

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
            pages.put(tier, page, slot, keys, values, distinct=True)
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

    def end(self) -> None:
        """Settles what the step changed."""

    # Whole layers in one call.

    def fused(self) -> FusedStep | None:
        """What does a whole layer in one call, with the same `attend`; None where the backend does not cover the
        step."""
        if not (self.pages.backend.fuses_layers or self.pages.on_device) or not self.holding.scores.fuses:
            return None
        # No such operation rotates keys between buffer and page, chooses the pages that it reads, or keeps bounds.
        if self.reads is not None or self.pages.formats[0].bounds:
            return None
        if self.holding.rope.mode == "pre_rope" and not (self.pages.on_device and self.holding.policy.residual is None):
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
            return self._open_tables(self._tables, target=target, update=update, turn=self._turn)
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
            return self._open_tables([self._tables[tier]], target=target, turn=self._turn)
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
            power=spec.power,
            group=spec.group_reduce,
            update=update,
            skip_near=spec.skip_near,
        )

    def _open_tables(
        self,
        tiers: list[TierTable],
        *,
        held: tuple[Tensor, Tensor] | None = None,
        ring: StepRing | None = None,
        target: StepTarget | None = None,
        update: ScoreUpdate | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
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
            power=spec.power,
            group=spec.group_reduce,
            update=update,
            skip_near=spec.skip_near,
            turn=turn,
        )
