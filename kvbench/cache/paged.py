"""Tokens that go straight to pages: how prompts are written, and how a decode step writes, reads and scores."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvbench.cache import moves
from kvbench.cache.checks import CheckedPlans
from kvbench.cache.counters import Counters
from kvbench.cache.fit import Fit
from kvbench.cache.kept import Kept, PromptLayer
from kvbench.cache.late import to_device
from kvbench.cache.layout import ModelShape
from kvbench.cache.pages import Pages
from kvbench.cache.reads import StepReads
from kvbench.cache.rope import Rope
from kvbench.cache.rotation import Turns
from kvbench.cache.scores import Scores
from kvbench.cache.view import PagesView
from kvbench.kernels.backend import FusedStep, Ring, ScoreUpdate, StepRing, StepTarget, TierPages
from kvbench.policy import CompactPlan, DecodePlan, Policy


class Paged:
    """Holds every token in pages, and lets the policy act on them.

    Args:
        policy: Decides.
        shape: The model's shape.
        pages: The pages.
        counters: What the rows have seen.
        turns: What keys and values took before they come here; statistics see them without.
        first_layer: The model's number of the first layer that is held here; other arguments count from it.
    """

    def __init__(
        self, policy: Policy, shape: ModelShape, pages: Pages, counters: Counters, turns: Turns, first_layer: int = 0
    ) -> None:
        self.policy, self.shape, self.pages, self.counters = policy, shape, pages, counters
        self.turns, self.first_layer = turns, first_layer
        self.rope, self.scores = Rope(policy, shape), Scores(policy, shape, pages, turns, first_layer)
        self.plans = CheckedPlans(policy, pages)
        self._due: dict[int, int] = {}  # row -> whether its bulk eviction is due, where the host was told
        self.fit: Fit | None = None  # what a budget in bytes buys; the store's, which knows what else a row holds

    @property
    def parts(self) -> "Sequence[Paged]":
        """What holds the layers, in their order: this alone, or the parts of a `Split`."""
        return (self,)

    def part_of(self, layer: int) -> "tuple[int, Paged]":
        """Which of `parts` holds a layer of the model, by number and itself."""
        return 0, self

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
        lists, num_tiers = self.pages.layer_lists(rows, layer), len(self.pages.formats)
        tiers = [self.pages.tier(tier, lists, width[tier] if width else None) for tier in range(num_tiers)]
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

    def lists(self, row: int) -> Tensor:
        """List numbers int64 [M] of one row."""
        return self.pages.lists_of(torch.tensor([row], device=self.shape.device))

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
            tier_of: int8 [H, N], the plan.
            score: fp32 [H, N] what the slots' scores begin with, or None for 0.
        """
        paged_k = self.rope.strip(k, torch.arange(k.shape[1], device=k.device))
        lists = self.pages.layer_lists(torch.tensor([row], device=k.device), layer).flatten()
        prompt = PromptLayer(row, layer, lists, k, v, paged_k, score)
        for tier in range(len(self.pages.formats)):
            self._write_tier(prompt, tier, Kept.of(tier_of == tier))

    def _write_tier(self, prompt: PromptLayer, tier: int, kept: Kept) -> None:
        head, token = kept.head, kept.token
        self.pages.table.reserve(prompt.lists, tier, kept.count)
        page, slot = self.pages.table.lookup(prompt.lists[head], tier, kept.ordinal)
        score = 0.0 if prompt.score is None else prompt.score[head, token]
        self.pages.put(tier, page, slot, prompt.paged_k[head, token], prompt.v[head, token], score=score, pos=token)

    def append(self, row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Appends a segment to tier 0 and attends over pages and segment; see `CompressedStore.append_chunk`."""
        pages, chunk = self.pages, k.shape[1]
        rows = torch.tensor([row], device=k.device)
        tiers, _ = self.layer(rows, layer)
        self.rope.turn(tiers, None)
        keys, values, live = pages.backend.gather_dense(pages.pool.pages, tiers, None)
        out = pages.backend.chunk_attention(q, k, v, (keys[0], values[0], live[0]), scale)
        lists = pages.layer_lists(rows, layer).flatten()
        first = pages.table.reserve(lists, 0, torch.full_like(lists, chunk))
        offset = torch.arange(chunk, device=k.device)
        each, ordinal = lists.repeat_interleave(chunk), (first[:, None] + offset).flatten()
        pages.table.own([(0, each, ordinal)])
        page, slot = pages.table.lookup(each, 0, ordinal)
        position = self.counters.seen[row] + offset
        score = self.scores.of_token(k, v).flatten() if self.scores.writes_tokens else 0.0
        pages.put(
            0,
            page,
            slot,
            self.rope.strip(k, position).flatten(0, 1),
            v.flatten(0, 1),
            score=score,
            pos=position.repeat(len(lists)),
        )
        return out

    # Decode steps.

    def open(self, rows: Tensor, numbers: Sequence[int]) -> "list[PagedStep]":
        """Plans one decode step for rows (int64 [S]), which the host knows as `numbers`, and makes room for their
        tokens; one step for each of `parts`.

        Raises:
            PoolExhausted: No page for a new slot; nothing was changed, except that a bulk eviction that was due has
                taken place.
            ValueError: The plan breaks a rule; the same holds.
        """
        self._compact(rows, numbers)
        return [self.step(rows, numbers)]

    def step(self, rows: Tensor, numbers: Sequence[int], plan: DecodePlan | None = None) -> "PagedStep":
        """A step by a plan; None = the policy is asked."""
        return PagedStep(self, rows, numbers, plan)

    def tell(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Tells the host, once a step has ended and later where it does not wait, what the next one has to know."""
        self.pages.tell(rows, numbers)
        if not (self.policy.compact_every and self.pages.on_device):
            return

        def learn(due: list[int]) -> None:
            self._due |= zip(numbers, due, strict=True)

        self.pages.late.post(self.plans.due(self.view(rows, numbers)), learn)

    def _compact(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Bulk eviction for the rows whose turn it is."""
        if not self.policy.compact_every:
            return
        told = [self._due.pop(number, None) for number in numbers]
        if None in told:
            told = self.plans.due(self.view(rows)).tolist()
        whose = [number for number, is_due in zip(numbers, told, strict=True) if is_due]
        if not whose:
            return
        due = rows if len(whose) == len(numbers) else to_device(whose, rows.device)
        lists = self.pages.lists_of(due)
        self.pages.table.own_all(lists)  # before the plan: what cannot be carried out is not asked for
        self.evict(lists, whose, self.plans.compact(self.measured_view(due, whose)))

    def evict(self, lists: Tensor, numbers: Sequence[int], plan: CompactPlan) -> None:
        """Carries out a bulk eviction on all lists (int64 [M]) of rows, whose pages nobody shares."""
        moves.evict(self.pages, lists, plan)
        if plan.restart_scores:
            self.scores.restart(lists, [self.pages.width(numbers, tier) for tier in range(len(self.pages.formats))])


class PagedStep:
    """A decode step over pages, planned and with its slots reserved.

    Args:
        holding: What holds the tokens.
        rows: int64 [S] live rows.
        numbers: The same as the host knows them.
        plan: What the policy decided; None = it is asked.
    """

    reads: StepReads | None = None  # chooses what to read of each layer, and counts it; None = everything is read

    def __init__(self, holding: Paged, rows: Tensor, numbers: Sequence[int], plan: DecodePlan | None = None) -> None:
        self._given = plan
        self.holding, self.pages, self.rows, self.numbers = holding, holding.pages, rows, numbers
        self.tokens_seen = holding.counters.tokens_seen[rows]
        self.lists = self.pages.lists_of(rows).view(len(rows), *self.pages.shape[1:])  # [S, L, H]
        self._plan()

    def _plan(self) -> None:
        policy, pages, lists = self.holding.policy, self.pages, self.lists.flatten()
        self.view = self.holding.view(self.rows, self.numbers)
        plan = self.holding.plans.decode(self.view) if self._given is None else self._given
        self.tier = plan.tier
        pages.grow(self.numbers, 1)
        page, slot = moves.make_room(pages, lists, plan, own_all=policy.score.decode_update)
        if pages.formats[self.tier].slot.track:
            pages.put(self.tier, page, slot, pos=self.tokens_seen.repeat_interleave(pages.lists_per_row))
        self.page, self.slot = page.view(self.lists.shape), slot.view(self.lists.shape)
        if policy.reading is not None:
            self.reads = StepReads.begin(policy.reading, self.view)

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
        page, slot, keys = self.page[:, layer].flatten(), self.slot[:, layer].flatten(), k.flatten(0, 1)
        values = v.flatten(0, 1)
        pages.put(self.tier, page, slot, keys, values, distinct=True)
        if scores.writes_tokens:
            pages.field(self.tier, "score")[page, slot] = scores.of_token(keys, values)
        tiers, _ = self.holding.layer(self.rows, layer, self.width[layer])
        if self.reads is not None:
            tiers = [self.reads.choose(pages, self.holding.first_layer + layer, q, tiers[0])]
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
        if not self.pages.backend.fuses_layers or not self.holding.scores.fuses:
            return None
        # No such operation rotates keys between buffer and page, nor chooses the pages that it reads.
        if self.holding.rope.mode == "pre_rope" or self.reads is not None:
            return None
        return self._fuse()

    def _fuse(self) -> FusedStep | None:
        spec = self.holding.policy.score
        tiers = [
            self.pages.tier(tier, self.lists, self.pages.width(self.numbers, tier))
            for tier in range(len(self.pages.formats))
        ]
        if not self.holding.rope.turn_all_layers(tiers, self.view, waits=not self.pages.on_device):
            return None
        update: ScoreUpdate | None = None
        if spec.decode_update:
            update = "replace" if spec.decode_replace else "add"
        return self._open_layers(tiers, target=(self.tier, self.page, self.slot), update=update)

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
