"""Key norms: keys with a small norm attract attention, so they stay."""

from dataclasses import dataclass
from typing import Annotated

import torch

from kvbench.policy import (
    EVICT,
    MAX_TOKENS,
    Budget,
    BudgetText,
    CompactPlan,
    DecodeView,
    KeyNorms,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
    TierText,
    Whole,
    rank_descending,
    shrink_to_share,
)


@dataclass(kw_only=True)
class KeyNorm(Policy):
    """Keeps, per KV head, the prompt tokens whose keys have the smallest Euclidean norm; no attention is looked at.

    Args:
        budget: Mean over layers of what stays of the prompt: ratio, tokens per head, or bytes.
        skip_layers: First layers that keep everything, >= 0; the others share what the budget leaves.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never.
        tier: Precision of what is kept.

    Source: alessiodevoto/l2compress cache.py, l2_compress (EMNLP 2024).
    Differs: one budget for the whole cache: with `skip_layers` the other layers keep less, so that the mean is met (the
        original keeps its ratio in them); no minimum length (`prune_after`); kept tokens stay in position order.
    """

    budget: BudgetText = 0.25
    skip_layers: Annotated[int, Whole(0, 1000, unit="layers")] = 0
    decode_every: Annotated[int, Whole(0, MAX_TOKENS, unit="steps")] = 0
    tier: TierText = "fp16"

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.compact_every = self.decode_every
        self.score = ScoreSpec(statistic=KeyNorms(), track=("score", "pos") if self.decode_every else ())

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, skipped, length = view.budget_tokens(self._budget), self.skip_layers, view.num_tokens
        if budget < length:
            left = budget * view.num_layers - skipped * length
            if skipped >= view.num_layers or left < view.num_layers - skipped:
                raise ValueError(
                    f"skip_layers={skipped} whole layers of {view.num_layers} leave nothing of budget={self.budget} "
                    f"({budget} of {length} tokens) for the others; lower skip_layers or raise the budget"
                )
            if int(view.layers[0]) < skipped:
                return PrefillPlan(tier_of=view.filled(0))
            budget = left // (view.num_layers - skipped)
        return PrefillPlan(tier_of=torch.where(rank_descending(view.score) < budget, 0, EVICT).to(torch.int8))

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return shrink_to_share(view, self._budget, 0)

    def check_outcome(self, record: dict) -> str | None:
        return self.share_complaint(record, self._budget, 0, mean=self.skip_layers > 0)
