"""Expected attention: tokens stay that the queries to come would attend to, were they drawn like those seen."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.policy import ALL_QUERIES, LayerTensors, Need, Number, Scored, Statistic, Whole


@dataclass(frozen=True)
class ExpectedAttentionScore(Statistic):
    """Mean attention of normally distributed queries at the next positions, times the norm of the value."""

    sinks: int
    future: int
    covariance: bool
    value_norm: bool
    epsilon: float
    needs: ClassVar[frozenset[Need]] = frozenset({"before_rope"})
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "expected attention of the next positions, norms of values"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        mean, spread = self._queries_to_come(seen)
        keys = seen.k.float()
        logit = torch.einsum("hnd,hgd->hgn", keys, seen.grouped(mean)) * seen.scale
        if self.covariance:
            group = seen.grouped(spread)
            rotated = torch.einsum("hnd,hgde->hgne", keys, group)
            logit = logit + torch.einsum("hgne,hne->hgn", rotated, keys) * (seen.scale**2 / 2)
        is_sink = seen.pos < self.sinks
        hidden = is_sink & ~is_sink.all(-1, keepdim=True)  # a prompt of sinks alone is ranked whole
        score = logit.masked_fill(hidden[:, None], float("-inf")).softmax(-1).mean(1)
        if self.value_norm:
            score = (score + self.epsilon) * torch.linalg.vector_norm(seen.v.float(), dim=-1)
        return torch.where(is_sink, 1.0 + score.amax(-1, keepdim=True), score)

    of_slots = of_prompt

    def _queries_to_come(self, seen: LayerTensors) -> tuple[Tensor, Tensor]:
        """Mean [Hq, D] and covariance [Hq, D, D] of the queries, turned to the mean of the next positions."""
        counted = seen.q_pos >= self.sinks
        which = counted if bool(counted.any()) else ~counted
        plain = seen.rotated(seen.q[:, which], -seen.q_pos[which])
        mean = plain.mean(1)
        centred = plain - mean[:, None]
        spread = centred.mT @ centred / plain.shape[1]
        come = torch.arange(seen.tokens_seen, seen.tokens_seen + self.future, device=plain.device)
        axes = torch.eye(plain.shape[-1], device=plain.device)
        turn = seen.rotated(axes.expand(len(come), -1, -1), come[:, None]).mean(0)  # row i: where axis i comes to lie
        return mean @ turn, turn.mT @ spread @ turn


@dataclass(kw_only=True)
class ExpectedAttention(Scored):
    """Keeps the tokens that future queries are expected to attend to, from the mean and spread of past queries.

    Args:
        sinks: First tokens that always stay; their queries do not count. >= 0.
        future: Next positions that the rotary embedding is averaged over; >= 1.
        covariance: Count the spread of the queries, and not their mean alone.
        value_norm: Multiply the expectation by the value's Euclidean norm.
        epsilon: Added to the expectation before that; >= 0.
        recent_queries: Last queries that evictions while decoding estimate from; they are kept, and billed. >= 1.

    Source: NVIDIA/kvpress expected_attention_press.py (Devoto et al. 2025, arXiv 2510.00636).
    Differs: queries before their rotary embedding are those after it, turned back, which asks for a plain rotary
        embedding; the statistics are fp32; in a prompt of at most `sinks` tokens all queries count. While decoding, the
        last `recent_queries` queries count in place of kvpress's buffer of hidden states.
    """

    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    future: Annotated[int, Whole(1, 8192)] = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: Annotated[float, Number(0, 1)] = 0.0
    recent_queries: Annotated[int, Whole(1, 4096)] = 64

    def declare(self) -> None:
        super().declare()
        statistic = ExpectedAttentionScore(self.sinks, self.future, self.covariance, self.value_norm, self.epsilon)
        self.score_by(statistic, slot_queries=self.recent_queries, prefill_queries=ALL_QUERIES)

    def always(self, budget: int) -> tuple[int, int]:
        return self.sinks, 0
