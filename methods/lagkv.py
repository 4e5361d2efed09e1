"""LagKV: a token stays when its key and value stand out against the range of the tokens that come after."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.policy import LayerTensors, Scored, Statistic, Whole


@dataclass(frozen=True)
class LagRelative(Statistic):
    """Rank of a token within its partition by how unevenly its channels lie in the ranges of the next partition."""

    sinks: int
    lag: int
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "range of keys and values in the next partition"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        length = seen.k.shape[1]
        # Newest last: what is not ranked is a window, of which a small budget keeps the end.
        score = (2 + torch.arange(length, device=seen.k.device) / length).repeat(seen.k.shape[0], 1)
        first = int((seen.pos[0] < self.sinks).sum())  # a list whose sinks are gone has none to skip
        ranked = ((length - first) // self.lag - 1) * self.lag  # the last whole partition has no next one
        if ranked > 0:
            parts = [self._spread(x[:, first : first + ranked + self.lag].float()) for x in (seen.k, seen.v)]
            rank = (parts[0] + parts[1]).argsort(dim=-1, stable=True).argsort(-1)
            score[:, first : first + ranked] = rank.flatten(1) / self.lag
        return score.masked_fill(seen.pos < self.sinks, 4.0)

    of_slots = of_prompt

    def _spread(self, x: Tensor) -> Tensor:
        """Softmax over a partition of each token's standard deviation over channels, fp32 [H, partitions, lag]."""
        parts = x.unflatten(1, (-1, self.lag))
        low, high = parts[:, 1:].amin(2, keepdim=True), parts[:, 1:].amax(2, keepdim=True)
        width = high - low
        inside = ((parts[:, :-1] - low) / width).where(width > 0, 0.0)  # a channel without a range says nothing
        return inside.std(-1).softmax(-1)


@dataclass(kw_only=True)
class LagKV(Scored):
    """Cuts the prompt into partitions and keeps, of each, the tokens that the next one explains least.

    Args:
        sinks: First tokens that always stay; >= 0.
        lag: Tokens per partition. The last whole one and what follows it stay as far as the budget allows.

    Source: LagKV (Liang et al. 2025, arXiv 2504.04704), as NVIDIA/kvpress lagkv_press.py ranks a whole prompt.
    Differs: the budget is met exactly, where the paper keeps a fixed share of each partition; when it is below the
        sinks and the last partitions, their newest tokens stay; a channel that is constant over a partition counts as
        0. While decoding, partitions are of the slots that are left.
    """

    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    lag: Annotated[int, Whole(2, unit="tokens")] = 128

    def declare(self) -> None:
        super().declare()
        self.score_by(LagRelative(self.sinks, self.lag))

    def always(self, budget: int) -> tuple[int, int]:
        return self.sinks, 0
