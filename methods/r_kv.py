"""R-KV: a token stays when recent queries look at it and no other key says the same."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.policy import LayerTensors, Number, Scored, Statistic, Steps, Whole

ROWS = 512  # of a head's similarities that lie in memory at once


@dataclass(frozen=True)
class Redundancy(Statistic):
    """Pooled attention of the last queries minus the softmax of how similar other keys are, mixed."""

    window: int
    pool_kernel: int
    mix: float
    threshold: float
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "redundancy of keys"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        length = seen.k.shape[1]
        prefix = length - min(self.window, length)
        score = 2.0 + seen.pos / (1.0 + seen.tokens_seen)  # of the window; the newest last to go
        if prefix:
            logits = seen.grouped(seen.logits()).amax(1)[..., :prefix]
            # A query at a position before some held keys does not see them; one that sees none says nothing.
            blind = logits.isneginf().all(-1, keepdim=True)
            attention = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0).mean(1)
            pooled = F.max_pool1d(attention, self.pool_kernel, stride=1, padding=self.pool_kernel // 2)
            ranked = self.mix * pooled - (1 - self.mix) * self.repeated(seen.k)[:, :prefix]
            score[:, :prefix] = ranked
        return score

    of_slots = of_prompt

    def repeated(self, k: Tensor) -> Tensor:
        """Softmax over the keys [H, n, D] of their mean cosine with the others, fp32 [H, n].

        Of the keys that each key is similar to, the last one is not held against that last one, so that of a run of
        repetitions the newest looks new.
        """
        unit = k.float() / (torch.linalg.vector_norm(k.float(), dim=-1, keepdim=True) + 1e-8)
        length, index = k.shape[1], torch.arange(k.shape[1], device=k.device)
        total = torch.zeros(k.shape[:2], device=k.device)
        for begin in range(0, length, ROWS):
            rows = unit[:, begin : begin + ROWS]
            cosine = rows @ unit.mT
            block = index[begin : begin + ROWS]
            cosine[:, block - begin, block] = 0.0
            last = torch.where(cosine > self.threshold, index, 0).amax(-1, keepdim=True)
            total += cosine.scatter_(-1, last, 0.0).sum(1)
        return (total / length).softmax(-1)


@dataclass(kw_only=True)
class RKV(Scored):
    """Keeps what the last queries attend to and no later key repeats, after the prompt and along the answer.

    Args:
        window: Last queries, whose tokens always stay; >= 1. They are kept for evictions while decoding, and billed.
        pool_kernel: Odd width of the maximum over neighbouring tokens' attention.
        mix: Weight of attention against redundancy, in [0, 1].
        similar: Cosine from which one key repeats another, in [0, 1].

    Source: Zefan-Cai/R-KV at d15c976, rkv/compression/r1_kv.py (Cai et al. 2025, arXiv 2505.24133).
    Differs: it evicts every 32 steps unless told otherwise, the original every 128. The budget may be a share of the
        sequence; the original's is in tokens, which a prompt below it fills up first, here too. Scores and similarities
        are fp32. A key that resembles no other one takes its cosine with the first key out of account, as in the
        original. The queries of evictions while decoding are kept in 16 bits.
    """

    window: Annotated[int, Whole(1, unit="tokens")] = 8
    pool_kernel: Annotated[int, Whole(1, 1023, unit="tokens", odd=True)] = 7
    mix: Annotated[float, Number(0, 1)] = 0.07
    similar: Annotated[float, Number(0, 1)] = 0.5
    decode_every: Steps = 32

    def declare(self) -> None:
        super().declare()
        statistic = Redundancy(self.window, self.pool_kernel, self.mix, self.similar)
        self.score_by(statistic, slot_queries=self.window, prefill_queries=self.window)

    def always(self, budget: int) -> tuple[int, int]:
        return 0, self.window
