"""H2O: heavy hitters by accumulated attention, and a recent window."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvbench.policy import (
    ALL_QUERIES,
    BudgetText,
    DecodePlan,
    DecodeView,
    Number,
    ScoreSpec,
    SettingsConflict,
    Stepwise,
    Whole,
)


@dataclass(kw_only=True)
class H2O(Stepwise):
    """Keeps, per KV head, the most recent tokens and those with the largest attention summed over all queries so far.

    In every decode step the new token takes the slot of the lightest token outside the recent window; with a threshold
    only where that one's attention, per query that counted, is below it, and the window is a share of the prompt.

    Args:
        group: Reduction of the query heads of a KV head: `sum`, `mean` or `max`.
        one_shot: Never evict after the prompt, and do not update scores (the variant that several comparison papers
            ran).
        window: Recent tokens of the one-shot variant instead of `recent_share`; 0 = use the share.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FMInference/H2O utils_real_drop (H2OKVCache_LayerWise). `one_shot` with
        window 8: KVCache-Factory H2OKVCluster.
    Differs: by default one kept set per KV head with the group's sum; the two budgets are one budget and a share.
        Evicted tokens leave before the next step's attention, not after the last one's: attention sees the same tokens,
        and one more is held in between. The original's masks, which free nothing and let a token come back, are not
        here. Its budgets are of the prompt and stand still: a share of all tokens seen (`50%seen`), with which budget
        and window grow, and `threshold` are kvbench's.
    """

    budget: BudgetText | None = 0.2
    recent_share: Annotated[float, Number(0, 1)] = 0.5
    group: Literal["sum", "mean", "max"] = "sum"
    one_shot: bool = False
    window: Annotated[int, Whole(0, unit="tokens")] = 0
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def declare(self) -> None:
        super().declare()
        if self.one_shot and self._budget.of_seen:
            raise SettingsConflict(
                f"one_shot=true never evicts behind the prompt, and budget={self.budget} is a share of all tokens "
                "seen; set one_shot=false or give a ratio of the prompt",
                setting="method.one_shot",
            )
        self.acts_in_decode = not self.one_shot
        self.rank_by(
            ScoreSpec(
                prefill_queries=ALL_QUERIES,
                group_reduce=self.group,
                decode_update=not self.one_shot,
                track=() if self.one_shot else ("score", "pos"),
            )
        )

    def always(self, budget: int) -> tuple[int, int]:
        return (0, self.window) if self.window else super().always(budget)

    @property
    def no_eviction(self) -> str:
        return "set one_shot=false" if self.one_shot else ""

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        return DecodePlan() if self.one_shot else super().plan_decode(view)
