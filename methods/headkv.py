"""HeadKV: SnapKV's choice, with a budget for each head by a table of how much the head retrieves."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import Allocation, Number, Whole


@dataclass(kw_only=True)
class HeadKV(SnapKV):
    """Keeps the observation window and the tokens its queries attend to most, by head budgets from a table.

    The table has one weight per layer and KV head.

    Args:
        allocation: `table`: heads in proportion to `table`, above a floor of `alpha`.
        alpha: Share of a head's budget that does not depend on the table, in [0, 1]: 1 - 1 / beta of the paper, which
            takes a share of 1 / beta from each head into a common pool. With `ada` as in `ada_snapkv`.
        table: Weights, >= 0, one per layer and KV head: a path, or a list of lists. They belong to one model; the
            YAML's are the embedded model's, measured by `kvbench calibrate what=gates`. Other allocations do without.

    Source: HeadKV (Fu et al. 2024, arXiv 2410.19258), from the paper alone, since its code carries no licence: the
        division of the budget, with beta = 1.2.
    Differs: the paper measures a head's weight by the attention that it gives to planted evidence while it answers
        questions that need retrieval and reasoning; `kvbench calibrate what=gates` measures the attention that answers
        give to whatever lies far back. Weights are per KV head. The budget is met exactly (largest remainder), and what
        a head could keep beyond the prompt goes to the others.
    """

    allocation: Allocation = "table"
    alpha: Annotated[float, Number(0, 1)] = 0.1667
    window: Annotated[int, Whole(1, unit="tokens")] = 8

    def declare(self) -> None:
        if self.allocation != "table":
            self.table = None  # the file's, for which another allocation has no use
        super().declare()
