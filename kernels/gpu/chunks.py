"""GPU backend: attention of a chunk of a prompt over what is held already, and over itself. Capture-safe."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.parts import LOG2_E, LOWEST, MIN_DOT, launch, power_of_two
from kvbench.kernels.gpu.prefill import _rows, _tile

# Queries and keys of a tile in fp32, with 8 warps and no loads ahead: larger ones, and more of either, spill registers.
_QUERIES, _KEYS = 32, 16


@triton.jit
def _take_tile(query, key, value, seen, top, norm, acc, scale2):
    """What an online softmax comes to with one more tile of keys [BN, DP]; `seen`: bool, which of them a query sees."""
    logit = tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale2, LOWEST)
    new_top = tl.maximum(top, tl.max(logit, 1))
    p = tl.where(seen, tl.exp2(logit - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    return new_top, norm * shrink + tl.sum(p, 1), acc * shrink[:, None] + tl.dot(p, value, input_precision="ieee")


@triton.jit
def _attend_chunk(
    q, k, v, past_k, past_v, live, out, scale2, chunk, past, group_size, q_head, q_token, k_head, k_token, v_head,
    v_token, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of a chunk's queries of one head: over the live entries of its list, then causally over the chunk."""
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    kv = head // group_size
    query = _tile(q, head * q_head, q_token, i, D, DP, chunk, tl.float32)
    top, norm = tl.full([BM], LOWEST, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for begin in range(0, past, BN):
        j = begin + tl.arange(0, BN)
        there = tl.load(live + kv * past + j, mask=j < past, other=0) != 0
        key = _tile(past_k, kv * past * D, D, j, D, DP, past, tl.float32)
        value = tl.where(there[:, None], _tile(past_v, kv * past * D, D, j, D, DP, past, tl.float32), 0.0)
        seen = there[None, :] & (i < chunk)[:, None]
        top, norm, acc = _take_tile(query, key, value, seen, top, norm, acc, scale2)
    for begin in range(0, tl.minimum(chunk, (tl.program_id(0) + 1) * BM), BN):
        j = begin + tl.arange(0, BN)
        key = _tile(k, kv * k_head, k_token, j, D, DP, chunk, tl.float32)
        value = _tile(v, kv * v_head, v_token, j, D, DP, chunk, tl.float32)
        seen = (j[None, :] <= i[:, None]) & (i < chunk)[:, None]
        top, norm, acc = _take_tile(query, key, value, seen, top, norm, acc, scale2)
    d = tl.arange(0, DP)
    cells = (i < chunk)[:, None] & (d < D)[None, :]
    tl.store(out + (head * chunk + i)[:, None] * D + d[None, :], acc / norm[:, None], mask=cells)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """Launches `_attend_chunk`; arguments and result as of `Backend.chunk_attention`."""
    past_k, past_v, live = (x.contiguous() for x in history)
    q, k, v = _rows(q), _rows(k), _rows(v)
    heads, chunk, head_dim = q.shape
    out = torch.empty(heads, chunk, head_dim, device=q.device)
    strides = [s for x in (q, k, v) for s in x.stride()[:2]]
    launch(
        _attend_chunk, (-(-chunk // _QUERIES), heads), q, k, v, past_k.float(), past_v.float(), live.view(torch.uint8),
        out, scale * LOG2_E, chunk, past_k.shape[1], heads // len(k), *strides, D=head_dim,
        DP=power_of_two(head_dim, MIN_DOT), BM=_QUERIES, BN=_KEYS, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
