"""Times decode attention over pages of every format next to dense attention, with and without scores.

Runs with torch (and triton on a GPU) alone: `python -m kvbench.kernels.bench.attention lengths=[4096]`.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import caches, machine
from kvbench.kernels.bench.bench import DTYPES, Bench, Common, Skipped, main, parse_shape, setting
from kvbench.kernels.bench.rounds import Variant, cuda_graph, failed_variant
from kvbench.kernels.operands import Reduce

SCORES = {"none": "", "return": " + scores"}
# Of the largest exact element. The kernels are held to 1e-5 by their own tests; here only a wrong one must be caught.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
BF16_TOLERANCE = 2e-2  # of bf16 queries and elements, whose weights have 8 bits
DENSE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}
PAGE_TOKENS = 16  # FlashInfer's and vLLM's usual page
WORKSPACE_BYTES = 128 << 20
PEER_TOLERANCE = 1e-2  # fp16 keys, values and result
FITS = 0.9  # of the free memory may be taken


@dataclass(kw_only=True)
class Settings(Common):
    """Decode attention over pages of every format beside dense attention."""

    what = "attention"
    quick = {
        "lengths": [4096],
        "batches": [1],
        "formats": "K16V16 K8V4 K4V2 KIVI2".split(),
        "rounds": 5,
        "threads": [1],
    }

    formats: list[str] = setting(
        "K16V16 K8V8 K8V4 K4V4 K4V2 K2V2 KIVI4 KIVI2 K8V4+K4V2".split(),
        "Page formats, names of `caches.slot_format`, or two joined by + with half of the tokens each.",
    )
    shapes: list[str] = setting(["9x3x64", "32x8x128"], "Query heads x KV heads x head dim of one layer.")
    lengths: list[int] = setting([1024, 4096, 16384], "Tokens held per sequence.", 1)
    batches: list[int] = setting([1, 4], "Sequences.", 1)
    scores: list[str] = setting(
        ["none", "return"], "none, return = the largest probability of the group's query heads per token.", among=SCORES
    )
    dense: list[str] = setting(
        ["fp32", "bf16", "fp16"], "Element types of dense attention: fp32, bf16, fp16.", among=DTYPES
    )
    queries: str = setting(
        "fp16", "Type of the queries, and of elements of 16 bits, on a GPU: fp16, bf16.", among=("fp16", "bf16")
    )
    peers: bool = setting(True, "Time FlashAttention and FlashInfer where they can be imported.")

    def check(self) -> None:
        super().check()
        for text in self.shapes:
            parse_shape(text)
        for name in self.formats:
            for part in name.split("+"):
                caches.slot_format(part, 64)

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(self.shapes, threads, self.batches, self.lengths)
        return [{"shape": s, "length": length, "batch": batch, "threads": n} for s, n, batch, length in every]

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        dense = [f"sdpa {dtype}{way}" for dtype in self.dense for way in ("", " grouped")]
        capture = cuda_graph if self.graph and bench.device != "cpu" else None
        return {"baselines": [*dense, "K16V16"], "probe": bench.bandwidth.variant(), "capture": capture}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        queries, heads, dim = parse_shape(cell["shape"])
        length, batch, device = cell["length"], cell["batch"], bench.device
        self._check_memory(cell, device)
        generator = torch.Generator(device=device).manual_seed(self.seed)
        # Queries twice as large make attention about as peaked as in real models.
        q = 2 * torch.randn(batch, queries, dim, generator=generator, device=device)
        k, v = (torch.randn(batch, heads, length, dim, generator=generator, device=device) for _ in range(2))
        made = []
        for name in self.dense:
            made += self._dense(name, q, k, v)
        for name in self.formats:
            try:
                made += self._paged(name, q, k, v, bench.backend)
            except Exception as problem:  # a writer that does not compile, memory: the others are still measured
                made.append(failed_variant(name, problem))
        if device != "cpu" and self.peers:
            made += peer_variants(q, k, v, self.working_set(device), self.max_buffers)
        return made

    def need_bytes(self, cell: dict, device: str) -> int:
        """Memory that a cell takes at its worst moment: all of its variants at once, the probe, and whichever is the
        larger one of a buffer on its way to another and one sequence in fp64 beside its exact attention."""
        queries, heads, dim = parse_shape(cell["shape"])
        length, batch = cell["length"], cell["batch"]
        numbers = 2 * heads * dim * length * batch  # of keys and values

        def of_buffers(size: float) -> float:
            return size * caches.num_buffers(size, self.working_set(device), self.max_buffers)

        dense = [numbers * DTYPES[name].itemsize for name in self.dense]
        paged = []
        for name in self.formats:
            with suppress(ValueError):  # of tokens that fill no whole groups: its own rows are refused
                layout, lists = caches.lay_out(name, length, dim, device.split(":")[0]), batch * heads
                read = layout.token_bytes * lists * length
                count = caches.num_buffers(read, self.working_set(device), self.max_buffers)
                paged.append((lists * layout.list_pages * layout.page_bytes, count))
        peers = device != "cpu" and self.peers and any(find_spec(module) for module, _ in PEERS.values())
        held = 4 * numbers + sum(map(of_buffers, dense)) + sum(size * count for size, count in paged)
        # 16-bit keys and values for all of them, buffers for each, and one buffer on its way into pages.
        held += peers * (4 * numbers + len(PEERS) * of_buffers(2 * numbers) + WORKSPACE_BYTES)
        on_its_way = max([0, *(size for size, count in paged if count > 1)])
        exact = 8 * (numbers // batch + 3 * queries * length)
        return int(held + max(on_its_way, exact) + machine.PROBE_BYTES + machine.PROBE_STEP_BYTES)

    def _check_memory(self, cell: dict, device: str) -> None:
        """Raises Skipped where a cell does not fit in memory."""
        need, free = self.need_bytes(cell, device), machine.available_bytes(device)
        if free is not None and need >= FITS * free:
            raise Skipped(f"needs about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")

    def _dense(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Variant]:
        """Two ways to ask torch for the same attention: the group as query heads, as models do, and as query tokens,
        which reads every key once."""
        dtype, scale = DTYPES[name], q.shape[-1] ** -0.5
        size = (k.numel() + v.numel()) * dtype.itemsize
        count = caches.num_buffers(size, self.working_set(k.device.type), self.max_buffers)
        # One array, from the same kind of memory as the pages.
        keys, values = (memory.empty(count, *x.shape, dtype=dtype, device=x.device).copy_(x) for x in (k, v))
        by_head = q.to(dtype)[:, :, None]
        by_token = q.to(dtype).unflatten(1, (k.shape[1], -1))

        def grouped(index: int) -> Tensor:
            return F.scaled_dot_product_attention(by_token, keys[index], values[index], scale=scale).flatten(1, 2)

        def models(index: int) -> Tensor:
            out = F.scaled_dot_product_attention(by_head, keys[index], values[index], scale=scale, enable_gqa=True)
            return out[:, :, 0]

        def error(call: Callable[[int], Tensor]) -> float:
            return caches.dense_error(call(count - 1), by_head[:, :, 0], keys[-1], values[-1], scale)

        return [
            Variant(
                name=label,
                call=call,
                num_buffers=count,
                bytes_per_call=size,
                check=partial(error, call),
                tolerance=DENSE_TOLERANCE[name],
                extra={"kind": "dense", "dtype": name},
            )
            for label, call in ((f"sdpa {name}", models), (f"sdpa {name} grouped", grouped))
        ]

    def _paged(self, name: str, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> list[Variant]:
        """Attention over pages of a format, with and without scores."""
        batch, heads, length, dim = k.shape
        parts, device = name.split("+"), k.device.type
        read = sum(caches.slot_read_bytes(caches.slot_format(part, dim)) for part in parts) / len(parts)
        count = caches.num_buffers(read * batch * heads * length, self.working_set(device), self.max_buffers)
        kind = DTYPES["fp16" if device == "cpu" else self.queries]
        held = caches.build_caches(name, k, v, backend, num_buffers=count, seed=self.seed, kind=kind)
        query, scale = q if device == "cpu" else q.to(kind), dim**-0.5

        def call(group: Reduce | None, index: int) -> object:
            return backend.paged_decode(query, held.pages, held.buffers[index], None, scale, group=group)

        groups: dict[str, Reduce | None] = {"none": None, "return": "max"}
        return [
            Variant(
                name=name + SCORES[wanted],
                call=partial(call, groups[wanted]),
                num_buffers=count,
                bytes_per_call=round(held.token_bytes * batch * heads * length),
                check=partial(caches.paged_error, backend, held, query, scale, groups[wanted], count - 1),
                tolerance=BF16_TOLERANCE if kind == torch.bfloat16 else TOLERANCE[device],
                versus=name if groups[wanted] else None,
                extra={"kind": "paged", "format": name, "scores": wanted, "token_bytes": held.token_bytes},
            )
            for wanted in self.scores
        ]


def peer_variants(q: Tensor, k: Tensor, v: Tensor, working_set_mb: int, most: int) -> list[Variant]:
    """FlashAttention and FlashInfer as further variants, where they can be imported; neither is required.

    Both are called with 16-bit pages or tensors, as their users do. Written from their documentation; not yet run on a
    GPU.
    """
    there = {f"{name} fp16": (module, build) for name, (module, build) in PEERS.items() if find_spec(module)}
    if not there:
        return []
    size, scale = 2 * (k.numel() + v.numel()), q.shape[-1] ** -0.5
    count = caches.num_buffers(size, working_set_mb, most)
    q, k, v = q.half(), k.half(), v.half()
    calls = {}
    for name, (module, build) in there.items():
        with suppress(ImportError):
            calls[name] = build(import_module(module), q, k, v, scale, count)
    return [
        Variant(
            name=name,
            call=call,
            num_buffers=count,
            bytes_per_call=size,
            tolerance=PEER_TOLERANCE,
            check=partial(lambda call: caches.dense_error(call(count - 1), q, k, v, scale), call),
            extra={"kind": "dense", "dtype": "fp16"},
        )
        for name, call in calls.items()
    ]


def _flash_attention(
    library: ModuleType, q: Tensor, k: Tensor, v: Tensor, scale: float, count: int
) -> Callable[[int], Tensor]:
    """`flash_attn_with_kvcache` with [S, n, H, D] caches: its split-KV decode kernel."""
    keys, values = ([x.transpose(1, 2).contiguous() for _ in range(count)] for x in (k, v))
    lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)

    def call(index: int) -> Tensor:
        where = {"cache_seqlens": lengths, "softmax_scale": scale}
        return library.flash_attn_with_kvcache(q[:, None], keys[index], values[index], **where)[:, 0]

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


PEERS = {"flash-attn": ("flash_attn", _flash_attention), "flashinfer": ("flashinfer", _flash_infer)}

if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
