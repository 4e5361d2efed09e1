"""CPU backend: column scores of a prompt; the matrix products are torch's, all else is one pass in C++."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.cpu.abi import ColumnsStruct, check, load
from kvbench.kernels.reference import attention as torch_attention

BLOCK = 32  # queries whose logits are made at a time
BF16_BLOCK = (
    128  # of a bf16 prompt: oneDNN prepares each width of logits anew, and puts the keys in order for each block
)
ROOM_BYTES = 32 << 20  # of logits that are there at a time, unless one KV head needs more


def column_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int = 0,
    power: int = 1,
    block: int | None = None,
    below_uniform: bool = False,
) -> Tensor:
    """How much attention each key of a prompt receives, summed over queries, in O(N) memory.

    Arguments and result are those of `reference.attention.column_scores`. The sums of a head do not depend on the
    number of threads (torch.get_num_threads() are used). Logits of a bf16 prompt are fp32 sums of exact products,
    by the processor's instructions for bf16 where it has them.

    Raises:
        MemoryError: No room for a block's sums.
    """
    checks.columns(q, k, queries, skip_near, power)
    if q.device.type != "cpu":
        return torch_attention.column_scores(
            q, k, scale, queries=queries, skip_near=skip_near, power=power, below_uniform=below_uniform
        )
    num_q_heads, length, head_dim = q.shape
    heads = k.shape[0]
    out = torch.zeros(num_q_heads, length)
    if not length:
        return out
    is_bf16 = q.dtype == k.dtype == torch.bfloat16 and _multiplies_bf16()
    block = min(block or (BF16_BLOCK if is_bf16 else BLOCK), length)
    grouped, keys = q.view(heads, -1, length, head_dim), k.float().transpose(1, 2)
    group = num_q_heads // heads
    at_once = min(heads, max(1, ROOM_BYTES // (4 * group * block * length)))
    room = torch.empty(at_once * group * block * length)
    first = 0 if queries < 0 else max(0, length - queries)
    for head in range(0, heads, at_once):
        some = min(at_once, heads - head)
        for begin in range(first, length, block):
            end = min(length, begin + block)
            rows = grouped[head : head + some, :, begin:end].float().flatten(1, 2)
            logits = room[: some * group * (end - begin) * end].view(some, -1, end)
            _products(rows, keys[head : head + some, :, :end], scale, logits, is_bf16)
            columns = ColumnsStruct(
                logits=logits.data_ptr(),
                sums=out[head * group :].data_ptr(),
                num_heads=some * group,
                num_queries=end - begin,
                width=end,
                sum_stride=length,
                skip_near=skip_near,
                power=power,
                below=int(below_uniform),
                num_threads=torch.get_num_threads(),
            )
            check(load().kvb_column_sums(ctypes.addressof(columns)))
    return out


@cache
def _multiplies_bf16() -> bool:
    """Whether the processor has instructions for products of bf16 with fp32 sums."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


def _products(rows: Tensor, keys: Tensor, scale: float, logits: Tensor, is_bf16: bool) -> None:
    """scale * rows @ keys, in fp32, of fp32 numbers; `is_bf16` says that each of them is one of bf16 too.

    torch multiplies bf16 into bf16 alone, which is too coarse for logits. Told that fp32 may be taken for bf16, oneDNN
    takes the same numbers, whose products are exact, and sums them in fp32.
    """
    if not is_bf16:
        torch.bmm(rows * scale, keys, out=logits)
        return
    onednn: Any = torch.backends.mkldnn  # its types do not know the setting
    matmul = onednn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:  # scaled behind the product: a row that was scaled before it has more digits than bf16
        torch.baddbmm(logits, rows, keys, beta=0, alpha=scale, out=logits)
    finally:
        matmul.fp32_precision = before
