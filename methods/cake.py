"""CAKE: layers get what their attention asks for, and tokens stay whose attention is large or unsteady."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.policy import Allocation, LayerTensors, Number, PrefillView, Scored, Statistic, Whole


@dataclass(frozen=True)
class AttentionShifts(Statistic):
    """Mean attention of the last queries plus a multiple of its variance over them, pooled along the tokens.

    Also, unpooled: `entropy`, a token's part of the entropy of the queries' attention, and `variance`.
    """

    gamma: float
    pool_kernel: int
    also: ClassVar[tuple[str, ...]] = ("entropy", "variance")
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "mean and variance over queries, entropy per layer"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        attention = seen.probabilities()
        spread = attention.var(1, unbiased=False)
        score, entropy, variance = (
            seen.grouped(x).mean(1)
            for x in (attention.mean(1) + self.gamma * spread, torch.special.entr(attention).sum(1), spread)
        )
        prefix = score.shape[-1] - seen.q.shape[1]
        if prefix > 0:
            before = F.max_pool1d(score[:, :prefix], self.pool_kernel, stride=1, padding=self.pool_kernel // 2)
            score = torch.cat([before, score[:, prefix:]], -1)
        return torch.stack([score, entropy, variance])

    of_slots = of_prompt


@dataclass(kw_only=True)
class CAKE(Scored):
    """Keeps the observation window and the tokens whose attention from it is large or changes.

    A layer's budget follows from how widely and how unsteadily its window attends.

    Args:
        allocation: `preference`: layers in proportion to entropy ** (1 / tau1) * variance ** (1 / tau2) of the window's
            attention to the tokens before it. The method then sees all layers at once, which holds the whole
            uncompressed prompt meanwhile.
        tau1: Temperature of the entropy; > 0.
        tau2: Temperature of the variance; > 0.
        gamma: Weight of the variance in a token's score; >= 0.
        window: Observation window, the last prompt queries; >= 1. While decoding they are kept, and billed.
        pool_kernel: Odd width of the maximum over neighbouring tokens.

    Source: CAKE (Qin et al. 2025, arXiv 2503.12491), from the paper alone, since its code carries no licence that
        says so: preference score, eviction indicator. From its code's configuration, not the paper: gamma 200
        with a window of 32, and the temperatures (tau1, tau2) for 128 and 1,024 tokens a layer: Llama-3.1-8B (1.6, 0.6)
        and (1.6, 0.4), Mistral-7B-v0.3 (1.0, 0.8) and (0.8, 0.5), Qwen2.5-7B (0.4, 0.6) and (1.5, 0.6), Llama-2-7B
        (0.9, 2.3) and (1.9, 1.8), Llama-2-13B (1.8, 2.0) and (0.5, 0.4).
    Differs: the paper's cascade evicts from earlier layers again while later ones are read, which ends at these budgets
        and lowers the prompt's peak; here all layers are planned at the end (`prefill.chunk` lowers the peak too). The
        temperatures are tuned per model and budget there; 1 weighs both plainly. Variances are those of the window's
        queries themselves; one kept set per KV head, by the mean of its query heads; the pool is SnapKV's.
    """

    allocation: Allocation = "preference"
    tau1: Annotated[float, Number(0, 100, above=True)] = 1.0
    tau2: Annotated[float, Number(0, 100, above=True)] = 1.0
    gamma: Annotated[float, Number(0, 1e6)] = 200.0
    window: Annotated[int, Whole(1, unit="tokens")] = 32
    pool_kernel: Annotated[int, Whole(1, 1023, unit="tokens", odd=True)] = 7

    def declare(self) -> None:
        super().declare()
        self.score_by(
            AttentionShifts(self.gamma, self.pool_kernel),
            slot_queries=self.window,
            prefill_queries=self.window,
            query_reduce="mean",
        )

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.window

    def layer_weights(self, view: PrefillView) -> Tensor:
        before = slice(0, max(0, view.num_tokens - self.window))
        entropy, variance = (view.extra[name][..., before].double().sum((1, 2)) for name in ("entropy", "variance"))
        return entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
