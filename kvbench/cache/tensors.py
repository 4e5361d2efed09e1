"""A layer as a statistic sees it, made of a prompt's tensors or of what pages hold."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.errors import BrokenRule
from kvbench.kernels.backend import Backend
from kvbench.kernels.operands import ColumnSums, HeadScores
from kvbench.kernels.reference.attention import rotate
from kvbench.kernels.reference.prompts import reduce_columns, reduce_scores
from kvbench.policy import ALL_QUERIES, AttentionCall, LayerTensors, Replay, ScoreSpec

ROWS = 32  # queries of a chunk whose attention lies in memory at once, fewer where that is more than the next number
MOST_NUMBERS = 1 << 24


@dataclass(frozen=True)
class Measurer:
    """The parts that the tensors of all layers share."""

    spec: ScoreSpec
    shape: ModelShape
    backend: Backend
    first_layer: int

    @property
    def reduction(self) -> HeadScores:
        """The way in which column sums become the scores of a KV head."""
        spec = self.spec
        return HeadScores(
            group=spec.group_reduce,
            pool=spec.pool,
            pool_kernel=spec.pool_kernel,
            pool_stage=spec.pool_stage,
            pool_region=spec.pool_region,
        )

    def output_projection(self, layer: int) -> Tensor | None:
        """[Hq, D, E] of a layer, where the statistic needs it."""
        weights = self.shape.output_projections
        if "output_projection" not in self.spec.statistic.needs or weights is None:
            return None
        weight = weights[layer]
        if type(weight) is not Tensor:  # quantised weights give back what they stand for
            weight = weight.dequantize().to(self.shape.dtype)
        return weight.T.unflatten(0, (self.shape.num_q_heads, -1))


class MeasuredTensors(LayerTensors):
    """A layer, or those of its KV heads (`heads` int64 [h] of `num_heads`) that hold equally many tokens.

    k, v [h, n, D] and pos int64 [h, n] in position order, at `tokens_seen` tokens.
    """

    def __init__(
        self,
        measurer: Measurer,
        layer: int,
        *,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        tokens_seen: int,
        scale: float,
        heads: Tensor | None = None,
        num_heads: int = 0,
    ) -> None:
        self.measurer, self.layer, self.k, self.v, self.pos = measurer, layer, k, v, pos
        self.tokens_seen, self.scale = tokens_seen, scale
        self._heads = None if heads is None or len(heads) == num_heads else heads
        self._num_heads = num_heads
        how = measurer.shape.softmax.of_layer(layer - measurer.first_layer)
        self._softmax = how if how.sinks is None else replace(how, sinks=self._chosen(how.sinks))
        projection = measurer.output_projection(layer)
        self._output_projection = None if projection is None else self._chosen(projection)

    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        inv_freq = self.measurer.shape.inv_freq
        if "before_rope" not in self.measurer.spec.statistic.needs:
            inv_freq = None
        turns = self._require(inv_freq, "rotary positions", "add 'before_rope' to its needs")
        return rotate(x.float(), position[..., None].float() * turns.to(x.device))

    def capped(self, products: Tensor) -> Tensor:
        return self._softmax.capped(products)

    def softmax(self, logits: Tensor) -> Tensor:
        return self._softmax.probabilities(logits)

    def of_these_heads(self, x: Tensor) -> Tensor:
        return self._chosen(self.measurer.shape.ranks.local(x, 0))

    def _chosen(self, x: Tensor) -> Tensor:
        """Entries of `heads`, along the first dimension, of the local part of all heads."""
        return x if self._heads is None else x.unflatten(0, (self._num_heads, -1))[self._heads].flatten(0, 1)

    def _pooled(self, columns: Tensor, queries: int) -> Tensor:
        """Columns fp32 [Hq, n], pooled and reduced to [H, n]."""
        return reduce_scores(columns, self.k.shape[0], queries, self.measurer.reduction)


class PromptTensors(MeasuredTensors):
    """One layer of a prompt.

    q [Hq, N, D], None if the prompt comes without queries; k, v [H, N, D] at the cache's granularity; the arguments of
    the attention call, the results of further passes, and fp32 [Hq, N] the log-sum-exp of every query's logits, if
    available.
    """

    def __init__(
        self,
        measurer: Measurer,
        layer: int,
        *,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        scale: float,
        call: AttentionCall | None = None,
        replays: tuple[Replay, ...] = (),
        lse: Tensor | None = None,
    ) -> None:
        pos = torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1)
        super().__init__(measurer, layer, k=k, v=v, pos=pos, tokens_seen=k.shape[1], scale=scale)
        self._all_q, self._call, self._replays, self._lse = q, call, replays, lse
        self._needs = measurer.spec.statistic.needs
        counted = measurer.spec.prefill_queries
        if q is not None and counted:
            self._q = q if counted < 0 else q[:, -counted:]

    def attention(self) -> Tensor:
        measurer, spec = self.measurer, self.measurer.spec
        columns = ColumnSums(
            queries=spec.prefill_queries, skip_near=spec.skip_near, power=spec.power, reduce=spec.query_reduce
        )
        q, k = self._queries(), self.k
        return measurer.backend.prompt_scores(
            q, k, self.scale, columns, measurer.reduction, self._lse, softmax=self._softmax
        )

    def low_counts(self) -> Tensor:
        spec = self.measurer.spec
        return self.measurer.backend.prompt_low_counts(
            self._queries(),
            self.k,
            self.scale,
            queries=spec.prefill_queries,
            skip_near=spec.skip_near,
            group=spec.group_reduce,
            softmax=self._softmax,
        )

    def _queries(self) -> Tensor:
        """All queries, for the operations that count the last ones themselves."""
        _ = self.q  # refuses where none count
        assert self._all_q is not None
        return self._all_q


class SlotTensors(MeasuredTensors):
    """Slots of a row as read from pages.

    With q [Hq, w, D] the last queries of all heads, and fp32 [h, n] tracked scores, or None.
    """

    def __init__(
        self, measurer: Measurer, layer: int, *, q: Tensor | None, stored: Tensor | None, **slots: Any
    ) -> None:
        super().__init__(measurer, layer, num_heads=measurer.shape.num_kv_heads, **slots)
        self.stored, self._q = stored, None if q is None else self._chosen(q)

    def attention(self) -> Tensor:
        """Scores as for a prompt; the last slots count as the window that `pool_region` leaves alone."""
        spec, prob = self.measurer.spec, self.probabilities()
        pos = self.pos.repeat_interleave(self.q.shape[0] // self.k.shape[0], 0)
        counts = self.q_pos[None, :, None] - pos[:, None] >= spec.skip_near
        columns = (prob**spec.power).masked_fill(~counts, 0.0)
        return self._pooled(reduce_columns(columns, counts, spec.query_reduce), self.q.shape[1])

    def low_counts(self) -> Tensor:
        raise BrokenRule("low_counts is of a prompt only; slots track what decode steps count")


class ChunkTensors(MeasuredTensors):
    """Held tokens of a prompt that is read in chunks, the newest chunk included, whose queries are q [Hq, n, D].

    `before`, fp32 [h, m], are the sums over the queries of earlier chunks, None where only the newest queries count;
    `summed` adds those of this chunk, once a statistic has read them.
    """

    def __init__(self, measurer: Measurer, layer: int, *, q: Tensor, before: Tensor | None, **held: Any) -> None:
        super().__init__(measurer, layer, **held)
        self._before = self.summed = before
        self._needs = measurer.spec.statistic.needs
        if counted := measurer.spec.prefill_queries:
            self._q = self._chosen(q if counted == ALL_QUERIES else q[:, -counted:])

    def attention(self) -> Tensor:
        return self._with_earlier(self._columns(below_uniform=False))

    def low_counts(self) -> Tensor:
        return self._with_earlier(self._columns(below_uniform=True))

    def _with_earlier(self, columns: Tensor) -> Tensor:
        """Columns fp32 [Hq, m], pooled and reduced to [h, m], and what earlier chunks' queries gave."""
        spec = self.measurer.spec
        summed = self._pooled(columns, ALL_QUERIES if spec.prefill_queries == ALL_QUERIES else self.q.shape[1])
        if self._before is not None:
            summed = self.summed = self._before + summed
        return summed

    def _columns(self, below_uniform: bool) -> Tensor:
        """Column sums as of `reference.prompts`, fp32 [Hq, m], for queries that stand after keys with gaps."""
        spec, heads, q_pos = self.measurer.spec, len(self.k), self.q_pos
        grouped, keys = self.grouped(self.q), self.k.float().transpose(1, 2)
        shape = heads, grouped.shape[1], self.k.shape[1]
        out, counted = torch.zeros(shape, device=keys.device), torch.zeros(heads, 1, shape[2], device=keys.device)
        rows = max(1, min(ROWS, MOST_NUMBERS // out.numel()))
        for begin in range(0, len(q_pos), rows):
            queries = grouped[:, :, begin : begin + rows].float() * self.scale
            logits = self.capped(torch.matmul(queries.flatten(1, 2), keys).unflatten(1, (-1, queries.shape[2])))
            distance = (q_pos[begin : begin + rows, None] - self.pos[:, None]).int()
            prob = self.softmax(logits.masked_fill_((distance < 0)[:, None], float("-inf")))
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
