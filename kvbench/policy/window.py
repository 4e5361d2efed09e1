"""What the methods share that rank a prompt by an observation window, its last queries."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvbench.policy.base import Policy
from kvbench.policy.budget import Budget
from kvbench.policy.declare import ScoreSpec, Tier
from kvbench.policy.plans import CompactPlan
from kvbench.policy.ranking import rank_descending
from kvbench.policy.settings import BudgetText, TierText
from kvbench.policy.views import DecodeView
from kvbench.rules.kinds import MAX_TOKENS, Whole


@dataclass(kw_only=True)
class WindowRanked(Policy):
    """A method that keeps the window and what its queries attend to most; a subclass shares out the budget.

    A subclass defines `plan_prefill` and adds settings of its own. Where it has to check them, its `__post_init__`
    begins with `super().__post_init__()`. It sets `budget_is_mean` and `spare_pages` where the defaults do not fit:
    attributes without annotation, so that they are no settings.

    Args:
        budget: What stays of the prompt, window included: ratio, tokens per head, or bytes.
        window: Observation window, the last prompt queries; >= 1.
        pool: `max`, `avg` or `none`, over the prompt before the window.
        pool_kernel: Odd width of the pool.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never.
        tier: Precision of what is kept.
        granularity: `kv_head`: one kept set per KV head. `q_head`: one per query head, each stored and billed.
    """

    budget: BudgetText = 0.25
    window: Annotated[int, Whole(1, unit="tokens")] = 32
    pool: Literal["max", "avg", "none"] = "max"
    pool_kernel: Annotated[int, Whole(1, 1023, unit="tokens", odd=True)] = 7
    decode_every: Annotated[int, Whole(0, MAX_TOKENS, unit="steps")] = 0
    tier: TierText = "fp16"
    granularity: Literal["kv_head", "q_head"] = "kv_head"
    budget_is_mean = False  # over heads or layers; otherwise every list keeps to the budget
    spare_pages = 0  # that a list may hold beyond the budget, for released code that rounds

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.score = window_score(self._budget, self.window, self.pool, self.pool_kernel, self.decode_every)
        self.compact_every = self.decode_every

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        """Every list goes back to its share of the prompt's budget."""
        return shrink_to_share(view, self._budget, self.window)

    def check_outcome(self, record: dict) -> str | None:
        """The budget has to be met after the prompt, and at the end where the method also evicts while decoding."""
        return self.share_complaint(
            record, self._budget, self.window, mean=self.budget_is_mean, spare_pages=self.spare_pages
        )


def window_score(
    budget: Budget, window: int, pool: Literal["max", "avg", "none"], pool_kernel: int, decode_every: int
) -> ScoreSpec:
    """The statistics of methods that rank a prompt by its observation window.

    Args:
        budget: What stays; in tokens it must exceed the window, which always stays.
        window: Observation window, >= 1.
        pool: Over the prompt before the window.
        pool_kernel: Odd width of the pool.
        decode_every: Steps between evictions while decoding, which need scores and positions kept; 0 = never.

    Raises:
        ValueError: The budget leaves no token beside the window.
    """
    if budget.unit == "tokens" and budget.value <= window:
        raise ValueError(
            f"budget={budget.value:g} tokens must exceed window={window}; raise the budget or shrink the window"
        )
    return ScoreSpec(
        prefill_queries=window,
        pool=pool,
        pool_kernel=pool_kernel,
        group_reduce="mean",
        decode_update=decode_every > 0,
        track=("score", "pos") if decode_every else (),
    )


def shrink_to_share(view: DecodeView, budget: Budget, window: int, score: Tensor | None = None) -> CompactPlan:
    """Brings every list back to what the prompt's plan gave it: how prompt-only methods compress while decoding.

    With a ratio budget a list's share grows with the sequence (a prompt too short to have a share gets the ratio);
    otherwise it stays, and a prompt that fitted the budget grows up to it first. The lightest slots go, the last
    `window` tokens stay.

    Args:
        view: The view.
        budget: The method's budget.
        window: Last tokens that stay.
        score: fp32 [S, L, H, n] to rank by instead of the slots' scores.

    Source: none; the papers compress only the prompt.
    """
    slots = view.slots(0)
    seen, prompt = view.tokens_seen[:, None, None], view.prompt_tokens[:, None, None]
    if budget.unit == "ratio":
        # The one token that is kept of a prompt too short for the ratio is no share of it, or nothing would ever go.
        grown = (seen.double() * budget.value + 1e-9).long()  # as `Budget.tokens` does
        target = torch.where(prompt.double() * budget.value < 1, grown, view.prompt_slots * seen // prompt)
    else:
        allowed = view.budget_tokens(budget)[:, None, None]
        target = torch.where(prompt <= allowed, allowed, view.prompt_slots)
    ranked = slots.score if score is None else score
    ranked = ranked.masked_fill(slots.pos >= (seen - window)[..., None], float("inf"))
    ranked = ranked.masked_fill(~slots.valid, float("-inf"))
    return CompactPlan(keep=[rank_descending(ranked) < target.clamp(min=max(1, window))[..., None]])
