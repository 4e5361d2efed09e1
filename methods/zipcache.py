"""ZipCache: more bits for salient tokens than for others; new tokens stay in 16 bits for a while."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class ProbedSaliency(kv.Statistic):
    """Attention from a few queries, the newest and random ones, divided by the queries that can see a token.

    While decoding, that of every `window`-th query.
    """

    probes: float
    seed: int
    window: int
    words: ClassVar[str] = "of which some probe, per query that can see a token"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        length = seen.k.shape[1]
        before = min(int(length - self.probes * length), length - 1)
        rows = torch.arange(before, length)
        if before:
            make = torch.Generator().manual_seed(hash((self.seed, length)))
            rows = torch.cat([rows, torch.randint(0, before, (int(self.probes * length),), generator=make)])
        attention = seen.grouped(seen.probabilities(rows.to(seen.k.device))).sum((1, 2))
        return attention / (length - seen.pos)

    def of_step(self, probability: Tensor, num_keys: Tensor, step: Tensor) -> Tensor:
        # A token is ranked and moved before the next query counts, so its score is the attention of one query.
        return probability * ((step + 1) % self.window == 0)


@dataclass(kw_only=True)
class ZipCache(kv.Policy):
    """Stores the prompt's salient tokens at one precision and the others at a lower one.

    Tokens of the answer stay in 16 bits until they leave a window. Every `window` of them are ranked together, by the
    last one's query.

    Args:
        salient: Share of tokens at the higher precision, in [0, 1].
        high: Precision of salient tokens.
        low: Precision of the other tokens.
        window: Newest tokens of the answer that are not quantised, and number of tokens ranked together; >= 1.
        probes: Share of the prompt's queries that measure attention: as many of the newest, and as many random ones, in
            (0, 1].
        seed: Seed of the random queries.
        tier: Precision of the window.

    Source: ThisisBillhe/ZipCache zipcache/models/modeling_llama.py and zipcache_generation_demo.py (He et al. 2024,
        arXiv 2405.14256): 4 and 2 bits, 60 % salient, a window of 100.
    Differs: codes are per token with one scale for the vector; the paper's keys are per channel, and its values per
        token once channels are normalised, which the page formats lack (`store.rotation=hadamard` spreads outliers
        too). Tokens leave the window one by one, up to `window` steps after the original, which re-compresses all at
        once, the prompt's codes too. Random probes are drawn once for a length.
    """

    salient: Annotated[float, kv.Number(0, 1)] = 0.6
    high: kv.TierText = "k4v4"
    low: kv.TierText = "k2v2"
    window: Annotated[int, kv.Whole(1, unit="tokens")] = 100
    probes: Annotated[float, kv.Number(0, 1, above=True)] = 0.05
    seed: Annotated[int, kv.Whole(0, 2**63 - 1)] = 0
    tier: kv.TierText = "fp16"
    acts_in_decode = True

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier), kv.Tier.parse(self.high, "high"), kv.Tier.parse(self.low, "low"))
        self.score = kv.ScoreSpec(
            statistic=ProbedSaliency(self.probes, self.seed, self.window),
            prefill_queries=kv.ALL_QUERIES,
            decode_update=True,
            track=("score", "pos"),
        )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        lower = int((1 - self.salient) * view.num_tokens + 1e-9)
        is_high = kv.rank_descending(view.score) < view.num_tokens - lower
        return kv.PrefillPlan(tier_of=torch.where(is_high, 1, 2).to(torch.int8))

    def plan_decode(self, view: kv.DecodeView) -> kv.DecodePlan:
        """Puts the incoming token into the slot of the one that leaves the window, which goes to tier 1 or 2."""
        oldest = (view.tokens_seen - self.window)[:, None, None, None]
        leaving, tiers = view.find(0, oldest[:, 0, 0, 0]), [view.slots(tier) for tier in range(len(self.tiers))]
        score, pos, valid = (torch.cat([getattr(one, name) for one in tiers], -1) for name in ("score", "pos", "valid"))
        first = oldest - (oldest - view.prompt_tokens[:, None, None, None]) % self.window
        judged = valid & (pos >= first) & (pos < first + self.window)  # ranked together with it, whatever their tier
        oldest_score = score.masked_fill(~judged | (pos != oldest), float("-inf")).amax(-1, keepdim=True)
        above = judged & ((score > oldest_score) | ((score == oldest_score) & (pos < oldest)))
        lower = int((1 - self.salient) * self.window + 1e-9)
        tier = torch.where(above.sum(-1) < self.window - lower, 1, 2)
        return kv.DecodePlan(
            slot=torch.where(leaving.exists, leaving.slot, -1), demote_to=tier, demote_slot=torch.full_like(tier, -1)
        )

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        new = min(self.window, extent.new_tokens)
        return kv.Bounds(why="wait in the window, but that should be", tiers=(0,), in_tiers=(new, new))
