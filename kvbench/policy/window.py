"""What the methods share that rank a prompt by an observation window, its last queries."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvbench.policy.declare import ScoreSpec
from kvbench.policy.scored import Scored
from kvbench.rules import Whole


@dataclass(kw_only=True)
class WindowRanked(Scored):
    """A method that keeps the window and what its queries attend to most.

    A subclass adds settings of its own, or other defaults. Where it has to check them, its `__post_init__` begins with
    `super().__post_init__()`.

    Args:
        budget: What stays of the prompt, window included: ratio, tokens per head, or bytes; null = `threshold` decides.
        window: Observation window, the last prompt queries; >= 1.
        pool: `max`, `avg` or `none`, over the prompt before the window.
        pool_kernel: Odd width of the pool.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: one per query head, each stored and billed.
    """

    window: Annotated[int, Whole(1, unit="tokens")] = 32
    pool: Literal["max", "avg", "none"] = "max"
    pool_kernel: Annotated[int, Whole(1, 1023, unit="tokens", odd=True)] = 7
    granularity: Literal["kv_head", "q_head"] = "kv_head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._budget.unit == "tokens" and self._budget.value <= self.window and self.protect != "prompt":
            raise ValueError(
                f"budget={self._budget.value:g} tokens must exceed window={self.window}; raise the budget or shrink "
                "the window"
            )
        self.rank_by(
            ScoreSpec(
                prefill_queries=self.window,
                pool=self.pool,
                pool_kernel=self.pool_kernel,
                group_reduce="mean",
                decode_update=self.decode_every > 0,
                track=("score", "pos") if self.decode_every else (),
            )
        )

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.window
