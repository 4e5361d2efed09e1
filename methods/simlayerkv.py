"""SimLayerKV: layers whose attention stays with the first and the newest tokens keep no others."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

import torch

import kvbench.policy as kv


@dataclass(kw_only=True)
class SimLayerKV(kv.Policy):
    """Keeps all tokens in some layers, and only the first and the last ones in lazy layers.

    In a lazy layer the last prompt queries attend to little else.

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

    threshold: Annotated[float, kv.Number(0, 1)] = 0.9
    sinks: Annotated[int, kv.Whole(0, unit="tokens")] = 4
    recent: Annotated[int, kv.Whole(1, unit="tokens")] = 1024
    queries: Annotated[int, kv.Whole(1, unit="tokens")] = 1
    tier: kv.TierText = "fp16"
    acts_in_decode = True
    in_chunks = False  # a layer that was lazy once has dropped what it would need to be no more
    scope = "layer"

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.score = kv.ScoreSpec(prefill_queries=self.queries, group_reduce="mean")

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        position = torch.arange(view.num_tokens, device=view.layers.device)
        stays = (position < self.sinks) | (position >= view.num_tokens - self.recent)
        on_them = view.score.mean(1)[:, stays].sum(-1) / min(self.queries, view.num_tokens)
        is_lazy = on_them > (self.threshold if self.threshold < 1 else float("inf"))  # sums of shares may exceed 1
        goes = is_lazy[:, None, None] & ~stays
        return kv.PrefillPlan(tier_of=view.filled(0).masked_fill(goes, kv.EVICT))

    def plan_decode(self, view: kv.DecodeView) -> kv.DecodePlan:
        """Overwrites slot sinks + t mod recent at step t in lazy layers, which hold fewer tokens than were seen.

        The prompt's tokens are in position order, so that none need be stored.
        """
        turns = view.tokens_seen - view.prompt_tokens
        slot = (self.sinks + turns % self.recent)[:, None, None]
        return kv.DecodePlan(slot=torch.where(view.num_slots(0) < view.tokens_seen[:, None, None], slot, -1))

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        """A list holds all tokens or those of a lazy layer; how many are lazy, the prompt's slots say."""
        limit, prompt, seen, lists = self.sinks + self.recent, extent.prompt_tokens, extent.tokens_seen, extent.lists
        lazy = (lists * prompt - extent.prompt_slots) // (prompt - limit) if prompt > limit else 0
        at_prompt, at_end = (((lists - lazy) * length + lazy * min(length, limit)) / lists for length in (prompt, seen))
        return kv.Bounds(
            why=f"{lazy} lazy lists of {limit} make",
            prompt=(min(prompt, limit), inf),
            prompt_mean=(at_prompt, at_prompt),
            end_mean=(at_end, at_end),
        )
