"""Scissorhands: what recent queries hardly looked at is dropped, many tokens at a time."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True, kw_only=True)
class WhenFull(kv.Compaction):
    """Evictions whenever the budget is full: all lists hold as many tokens, so the count of steps says when."""

    budget: kv.Budget
    drop: float

    def due(self, view: kv.DecodeView) -> Tensor:
        budget = view.budget_tokens(self.budget)
        since_full = view.tokens_seen - torch.maximum(view.prompt_tokens, budget)
        return (since_full >= 0) & (since_full % self.dropped(budget) == 0)

    def dropped(self, budget: Tensor) -> Tensor:
        """Tokens dropped at once, int64 [S]."""
        return (budget.double() * self.drop).long().clamp(min=1)


@dataclass(kw_only=True)
class Scissorhands(kv.Policy):
    """Keeps the tokens that few recent queries attended to with less than the uniform share, and the most recent ones.

    The prompt is cut to the budget by its last `history` queries. Whenever the budget is full and a token comes in, a
    share of the budget is dropped at once: the tokens that were below 1 / (tokens held) most often since the last drop.
    The cache thus holds between 1 - `drop` and all of the budget; after a prompt above it, the first step drops.

    Args:
        budget: Most tokens per KV head: ratio of the prompt, tokens, or bytes.
        history: Last prompt queries that count; >= 1.
        recent: Last tokens that are never dropped, as far as the budget allows; >= 0.
        drop: Share of the budget that is dropped at once, in (0, 1]; at least one token.
        normalize: Rank by the share of low queries among the counted ones that saw a token; false: by their number,
            which favours tokens that came late.
        tier: Precision of what is kept.

    Source: Scissorhands (Liu et al., NeurIPS 2023), Algorithms 1 and 2 with w=400, r=10, m=0.5 B, as other work
        describes them: the paper's text was not at hand, and no official code is known. AnswerDotAI/cold-compress
        cache.py, KVCacheScissorhands, for `normalize`.
    Differs: while decoding, the queries that count are those since the last drop, not the last `history` ones; one
        count per KV head, of queries for which all of its query heads are low; every layer has the same budget (the
        paper gives later layers more by their measured persistence).
    """

    budget: kv.BudgetText = 0.25
    history: Annotated[int, kv.Whole(1, unit="tokens")] = 400
    recent: Annotated[int, kv.Whole(0, unit="tokens")] = 10
    drop: Annotated[float, kv.Number(0, 1, above=True)] = 0.5
    normalize: bool = True
    tier: kv.TierText = "fp16"
    acts_in_decode = True
    no_upkeep = "drops a share of a full cache at once and counts queries since then, by a budget that stands still"

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.limit = self._budget = kv.Budget.parse(self.budget)
        self.compaction = self._when_full = WhenFull(budget=self._budget, drop=self.drop)
        self.score = kv.ScoreSpec(
            statistic=kv.BelowUniform(),
            prefill_queries=self.history,
            group_reduce="max",
            decode_update=True,
            track=("score", "pos"),
        )

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        return min(budget, num_prompt_tokens + num_new_tokens)  # a full budget shrinks before a token comes in

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        budget, length = view.budget_tokens(self._budget), view.num_tokens
        position = torch.arange(length, device=view.score.device)
        seen_by = (length - position).clamp(max=self.history)
        score = view.score / seen_by if self.normalize else view.score
        score = score.masked_fill(position >= length - self.recent, float("inf"))
        tier_of = torch.where(kv.rank_descending(score) < budget, 0, kv.EVICT).to(torch.int8)
        return kv.PrefillPlan(tier_of=tier_of)

    def plan_compact(self, view: kv.DecodeView) -> kv.CompactPlan:
        budget, slots = view.budget_tokens(self._budget), view.slots(0)
        seen, dropped, score = view.tokens_seen, self._when_full.dropped(budget), slots.score
        if self.normalize:  # counted: since the last drop, and before the first one since the prompt's history began
            full = torch.maximum(view.prompt_tokens, budget)
            since = torch.where(seen == full, view.prompt_tokens - self.history, seen - dropped)
            first = torch.maximum(slots.pos, since[:, None, None, None])
            score = score / (seen[:, None, None, None] - first).clamp(min=1)
        keep = (budget - dropped)[:, None, None, None]
        is_recent = slots.pos >= (seen - self.recent)[:, None, None, None]
        # Among recent tokens the newest go last, so that a budget below `recent` keeps the newest.
        score = torch.where(is_recent, 1.0 + slots.pos, score).masked_fill(~slots.valid, float("-inf"))
        by_position = slots.pos.argsort(dim=-1)  # equal counts are common, and slots lose their order when others move
        rank = torch.empty_like(by_position)
        rank.scatter_(-1, by_position, kv.rank_descending(score.gather(-1, by_position)))
        return kv.CompactPlan(keep=[rank < keep], restart_scores=True)

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.within(extent, self._budget, at_end=0)
