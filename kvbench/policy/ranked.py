"""Base of the methods that rank a prompt's tokens and keep the best."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from kvbench.errors import SettingsConflict
from kvbench.policy.allocation import Allocation, Shares
from kvbench.policy.bounds import Bounds, Extent, of_answer, within
from kvbench.policy.budget import Budget, BudgetText
from kvbench.policy.by_layer import ByLayer
from kvbench.policy.declare import ALL_QUERIES, Compaction, ScoreSpec
from kvbench.policy.eviction import (
    Protect,
    Protection,
    answer_share,
    displace_lightest,
    prompt_share,
    seen_share,
    shrink_to_share,
)
from kvbench.policy.plans import EVICT, CompactPlan, DecodePlan, PrefillPlan, SlotArrays
from kvbench.policy.ranking import TwoStages, chunk_means, rank_descending, whole_chunks
from kvbench.policy.settings import TierText
from kvbench.policy.statistics import Statistic, WithValueNorms
from kvbench.policy.tiers import Tier
from kvbench.policy.views import GONE, DecodeView, PrefillView
from kvbench.rules import MAX_TOKENS, TABLE_OR_PATH, Number, Whole
from kvbench.rules.tables import read_table

Steps = Annotated[int, Whole(0, MAX_TOKENS, unit="steps")]


@dataclass(kw_only=True)
class Ranked(ByLayer):
    """Base of methods that keep the tokens of a prompt with the highest scores.

    Of a prompt longer than the budget,

        first, last = always(budget)                    # tokens at the ends stay
        score = ranking(view)[..., first:-last]         # the others compete: by default with what `rank_by` declared
        own = shares.targets(score, budget - first - last)  # how many of them each list keeps
        keep = rank_descending(score) < own

    With `decode_every` all held tokens are ranked again before every so many steps, and lists go back to their share.

    A budget such as `50%seen` is a share of all tokens seen, the prompt's and the answer's so far, and is kept to at
    every step: once a list holds its share of it, which is in proportion to what the prompt's plan gave it, the
    lightest token makes room for the incoming one. Scores of attention are summed on over the steps, as with
    `decode_every`. Scores measured on the held tokens are measured anew before each step, or before every
    `decode_every` steps with room for as many tokens. Where a score is of the prompt alone, its tokens go first, and
    then the oldest of the answer. Where that is above its share, a list keeps its window (the incoming token counted),
    or what is protected and the tokens that come in before the next eviction, at least one of them besides another.

    A subclass says by what it ranks: its `declare` calls `super().declare()` and then `self.rank_by(ScoreSpec(...))`.
    It defines `always` where some tokens stay whatever their score is, and `ranking` where it does not rank by the
    plain score. Its parts are `shares` (which lists share the budget), `protection` (what no eviction takes) and
    `stages` (the second criterion of a value-aware choice).

    Args:
        budget: Tokens kept of the prompt: ratio, tokens per head, or bytes; or of all tokens seen (`50%seen`); the mean
            where lists share it unequally; null = `threshold` decides.
        tier: Precision of what is kept.
        allocation: `uniform`: every head of every layer keeps as much. `pyramid`: lower layers keep more, as PyramidKV.
            `ada`: a head of a layer keeps as many tokens as it has among the layer's best, as Ada-KV. `ada_pyramid`:
            both. `global`: as `ada`, over all layers and heads. `table`: in proportion to `table`. `preference`: in
            proportion to what the method finds a prompt's layers to be worth, where it does (`cake`).
        alpha: Share of a head's budget that `ada`, `global` and `table` do not touch, in [0, 1].
        beta: Steepness of a pyramid: the last layer keeps base / beta and what always stays; >= 1.
        table: Weights for `allocation=table`, >= 0, one per layer and KV head: a path, or a list of lists.
        chunk: Rank chunks of so many consecutive tokens by their mean: they stay or go together, except one per head
            that `cut_chunk` is about. 1 = single tokens.
        cut_chunk: A chunk that the budget has room for in part stays in part, so that the budget is met; false = it
            goes, and up to `chunk` - 1 tokens per head stay unspent.
        value_aware: Let the score choose half of a head's tokens, and the score times the norm of the projected value
            the others, as CriticalKV.
        protect: Tokens that are never evicted, in addition to those that the method keeps: `none`; the first
            `protect_tokens` (`sinks`); the `instruction` that stands before the user's text in a chat; the whole
            `prompt`, so that only the answer is compressed, during decoding, and the budget is of the answer (in
            bytes, of both); the `answer`, so that only tokens of the prompt go.
        protect_tokens: First tokens that `protect=sinks` keeps; >= 1.
        threshold: Keep the tokens whose score is at least this, however many they are, in place of a budget. A sum over
            queries counts per query. null = the budget decides.
        decode_every: Score all slots again and evict before every n-th decode step, down to each list's share of the
            prompt's budget; 0 = never. This and the next are settings of those methods alone that redefine them.
        official_rounding: Round shares as released code does, which may miss the budget.
    """

    no_upkeep = ""
    budget: BudgetText | None = 0.25
    tier: TierText = "fp16"
    allocation: Allocation = "uniform"
    alpha: Annotated[float, Number(0, 1)] = 0.2
    beta: Annotated[int, Whole(1, 1000)] = 20
    table: Annotated[str | Sequence[Sequence[float]] | None, TABLE_OR_PATH] = None
    chunk: Annotated[int, Whole(1, unit="tokens")] = 1
    cut_chunk: bool = True
    value_aware: bool = False
    protect: Protect = "none"
    protect_tokens: Annotated[int, Whole(1, unit="tokens")] = 4
    threshold: Annotated[float | None, Number(-1e9, 1e9)] = None
    decode_every: int = field(init=False, repr=False, compare=False, default=0)
    ranks_anew: bool = field(init=False, repr=False, compare=False, default=False)
    official_rounding: bool = field(init=False, repr=False, compare=False, default=False)

    def declare(self) -> None:
        if (self.budget is None) == (self.threshold is None):
            raise SettingsConflict(
                f"budget={self.budget} and threshold={self.threshold}: one of them says what stays, so give one and "
                "set the other to null",
                setting="method.threshold",
            )
        # The numbers of a table, so that a run's identity does not hang on a path.
        self.table = self._table = None if self.table is None else read_table(self.table)
        # A threshold has no budget; readers of one get a number in which everything fits.
        self.limit = self._budget = Budget.parse(1.0 if self.budget is None else self.budget)
        self.tiers = (Tier.parse(self.tier),)
        self.spread()
        self.shares = Shares(
            allocation=self.allocation,
            alpha=self.alpha,
            beta=self.beta,
            table=self._table,
            official_rounding=self.official_rounding,
        )
        self.stages = self.make_stages()
        self.scope, self.budget_is_mean = self.shares.scope, self.shares.is_mean
        self.protection = Protection(self.protect, self.protect_tokens)
        self.needs_instruction = self.protect == "instruction"
        self.fewest_tokens = max(1, self.protection.sinks)
        self.needs_prompt_slots = self._budget.of_seen
        if self.decode_every:
            self.compaction = Compaction(self.decode_every, from_start=self._budget.of_seen)
            self.fewest_tokens = max(self.fewest_tokens, self.last_tokens())
        self._refuse()

    def _refuse(self) -> None:
        """Refuses settings that do not go together."""
        prefers = type(self).layer_weights is not Ranked.layer_weights
        self.shares.check(self.budget, self._budget, None if prefers else type(self).__name__)
        self.protection.check(self.budget, self._budget, self.no_eviction)
        shared = f"allocation={self.allocation}" if self.shares.is_mean else "value_aware=true"
        wrong = {
            "threshold": self.threshold is not None
            and (self.shares.is_mean or self.value_aware)
            and f"threshold={self.threshold} leaves {shared} no budget to divide; set one of the two",
            "cut_chunk": not self.cut_chunk
            and self.chunk == 1
            and "cut_chunk=false is about chunks, and chunk=1 makes none; set chunk to more tokens",
            "value_aware": self.value_aware
            and self.chunk > 1
            and f"value_aware=true ranks single tokens a second time, which chunk={self.chunk} does not allow; set one "
            "of the two",
        }
        for setting, why in wrong.items():
            if why:
                raise SettingsConflict(why, setting=f"method.{setting}")

    def rank_by(self, spec: ScoreSpec) -> None:
        """Declares the score, and how it keeps lists to a share of all tokens seen."""
        if self._budget.of_seen and self.compaction is None:
            if self.ranks_anew or spec.statistic.answers("of_slots"):
                self.compaction = Compaction(from_start=True)
            else:
                self.acts_in_decode, spec = True, replace(spec, track=("score", "pos"))
        self.score = replace(spec, statistic=WithValueNorms(spec.statistic)) if self.value_aware else spec

    def score_by(self, statistic: Statistic, *, slot_queries: int = 0, **how: Any) -> None:
        """Declares a score that is measured again before every eviction.

        Its statistic measures a prompt and, at a later eviction, the slots held, with the last `slot_queries`; `how`
        are fields of the ScoreSpec.
        """
        later: dict[str, Any] = {"slot_queries": slot_queries, "track": ("pos",)} if self.evicts_later else {}
        self.rank_by(ScoreSpec(statistic=statistic, **later, **how))

    def sums(self, **how: Any) -> ScoreSpec:
        """A score of attention, to which every decode step adds its own where tokens are evicted later."""
        later: dict[str, Any] = {"decode_update": True, "track": ("score", "pos")} if self.evicts_later else {}
        return ScoreSpec(**later, **how)

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        self.shares.check_model(num_layers, num_kv_heads)

    # Hooks of subclasses.

    def always(self, budget: int) -> tuple[int, int]:
        """Numbers of first and last tokens of a prompt that stay whatever their score.

        First ones take precedence where the budget is too small for all. Default: none.
        """
        return 0, 0

    def last_tokens(self) -> int:
        """Last tokens that evictions while decoding keep. Default: as many as of a prompt of any length."""
        return self.always(MAX_TOKENS)[1]

    def ranking(self, view: PrefillView) -> Tensor:
        """Values fp32 [V, H, N] by which the tokens of a prompt are ranked. Default: the score."""
        return view.score

    def layer_weights(self, view: PrefillView) -> Tensor:
        """Weight of each layer of a prompt, fp64 [L], >= 0, for `allocation=preference`; the view has them all."""
        raise NotImplementedError(f"{type(self).__name__} does not define layer_weights")

    def prompt_budget(self, view: PrefillView) -> int:
        """Tokens per list that stay of a prompt, the mean where lists share them.

        Default: the budget, and what is protected where that is more.
        """
        first = self.protection.first(view.instruction_tokens)
        return max(view.budget_tokens(self._budget), min(first, view.num_tokens))

    def make_stages(self) -> TwoStages:
        """The selection of `value_aware`. Default: as CriticalKV."""
        return TwoStages()

    @property
    def evicts_later(self) -> bool:
        """True if held tokens are ranked again after the prompt. Valid once `Ranked.declare` has read the budget."""
        return bool(self.decode_every) or self._budget.of_seen

    @property
    def decides_steps(self) -> bool:
        return self.acts_in_decode

    @property
    def no_eviction(self) -> str:
        """Settings that make the method evict while decoding, for messages; empty = it does.

        Read before `declare` has ended.
        """
        settable = type(self).__dataclass_fields__["decode_every"].init
        remedy = "set decode_every" if settable else "the method decides about prompts alone, so set protect=none"
        return "" if self.decode_every else remedy

    # The plan.

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        if self.protect == "prompt":
            return PrefillPlan(tier_of=view.filled(0))
        if self.threshold is not None:
            return PrefillPlan(tier_of=torch.where(self._reaches(view, self.threshold), 0, EVICT).to(torch.int8))
        budget, tier_of = self.prompt_budget(view), view.filled(0)
        if budget < view.num_tokens:
            tier_of = torch.where(self._stays(view, budget), tier_of, EVICT).to(torch.int8)
        return PrefillPlan(tier_of=tier_of)

    def _stays(self, view: PrefillView, budget: int) -> Tensor:
        """Mask bool [V, H, N] of the tokens of a prompt longer than the budget that stay."""
        first, last = self._ends(budget, view.instruction_tokens)
        first = min(first, budget)
        last = min(last, budget - first)
        free = slice(first, view.num_tokens - last)
        score, held = self._scores(view, free), _held(view, free)
        # A head without a token would be none; where nothing stays anyhow, each begins with its best one.
        counts = self.shares.targets(view, score, budget - first - last, int(first + last == 0), self.layer_weights)
        if self.value_aware:
            mean = self.per_query(score, view.num_tokens)
            chosen = self.stages.choose(mean, view.extra["norm"][..., free], held, counts)
        else:
            chosen = rank_descending(score) < counts
        if not self.cut_chunk:
            chosen = whole_chunks(chosen, held, self.chunk, may_be_none=first + last > 0)
        keep = torch.ones(*view.filled(0).shape, dtype=torch.bool, device=score.device)
        keep[..., free] = chosen
        return keep

    def _scores(self, view: PrefillView, free: slice) -> Tensor:
        """Values fp32 [V, H, n] by which tokens are ranked, chunks merged; the smallest number for dropped ones."""
        score = self.ranking(view)[..., free]
        if self.chunk > 1:
            score = chunk_means(score, _held(view, free), self.chunk)
        return score if view.held is None else score.masked_fill(~view.held[..., free], GONE)

    def _reaches(self, view: PrefillView, threshold: float) -> Tensor:
        """Mask bool [V, H, N] of tokens that reach the threshold or always stay, and of each list's best."""
        first, last = self._ends(view.num_tokens, view.instruction_tokens)
        position = torch.arange(view.num_tokens, device=view.layers.device)
        stays = (position < first) | (position >= view.num_tokens - last)
        score = self.per_query(self._scores(view, slice(None)), view.num_tokens)
        return (score >= threshold) | stays | (rank_descending(score) == 0)

    def _ends(self, budget: int, instruction_tokens: int) -> tuple[int, int]:
        """First and last tokens of a prompt that stay."""
        first, last = self.always(budget)
        return max(first, self.protection.first(instruction_tokens)), last

    def per_query(self, score: Tensor, num_tokens: int) -> Tensor:
        """A prompt's scores, divided by the queries that they are sums over."""
        spec = self.score
        if not spec.statistic.by_queries or spec.query_reduce != "sum" or not spec.prefill_queries:
            return score
        return score / (num_tokens if spec.prefill_queries == ALL_QUERIES else min(spec.prefill_queries, num_tokens))

    # Evictions while decoding.

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        return self.keep_up(view, self.last_tokens()) if self.acts_in_decode else DecodePlan()

    def keep_up(self, view: DecodeView, window: int | Tensor, over_layer: bool = False) -> DecodePlan:
        """Evicts the token with the lowest score of each list at its share of all tokens seen, for the incoming one.

        The last `window` stay, the incoming one counted. `over_layer` decides once per layer.
        """
        grows = self.score.decode_update or self.score.statistic.answers("of_token")
        target = self._seen_target(view, window)
        return displace_lightest(view, target, window, self._first_held(view), grows=grows, over_layer=over_layer)

    def _first_held(self, view: DecodeView) -> int | Tensor:
        """First tokens that stay, of a prompt and after it: int64 [S] where sequences differ, else one number."""
        first, protected = self.always(MAX_TOKENS)[0], self.protection.first_held(view)
        return protected.clamp(min=first) if isinstance(protected, Tensor) else max(first, protected)

    def _seen_target(self, view: DecodeView, window: int | Tensor, lookahead: int = 0) -> Tensor:
        """Tokens that a list may hold with the incoming one and `lookahead` more, int64 [S, L, H].

        Its share of all tokens seen, and at least what always stays.
        """
        target = seen_share(view, self._budget, self.protection, lookahead)
        for least in (window, self._first_held(view) + 1):
            target = target.clamp(min=least) if isinstance(least, int) else torch.maximum(target, least[:, None, None])
        return target

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return self.shrink(view)

    def shrink(self, view: DecodeView, score: Tensor | None = None) -> CompactPlan:
        """Evicts every list in bulk down to its share, or to the tokens that reach the threshold.

        Protected tokens stay.
        """
        slots, window = view.slots(0), self.last_tokens()
        stays = self.protection.slots(view, slots.pos) & slots.valid
        if self._budget.of_seen:
            assert self.compaction is not None, "it plans evictions in bulk"
            coming = self.compaction.every
            target = self._seen_target(view, window, coming - 1) - coming
            return shrink_to_share(view, self._budget, max(0, window - 1), score, stays=stays, target=target)
        if self.threshold is None:
            target = answer_share(view, self._budget) if self.protect == "prompt" else self._share(view)
            return shrink_to_share(view, self._budget, window, score, stays=stays, target=target)
        ranked = self._per_query_held(view, slots) if score is None else score
        stays |= slots.pos >= (view.tokens_seen[:, None, None] - window)[..., None]
        best = rank_descending(ranked.masked_fill(~slots.valid, float("-inf"))) == 0
        return CompactPlan(keep=[(ranked >= self.threshold) | stays | best])

    def _share(self, view: DecodeView) -> Tensor:
        """`prompt_share`, int64 [S, L, H], in which slots of first tokens beyond the budget do not grow."""
        if not self.protection.is_first:
            return prompt_share(view, self._budget)
        allowed = view.budget_tokens(self._budget)
        room = self.protection.room(view, allowed)[:, None, None]
        return prompt_share(view, self._budget, view.prompt_slots * allowed[:, None, None] // room)

    def _per_query_held(self, view: DecodeView, slots: SlotArrays) -> Tensor:
        """Slots' scores; tracked sums divided by the queries since their token, of a prompt those that count."""
        if not self.score.decode_update:
            return slots.score
        origin = slots.pos
        if self.score.prefill_queries > 0:
            origin = torch.maximum(origin, (view.prompt_tokens - self.score.prefill_queries)[:, None, None, None])
        return slots.score / (view.tokens_seen[:, None, None, None] - origin).clamp(min=1)

    # How many tokens it holds.

    def least_tokens(self, num_prompt_tokens: int) -> int:
        if self.protect != "prompt":
            return super().least_tokens(num_prompt_tokens)
        return num_prompt_tokens + max(1, self.last_tokens() if self.decode_every else 1)

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        if self.protect == "answer":  # which stays in addition to a list's part of a shared budget
            return min(budget, num_prompt_tokens) + num_new_tokens
        return super().most_tokens(budget, num_prompt_tokens, num_new_tokens)

    def bounds(self, extent: Extent) -> Bounds | None:
        """The budget has to be met after the prompt, and at the end where the method also evicts while decoding."""
        if self.threshold is not None:
            return None
        if self._budget.of_seen:
            window, first = self.last_tokens(), self.protection.first(extent.instruction_tokens)
            first = max(self.always(MAX_TOKENS)[0], first)
            floor = max(window, first + 1)
            if self.compaction is not None:
                floor = max(1, window - 1, first) + self.compaction.every
            return self.within_budget(extent, floor=floor)
        if self.compaction is None:
            return self.within_budget(extent)
        stays, allowed = self.last_tokens(), extent.allowed(self._budget, extent.tokens_seen)
        if self.protect == "prompt":
            return of_answer(extent, self._budget, stays, self.compaction.every)
        if self.protect == "answer" and extent.new_tokens:
            # Where lists share the budget, some hold little else, others their share.
            stays = max(stays, extent.new_tokens + (allowed if self.budget_is_mean else 0))
        stays = max(stays, self.protection.first(extent.instruction_tokens), allowed)
        most = stays + self.compaction.every + self.shares.spare_pages * extent.page_tokens
        return replace(self.within_budget(extent), end_mean=(0, most))

    def within_budget(self, extent: Extent, at_end: int | None = None, floor: int = 1) -> Bounds:
        """The bounds that the budget sets; `at_end` and `floor` as `within` has them."""
        return within(
            extent,
            self._budget,
            at_least=max(1, self.protection.first(extent.instruction_tokens)),
            mean=self.budget_is_mean,
            spare_pages=self.shares.spare_pages,
            unspent=0 if self.cut_chunk else self.chunk - 1,
            at_end=at_end,
            floor=floor,
        )

    def fewest_of_prompt(self, extent: Extent) -> int:
        """Tokens of a prompt that stay in each list whatever their score is."""
        return min(extent.prompt_tokens, sum(self._ends(extent.prompt_tokens, extent.instruction_tokens)))


def _held(view: PrefillView, free: slice) -> Tensor:
    """Mask bool [V, H, n] of the tokens that are still held."""
    held = torch.ones_like(view.filled(0), dtype=torch.bool) if view.held is None else view.held
    return held[..., free]


@dataclass(kw_only=True)
class Scored(Ranked):
    """A method that keeps the tokens with the highest scores, and leaves it to its user to evict again while decoding.

    Args:
        decode_every: Score all slots again and evict single tokens, by the score alone, before every n-th decode step,
            down to each list's share of the prompt's budget; 0 = never, as most papers have it.
    """

    decode_every: Steps = 0
