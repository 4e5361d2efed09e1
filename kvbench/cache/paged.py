"""Tokens that go straight to pages: how prompts are written, and how a decode step makes room."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache import moves, reslot
from kvbench.cache.holding import Holding
from kvbench.cache.kept import Kept, PromptLayer
from kvbench.cache.late import to_device
from kvbench.cache.steps import PagedStep
from kvbench.policy import CompactPlan, DecodePlan


class Paged(Holding):
    """Holds every token in pages, and lets the policy act on them; takes what a `Holding` takes."""

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
        return not (self.policy.acts_in_decode or self.policy.compaction)

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
        k, v, of = prompt.paged_k[head, token], prompt.v[head, token], (prompt.layer, head)
        self.pages.put(tier, page, slot, k, v, score=score, pos=token, of=of)

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
        reslot.replan(self.pages, layer, lists, tier_of, pos, self.rope.strip(k, position), v, peak)

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
                of=(layer, torch.arange(len(lists), device=k.device).repeat_interleave(chunk)),
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
        self.due.tell(numbers, lambda: self.view(rows, numbers))

    def _compact(self, rows: Tensor, numbers: Sequence[int]) -> None:
        """Bulk eviction for the rows whose turn it is."""
        whose = self.due.whose(numbers, lambda: self.view(rows))
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
