"""GPU backend: a prompt's attention with its log-sum-exp, and column scores, in O(N) memory.

Column sums take two passes. The first finds every counted query's maximum and sum of exponentials, and is left out
where torch's own fused attention of the prompt gave their log-sum-exp (`reference/prompts.py`). In the second each
program owns a block of keys and goes over the queries behind it, so that no two programs add to the same sum. Nothing
of size N x N is ever written. Capture-safe. The store does not use `attention_with_lse`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.parts import ELEMENT, INTERPRETED, LOG2_E, LOWEST, MIN_DOT, launch, power_of_two
from kvbench.kernels.operands import ColumnSums


@triton.jit
def _tile(x, start, stride, i, D: tl.constexpr, DP: tl.constexpr, length, OP: tl.constexpr):
    """Rows i of a head, [len(i), DP], as operands; 0 outside."""
    d = tl.arange(0, DP)
    mask = (i < length)[:, None] & (d < D)[None, :]
    return tl.load(x + start + i.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0).to(OP)


@triton.jit
def _attend_prompt(
    q, k, v, out, tops, sums, scale2, length, first, group_size, q_head, q_token, k_head, k_token, v_head, v_token,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Causal attention of one block of queries of one head: its output when wanted, its maximum and its sum."""
    head = tl.program_id(1).to(tl.int64)
    i = first + tl.program_id(0) * BM + tl.arange(0, BM)
    kv = head // group_size
    query = _tile(q, head * q_head, q_token, i, D, DP, length, OP)
    top = tl.full([BM], LOWEST, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for begin in range(0, tl.minimum(length, first + (tl.program_id(0) + 1) * BM), BN):
        j = begin + tl.arange(0, BN)
        key = _tile(k, kv * k_head, k_token, j, D, DP, length, OP)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * scale2
        logit = tl.where(j[None, :] <= i[:, None], logit, LOWEST)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(p, 1)
        if VALUES:
            value = _tile(v, kv * v_head, v_token, j, D, DP, length, OP)
            acc = acc * shrink[:, None] + tl.dot(p.to(OP), value, input_precision="ieee")
        top = new_top
    at = head * (length - first) + i - first
    tl.store(tops + at, top, mask=i < length)
    tl.store(sums + at, norm, mask=i < length)
    if VALUES:
        d = tl.arange(0, DP)
        cells = (i < length)[:, None] & (d < D)[None, :]
        tl.store(out + (head * length + i)[:, None] * D + d[None, :], acc / norm[:, None], mask=cells)


@triton.jit
def _sum_columns(
    q, k, tops, sums, columns, scale2, length, first, skip_near, group_size, q_head, q_token, k_head, k_token,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr, POWER: tl.constexpr,
    BELOW: tl.constexpr,
):  # fmt: skip
    """What one block of keys receives from the counted queries of one head; with BELOW, minus one from each that gives
    less than an equal share of what it sees."""
    head = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    key = tl.trans(_tile(k, (head // group_size) * k_head, k_token, j, D, DP, length, OP))
    column = tl.zeros([BN], tl.float32)
    reach = tl.maximum(tl.program_id(0) * BN + skip_near - first, 0)  # the first query that any of these keys counts
    for begin in range(first + reach // BM * BM, length, BM):
        i = begin + tl.arange(0, BM)
        query = _tile(q, head * q_head, q_token, i, D, DP, length, OP)
        at = head * (length - first) + i - first
        top = tl.load(tops + at, mask=i < length, other=0.0)
        norm = tl.load(sums + at, mask=i < length, other=1.0)
        p = tl.exp2(tl.dot(query, key, input_precision="ieee") * scale2 - top[:, None]) / norm[:, None]
        if BELOW:
            p = tl.where(p < (1.0 / (i + 1).to(tl.float32))[:, None], -1.0, 0.0)
        if POWER == 2:
            p = p * p
        distance = i[:, None] - j[None, :]
        counted = (distance >= 0) & (distance >= skip_near) & (i < length)[:, None]
        column += tl.sum(tl.where(counted, p, 0.0), 0)
    tl.store(columns + head * length + j, column, mask=j < length)


def _operand(q: Tensor, others: tuple[Tensor, ...]) -> tl.dtype:
    """Type of the products' operands: the prompt's own, fp32 where they differ."""
    exact = all(x.dtype == q.dtype for x in others) and not (INTERPRETED and q.dtype == torch.bfloat16)
    return ELEMENT[q.dtype] if exact else tl.float32


def _blocks(operand: tl.dtype) -> tuple[int, int]:
    """Queries and keys per tile."""
    return (32, 32) if operand == tl.float32 and not INTERPRETED else (64, 64)


def _rows(x: Tensor) -> Tensor:
    """`x` with adjacent channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def prompt_statistics(
    q: Tensor, k: Tensor, scale: float, first: int, attend: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Maximum in base 2 and sum of exponentials, fp32 [Hq, N - first], of queries `first` on.

    With `attend`, values [H, N, D] and a place [Hq, N, D] for the output, which is then filled.
    """
    heads, length, head_dim = q.shape
    q, k = _rows(q), _rows(k)
    values, target = (None, None) if attend is None else (_rows(attend[0]), attend[1])
    operand = _operand(q, (k,) if values is None else (k, values))
    rows, columns = _blocks(operand)
    tops, sums = (torch.empty(heads, length - first, device=q.device) for _ in range(2))
    if values is None or target is None:
        values, target = k, tops  # neither is touched
    strides = [s for x in (q, k, values) for s in x.stride()[:2]]
    launch(
        _attend_prompt, (-(-(length - first) // rows), heads), q, k, values, target, tops, sums, scale * LOG2_E, length,
        first, heads // k.shape[0], *strides, D=head_dim, DP=power_of_two(head_dim, MIN_DOT), BM=rows, BN=columns,
        OP=operand, VALUES=attend is not None,
    )  # fmt: skip
    return tops, sums


def sum_columns(q: Tensor, k: Tensor, scale: float, columns: ColumnSums, lse: Tensor | None) -> Tensor:
    """Launches what `Backend.column_scores` takes. With `lse` the first pass is left out; not for counts, where a
    probability of just 1 / n must not be a rounding below it."""
    assert lse is None or not columns.below_uniform, "counts take both passes"
    heads, length, head_dim = q.shape
    q, k = _rows(q), _rows(k)
    first = 0 if columns.queries < 0 else max(0, length - columns.queries)
    if lse is None:
        tops, sums = prompt_statistics(q, k, scale, first)
    else:
        tops = (lse[:, first:] * LOG2_E).contiguous()
        sums = torch.ones_like(tops)
    operand = _operand(q, (k,))
    rows, width = _blocks(operand)
    out = torch.empty(heads, length, device=q.device)
    launch(
        _sum_columns, (-(-length // width), heads), q, k, tops, sums, out, scale * LOG2_E, length, first,
        columns.skip_near, heads // k.shape[0], *q.stride()[:2], *k.stride()[:2], D=head_dim,
        DP=power_of_two(head_dim, MIN_DOT), BM=rows, BN=width, OP=operand, POWER=columns.power,
        BELOW=columns.below_uniform,
    )  # fmt: skip
    return out
