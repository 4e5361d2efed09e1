"""The uncompressed cache."""

from dataclasses import dataclass

from kvbench.policy import Policy, Tier, TierText


@dataclass(kw_only=True)
class Full(Policy):
    """Every token stays, in 16 bits: the papers' FP16 baseline and 100 % of every ratio.

    Args:
        tier: `fp16`, or `native` for the model's own dtype (exactness tests), or any token-axis tier.

    Source: the papers' FP16 baseline.
    Differs: none.
    """

    tier: TierText = "fp16"

    def declare(self) -> None:
        self.tiers = (Tier.parse(self.tier),)
