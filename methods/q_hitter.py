"""Q-Hitter: what is kept will be quantised, so tokens count by attention and by how well they bear it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class HittersBearing(kv.Statistic):
    """Mix of attention and of how small key and value errors would be, each from 0 to 1 over a layer.

    The attention itself is `attention`.
    """

    bits: int
    mix: float
    also: ClassVar[tuple[str, ...]] = ("attention",)
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "mixed with errors of quantisation"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        return self._mixed(seen.attention(), seen)

    def of_slots(self, seen: kv.LayerTensors) -> Tensor:
        assert seen.stored is not None, "the method tracks scores"
        return self._mixed(seen.stored, seen)

    def _mixed(self, attention: Tensor, seen: kv.LayerTensors) -> Tensor:
        bears = 1 - (scaled(self.error(seen.k)) + scaled(self.error(seen.v))) / 2
        return torch.stack([self.mix * scaled(attention) + (1 - self.mix) * bears, attention])

    def error(self, x: Tensor) -> Tensor:
        """Euclidean norm fp32 [H, n] of what min-max codes of vectors x [H, n, D] get wrong."""
        x = x.float()
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (high - low).clamp(min=1e-5) / (2**self.bits - 1)
        return torch.linalg.vector_norm(((x - low) / step).round() * step + low - x, dim=-1)


@dataclass(kw_only=True)
class QHitter(kv.Scored):
    """Keeps recent tokens, the most attended ones, and others by attention and small quantisation loss.

    Everything is stored in few bits.

    Args:
        mix: Weight of attention where both count, in [0, 1].
        sure_share: Share of the budget that goes by attention alone, in [0, 1].
        bits: Bits of the codes whose errors count; those of `tier`.
        window: Last tokens that always stay.

    Source: VITA-Group/Q-Hitter utils/modify_llama.py (QH2OKVCache; Zhang et al., MLSys 2024): 4 bits, 0.07 of the
        prompt by attention alone in a budget of 0.2.
    Differs: one kept set per KV head, by its query heads' sum. The window is a number of tokens, there a share. The
        original evicts at every step, here after the prompt and every `decode_every` steps, when the errors of tokens
        that are codes already are about 0. Its script weighs attention with 1, which leaves errors no say; `mix` is
        0.5. Codes have a zero that is not rounded.
    """

    budget: kv.BudgetText | None = 0.2
    mix: Annotated[float, kv.Number(0, 1)] = 0.5
    sure_share: Annotated[float, kv.Number(0, 1)] = 0.35
    bits: Annotated[int, kv.Choice((2, 4, 8), unit="bits")] = 4
    window: Annotated[int, kv.Whole(0, unit="tokens")] = 32
    tier: kv.TierText = "int4"

    def declare(self) -> None:
        super().declare()
        self.rank_by(
            self.sums(statistic=HittersBearing(self.bits, self.mix), prefill_queries=kv.ALL_QUERIES, group_reduce="sum")
        )

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.window

    def ranking(self, view: kv.PrefillView) -> Tensor:
        """Tokens that go by attention alone come first; the others' numbers are at most 1."""
        rank = kv.rank_descending(view.extra["attention"][..., : max(0, view.num_tokens - self.window)])
        sure = torch.zeros_like(view.score)
        sure[..., : rank.shape[-1]] = (rank < int(self.sure_share * self.prompt_budget(view))).float()
        return view.score + 2 * sure

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        plan = super().plan_prefill(view)
        plan.score = view.extra["attention"] if self.evicts_later else None
        return plan


def scaled(x: Tensor) -> Tensor:
    """Scale `x` linearly, from 0 for its smallest number to 1 for its largest."""
    low, high = x.min(), x.max()
    return (x - low) / (high - low).clamp(min=1e-30)
