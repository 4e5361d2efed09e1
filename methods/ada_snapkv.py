"""Ada-SnapKV: SnapKV's scores ranked over all heads of a layer, so that heads share one budget."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import torch

from kvbench.policy import (
    EVICT,
    Number,
    PrefillPlan,
    PrefillView,
    Whole,
    WindowRanked,
    largest_remainder,
    pyramid_budgets,
    rank_descending,
)


@dataclass(kw_only=True)
class AdaSnapKV(WindowRanked):
    """Gives every head of a layer a budget by how many of the layer's best tokens are its own, with a floor.

    Args:
        budget: Mean over heads of what stays of the prompt, window included: ratio, tokens per head, or bytes.
        alpha: Share of a head's budget that does not depend on the ranking, in [0, 1].
        pyramid: Give layers PyramidKV's budgets instead of equal ones (Ada-PyramidKV).
        beta: Steepness of the pyramid; >= 1.
        window: Observation window; >= 1.
        pool: `max`, `avg` or `none`.
        pool_kernel: Odd width of the pool.
        official_rounding: Round each head's budget half to even as the released code does, which may lose or gain
            tokens; its pyramid has no uniform branch for prompts below twice the budget either.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FFY0/AdaKV at efe4e2e, AdaptiveSnapKVCluster (normalize off, alpha 0.2 for GQA).
    Differs: largest-remainder rounding keeps the layer's total exact unless `official_rounding`; by default
        one kept set per KV head with the group's mean.
    """

    alpha: Annotated[float, Number(0, 1)] = 0.2
    pyramid: bool = False
    beta: Annotated[int, Whole(1, 1000)] = 20
    official_rounding: bool = False
    scope = "layer"
    budget_is_mean = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spare_pages = int(self.official_rounding)

    def head_budgets(self, score: torch.Tensor, base: int) -> list[int]:
        """Prefix tokens per head from pooled prefix scores fp32 [H, prefix]; the mean is `base`."""
        heads = score.shape[0]
        best = rank_descending(score.flatten()) < heads * base  # ties go to the lower head, then to the lower position
        counts = best.view(heads, -1).sum(1).tolist()
        if self.official_rounding:
            return [round(count * (1 - self.alpha) + int(base * self.alpha)) for count in counts]
        alpha = Fraction(str(self.alpha))
        parts = [count * (alpha.denominator - alpha.numerator) + base * alpha.numerator for count in counts]
        return largest_remainder(parts, alpha.denominator, heads * base)

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, tier_of = view.budget_tokens(self._budget), view.filled(0)
        window = min(self.window, budget)
        if budget < view.num_tokens:
            prefix = view.num_tokens - window
            score = view.score[0, :, :prefix]
            base = budget - window
            if self.pyramid:
                layers = pyramid_budgets(
                    base,
                    prefix,
                    view.num_tokens,
                    view.num_layers,
                    beta=self.beta,
                    official_rounding=self.official_rounding,
                    uniform_middle=not self.official_rounding,
                )
                base = layers[int(view.layers[0])]
            own = torch.tensor(self.head_budgets(score, base), device=score.device)[:, None]
            tier_of[0, :, :prefix] = torch.where(rank_descending(score) < own, 0, EVICT)
        return PrefillPlan(tier_of=tier_of)
