"""PyramidInfer: each layer keeps some of what the layer below it kept, by that layer's attention, fewer and fewer."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class RecentAttention(kv.Statistic):
    """Mean attention of the last queries, the newest of which weigh more."""

    recent_share: float
    distance_weight: float
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "of which a recent share counts"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        count = 1 + int(self.recent_share * seen.k.shape[1])
        attention = seen.probabilities(slice(-count, None))
        weight = torch.linspace(1.0, self.distance_weight, attention.shape[1], device=attention.device)
        return seen.grouped((attention * weight[:, None]).mean(1)).mean(1)


@dataclass(kw_only=True)
class PyramidInfer(kv.Policy):
    """Keeps first and newest tokens, and in each layer those attended to most in the layer below, among its kept ones.

    Recent queries decide; all heads of a layer keep the same tokens. The first layer uses its own attention.

    Args:
        budget: Tokens kept of the prompt, the mean over layers: ratio, tokens per head, or bytes.
        decay: Share that a layer keeps of the layer below where the pyramid is steepest, at the top, in (0, 1];
            between, the share falls from 1 along half a cosine. 1 = all layers keep as much.
        recent_share: Share of the prompt whose queries count, its end, in [0, 1].
        distance_weight: Weight of the newest query, where the oldest that counts has 1; > 0.
        sinks: First tokens that always stay.
        window: Last tokens that always stay.
        tier: Precision of what is kept.

    Source: mutonix/pyramidinfer models/modeling_llama_pyramidinfer.py and configs/llama3_8b.json (Yang et al. 2024,
        arXiv 2405.12532), its prompt stage.
    Differs: a budget scales the pyramid, whose shape is `decay`; there the decay alone says how much stays. Prompts are
        read with all tokens, where the original's upper layers do not compute what lower ones dropped. The window is a
        number of tokens, there the recent share. Tokens of the answer all stay, there every 16 of them are thinned.
    """

    budget: kv.BudgetText = 0.25
    decay: Annotated[float, kv.Number(0, 1, above=True)] = 0.9
    recent_share: Annotated[float, kv.Number(0, 1)] = 0.2
    distance_weight: Annotated[float, kv.Number(0, 1000, above=True)] = 1.2
    sinks: Annotated[int, kv.Whole(0, unit="tokens")] = 4
    window: Annotated[int, kv.Whole(0, unit="tokens")] = 32
    tier: kv.TierText = "fp16"
    no_upkeep = "chooses in each layer among what the layer below kept of a whole prompt, and scores no token behind it"
    scope = "model"
    budget_is_mean = True

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        self.limit = self._budget = kv.Budget.parse(self.budget)
        statistic = RecentAttention(self.recent_share, self.distance_weight)
        self.score = kv.ScoreSpec(statistic=statistic, prefill_queries=kv.ALL_QUERIES)

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        tier_of, budget = view.filled(0), view.budget_tokens(self._budget)
        if budget >= view.num_tokens:
            return kv.PrefillPlan(tier_of=tier_of)
        first = min(self.sinks, budget)
        last = min(self.window, budget - first)
        # Every layer keeps a token: where none is first or last, one comes before others are shared out.
        reserve = int(first + last == 0)
        free = slice(first, view.num_tokens - last)
        score = view.score[..., free].mean(1)
        room = score.shape[-1] - reserve
        total = (budget - first - last - reserve) * view.num_layers
        counts = sorted(kv.share_with_cap(self.shape(view.num_layers), total, room, at_least=0), reverse=True)
        below = torch.ones_like(score[0], dtype=torch.bool)
        for layer, count in enumerate(counts):
            among = score[max(0, layer - 1)].masked_fill(~below, float("-inf"))
            below = below & (kv.rank_descending(among) < count + reserve)
            tier_of[layer, :, free].masked_fill_(~below, kv.EVICT)
        return kv.PrefillPlan(tier_of=tier_of)

    def shape(self, num_layers: int) -> Tensor:
        """Share that each layer keeps, fp64 [L], relative to the first; it never rises."""
        steps = [
            (1 - self.decay) * (math.cos(math.pi * i / num_layers) + 1) / 2 + self.decay for i in range(num_layers - 1)
        ]
        return torch.tensor([1.0, *steps], dtype=torch.float64).cumprod(0)

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.within(extent, self._budget, mean=True)
