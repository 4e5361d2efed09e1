"""ThinK: keys without the channels that count least in the logits."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class ChannelLogits(kv.Probability):
    """Attention, and per key channel the Frobenius norm of its part of the logits of the queries that count.

    The norm of the queries' channel, over all query heads of the KV head, times that of the keys' channel.
    """

    in_chunks: ClassVar[bool] = False

    def of_channels(self, seen: kv.LayerTensors) -> Tensor:
        queries = seen.grouped(seen.q.float()).square().sum((1, 2))
        return (queries * seen.k.float().square().sum(1)).sqrt()


@dataclass(kw_only=True)
class ThinK(kv.Policy):
    """Stores the keys of the prompt without the channels that count least in the logits of its last queries.

    The channels differ by KV head; values, the window and the answer stay whole.

    Args:
        keep_channels: Share of the key channels that stays, in (0, 1], rounded up to whole channels.
        window: Last prompt queries that count; their own keys keep all channels.
        keep_tokens: Share of the prompt that stays, window included: the tokens that the window attends to most, as
            SnapKV chooses them (max-pooled over 7); 1 = all.
        native: Store the model's own dtype instead of 16 bits (lossless where all channels stay; for tests).

    Source: ThinK (Xu et al. 2024, arXiv 2407.21018); SalesforceAIResearch/ThinK kv_pruning_utils.py,
        `key_pruner_query_driven`.
    Differs: one set of channels per KV head, by the sum over its query heads (the original repeats KV heads first, and
        prunes each query head's copy), measured over all keys of the prompt, also those that `keep_tokens` drops; the
        window and the recent tokens, which the original sets apart, are one; `keep_tokens` pools as `snapkv` here does
        (the original by the mean of 5); values are never pruned.
    """

    keep_channels: Annotated[float, kv.Number(0, 1, above=True)] = 0.6
    window: Annotated[int, kv.Whole(1, unit="tokens")] = 32
    keep_tokens: Annotated[float, kv.Number(0, 1, above=True)] = 1.0
    native: bool = False

    in_chunks = False

    def declare(self) -> None:
        self.tiers = (kv.Tier(native=self.native), kv.Tier(native=self.native, k_kept=self.keep_channels))
        self.score = kv.ScoreSpec(
            statistic=ChannelLogits(), prefill_queries=self.window, pool="max", pool_kernel=7, group_reduce="mean"
        )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        tier_of, before = view.filled(0), max(0, view.num_tokens - self.window)
        tier_of[..., :before] = 1
        if before and self.keep_tokens < 1:
            budget = max(0, view.budget_tokens(kv.Budget.parse(self.keep_tokens)) - self.window)
            stays = kv.rank_descending(view.score[..., :before]) < budget
            tier_of[..., :before] = torch.where(stays, 1, kv.EVICT).to(torch.int8)
        return kv.PrefillPlan(tier_of=tier_of, channels=view.channels.argsort(dim=-1, descending=True, stable=True))

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.within(extent, kv.Budget.parse(self.keep_tokens), at_least=self.window)
