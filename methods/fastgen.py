"""FastGen: each head keeps as little as it needs, by a profile of its attention over the prompt."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv

ROWS = 256  # queries whose attention lies in memory at once


@dataclass(frozen=True)
class Profile(kv.Statistic):
    """Attention that a token receives, summed over queries; as `far`, the part from queries far after it."""

    local: float
    also: ClassVar[tuple[str, ...]] = ("far",)
    words: ClassVar[str] = "those far behind a token apart"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        length = seen.k.shape[1]
        sums = torch.zeros(2, *seen.pos.shape, device=seen.k.device)
        for begin in range(0, length, ROWS):
            rows = slice(begin, begin + ROWS)
            attention = seen.grouped(seen.probabilities(rows)).mean(1)
            far = seen.q_pos[rows, None] - seen.pos[:, None] >= local_tokens(self.local, length)
            sums += torch.stack([attention.sum(1), (attention * far).sum(1)])
        return sums


@dataclass(kw_only=True)
class FastGen(kv.Policy):
    """Keeps of the prompt, per head, the first of four sets that receives enough of the head's attention.

    The first tokens; these and the most attended ones; these and the newest ones; everything.

    Args:
        recovery: Share of a head's attention that its set has to receive, the mean over the prompt's queries, in
            [0, 1]; 1 = keep everything.
        sinks: First tokens, which stand for the paper's special tokens; >= 1.
        frequent: Most attended tokens, as a share of the prompt, in [0, 1].
        local: Newest tokens, as a share of the prompt, in [0, 1]; every query has its own.
        tier: Precision of what is kept.

    Source: FastGen (Ge et al. 2023, arXiv 2310.01801), as AnswerDotAI/cold-compress cache.py (KVCacheHybrid) profiles
        heads; recovery 0.95 and shares of 0.3 are the paper's, which was not at hand.
    Differs: a policy does not see which tokens are special or punctuation, so that the first ones stand for the special
        ones, and the sets with punctuation are left out; one profile per KV head, by its query heads' mean. The most
        attended tokens are those with the largest sums, in cold-compress the largest means over the queries that see
        them. Tokens of the answer all stay; the paper's heads go on evicting by their sets.
    """

    recovery: Annotated[float, kv.Number(0, 1)] = 0.95
    sinks: Annotated[int, kv.Whole(1, unit="tokens")] = 4
    frequent: Annotated[float, kv.Number(0, 1)] = 0.3
    local: Annotated[float, kv.Number(0, 1)] = 0.3
    tier: kv.TierText = "fp16"

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.score = kv.ScoreSpec(statistic=Profile(self.local), prefill_queries=kv.ALL_QUERIES)

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        length = view.num_tokens
        share, near = view.score / length, (view.score - view.extra["far"]) / length
        position = torch.arange(length, device=share.device)
        first, last = position < self.sinks, position >= length - local_tokens(self.local, length)
        keep, done = torch.ones_like(share, dtype=torch.bool), torch.zeros_like(share[..., :1], dtype=torch.bool)
        for frequent, local in ((False, False), (True, False), (True, True)):
            fixed = (first | last if local else first).expand_as(keep)
            rank = kv.rank_descending(share.masked_fill(fixed, -1.0))
            chosen = first | (rank < self._frequent(length)) if frequent else first.expand_as(keep)
            received = torch.where(chosen, share, near if local else torch.zeros_like(near)).sum(-1, keepdim=True)
            fits = (received >= self.recovery) & ~done if self.recovery < 1 else torch.zeros_like(done)
            keep = torch.where(fits, chosen | fixed, keep)
            done = done | fits
        return kv.PrefillPlan(tier_of=torch.where(keep, 0, kv.EVICT).to(torch.int8))

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        length = extent.prompt_tokens
        first, often, newest = min(self.sinks, length), self._frequent(length), local_tokens(self.local, length)
        end = extent.prompt_slots / extent.lists + extent.new_tokens
        return kv.Bounds(
            why="its sets and all of the answer have",
            prompt_sizes=(first, min(length, first + often), min(length, first + newest + often), length),
            end_mean=(end, end),
        )

    def _frequent(self, length: int) -> int:
        return math.ceil(self.frequent * length)


def local_tokens(share: float, length: int) -> int:
    """Number of near tokens."""
    return max(1, int(share * length))
