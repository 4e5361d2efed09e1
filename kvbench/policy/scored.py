"""What the methods share that keep the tokens of a prompt which a statistic scores highest."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from kvbench.policy.base import Policy
from kvbench.policy.budget import Budget
from kvbench.policy.declare import ScoreSpec, Tier
from kvbench.policy.plans import EVICT, CompactPlan, PrefillPlan
from kvbench.policy.ranking import rank_descending
from kvbench.policy.settings import BudgetText, TierText
from kvbench.policy.statistics import Statistic
from kvbench.policy.views import DecodeView, PrefillView
from kvbench.policy.window import shrink_to_share
from kvbench.rules.kinds import MAX_TOKENS, Whole


@dataclass(kw_only=True)
class Scored(Policy):
    """A method that keeps, per KV head, the tokens with the highest scores; a subclass says by which statistic.

    Its `__post_init__` calls `super().__post_init__()` and then `self.score_by(...)`.

    Args:
        budget: What stays of the prompt: ratio, tokens per head, or bytes.
        decode_every: Score all slots again and evict before every n-th decode step, down to each list's share of the
            prompt's budget; 0 = never.
        tier: Precision of what is kept.
    """

    budget: BudgetText = 0.25
    decode_every: Annotated[int, Whole(0, MAX_TOKENS, unit="steps")] = 0
    tier: TierText = "fp16"

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.compact_every = self.decode_every

    def score_by(self, statistic: Statistic, *, slot_queries: int = 0, **how: Any) -> None:
        """Declares the score.

        Args:
            statistic: Measures a prompt, and the slots held where `decode_every` asks for that.
            slot_queries: Last queries that it looks at while decoding.
            how: Further fields of the ScoreSpec.
        """
        self.score = ScoreSpec(
            statistic=statistic,
            slot_queries=slot_queries if self.decode_every else 0,
            track=("pos",) if self.decode_every else (),
            **how,
        )

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget = view.budget_tokens(self._budget)
        return PrefillPlan(tier_of=torch.where(rank_descending(view.score) < budget, 0, EVICT).to(torch.int8))

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return shrink_to_share(view, self._budget, 0)

    def check_outcome(self, record: dict) -> str | None:
        return self.share_complaint(record, self._budget, 0)
