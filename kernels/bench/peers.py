"""FlashAttention and FlashInfer as further variants of the attention bench, where they are installed.

Neither is required. Both are called as their documents say, on tensors or pages that hold the same keys and values.
Written from these documents; no GPU has run them here yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from kvbench.kernels.bench import caches
from kvbench.kernels.bench.rounds import Absent, Variant, failed_variant

PAGE_TOKENS = 16  # FlashInfer's and vLLM's usual page
WORKSPACE_BYTES = 128 << 20  # which FlashInfer recommends, for what lies between its two kernels
PLAN_BYTES = 8 << 20  # of a wrapper of FlashInfer's
E4M3_MOST = 448.0
QUERY = torch.bfloat16  # of every peer
# Of the largest exact element: bf16 results, whose weights have 8 bits.
TOLERANCE = 2e-2

Call = Callable[[int], Tensor]


@dataclass(frozen=True)
class Cache:
    """Keys and values [S, H, n, D] of a peer's type, their scales, and the number of copies that calls cycle through.

    Args:
        scales: Scales of keys and of values; None where their type needs none.
    """

    k: Tensor
    v: Tensor
    num_buffers: int
    scales: tuple[float, float] | None = None


@dataclass(frozen=True)
class Peer:
    """A library's decode attention.

    Args:
        name: Name of its row.
        module: Name of the module to import.
        install: Hint for installing the package, for the message.
        kind: Type of its keys and values.
        build: Prepares a call on a buffer, of queries [S, Hq, D] and a factor on the logits.
    """

    name: str
    module: str
    install: str
    kind: torch.dtype
    build: Callable[[ModuleType, Tensor, Cache, float], Call]

    @property
    def is_there(self) -> bool:
        """True if the module is installed."""
        return find_spec(self.module) is not None

    def need_bytes(self, numbers: int, num_buffers: int) -> int:
        """Bytes of a device that it takes, of so many keys and values together."""
        workspace = WORKSPACE_BYTES + num_buffers * PLAN_BYTES if self.module == "flashinfer" else 0
        return numbers * self.kind.itemsize * num_buffers + workspace


def variants(q: Tensor, k: Tensor, v: Tensor, working_set_mb: int, most: int) -> list[Variant]:
    """Variant of each peer over keys and values [S, H, n, D].

    A peer that is not installed, or cannot be prepared, is refused with the reason.

    Args:
        q: [S, Hq, D] queries.
        working_set_mb, most: MB of buffers of each, and how many at most.
    """
    made = []
    for peer in PEERS:
        size = (k.numel() + v.numel()) * peer.kind.itemsize
        count = caches.num_buffers(size, working_set_mb, most)
        try:
            made.append(_variant(peer, q.to(QUERY), k, v, size, count))
        except Exception as problem:  # libraries compile and import in ways of their own; the others are still measured
            made.append(failed_variant(peer.name, problem))
    return made


def _variant(peer: Peer, q: Tensor, k: Tensor, v: Tensor, size: int, count: int) -> Variant:
    if not peer.is_there:
        raise Absent(f"{peer.module} is not installed: {peer.install}")
    held, scale = _stored(peer.kind, k, v, count), q.shape[-1] ** -0.5
    call = peer.build(import_module(peer.module), q, held, scale)

    def error() -> float:
        factors, out, errors = held.scales or (1.0, 1.0), call(count - 1), []
        for index in range(len(q)):  # one by one, as in fp32 they take several times their memory
            keys, values = held.k[index].float() * factors[0], held.v[index].float() * factors[1]
            exact, _ = caches.exact_attention(q[index], keys, values, scale)
            errors.append(caches.relative_error(out[index], exact))
        return caches.worst(errors)

    return Variant(
        name=peer.name,
        call=call,
        num_buffers=count,
        bytes_per_call=size,
        check=error,
        tolerance=TOLERANCE,
        extra={"kind": "peer", "dtype": str(peer.kind).removeprefix("torch.")},
    )


def _stored(kind: torch.dtype, k: Tensor, v: Tensor, count: int) -> Cache:
    """Keys and values as a type; in 8 bits divided by one factor each, so that the largest is the type's largest."""
    if kind.itemsize > 1:
        return Cache(k.to(kind), v.to(kind), count)
    factors = float(k.abs().max()) / E4M3_MOST, float(v.abs().max()) / E4M3_MOST
    return Cache((k / factors[0]).to(kind), (v / factors[1]).to(kind), count, factors)


def _flash_attention(library: ModuleType, q: Tensor, held: Cache, scale: float) -> Call:
    """`flash_attn_with_kvcache` with [S, n, H, D] caches: its split-KV decode kernel."""
    keys, values = ([x.transpose(1, 2).contiguous() for _ in range(held.num_buffers)] for x in (held.k, held.v))
    lengths = torch.full((len(q),), held.k.shape[2], dtype=torch.int32, device=q.device)

    def call(index: int) -> Tensor:
        where = {"cache_seqlens": lengths, "softmax_scale": scale}
        return library.flash_attn_with_kvcache(q[:, None], keys[index], values[index], **where)[:, 0]

    return call


def _flash_infer(library: ModuleType, q: Tensor, held: Cache, scale: float, tensor_cores: bool = False) -> Call:
    """`BatchDecodeWithPagedKVCacheWrapper` over pages of 16 tokens, planned once per buffer."""
    sequences, heads, length, dim = held.k.shape
    if length % PAGE_TOKENS:
        raise ValueError(f"{length} tokens are no whole number of pages of {PAGE_TOKENS}")
    width, count = length // PAGE_TOKENS, held.num_buffers
    per_buffer = sequences * width
    paged = [x.transpose(1, 2).reshape(per_buffer, PAGE_TOKENS, heads, dim) for x in (held.k, held.v)]
    keys, values = (torch.cat([x] * count) for x in paged)
    indptr = torch.arange(0, per_buffer + 1, width, dtype=torch.int32, device=q.device)
    last = torch.full((sequences,), PAGE_TOKENS, dtype=torch.int32, device=q.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)  # one for all: they run in turn
    shape, kinds = (q.shape[1], heads, dim, PAGE_TOKENS), {"q_data_type": q.dtype, "kv_data_type": held.k.dtype}
    planned = []
    for index in range(count):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        ids = torch.arange(index * per_buffer, (index + 1) * per_buffer, dtype=torch.int32, device=q.device)
        wrapper.plan(indptr, ids, last, *shape, **kinds, sm_scale=scale)
        planned.append(wrapper)
    scales = {} if held.scales is None else {"k_scale": held.scales[0], "v_scale": held.scales[1]}
    return lambda index: planned[index].run(q, (keys, values), **scales)


_FLASH_INFER = "pip install --no-deps flashinfer-python==0.5.3 apache-tvm-ffi"
# Which FlashInfer recommends where many query heads share a KV head.
_ON_TENSOR_CORES = partial(_flash_infer, tensor_cores=True)
PEERS = (
    Peer("flash-attn bf16", "flash_attn", "pip install flash-attn", torch.bfloat16, _flash_attention),
    Peer("flashinfer bf16", "flashinfer", _FLASH_INFER, torch.bfloat16, _flash_infer),
    Peer("flashinfer bf16, tensor cores", "flashinfer", _FLASH_INFER, torch.bfloat16, _ON_TENSOR_CORES),
    Peer("flashinfer fp8", "flashinfer", _FLASH_INFER, torch.float8_e4m3fn, _flash_infer),
    Peer("flashinfer fp8, tensor cores", "flashinfer", _FLASH_INFER, torch.float8_e4m3fn, _ON_TENSOR_CORES),
)
