"""Uniform quantisation: every token in one precision, nothing evicted."""

from dataclasses import dataclass, replace
from typing import Annotated

from kvbench.policy import Policy, Tier, TierText, Whole


@dataclass(kw_only=True)
class Uniform(Policy):
    """Stores every key and value vector at one precision, quantised when it is appended.

    Args:
        tier: `int8`, `int4`, `fp8` (e4m3 without scales, what serving engines ship) or k<bits>v<bits>.
        symmetric: Codes centred on zero, without zero points (integer tiers).
        splits: Equal groups that a vector is cut into, each with its own scale.

    Source: Atom/QServe style KV quantisation as DiffKV section 2.2 describes it; DiffKV's INT4 baseline (K4V4,
        thresholds 0). fp8: vLLM kv_cache_dtype=fp8 (e4m3, scale 1).
    Differs: weights and activations stay as they are, and keys are not smoothed: only the cache is measured.
    """

    tier: TierText = "int8"
    symmetric: bool = False
    splits: Annotated[int, Whole(1, 1024)] = 1

    def __post_init__(self) -> None:
        named = Tier.parse(self.tier)
        if max(named.k_bits, named.v_bits) == 16 and not named.native:
            raise ValueError(
                f"tier={self.tier} leaves 16-bit elements, as method=full does; choose int8, int4, fp8 or k8v4"
            )
        if self.symmetric and min(named.k_bits, named.v_bits) < 2:
            raise ValueError(
                f"symmetric=true needs at least 2 bits, but tier={self.tier} has {min(named.k_bits, named.v_bits)}"
            )
        if not (named.native or named.fp8):
            named = replace(named, k_splits=self.splits, v_splits=self.splits, symmetric=self.symmetric)
        self.tiers = (named,)
