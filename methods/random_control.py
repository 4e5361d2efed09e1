"""The control: keeps tokens at random."""

from dataclasses import dataclass
from typing import Annotated

import torch

from kvbench.policy import (
    EVICT,
    MAX_TOKENS,
    Budget,
    BudgetText,
    CompactPlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
    TierText,
    Whole,
    rank_descending,
    shrink_to_share,
)


@dataclass(kw_only=True)
class RandomControl(Policy):
    """Keeps sinks, a recent window, and a seeded random choice of the other prompt tokens per layer and head.

    A method that chooses by attention has to beat this at the same bytes.

    Args:
        budget: What stays of the prompt: ratio, tokens per head, or bytes.
        sinks: First tokens that always stay.
        window: Last tokens that always stay, as in the methods it is compared with.
        seed: Of the choice; the prompt's length is mixed in.
        decode_every: Evict again before every n-th decode step, down to each list's share of the prompt's budget;
            0 = never, as the papers have it.
        tier: Precision of what is kept.

    Source: none (control).
    Differs: none.
    """

    budget: BudgetText = 0.25
    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    window: Annotated[int, Whole(0, unit="tokens")] = 32
    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0
    decode_every: Annotated[int, Whole(0, MAX_TOKENS, unit="steps")] = 0
    tier: TierText = "fp16"

    def __post_init__(self) -> None:
        self.tiers, self._budget = (Tier.parse(self.tier),), Budget.parse(self.budget)
        self.compact_every = self.decode_every
        self.score = ScoreSpec(track=("pos",) if self.decode_every else ())

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        budget, tier_of = view.budget_tokens(self._budget), view.filled(0)
        if budget < view.num_tokens:
            draws = []
            for layer in view.layers.tolist():
                generator = torch.Generator().manual_seed(hash((self.seed, layer, view.num_tokens)))
                draws.append(torch.rand(view.num_kv_heads, view.num_tokens, generator=generator))
            score = torch.stack(draws).to(view.layers.device)
            score[..., : self.sinks] = 3.0  # above every draw, and above the window when both do not fit
            score[..., max(0, view.num_tokens - self.window) :] = 2.0
            tier_of = torch.where(rank_descending(score) < budget, 0, EVICT).to(torch.int8)
        return PrefillPlan(tier_of=tier_of)

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        pos = view.slots(0).pos
        draws = []
        for seen, own in zip(view.tokens_seen.tolist(), pos, strict=True):
            generator = torch.Generator().manual_seed(hash((self.seed, seen)))
            draws.append(torch.rand(own.shape, generator=generator).to(pos.device))
        score = torch.stack(draws).masked_fill(pos < self.sinks, 3.0)
        return shrink_to_share(view, self._budget, self.window, score)

    def check_outcome(self, record: dict) -> str | None:
        return self.share_complaint(record, self._budget, self.window)
