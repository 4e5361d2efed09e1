"""CriticalKV: half of the budget by attention, the rest by attention times what the value adds to the output."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Number, TwoStages


@dataclass(kw_only=True)
class Critical(SnapKV):
    """Chooses among SnapKV's tokens in two stages: by attention alone, then by attention times projected values.

    Args:
        first_stage: Share of a head's budget outside the window that goes by attention alone, in [0, 1].
        epsilon: Added to the attention before it is multiplied; >= 0.
        allocation: `uniform`; `ada` and `ada_pyramid` are CriticalKV over Ada-SnapKV and Ada-PyramidKV.
        value_aware: false leaves SnapKV, or what `allocation` makes of it.
        official_rounding: As in `ada_snapkv`.

    Source: CriticalKV (Feng et al. 2025, arXiv 2502.03805), Algorithm 1; NVIDIA/kvpress criticalkv_press.py.
    Differs: the window is outside of both stages, where kvpress counts it in the first. Scores are means over the
        window's queries, so that `epsilon` means the same; budgets, pooling and heads are those of `snapkv` and
        `ada_snapkv`.
    """

    value_aware: bool = True
    first_stage: Annotated[float, Number(0, 1)] = 0.5
    epsilon: Annotated[float, Number(0, 1)] = 1e-4
    official_rounding: bool = False

    def make_stages(self) -> TwoStages:
        return TwoStages(self.first_stage, self.epsilon)
