"""MiniKV: heavy hitters chosen once, then quantised to 2 bits."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy import (
    ALL_QUERIES,
    EVICT,
    Policy,
    PrefillPlan,
    PrefillView,
    Residual,
    ScoreSpec,
    Tier,
    largest_remainder,
    rank_descending,
)


@dataclass(kw_only=True)
class MiniKV(Policy):
    """Keeps heavy hitters and a recent window of the prompt, all at `bits`; generated tokens pass a 16-bit buffer and
    are never evicted.

    Args:
        heavy: Mean over layers of the heavy hitters' share of the prompt, in (0, 1].
        recent: The recent window's share of the prompt, in (0, 1].
        allocation: Heavy hitters per layer: `uniform`; `pyramid`: linear from 2x - x/depth to x/depth; `var_prop`,
            `var_inv`: proportional or inversely proportional to the variance of the layer's accumulated attention.
        depth: Depth of the pyramid, >= 1.
        bits: Bits per element of keys and values.
        group: Tokens per key scale and channels per value scale.
        residual_tokens: Length of the 16-bit buffer, a multiple of `group`.
        native: Store the model's own dtype instead (lossless; for tests).

    Source: MiniKV sections 4.2 and 4.3, Algorithm 1; MiniKV-Dev at 486a1ca, cache_impl.py.
    Differs: exact attention sums (the selective kernel leaves out a normalisation); KV-head granularity with the
        group's sum; at least one heavy and one recent token.
    """

    heavy: float = 0.25
    recent: float = 0.25
    allocation: Literal["uniform", "pyramid", "var_prop", "var_inv"] = "pyramid"
    depth: int = 7
    bits: int = 2
    group: int = 16
    residual_tokens: int = 128
    native: bool = False

    def __post_init__(self) -> None:
        for name, value in (("heavy", self.heavy), ("recent", self.recent)):
            if not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be in (0, 1], a share of the prompt")
        if self.allocation not in ("uniform", "pyramid", "var_prop", "var_inv"):
            raise ValueError(f"allocation={self.allocation!r} must be uniform, pyramid, var_prop or var_inv")
        if self.depth < 1:
            raise ValueError(f"depth={self.depth} must be >= 1")
        if self.group < 8 or self.group % 8 or self.residual_tokens < 1 or self.residual_tokens % self.group:
            raise ValueError(
                f"group={self.group} must be a multiple of 8 and residual_tokens={self.residual_tokens} a multiple of "
                "group"
            )
        self.scope = "model" if self.allocation.startswith("var") else "head"
        coded = Tier(k_bits=self.bits, v_bits=self.bits, k_axis="channel", k_group=self.group, v_group=self.group)
        self._tier = Tier(native=True) if self.native else coded

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return (self._tier,)

    @property
    def score(self) -> ScoreSpec:
        return ScoreSpec(prefill_queries=ALL_QUERIES, group_reduce="sum")

    @property
    def residual(self) -> Residual:
        return Residual(num_tokens=self.residual_tokens, v_flush="all", when="before_attention", hold_prompt=False)

    def heavy_counts(self, view: PrefillView) -> list[int]:
        """Heavy hitters of every layer of the view; at least one."""
        length, total = view.num_tokens, view.num_layers
        if self.allocation == "uniform" or total == 1:
            return [max(1, int(length * self.heavy))] * len(view.layers)
        if self.allocation == "pyramid":
            last = self.heavy / self.depth
            first = 2 * self.heavy - last
            return [
                max(1, int(length * (first + (last - first) / (total - 1) * layer))) for layer in view.layers.tolist()
            ]
        variance = view.score.var(-1, unbiased=False).mean(-1).double()
        weight = variance if self.allocation == "var_prop" else 1.0 / variance.clamp(min=1e-30)
        return share_with_cap(weight, int(length * self.heavy) * total, length - self._recent(length))

    def _recent(self, length: int) -> int:
        return max(1, int(length * self.recent))

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        tier_of, recent = view.filled(0), self._recent(view.num_tokens)
        prefix = max(0, view.num_tokens - recent)
        if prefix:
            own = torch.tensor(self.heavy_counts(view), device=view.layers.device)[:, None, None]
            tier_of[..., :prefix] = torch.where(rank_descending(view.score[..., :prefix]) < own, 0, EVICT)
        return PrefillPlan(tier_of=tier_of)


def share_with_cap(weight: Tensor, total: int, cap: int) -> list[int]:
    """Whole shares proportional to `weight` [L], none above `cap`; what a cap cuts off is shared again among the
    others; at least one each."""
    shares, open_layers, left = [0] * len(weight), list(range(len(weight))), min(total, cap * len(weight))
    while open_layers:
        parts = [Fraction(float(weight[layer])) for layer in open_layers]
        scaled = [part * left / sum(parts) for part in parts]
        over = [layer for layer, part in zip(open_layers, scaled, strict=True) if part >= cap]
        if not over:
            common = sum(parts)
            exact = largest_remainder([part * left for part in parts], common, left)
            for layer, value in zip(open_layers, exact, strict=True):
                shares[layer] = value
            break
        for layer in over:
            shares[layer] = cap
        left -= cap * len(over)
        open_layers = [layer for layer in open_layers if layer not in over]
    return [max(1, share) for share in shares]
