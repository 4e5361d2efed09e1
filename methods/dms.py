"""DMS: a token is evicted when it leaves a window, by a threshold, so that each head keeps as many as it needs."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

import torch

import kvbench.policy as kv


@dataclass(kw_only=True)
class DMS(kv.Policy):
    """Keeps a sliding window, and older tokens that its queries attended to more than a threshold.

    A token's fate is decided when it leaves the window, once.

    Args:
        threshold: Mean attention that a token has to receive to stay, as a multiple of the uniform share 1 / (tokens
            seen); >= 0. 0 = all stay.
        window: Tokens before which eviction waits, and prompt queries that count; >= 1.
        tier: Precision of what is kept.

    Source: DMS (Lancucki et al. 2025, arXiv 2506.05345): per-head lengths, eviction delayed by a window of 256 tokens.
        NVIDIA/kvpress dms_press.py, too, wraps an existing score in the rule.
    Differs: this is the rule without the training. In the paper a neuron of the key projection, trained with the model,
        decides when a token is written, and its decision waits; no such weights are here, so the attention received
        inside the window decides, at its end. Prompts are read with all tokens, where the paper masks evicted ones. A
        token's own query and those of the same KV head count, the largest of the group.
    """

    threshold: Annotated[float, kv.Number(0, 1e6)] = 0.5
    window: Annotated[int, kv.Whole(1, unit="tokens")] = 256
    tier: kv.TierText = "fp16"
    acts_in_decode = True

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.score = kv.ScoreSpec(
            prefill_queries=self.window, group_reduce="max", decode_update=True, track=("score", "pos")
        )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        position = torch.arange(view.num_tokens, device=view.layers.device)
        share = view.score / min(self.window, view.num_tokens) * view.num_tokens
        goes = (share < self.threshold) & (position < view.num_tokens - self.window)
        return kv.PrefillPlan(tier_of=view.filled(0).masked_fill(goes, kv.EVICT))

    def plan_decode(self, view: kv.DecodeView) -> kv.DecodePlan:
        """The incoming token takes the slot of the one that leaves the window, where that goes."""
        leaving = view.find(0, view.tokens_seen - self.window)
        share = leaving.value * view.tokens_seen[:, None, None]
        return kv.DecodePlan(slot=torch.where(leaving.exists & (share < self.threshold), leaving.slot, -1))

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        least = min(extent.prompt_tokens, self.window)
        return kv.Bounds(why="those in the window wait for their eviction, which are", prompt=(least, inf))
