"""What a statistic sees of a layer while its prompt is read in chunks: what is held so far, and the newest queries."""

import torch
from torch import Tensor

from kvbench.cache.tensors import MeasuredTensors, Measurer
from kvbench.policy import ALL_QUERIES

ROWS = 32  # queries whose attention lies in memory at once, fewer where that is more than the next number
MOST_NUMBERS = 1 << 24


class ChunkTensors(MeasuredTensors):
    """KV heads of one layer that hold the same number of tokens, the newest chunk's included.

    Args:
        measurer: What all layers share.
        layer: The layer.
        heads: int64 [h] which heads of the cache these are.
        num_heads: Heads of the cache in all.
        k, v: fp32 [h, m, D] in the order of their positions.
        pos: int64 [h, m].
        tokens_seen: Tokens read so far.
        scale: Factor on attention logits.
        q: [Hq, n, D] the chunk's queries, of all heads.
        before: fp32 [h, m] what all queries of earlier chunks gave; None where only the newest queries count.

    Attributes:
        summed: fp32 [h, m] `before` and what the chunk's queries gave, once a statistic has asked; else None.
    """

    def __init__(
        self,
        measurer: Measurer,
        layer: int,
        heads: Tensor,
        num_heads: int,
        *,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        tokens_seen: int,
        scale: float,
        q: Tensor,
        before: Tensor | None,
    ) -> None:
        super().__init__(measurer, layer, k, v, pos, tokens_seen, scale)
        self._num_heads, self._heads = num_heads, heads
        self._before, self.summed = before, None if before is None else before
        self._needs = measurer.spec.statistic.needs
        counted = measurer.spec.prefill_queries
        if counted:
            self._q = self.of_these_heads(q if counted == ALL_QUERIES else q[:, -counted:])
        projection = measurer.output_projection(layer)
        self._output_projection = None if projection is None else self.of_these_heads(projection)

    def attention(self) -> Tensor:
        return self._with_earlier(self._columns(below_uniform=False))

    def low_counts(self) -> Tensor:
        return self._with_earlier(self._columns(below_uniform=True))

    def of_these_heads(self, x: Tensor) -> Tensor:
        if len(self._heads) == self._num_heads:
            return x
        return x.unflatten(0, (self._num_heads, -1))[self._heads].flatten(0, 1)

    def _with_earlier(self, columns: Tensor) -> Tensor:
        """Columns fp32 [Hq, m], pooled and reduced to [h, m], and what earlier chunks' queries gave."""
        spec = self.measurer.spec
        found = self._pooled(columns, ALL_QUERIES if spec.prefill_queries == ALL_QUERIES else self.q.shape[1])
        if self._before is not None:
            found = self.summed = self._before + found
        return found

    def _columns(self, below_uniform: bool) -> Tensor:
        """As `reference.attention.column_scores`, fp32 [Hq, m], for queries that stand behind keys with gaps."""
        spec, heads, q_pos = self.measurer.spec, len(self.k), self.q_pos
        grouped, keys = self.grouped(self.q), self.k.float().transpose(1, 2)
        shape = heads, grouped.shape[1], self.k.shape[1]
        out, counted = torch.zeros(shape, device=keys.device), torch.zeros(heads, 1, shape[2], device=keys.device)
        rows = max(1, min(ROWS, MOST_NUMBERS // out.numel()))
        for begin in range(0, len(q_pos), rows):
            own = grouped[:, :, begin : begin + rows].float() * self.scale
            logits = torch.matmul(own.flatten(1, 2), keys).unflatten(1, (-1, own.shape[2]))
            distance = (q_pos[begin : begin + rows, None] - self.pos[:, None]).int()
            prob = logits.masked_fill_((distance < 0)[:, None], float("-inf")).softmax(-1)
            if below_uniform:
                prob = -(prob < 1.0 / (distance >= 0).sum(-1)[:, None, :, None]).float()
            if spec.power == 2:
                prob = prob.square_()
            counts = (distance >= max(0, spec.skip_near))[:, None]
            prob = prob.masked_fill_(~counts, 0.0)
            out = torch.maximum(out, prob.amax(2)) if spec.query_reduce == "max" else out + prob.sum(2)
            counted += counts.sum(2)
        if spec.query_reduce == "mean":
            out = out / counted.clamp(min=1)
        return out.flatten(0, 1)
