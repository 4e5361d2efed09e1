"""A prompt's attention and its scores, in plain torch."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.operands import PLAIN, ColumnSums, HeadScores, Reduce, Softmax
from kvbench.kernels.reference.attention import reduce_group
from kvbench.kernels.reference.pages import Operations, in_plain_torch

CHUNK_ROWS = 64  # queries of a chunk whose mask lies in memory at once
COLUMN_ROWS = 64  # queries whose probabilities are summed at once
FLASH_CAPABILITY = (8, 0)  # Ampere; a T4 has (7, 5)
LARGEST_DIM = 256  # of a head, in torch's fused kernels for GPUs


class PromptOperations(Operations):
    """Operations of a prompt; `Backend` has the legend."""

    def prefill_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax = PLAIN) -> Tensor:
        """Causal attention of a whole prompt on uncompressed keys and values.

        Args:
            q: [Hq, N, D], the model's dtype.
            k, v: [H, N, D], post-RoPE.
            softmax: Caps and sinks of the layer.

        Returns:
            [Hq, N, D] in the same dtype.
        """
        checks.prompt(q, k, v, softmax)
        if not softmax.is_plain:
            return self._prefill_with_sinks(q, k, v, scale, softmax)[0]
        if q.device.type != "cpu" and not has_flash(q):  # torch's other fused kernel supports no groups of query heads
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        grouped = len(k) != len(q)
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0]

    def prefill_attention_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax = PLAIN
    ) -> tuple[Tensor, Tensor | None]:
        """`prefill_attention` with the log-sum-exp of every query's logits and sink, fp32 [Hq, N].

        The log-sum-exp is None where `takes_lse` is not set, or no kernel returns it for these tensors.
        """
        if not self.takes_lse:
            return self.prefill_attention(q, k, v, scale, softmax), None
        if not softmax.is_plain:
            return self._prefill_with_sinks(q, k, v, scale, softmax)
        output = attention_with_lse(q, k, v, scale)
        return (self.prefill_attention(q, k, v, scale), None) if output is None else output

    def _prefill_with_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax
    ) -> tuple[Tensor, Tensor | None]:
        """`prefill_attention_with_lse` for a softmax with sinks or a cap.

        Sinks are added to the log-sum-exp of a fused kernel; other cases run as a chunk with an empty past.
        """
        output = None if softmax.cap else attention_with_lse(q, k, v, scale)
        if output is not None:
            return softmax.with_sinks(*output)
        nothing = k[:, :0], v[:, :0], None
        return self.chunk_attention(q, k, v, nothing, scale, softmax).to(q.dtype), None

    @in_plain_torch
    def chunk_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: tuple[Tensor, Tensor, Tensor | None],
        scale: float,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Attention of a chunk of tokens over a history and over itself, causally.

        It goes by blocks of queries, since a mask is as large as the product of queries and keys.

        Args:
            q: [Hq, n, D].
            k, v: [H, n, D].
            history: keys, values [H, M, D] and live bool [H, M], as `gather_dense` gives them for one sequence; live is
                None where all of it is.
            softmax: Caps and sinks of the layer.

        Returns:
            [Hq, n, D], fp32 or the dtype of `q`.
        """
        checks.chunk(q, k, v, history, softmax)
        past_k, past_v, live = history
        heads, chunk, head_dim = k.shape
        live = torch.ones(past_k.shape[:2], dtype=torch.bool, device=q.device) if live is None else live
        keys, values = (torch.cat([past, new.float()], 1)[:, None] for past, new in ((past_k, k), (past_v, v)))
        grouped = q.view(heads, -1, chunk, head_dim)
        out = torch.empty(grouped.shape, device=q.device)
        for begin in range(0, chunk, CHUNK_ROWS):
            end = min(chunk, begin + CHUNK_ROWS)
            rows, shape = end - begin, (-1, grouped.shape[1], -1, -1)
            causal = torch.ones(rows, end, dtype=torch.bool, device=q.device).tril(begin)
            mask = torch.cat([live[:, None].expand(-1, rows, -1), causal.expand(heads, -1, -1)], -1)
            seen = past_k.shape[1] + end
            rows_q, rows_k, rows_v = grouped[:, :, begin:end].float(), keys[:, :, :seen], values[:, :, :seen]
            if softmax.is_plain:
                out[:, :, begin:end] = F.scaled_dot_product_attention(
                    rows_q, rows_k.expand(shape), rows_v.expand(shape), attn_mask=mask[:, None], scale=scale
                )
            else:
                logits = softmax.capped(torch.matmul(rows_q * scale, rows_k.transpose(2, 3)))
                prob = softmax.probabilities(logits.masked_fill(~mask[:, None], float("-inf")))
                out[:, :, begin:end] = torch.matmul(prob, rows_v)
        return out.flatten(0, 1)

    @in_plain_torch
    def column_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        columns: ColumnSums,
        lse: Tensor | None = None,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Attention that each key of a prompt receives from each query head, reduced over queries, in O(N) memory.

        Backends accelerate this step of `prompt_scores` and `prompt_low_counts`.

        `out[h, j] = sum over counted queries i >= j + skip_near of softmax_j(scale * q_i k_j)^power`, the softmax over
        keys 0..i.

        Args:
            q: [Hq, N, D]; k: [H, N, D].
            columns: Queries that count, and their form.
            lse, softmax: As for `prompt_scores`.

        Returns:
            fp32 [Hq, N].
        """
        checks.columns(q, k, columns, softmax)
        queries, skip_near = columns.queries, columns.skip_near
        num_q_heads, length, head_dim = q.shape
        heads = k.shape[0]
        out = torch.zeros(heads, num_q_heads // heads, length, device=q.device)
        first = 0 if queries < 0 else max(0, length - queries)
        grouped = (q.float() * scale).view(heads, -1, length, head_dim)
        keys = k.float().transpose(1, 2)
        for begin in range(first, length, COLUMN_ROWS):
            end = min(length, begin + COLUMN_ROWS)
            logits = torch.matmul(grouped[:, :, begin:end].flatten(1, 2), keys[:, :, :end])
            logits = softmax.capped(logits.unflatten(1, (-1, end - begin)))
            near = max(0, begin - skip_near)  # only keys from here on can be ahead of a query or too near to it
            distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(near, end, device=q.device)
            logits[..., near:].masked_fill_(distance < 0, float("-inf"))
            prob = softmax.probabilities(logits)
            if columns.below_uniform:
                seen = torch.arange(begin + 1, end + 1, device=q.device)
                prob = -(prob < 1.0 / seen[:, None]).float()
                prob[..., near:].masked_fill_(distance < 0, 0.0)
            if columns.power == 2:
                prob = prob.square_()
            if skip_near:
                prob[..., near:].masked_fill_(distance < skip_near, 0.0)
            if columns.reduce == "max":
                out[..., :end] = torch.maximum(out[..., :end], prob.amax(2))
            else:
                out[..., :end] += prob.sum(2)
        if columns.reduce == "mean":
            position = torch.arange(length, device=q.device)
            out /= (length - (position + skip_near).clamp(min=first)).clamp(min=1)
        return out.flatten(0, 1)

    def prompt_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        columns: ColumnSums,
        reduction: HeadScores,
        lse: Tensor | None = None,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """The score of every prompt key per KV head: the attention it receives, pooled and reduced in the stated order.

        Args:
            q: [Hq, N, D].
            k: [H, N, D].
            columns: Queries that count for a key, and their form.
            reduction: Reduction of these sums to the score of a KV head.
            lse: fp32 [Hq, N] the log-sum-exp of every query's logits and sink, which saves a pass where `takes_lse`.
            softmax: Caps and sinks of the layer.

        Returns:
            fp32 [H, N].
        """
        scores = self.column_scores(q, k, scale, columns, lse, softmax)
        return reduce_scores(scores, k.shape[0], columns.queries, reduction)

    def prompt_low_counts(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        *,
        queries: int,
        skip_near: int,
        group: Reduce,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Minus the number of counted queries whose weight on a prompt key is below 1 / (keys they see), per KV head.

        Args:
            q: [Hq, N, D].
            k: [H, N, D].
            queries, skip_near: As in `ColumnSums`.
            group: Reduction of the query heads of a KV head.
            softmax: Caps and sinks of the layer.

        Returns:
            fp32 [H, N].
        """
        columns = ColumnSums(queries=queries, skip_near=skip_near, below_uniform=True)
        scores = self.column_scores(q, k, scale, columns, softmax=softmax)
        return reduce_group(scores.view(k.shape[0], -1, k.shape[1]), group, 1)


def has_flash(q: Tensor) -> bool:
    """True if torch's flash attention for GPUs takes queries, and keys and values that are like them; others raise."""
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > LARGEST_DIM:
        return False
    return not q.is_cuda or torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Attention of a prompt with the log-sum-exp of every query's logits, fp32 [Hq, N]; None where torch has no kernel.

    Arguments are those of `Backend.prefill_attention`; the kernels are those of `scaled_dot_product_attention`, where
    applicable.
    """
    checks.prompt(q, k, v)
    prompt = q[None], k[None], v[None]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*prompt, 0.0, True, scale=scale)
    elif has_flash(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*prompt, 0.0, True, scale=scale)[:2]
    else:
        return None
    return out[0], lse[0, :, : q.shape[1]].float()


def attention_behind(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, scale: float) -> Tensor | None:
    """`Backend.chunk_attention` after a fully live history, by torch's flash attention for GPUs.

    Returns [Hq, n, D] in the dtype of `q`, or None where that kernel does not support the tensors.

    Its causal mask is that of the last queries, as `torch.nn.attention.bias.causal_lower_right` relies on; for AMD's
    that is not said.
    """
    alike = {x.dtype for x in (q, k, v, past_k, past_v)} == {q.dtype}
    if q.device.type == "cpu" or torch.version.hip or not alike or not has_flash(q):
        return None
    keys, values = (torch.cat(pair, 1)[None] for pair in ((past_k, k), (past_v, v)))
    return torch.ops.aten._scaled_dot_product_flash_attention(q[None], keys, values, 0.0, True, scale=scale)[0][0]


def reduce_columns(prob: Tensor, counts: Tensor, reduce: Reduce) -> Tensor:
    """Reduces probabilities fp32 [..., w, n], 0 where a query does not count for a key, over the queries.

    `counts` is a broadcastable bool mask of the queries that count.
    """
    if reduce == "max":
        return prob.amax(-2)
    return prob.sum(-2) / (counts.sum(-2).clamp(min=1) if reduce == "mean" else 1)


def pool_scores(score: Tensor, kind: Literal["avg", "max"], kernel: int) -> Tensor:
    """Centred pooling along the last axis, stride 1, for any leading shape.

    `avg` counts padding as zeros, `max` ignores it.
    """
    rows = score.reshape(-1, 1, score.shape[-1])
    op = F.avg_pool1d if kind == "avg" else F.max_pool1d
    return op(rows, kernel, stride=1, padding=kernel // 2).view(score.shape)


def reduce_scores(columns: Tensor, heads: int, queries: int, reduction: HeadScores) -> Tensor:
    """Pools and group-reduces column sums fp32 [Hq, N] to [H, N]; the last `queries` of the tokens count, -1 = all."""
    checks.reduction(reduction)
    columns = columns.view(heads, -1, columns.shape[-1])

    def pooled(x: Tensor) -> Tensor:
        whole = reduction.pool_region == "all" or queries < 0
        cut = x.shape[-1] if whole else max(0, x.shape[-1] - queries)
        if reduction.pool == "none" or cut == 0:
            return x
        return torch.cat([pool_scores(x[..., :cut], reduction.pool, reduction.pool_kernel), x[..., cut:]], -1)

    if reduction.pool_stage == "per_query_head":
        return reduce_group(pooled(columns), reduction.group, 1)
    return pooled(reduce_group(columns, reduction.group, 1))
