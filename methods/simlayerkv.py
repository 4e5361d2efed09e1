"""SimLayerKV: layers whose attention stays with the first and the newest tokens keep no others."""

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
class SimLayerKV(Policy):
    """Keeps all tokens in some layers, and only the first and the last ones in lazy layers: those whose last prompt
    queries attend to little else.

    A prompt of at most `sinks` + `recent` tokens is kept whole, and so is its answer: no layer was found lazy.

    Args:
        threshold: Share of attention on the first and last tokens above which a layer is lazy, in [0, 1]; 1 = none is.
            It belongs to a model: kvpress names 0.9 for Llama-3, 0.65 for Llama-2, 0.8 for Mistral, 0.85 for Qwen.
        sinks: First tokens that lazy layers keep; >= 0.
        recent: Last tokens that lazy layers keep; >= 1.
        queries: Last prompt queries that are asked; >= 1.
        tier: Precision of what is kept.

    Source: SimLayerKV (Zhang et al. 2024, arXiv 2410.13846), as NVIDIA/kvpress simlayerkv_press.py finds lazy layers.
    Differs: lazy layers keep to sinks and recent tokens while decoding, as the paper has it (kvpress lets them grow),
        and a new token takes the place of the oldest recent one before its step, so that it is one of `recent`. A query
        counts with all that it attends to, where kvpress leaves out the tokens of the asking queries.
    """

    threshold: Annotated[float, Number(0, 1)] = 0.9
    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    recent: Annotated[int, Whole(1, unit="tokens")] = 1024
    queries: Annotated[int, Whole(1, unit="tokens")] = 1
    tier: TierText = "fp16"
    acts_in_decode = True
    in_chunks = False  # a layer that was lazy once has dropped what it would need to be no more
    scope = "layer"

    def __post_init__(self) -> None:
        self.tiers = (Tier.parse(self.tier),)
        self.score = ScoreSpec(prefill_queries=self.queries, group_reduce="mean")

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        position = torch.arange(view.num_tokens, device=view.layers.device)
        stays = (position < self.sinks) | (position >= view.num_tokens - self.recent)
        on_them = view.score.mean(1)[:, stays].sum(-1) / min(self.queries, view.num_tokens)
        is_lazy = on_them > (self.threshold if self.threshold < 1 else float("inf"))  # sums of shares may exceed 1
        goes = is_lazy[:, None, None] & ~stays
        return PrefillPlan(tier_of=view.filled(0).masked_fill(goes, EVICT))

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """In lazy layers, which hold fewer tokens than were seen, step t takes slot sinks + t mod recent: those of the
        prompt lie in the order of their positions, so none need be stored."""
        turns = view.tokens_seen - view.prompt_tokens
        slot = (self.sinks + turns % self.recent)[:, None, None]
        return DecodePlan(slot=torch.where(view.num_slots(0) < view.tokens_seen[:, None, None], slot, -1))

    def check_outcome(self, record: dict) -> str | None:
        kept = record.get("kept", {})
        if not kept:
            return None
        limit, prompt, seen, lists = self.sinks + self.recent, kept["prompt_tokens"], kept["tokens_seen"], kept["lists"]
        gone, held = lists * prompt - kept["prompt_slots"], sum(kept["slots_per_tier"])
        lazy, rest = divmod(gone, prompt - limit) if prompt > limit else (0, gone)
        if rest or kept["prompt_slots_min"] < min(prompt, limit):
            return (
                f"{kept['prompt_slots']} slots of a prompt of {prompt} tokens are not whole lists and lists of {limit}"
            )
        if held != (expected := (lists - lazy) * seen + lazy * min(seen, limit)):
            return f"{held} slots after {seen} tokens, but {lazy} lazy lists of {limit} make {expected}"
        return None
