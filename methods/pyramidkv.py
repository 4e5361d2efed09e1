"""PyramidKV: SnapKV's selection with a budget that shrinks from the first layer to the last."""

from dataclasses import dataclass

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Allocation


@dataclass(kw_only=True)
class PyramidKV(SnapKV):
    """Keeps the observation window and the tokens its queries attend to most, with more of them in lower layers.

    The mean over layers is the budget.

    Args:
        allocation: `pyramid`, which is SnapKV's even budget where a budget without its window is above half of the
            prompt; `ada_pyramid` is Ada-PyramidKV.
        beta: Steepness: the last layer keeps base / beta prefix tokens; >= 1.
        official_rounding: Round the step between layers down as the released code does, which spends more than the
            budget.

    Source: Zefan-Cai/KVCache-Factory at c97f9d7, PyramidKVCluster.
    Differs: the budget is met exactly (largest remainder) unless `official_rounding`; budgets are computed for every
        prompt; one layer works. The default window is 32, as in SnapKV and AdaKV, so that the three compare; the class
        there has 64 and run_longbench.py 8, as KV-Compress's comparison. Kept sets and ties as in `snapkv`. With
        `50%seen` layers hold their shares of the prompt's plan as the answer grows.
    """

    allocation: Allocation = "pyramid"
    official_rounding: bool = False
