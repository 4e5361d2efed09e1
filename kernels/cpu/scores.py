"""CPU backend: column scores of a prompt; the matrix products are torch's, all else is one pass in C++."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.cpu.abi import ColumnsStruct, check, load
from kvbench.kernels.reference import attention as torch_attention

BLOCK = 32  # queries whose logits are made at a time


def column_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int = 0,
    power: int = 1,
    block: int = BLOCK,
    below_uniform: bool = False,
) -> Tensor:
    """How much attention each key of a prompt receives, summed over queries, in O(N) memory.

    Arguments and result are those of `reference.attention.column_scores`. The sums of a head do not depend on the
    number of threads (torch.get_num_threads() are used).

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
    first = 0 if queries < 0 else max(0, length - queries)
    grouped, keys = q.view(heads, -1, length, head_dim), k.float().transpose(1, 2)
    room = torch.empty(num_q_heads * min(block, length) * length)
    for begin in range(first, length, block):
        end = min(length, begin + block)
        rows = (grouped[:, :, begin:end].float() * scale).flatten(1, 2)
        logits = room[: num_q_heads * (end - begin) * end].view(heads, -1, end)
        torch.bmm(rows, keys[:, :, :end], out=logits)
        columns = ColumnsStruct(
            logits=logits.data_ptr(),
            sums=out.data_ptr(),
            num_heads=num_q_heads,
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
