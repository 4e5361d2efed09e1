"""FlashAttention and FlashInfer as further variants, where they are installed. Neither is required.

Both are called with 16-bit pages or tensors, as their users do. Written from their documentation; not yet run on a GPU.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from kvbench.kernels.bench import caches
from kvbench.kernels.bench.rounds import Variant

PAGE_TOKENS = 16  # FlashInfer's and vLLM's usual page
WORKSPACE_BYTES = 128 << 20
TOLERANCE = 1e-2  # fp16 keys, values and result


def variants(q: Tensor, k: Tensor, v: Tensor, working_set_mb: int, most: int) -> list[Variant]:
    """The peers that can be imported.

    Args:
        q: fp32 [S, Hq, D].
        k, v: fp32 [S, H, n, D].
        working_set_mb: MB of buffers per variant.
        most: Buffers at most.
    """
    size, scale = 2 * (k.numel() + v.numel()), q.shape[-1] ** -0.5
    count = caches.num_buffers(size, working_set_mb, most)
    q, k, v = q.half(), k.half(), v.half()
    made = []
    for name, module, build in (
        ("flash-attn fp16", "flash_attn", _flash_attention),
        ("flashinfer fp16", "flashinfer", _flash_infer),
    ):
        try:
            call = build(import_module(module), q, k, v, scale, count)
        except ImportError:
            continue
        made.append(
            Variant(
                name=name,
                call=call,
                num_buffers=count,
                bytes_per_call=size,
                tolerance=TOLERANCE,
                check=partial(lambda call: caches.dense_error(call(count - 1), q, k, v, scale), call),
                extra={"kind": "dense", "dtype": "fp16"},
            )
        )
    return made


def _flash_attention(
    library: ModuleType, q: Tensor, k: Tensor, v: Tensor, scale: float, count: int
) -> Callable[[int], Tensor]:
    """`flash_attn_with_kvcache` with [S, n, H, D] caches: its split-KV decode kernel."""
    keys, values = ([x.transpose(1, 2).contiguous() for _ in range(count)] for x in (k, v))
    lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)

    def call(index: int) -> Tensor:
        return library.flash_attn_with_kvcache(
            q[:, None], keys[index], values[index], cache_seqlens=lengths, softmax_scale=scale
        )[:, 0]

    return call


def _flash_infer(
    library: ModuleType, q: Tensor, k: Tensor, v: Tensor, scale: float, count: int
) -> Callable[[int], Tensor]:
    """`BatchDecodeWithPagedKVCacheWrapper` over pages of 16 tokens, planned once per buffer."""
    sequences, heads, length, dim = k.shape
    if length % PAGE_TOKENS:
        raise ImportError(f"{length} tokens are no whole number of pages")
    width = length // PAGE_TOKENS
    per_buffer = sequences * width
    paged = [x.transpose(1, 2).reshape(per_buffer, PAGE_TOKENS, heads, dim) for x in (k, v)]
    keys, values = (x.repeat(count, 1, 1, 1) for x in paged)
    indptr = torch.arange(0, per_buffer + 1, width, dtype=torch.int32, device=q.device)
    last = torch.full((sequences,), PAGE_TOKENS, dtype=torch.int32, device=q.device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)  # one for all: they run in turn
    shape, more = (q.shape[1], heads, dim, PAGE_TOKENS), {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    planned = []
    for index in range(count):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        ids = torch.arange(index * per_buffer, (index + 1) * per_buffer, dtype=torch.int32, device=q.device)
        wrapper.plan(indptr, ids, last, *shape, **more, sm_scale=scale)
        planned.append(wrapper)
    return lambda index: planned[index].run(q, (keys, values))
