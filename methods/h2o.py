"""H2O: heavy hitters by accumulated attention, and a recent window."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from kvbench.policy import ALL_QUERIES, BudgetText, DecodePlan, DecodeView, Number, Ranked, ScoreSpec, Whole


@dataclass(kw_only=True)
class H2O(Ranked):
    """Keeps, per KV head, the tokens with the largest attention summed over all queries so far, and the most recent
    ones.

    In every decode step the new token takes the slot of the lightest token outside the recent window.

    Args:
        budget: Heavy and recent tokens together: ratio of the prompt, tokens, or bytes.
        recent_share: Share of the budget that is the recent window, in [0, 1].
        group: How the query heads of a KV head are reduced: `sum`, `mean` or `max`.
        one_shot: Never evict after the prompt, and do not update scores (the variant that several comparison papers
            ran).
        window: Recent tokens of the one-shot variant instead of `recent_share`; 0 = use the share.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FMInference/H2O utils_real_drop (H2OKVCache_LayerWise). `one_shot` with
        window 8: KVCache-Factory H2OKVCluster.
    Differs: by default one kept set per KV head with the group's sum; the two budgets are one budget and a share.
    """

    budget: BudgetText = 0.2
    recent_share: Annotated[float, Number(0, 1)] = 0.5
    group: Literal["sum", "mean", "max"] = "sum"
    one_shot: bool = False
    window: Annotated[int, Whole(0, unit="tokens")] = 0
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return 0, self.window or int(budget * self.recent_share)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        if self.one_shot:
            return DecodePlan()
        budget = view.budget_tokens(self._budget)
        recent = (budget.double() * self.recent_share).long()  # the prompt's number: 0.29 x 100 differs in fp32
        lightest = view.argmin(0, by="score", before=view.tokens_seen - recent)
        full = view.tokens_seen > torch.maximum(view.prompt_tokens, budget)  # whatever a list's share is
        full = full[:, None, None]
        return DecodePlan(slot=torch.where(full & lightest.found, lightest.slot, -1))

    def check_outcome(self, record: dict) -> str | None:
        return self.budget_complaint(
            record, self._budget, mean=self.budget_is_mean, at_end=None if self.one_shot else 1
        )
