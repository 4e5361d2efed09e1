"""Ada-SnapKV: SnapKV's scores ranked over all heads of a layer, so that heads share one budget."""

from dataclasses import dataclass

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Allocation


@dataclass(kw_only=True)
class AdaSnapKV(SnapKV):
    """Gives every head of a layer a budget by how many of the layer's best tokens are its own, with a floor.

    Args:
        alpha: Share of a head's budget that does not depend on the ranking, in [0, 1].
        allocation: `ada`; `ada_pyramid` gives layers PyramidKV's budgets instead of equal ones (Ada-PyramidKV).
        official_rounding: Round each head's budget half to even as the released code does, which may lose or gain
            tokens; its pyramid has no uniform branch for prompts below twice the budget either.

    Source: FFY0/AdaKV at efe4e2e, AdaptiveSnapKVCluster (normalize off, alpha 0.2 for GQA).
    Differs: largest-remainder rounding keeps the layer's total exact unless `official_rounding`; by default
        one kept set per KV head with the group's mean; ties as in `snapkv`. `alpha` is the even share, as in the
        released code, whose README has 0.5. Ada-PyramidKV's layers get budgets for every prompt, there for the first.
        With `50%seen` heads hold their shares of the prompt's plan as the answer grows.
    """

    allocation: Allocation = "ada"
    official_rounding: bool = False
