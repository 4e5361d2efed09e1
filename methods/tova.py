"""TOVA: the token that the newest query attends to least makes room."""

from dataclasses import dataclass

import torch

from kvbench.policy import (
    EVICT,
    Budget,
    BudgetText,
    DecodePlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
    TierText,
    rank_descending,
)


@dataclass(kw_only=True)
class TOVA(Policy):
    """Keeps the tokens that the last query attends to most, the same ones in every head of a layer.

    The prompt is cut down to the budget by its last query. From then on each step drops the token with the smallest
    attention of that step, whatever its age: neither sinks nor recent tokens are protected.

    Args:
        budget: What stays: ratio of the prompt, tokens, or bytes.
        per_head: Every KV head ranks and drops on its own, by the mean of its query heads.
        tier: Precision of what is kept.

    Source: schwartz-lab-NLP/TOVA src/tova_cache.py (mean over all heads of a layer, then top-k of the last query).
    Differs: the victim of a step is overwritten when the next step begins, so one token more than the budget is held
        between steps, as many as the original attends to; kept tokens stay in position order after the prompt;
        `per_head` is an addition.
    """

    budget: BudgetText = 0.25
    per_head: bool = False
    tier: TierText = "fp16"
    scope = "layer"
    acts_in_decode = True

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.score = ScoreSpec(
            prefill_queries=1, group_reduce="mean", decode_update=True, decode_replace=True, track=("score", "pos")
        )

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, score = view.budget_tokens(self._budget), view.score
        if not self.per_head:
            score = score.mean(1, keepdim=True).expand_as(score)
        tier_of = torch.where(rank_descending(score) < budget, 0, EVICT).to(torch.int8)
        return PrefillPlan(tier_of=tier_of)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        lightest = view.argmin(0, by="score", over_layer=not self.per_head)
        full = view.num_slots(0) > view.budget_tokens(self._budget)[:, None, None]
        return DecodePlan(slot=torch.where(full & lightest.found, lightest.slot, -1))

    def check_outcome(self, record: dict) -> str | None:
        return self.budget_complaint(record, self._budget, at_end=1)
