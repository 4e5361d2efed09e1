"""SnapKV: the last prompt queries choose what stays."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvbench.policy import Scored, SettingsConflict, Whole


@dataclass(kw_only=True)
class SnapKV(Scored):
    """Keeps, per KV head, the observation window and the prompt tokens that its queries attend to most.

    The attention is pooled along the prompt.

    Args:
        window: Observation window, the last prompt queries, whose tokens stay and are part of the budget; >= 1.
        pool: `max`, `avg` or `none`, over the prompt before the window.
        pool_kernel: Odd width of the pool.
        granularity: `kv_head`: one kept set per KV head. `q_head`: KV heads are repeated first, as the original does,
            and every query head's copy is stored and billed.

    Source: FasterDecoding/SnapKV snapkv_utils.py; defaults of its LongBench configs (w32, k7, max).
    Differs: by default one kept set per KV head with the group's mean score before pooling; kept tokens are stored in
        position order; scores are summed in fp32; a prompt of exactly the budget is left alone; of equal scores, which
        a pool makes many of, the earlier token stays. Nothing goes after the prompt, as there; DiffKV compares it at
        50 % of the cache and does not say how: with `50%seen` the scores are summed on over the answer, and the
        lightest token outside of the window makes room for each new one.
    """

    window: Annotated[int, Whole(1, unit="tokens")] = 32
    pool: Literal["max", "avg", "none"] = "max"
    pool_kernel: Annotated[int, Whole(1, 1023, unit="tokens", odd=True)] = 7
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def declare(self) -> None:
        super().declare()
        if self._budget.unit == "tokens" and self._budget.value <= self.window and self.protect != "prompt":
            raise SettingsConflict(
                f"budget={self._budget.value:g} tokens must exceed window={self.window}; raise the budget or shrink "
                "the window",
                setting="method.budget",
            )
        # The budget goes to the window, and to the tokens with the largest of these scores before it.
        self.rank_by(
            self.sums(
                prefill_queries=self.window,  # the attention of the window's queries, summed
                group_reduce="mean",  # over the query heads of a KV head
                pool=self.pool,  # along the prompt before the window
                pool_kernel=self.pool_kernel,
            )
        )

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.window
