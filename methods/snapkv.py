"""SnapKV: the last prompt queries choose what stays."""

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.policy import (
    EVICT,
    Budget,
    CompactPlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
    rank_descending,
    shrink_to_share,
    window_score,
)


@dataclass(kw_only=True)
class SnapKV(Policy):
    """Keeps, per KV head, the observation window and the prompt tokens that its queries attend to most, pooled along
    the prompt.

    Args:
        budget: What stays of the prompt, window included: ratio, tokens per head, or bytes.
        window: Observation window, the last prompt queries; >= 1.
        pool: `max`, `avg` or `none`, over the prompt before the window.
        pool_kernel: Odd width of the pool.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FasterDecoding/SnapKV snapkv_utils.py; defaults of its LongBench configs (w32, k7, max).
    Differs: by default one kept set per KV head with the group's mean score before pooling; kept tokens are stored in
        position order; scores are summed in fp32; a prompt of exactly the budget is left alone.
    """

    budget: float | int | str = 0.25
    window: int = 32
    pool: str = "max"
    pool_kernel: int = 7
    decode_every: int = 0
    tier: str = "fp16"
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def __post_init__(self) -> None:
        self._tier, self._budget = Tier.parse(self.tier), Budget.parse(self.budget)
        self._score = window_score(
            self._budget, self.window, self.pool, self.pool_kernel, self.decode_every, self.granularity
        )
        self.compact_every = self.decode_every

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return (self._tier,)

    @property
    def score(self) -> ScoreSpec:
        return self._score

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, tier_of = view.budget_tokens(self._budget), view.filled(0)
        prefix = view.num_tokens - min(self.window, budget)
        if budget < view.num_tokens:
            rank = rank_descending(view.score[..., :prefix])
            tier_of[..., :prefix] = torch.where(rank < budget - (view.num_tokens - prefix), 0, EVICT)
        return PrefillPlan(tier_of=tier_of)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return shrink_to_share(view, self._budget, self.window)

    def check_outcome(self, record: dict) -> str | None:
        return self.share_complaint(record, self._budget, self.window)
