"""PyramidKV: SnapKV's selection with a budget that shrinks from the first layer to the last."""

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
    pyramid_budgets,
    rank_descending,
    shrink_to_share,
    window_score,
)


@dataclass(kw_only=True)
class PyramidKV(Policy):
    """Keeps the observation window and the tokens its queries attend to most; lower layers keep more, and the mean over
    layers is the budget.

    Args:
        budget: Mean over layers of what stays of the prompt, window included: ratio, tokens per head, or bytes.
        window: Observation window; >= 1.
        beta: Steepness: the last layer keeps base / beta prefix tokens; >= 1.
        pool: `max`, `avg` or `none`.
        pool_kernel: Odd width of the pool.
        official_rounding: Round the step between layers down as the released code does, which spends more than the
            budget.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: Zefan-Cai/KVCache-Factory at c97f9d7, PyramidKVCluster.
    Differs: the budget is met exactly (largest remainder) unless `official_rounding`; budgets are computed for every
        prompt; one layer works.
    """

    budget: float | int | str = 0.25
    window: int = 32
    beta: int = 20
    pool: str = "max"
    pool_kernel: int = 7
    official_rounding: bool = False
    decode_every: int = 0
    tier: str = "fp16"
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def __post_init__(self) -> None:
        self._tier, self._budget = Tier.parse(self.tier), Budget.parse(self.budget)
        if self.beta < 1:
            raise ValueError(f"beta={self.beta} must be >= 1")
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
        window = min(self.window, budget)
        if budget < view.num_tokens:
            prefix = view.num_tokens - window
            keep = [0] * view.num_layers
            if budget > window:
                keep = pyramid_budgets(
                    budget - window,
                    prefix,
                    view.num_tokens,
                    view.num_layers,
                    beta=self.beta,
                    official_rounding=self.official_rounding,
                )
            own = torch.tensor(keep, device=view.layers.device)[view.layers][:, None, None]
            tier_of[..., :prefix] = torch.where(rank_descending(view.score[..., :prefix]) < own, 0, EVICT)
        return PrefillPlan(tier_of=tier_of)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        return shrink_to_share(view, self._budget, self.window)

    def check_outcome(self, record: dict) -> str | None:
        spare = int(self.official_rounding)
        return self.share_complaint(record, self._budget, self.window, mean=True, spare_pages=spare)
