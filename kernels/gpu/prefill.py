"""GPU backend: column scores of a prompt in O(N) memory, and attention of a chunk of one over what is held already.

Column sums take two passes. The first finds every counted query's maximum and sum of exponentials, and is left out
where torch's own fused attention of the prompt gave their log-sum-exp (`reference/prompts.py`). In the second each
program owns a block of keys and goes over the queries after it, so that no two programs add to the same sum. Keys are
the rows of its products, so that the sum over queries stays within a warp; the log-sum-exp stands in the exponent, and
only the tiles that the diagonal cuts are masked. Nothing of size N x N is ever written. Capture-safe.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.parts import ELEMENT, INTERPRETED, LOG2_E, LOWEST, MIN_DOT, capped, launch, power_of_two
from kvbench.kernels.operands import PLAIN, ColumnSums, Softmax


@triton.jit
def _tile(x, start, stride, i, D: tl.constexpr, DP: tl.constexpr, length, OP: tl.constexpr):
    """Rows i of a head, [len(i), DP], as operands; 0 outside."""
    d = tl.arange(0, DP)
    mask = (i < length)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(x + start + i.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0).to(OP)


@triton.jit(do_not_specialize=["length", "first", "group_size"])
def _sum_queries(
    q, k, tops, sums, scale2, length, first, group_size, q_head, q_token, k_head, k_token, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The maximum and the sum of exponentials of one block of queries of one head, causally."""
    head = tl.program_id(1).to(tl.int64)
    i = first + tl.program_id(0) * BM + tl.arange(0, BM)
    query = _tile(q, head * q_head, q_token, i, D, DP, length, OP)
    top = tl.full([BM], LOWEST, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    for begin in range(0, tl.minimum(length, first + (tl.program_id(0) + 1) * BM), BN):
        j = begin + tl.arange(0, BN)
        key = _tile(k, (head // group_size) * k_head, k_token, j, D, DP, length, OP)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * scale2
        if CAP > 0:
            logit = capped(logit, CAP)
        logit = tl.where(j[None, :] <= i[:, None], logit, LOWEST)
        new_top = tl.maximum(top, tl.max(logit, 1))
        norm = norm * tl.exp2(top - new_top) + tl.sum(tl.exp2(logit - new_top[:, None]), 1)
        top = new_top
    at = head * (length - first) + i - first
    tl.store(tops + at, top, mask=i < length)
    tl.store(sums + at, norm, mask=i < length)


@triton.jit
def _count_turn(
    column, key, q, tops, sums, begin, j, scale2, length, near, q_token, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, OP: tl.constexpr, CAP: tl.constexpr, POWER: tl.constexpr, BELOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of queries to the sums [BN] of keys j; MASKED where some pairs of the tile do not count.

    `q`, `tops` and `sums` are offset to one head's first query: an offset of 64 bits would take two registers for each
    element of a thread.
    """
    i = begin + tl.arange(0, BM)
    query = _tile(q, 0, q_token, i, D, DP, length, OP)
    top = tl.load(tops + i, mask=i < length, other=0.0 if BELOW else float("inf"))
    logit = tl.dot(key, tl.trans(query), input_precision="ieee") * scale2
    if CAP > 0:
        logit = capped(logit, CAP)
    if BELOW:
        norm = tl.load(sums + i, mask=i < length, other=1.0)
        p = tl.exp2(logit - top[None, :]) / norm[None, :]
        p = tl.where((p < (1.0 / (i + 1).to(tl.float32))[None, :]) & (i < length)[None, :], -1.0, 0.0)
    else:
        p = tl.exp2(logit - top[None, :])
    if POWER == 2:
        p = p * p
    if MASKED:
        p = tl.where(i[None, :] >= (j + near)[:, None], p, 0.0)
    return column + tl.sum(p, 1)


@triton.jit(do_not_specialize=["length", "first", "skip_near", "group_size"])
def _sum_columns(
    q, k, tops, sums, columns, scale2, length, first, skip_near, group_size, q_head, q_token, k_head, k_token,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr, CAP: tl.constexpr,
    POWER: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    """Column sums of one block of keys over the counted queries of one head.

    With BELOW, minus one for each query whose weight is below an equal share of the keys that it sees.

    `tops`: log-sum-exp of the queries, base 2; with BELOW their maxima, and `sums` their sums of exponentials.
    """
    block = tl.program_id(0)  # the first keys have the most work, and begin first
    head = tl.program_id(1).to(tl.int64)
    j = block * BN + tl.arange(0, BN)
    key = _tile(k, (head // group_size) * k_head, k_token, j, D, DP, length, OP)
    near = tl.maximum(skip_near, 0)
    reach = tl.maximum(block * BN + near - first, 0)  # the first query that any of these keys counts
    begin = first + reach // BM * BM
    reach = tl.maximum(block * BN + BN - 1 + near - first, 0)  # and the first that all of them do
    whole = tl.minimum(first + (reach + BM - 1) // BM * BM, length)
    tops, sums = tops + head * (length - first) - first, sums + head * (length - first) - first
    column = tl.zeros([BN], tl.float32)
    for at in range(begin, whole, BM):
        column = _count_turn(
            column, key, q + head * q_head, tops, sums, at, j, scale2, length, near, q_token, D, DP, BM, OP, CAP,
            POWER, BELOW, True,
        )  # fmt: skip
    for at in range(whole, length, BM):
        column = _count_turn(
            column, key, q + head * q_head, tops, sums, at, j, scale2, length, near, q_token, D, DP, BM, OP, CAP,
            POWER, BELOW, False,
        )  # fmt: skip
    tl.store(columns + head * length + j, column, mask=j < length)


def _rows(x: Tensor) -> Tensor:
    """`x` with adjacent channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _operand(*tensors: Tensor) -> torch.dtype:
    """Type of the matrix products' operands: the one that all tensors have, as tensor cores take 16 bits; else fp32."""
    dtypes = {x.dtype for x in tensors}
    exact = len(dtypes) == 1 and not (INTERPRETED and torch.bfloat16 in dtypes)
    return dtypes.pop() if exact else torch.float32


def sum_columns(
    q: Tensor, k: Tensor, scale: float, columns: ColumnSums, lse: Tensor | None, softmax: Softmax
) -> Tensor:
    """Launches `Backend.column_scores`.

    With `lse` the first pass is skipped; not for counts, where a probability of exactly 1 / n must not be rounded below
    it.
    """
    assert lse is None or not columns.below_uniform, "counts take both passes"
    heads, length, head_dim = q.shape
    q, k = _rows(q), _rows(k)
    first = 0 if columns.queries < 0 else max(0, length - columns.queries)
    operand, group_size = ELEMENT[_operand(q, k)], heads // k.shape[0]
    rows = width = 32 if operand == tl.float32 and not INTERPRETED else 64  # queries and keys per tile
    strides = (*q.stride()[:2], *k.stride()[:2])
    tile = {"D": head_dim, "DP": power_of_two(head_dim, MIN_DOT), "BM": rows, "BN": width, "OP": operand}
    tile["CAP"] = softmax.cap * LOG2_E
    if lse is None:
        tops, sums = (torch.empty(heads, length - first, device=q.device) for _ in range(2))
        launch(
            _sum_queries, (-(-(length - first) // rows), heads), q, k, tops, sums, scale * LOG2_E, length, first,
            group_size, *strides, **tile,
        )  # fmt: skip
        if softmax.sinks is not None:
            sums += torch.exp2(softmax.sinks[:, None] * LOG2_E - tops)
        if not columns.below_uniform:
            tops = sums = tops + sums.log2_()
    else:
        tops = sums = (lse[:, first:] * LOG2_E).contiguous()
    out = torch.empty(heads, length, device=q.device)
    if operand != tl.float32 and tile["DP"] <= 128:
        tile["BN"] = 2 * width
    launch(
        _sum_columns, (-(-length // tile["BN"]), heads), q, k, tops, sums, out, scale * LOG2_E, length, first,
        columns.skip_near, group_size, *strides, **tile, POWER=columns.power, BELOW=columns.below_uniform,
    )  # fmt: skip
    return out


@triton.jit
def _take_tile(query, key, value, seen, top, norm, acc, scale2, CAP: tl.constexpr):
    """State of an online softmax after one more tile of keys [BN, DP]; `seen`: bool, the keys that a query sees."""
    logit = tl.dot(query, tl.trans(key), input_precision="ieee") * scale2
    if CAP > 0:
        logit = capped(logit, CAP)
    logit = tl.where(seen, logit, LOWEST)
    new_top = tl.maximum(top, tl.max(logit, 1))
    p = tl.where(seen, tl.exp2(logit - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    sums = tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return new_top, norm * shrink + tl.sum(p, 1), acc * shrink[:, None] + sums


@triton.jit(do_not_specialize=["chunk", "past", "group_size"])
def _attend_chunk(
    q, k, v, past_k, past_v, live, out, sinks, scale2, chunk, past, group_size, q_head, q_token, k_head, k_token,
    v_head, v_token, pk_head, pk_token, pv_head, pv_token, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, OP: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One block of a chunk's queries of one head: over the live entries of its list, then causally over the chunk."""
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    kv = head // group_size
    query = _tile(q, head * q_head, q_token, i, D, DP, chunk, OP)
    top, norm = tl.full([BM], LOWEST, tl.float32), tl.zeros([BM], tl.float32)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks + head) * 1.4426950408889634)
        norm = tl.where(top > LOWEST, 1.0, 0.0)
    acc = tl.zeros([BM, DP], tl.float32)
    for begin in range(0, past, BN):
        j = begin + tl.arange(0, BN)
        there = tl.load(live + kv * past + j, mask=j < past, other=0) != 0
        key = _tile(past_k, kv * pk_head, pk_token, j, D, DP, past, OP)
        value = tl.where(there[:, None], _tile(past_v, kv * pv_head, pv_token, j, D, DP, past, OP), 0.0)
        seen = there[None, :] & (i < chunk)[:, None]
        top, norm, acc = _take_tile(query, key, value, seen, top, norm, acc, scale2, CAP)
    for begin in range(0, tl.minimum(chunk, (tl.program_id(0) + 1) * BM), BN):
        j = begin + tl.arange(0, BN)
        key = _tile(k, kv * k_head, k_token, j, D, DP, chunk, OP)
        value = _tile(v, kv * v_head, v_token, j, D, DP, chunk, OP)
        seen = (j[None, :] <= i[:, None]) & (i < chunk)[:, None]
        top, norm, acc = _take_tile(query, key, value, seen, top, norm, acc, scale2, CAP)
    d = tl.arange(0, DP)
    cells = (i < chunk)[:, None] & (d < D)[None, :]
    tl.store(out + (head * chunk + i)[:, None] * D + d[None, :], acc / norm[:, None], mask=cells)


def _chunk_tile(kind: torch.dtype, padded: int) -> dict[str, int]:
    """Queries and keys of a tile, with 8 warps.

    Larger tiles, and prefetching of fp32 tiles, spill registers as compiled for sm_89 and gfx942.
    """
    if kind == torch.float32:
        return {"BM": 32, "BN": 16, "num_stages": 1}
    return {"BM": 128 if padded <= 128 else 64, "BN": 64 if padded <= 64 else 32, "num_stages": 2}


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    history: tuple[Tensor, Tensor, Tensor | None],
    scale: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Launches `_attend_chunk`; arguments and result as of `Backend.chunk_attention`."""
    kind = _operand(q, k, v)
    q, k, v, past_k, past_v = (_rows(x) for x in (q, k, v, history[0].to(kind), history[1].to(kind)))
    heads, chunk, head_dim = q.shape
    live = history[2]
    live = torch.ones(past_k.shape[:2], dtype=torch.bool, device=q.device) if live is None else live.contiguous()
    out = torch.empty(heads, chunk, head_dim, device=q.device)
    padded = power_of_two(head_dim, MIN_DOT)
    tile = _chunk_tile(kind, padded)
    launch(
        _attend_chunk, (-(-chunk // tile["BM"]), heads), q, k, v, past_k, past_v, live.view(torch.uint8),
        out, out if softmax.sinks is None else softmax.sinks, scale * LOG2_E, chunk, past_k.shape[1], heads // len(k),
        *(stride for x in (q, k, v, past_k, past_v) for stride in x.stride()[:2]), D=head_dim, DP=padded,
        OP=ELEMENT[kind], CAP=softmax.cap * LOG2_E, SINKS=softmax.sinks is not None, **tile, num_warps=8,
    )  # fmt: skip
    return out
