"""CriticalKV: half of the budget by attention, the rest by attention times what the value adds to the output."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.policy import EVICT, LayerTensors, Need, Number, PrefillPlan, PrefillView, Statistic, rank_descending


@dataclass(frozen=True)
class ProjectedValues(Statistic):
    """Attention; beside it, as `norm`, the L1 norm of the value times the output projection, the group's mean."""

    needs: ClassVar[frozenset[Need]] = frozenset({"output_projection"})
    also: ClassVar[tuple[str, ...]] = ("norm",)
    by_queries: ClassVar[bool] = True
    words: ClassVar[str] = "times the L1 norm of the projected value"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        return torch.stack([seen.attention(), self._norm(seen)])

    def _norm(self, seen: LayerTensors) -> Tensor:
        """fp32 [H, n], one query head at a time: a head's projected values are as wide as the model."""
        total = torch.zeros(seen.v.shape[:2], device=seen.v.device)
        weights = seen.grouped(seen.output_projection)
        for member in range(weights.shape[1]):
            total += (seen.v.float() @ weights[:, member].float()).abs().sum(-1)
        return total / weights.shape[1]


@dataclass(kw_only=True)
class Critical(AdaSnapKV):
    """Chooses among SnapKV's tokens in two stages: by attention alone, then by attention times projected values.

    Args:
        budget: What stays of the prompt (the mean over heads where `adaptive`), window included: ratio, tokens per
            head, or bytes.
        first_stage: Share of a head's budget beside the window that goes by attention alone, in [0, 1].
        epsilon: Added to the attention before it is multiplied; >= 0.
        adaptive: Give heads Ada-SnapKV's budgets instead of equal ones.
        alpha: With `adaptive`, the share of a head's budget that does not depend on the ranking, in [0, 1].
        pyramid: With `adaptive`, give layers PyramidKV's budgets (Ada-PyramidKV).
        beta: Steepness of the pyramid; >= 1.
        window: Observation window; >= 1.
        pool: `max`, `avg` or `none`.
        pool_kernel: Odd width of the pool.
        official_rounding: As in `ada_snapkv`.
        decode_every: Evict again by attention alone before every n-th decode step, down to each list's share of the
            prompt's budget; 0 = never, as the paper has it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: one per query head, each stored and billed.

    Source: CriticalKV (Feng et al. 2025, arXiv 2502.03805), Algorithm 1; NVIDIA/kvpress criticalkv_press.py.
    Differs: the window is outside of both stages, where kvpress counts it in the first. Scores are means over the
        window's queries, so that `epsilon` means the same; budgets, pooling and heads are those of `snapkv` and
        `ada_snapkv`.
    """

    first_stage: Annotated[float, Number(0, 1)] = 0.5
    epsilon: Annotated[float, Number(0, 1)] = 1e-4
    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget_is_mean = self.adaptive
        self.score = replace(self.score, statistic=ProjectedValues())

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, tier_of = view.budget_tokens(self._budget), view.filled(0)
        window = min(self.window, budget)
        prefix, own = view.num_tokens - window, torch.tensor(budget - window, device=view.score.device)
        if self.adaptive:
            tier_of = super().plan_prefill(view).tier_of  # says how many, not yet which
            own = (tier_of >= 0).sum(-1, keepdim=True) - window
        if prefix:
            mean = view.score[..., :prefix] / min(self.window, view.num_tokens)
            keep = self.two_stages(mean, view.extra["norm"][..., :prefix], own)
            tier_of[..., :prefix] = torch.where(keep, 0, EVICT)
        return PrefillPlan(tier_of=tier_of)

    def two_stages(self, score: Tensor, norm: Tensor, own: Tensor) -> Tensor:
        """Which prefix tokens [..., n] stay, bool; `own` tokens per head, int64 [..., 1] or one number."""
        first = rank_descending(score) < (own * self.first_stage).long()
        worth = (score + self.epsilon) * norm
        return rank_descending(worth.masked_fill(first, float("inf"))) < own
