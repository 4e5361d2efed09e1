"""DMS: a token is evicted when it leaves a window, by a threshold, so that each head keeps as many as it needs."""

from dataclasses import dataclass
from typing import Annotated

import torch

from kvbench.policy import (
    EVICT,
    DecodePlan,
    DecodeView,
    Number,
    Policy,
    PrefillPlan,
    PrefillView,
    ScoreSpec,
    Tier,
    TierText,
    Whole,
)


@dataclass(kw_only=True)
class DMS(Policy):
    """Keeps a sliding window, and behind it the tokens that its queries attended to more than a threshold; a token's
    fate is decided when it leaves the window, once.

    Args:
        threshold: Mean attention that a token has to receive to stay, as a multiple of the uniform share 1 / (tokens
            seen); >= 0. 0 = all stay.
        window: Tokens before which eviction waits, and prompt queries that count; >= 1.
        tier: Precision of what is kept.

    Source: DMS (Lancucki et al. 2025, arXiv 2506.05345): per-head lengths, eviction delayed by a window of 256 tokens.
        NVIDIA/kvpress dms_press.py likewise puts the rule around a score that is at hand.
    Differs: this is the rule without the training. In the paper a neuron of the key projection, trained with the model,
        decides when a token is written, and its decision waits; no such weights are here, so the attention received
        inside the window decides, at its end. Prompts are read with all tokens, where the paper masks evicted ones. A
        token's own query and those of the same KV head count, the largest of the group.
    """

    threshold: Annotated[float, Number(0, 1e6)] = 0.5
    window: Annotated[int, Whole(1, unit="tokens")] = 256
    tier: TierText = "fp16"
    acts_in_decode = True

    def __post_init__(self) -> None:
        self.tiers = (Tier.parse(self.tier),)
        self.score = ScoreSpec(
            prefill_queries=self.window, group_reduce="max", decode_update=True, track=("score", "pos")
        )

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        position = torch.arange(view.num_tokens, device=view.layers.device)
        share = view.score / min(self.window, view.num_tokens) * view.num_tokens
        goes = (share < self.threshold) & (position < view.num_tokens - self.window)
        return PrefillPlan(tier_of=view.filled(0).masked_fill(goes, EVICT))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """The incoming token takes the slot of the one that leaves the window, where that goes."""
        leaving = view.find(0, view.tokens_seen - self.window)
        share = leaving.value * view.tokens_seen[:, None, None]
        return DecodePlan(slot=torch.where(leaving.found & (share < self.threshold), leaving.slot, -1))

    def check_outcome(self, record: dict) -> str | None:
        kept = record.get("kept", {})
        if not kept or kept["prompt_slots_min"] >= (least := min(kept["prompt_tokens"], self.window)):
            return None
        return f"a head kept {kept['prompt_slots_min']} prompt tokens, but the last {least} wait for their eviction"
