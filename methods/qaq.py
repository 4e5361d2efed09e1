"""QAQ: bits of keys and of values chosen apart, token by token, by the error that attention tolerates in each."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv

BITS = kv.Choice((1, 2, 3, 4, 8), unit="bits")


@dataclass(frozen=True)
class NeededBits(kv.Statistic):
    """Bits that a token's key needs so that no attention of the last queries errs by more than the tolerance.

    Those of its value are `value_bits`.
    """

    key_error: float
    value_error: float
    largest_query: float
    also: ClassVar[tuple[str, ...]] = ("value_bits",)
    extremes: ClassVar[tuple[float, float]] = (0.0, 16.0)
    words: ClassVar[str] = "as bits of keys and values that keep errors of attention small"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        attention = seen.grouped(seen.probabilities()).flatten(1, 2).amax(1)  # [H, n]
        length, channels = seen.k.shape[1:]
        # A key's error moves the token's own attention by a (1 - a), and that of another token b by a b.
        first, second = torch.nn.functional.pad(attention, (0, 1)).topk(2, -1).values.split(1, -1)
        other = torch.where(attention == first, second, first)
        moved = attention * torch.maximum(1 - attention, other)
        for_key = length * self.largest_query * moved / math.sqrt(self.key_error / channels)
        for_value = length * attention / math.sqrt(self.value_error)
        return torch.stack([bits(seen.k, for_key), bits(seen.v, for_value)])


def bits(x: Tensor, precision: Tensor) -> Tensor:
    """Bits fp32 [H, n] at which codes of vectors x [H, n, D] are within 1 / precision of them."""
    x = x.float()
    return torch.log2((x.amax(-1) - x.amin(-1)) * precision / 2 + 1)


@dataclass(kw_only=True)
class QAQ(kv.Policy):
    """Stores each prompt token's key at one of two precisions and its value at one of two others.

    The attention of the last queries and its tolerance decide; the last prompt tokens and those of the answer have the
    higher ones.

    Args:
        key_low: Bits of a key that tolerates them.
        key_high: Bits of other keys; more than `key_low`.
        value_low: Bits of a value that tolerates them.
        value_high: Bits of other values; more than `value_low`.
        key_error: Square of the error of attention logits that is tolerated; larger = fewer bits.
        value_error: Square of the error of the output that is tolerated; larger = fewer bits.
        largest_query: Largest element of a query, by which errors of keys count.
        window: Last queries whose attention decides; the tokens after the first of them have the higher bits.
        native: Store the model's own dtype instead (lossless; for tests).

    Source: ClubieDong/QAQ-KVCacheQuantization src/quantizer.py (Dong et al. 2024, arXiv 2403.04643): precision per
        head, uniform codes, the last 5 rows of attention, queries up to 3. DiffKV's Table 1 gives its QAQ 18.8 % of the
        FP16 bytes, 3 bits per element, which bits 2 and 4 are on average.
    Differs: each side has two precisions, so that a page holds one of four formats; the original rounds up to any
        number of bits in a range. Outliers, 1 % there, are not kept apart in 16 bits. Tokens of the answer keep the
        higher bits, where the original measures text that is there already. Codes have a zero and a step over the whole
        range; there they are centred on the mean.
    """

    key_low: Annotated[int, BITS] = 2
    key_high: Annotated[int, BITS] = 4
    value_low: Annotated[int, BITS] = 2
    value_high: Annotated[int, BITS] = 4
    key_error: Annotated[float, kv.Number(0, 1e12, above=True)] = 1e4
    value_error: Annotated[float, kv.Number(0, 1e12, above=True)] = 10.0
    largest_query: Annotated[float, kv.Number(0, 1e6, above=True)] = 3.0
    window: Annotated[int, kv.Whole(1, unit="tokens")] = 5
    native: bool = False
    chooses_bits = True

    def declare(self) -> None:
        for side, low, high in (("key", self.key_low, self.key_high), ("value", self.value_low, self.value_high)):
            if low >= high:
                raise kv.SettingsConflict(
                    f"{side}_low={low} must be fewer bits than {side}_high={high}", setting=f"method.{side}_low"
                )
        pairs = [(k, v) for k in (self.key_high, self.key_low) for v in (self.value_high, self.value_low)]
        self.tiers = tuple(kv.Tier(native=True) if self.native else kv.Tier(k_bits=k, v_bits=v) for k, v in pairs)
        self.score = kv.ScoreSpec(
            statistic=NeededBits(self.key_error, self.value_error, self.largest_query), prefill_queries=self.window
        )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        """Tiers are both high, value low, key low, both low."""
        newest = torch.arange(view.num_tokens, device=view.score.device) > view.num_tokens - self.window
        low_key = (view.score <= self.key_low) & ~newest
        low_value = (view.extra["value_bits"] <= self.value_low) & ~newest
        return kv.PrefillPlan(tier_of=(2 * low_key.to(torch.int8) + low_value.to(torch.int8)))

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        return kv.Bounds(why="nothing is evicted of", end_mean=(extent.tokens_seen, extent.tokens_seen))
