"""Times decode attention over pages of every format next to dense attention, with and without scores.

Runs with torch (and triton on a GPU) alone: `python -m kvbench.kernels.bench.attention lengths=[4096]`.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import memory
from kvbench.kernels.bench import caches, machine, peers
from kvbench.kernels.bench.bench import DTYPES, Bench, Common, Skipped, main, parse_shape, setting
from kvbench.kernels.bench.rounds import Variant, cuda_graph, failed_variant
from kvbench.kernels.dispatch import HOST, gpu_backend
from kvbench.kernels.names import DECODES, TRITON
from kvbench.kernels.operands import Reduce

if TYPE_CHECKING:
    from kvbench.kernels.gpu.cuda_form import Form

SCORES = {"none": "", "return": " + scores"}
GROUPS: dict[str, Reduce | None] = {"none": None, "return": "max"}
# Of the largest exact element. The kernels are held to 1e-5 by their own tests; here only a wrong one must be caught.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
BF16_TOLERANCE = 2e-2  # of bf16 queries and elements, whose weights have 8 bits
DENSE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}
LISTS = ("equal", "unlike")
# Of attention in CUDA C++, as kernels/gpu/cuda_form.py has them: parts of a list, slots of each, tokens of a turn.
MOST_PARTS, LEAST_SLOTS, TURN = 24, 256, 32
GROUP_TOKENS = 128  # tokens of lists of unlike length are a multiple: whole key groups of two tiers
LEAST_LIST = 1 / 8  # of a cell's length: the shortest of lists of unlike length
FITS = 0.9  # of the free memory may be taken


@dataclass(kw_only=True)
class Settings(Common):
    """Decode attention over pages of every format, compared with dense attention."""

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
    decodes: list[str] = setting(
        [TRITON],
        "What attends to pages on a GPU, a row each: triton, cuda; host = the source in CUDA C++, built for this CPU.",
        among=(*DECODES[:2], HOST),
    )
    rings: list[int] = setting(
        [0],
        "Newest tokens of each list in a residual buffer of 16 bits, in cells of their own; formats of one tier.",
        0,
    )
    lists: list[str] = setting(
        ["equal"],
        "equal, unlike = each KV head's list has from an eighth of a length up to all of it, in cells of their own; "
        "dense attention reads all.",
        among=LISTS,
    )
    peers: bool = setting(True, "On a GPU, time FlashAttention and FlashInfer, or say that they are not installed.")

    def check(self) -> None:
        super().check()
        for text in self.shapes:
            parse_shape(text)
        for name in self.formats:
            for part in name.split("+"):
                caches.slot_format(part, 64)

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(self.shapes, threads, self.batches, self.lengths, self.rings, self.lists)
        cells = []
        for shape, n, batch, length, ring, lists in every:
            special = ({"ring": ring} if ring else {}) | ({"lists": lists} if lists != LISTS[0] else {})
            if len(special) < 2:
                cells.append({"shape": shape, "length": length, "batch": batch, **special, "threads": n})
        return cells

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        dense = [f"sdpa {dtype}{way}" for dtype in self.dense for way in ("", " grouped")]
        capture = cuda_graph if self.graph and bench.device != "cpu" else None
        return {"baselines": [*dense, "K16V16"], "probe": bench.bandwidth.variant(), "capture": capture}

    def prepare(self, bench: Bench) -> None:
        """Compiles the kernels in CUDA C++ together, which else come one after the other."""
        if "cuda" not in self.decodes or not (target := bench.environment.get("target")):
            return
        from kvbench.kernels.gpu.cuda_build import compile_parallel

        forms = self._forms()
        bench.stage(f"compiling {len(forms)} forms in CUDA C++ in {machine.num_cpus()} threads")
        bench.notes += compile_parallel(forms, target, machine.num_cpus())

    def _forms(self) -> "list[Form]":
        """The forms of the kernels in CUDA C++ that the cells have."""
        from kvbench.kernels.gpu.cuda_counts import form_named

        forms: dict[Form, None] = {}
        every = product(self.shapes, self.formats, self.scores, self.rings)
        for shape, name, scores, ring in every:
            queries, heads, dim = parse_shape(shape)
            how = {"queries": queries // heads, "query": self.queries, "ring": self.queries if ring else ""}
            with suppress(ValueError):  # what they do not take is refused with its rows
                forms[form_named(name, dim, out="fp32", scores=scores != "none", **how)] = None
        return list(forms)

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
        for name in self._formats(cell):
            try:
                made += self._paged(name, q, k, v, bench, cell)
            except Exception as problem:  # a writer that does not compile, memory: the others are still measured
                made.append(failed_variant(name, problem))
        if device != "cpu" and self.peers:
            made += peers.variants(q, k, v, self.working_set(device), self.max_buffers)
        return made

    def _formats(self, cell: dict) -> list[str]:
        """The formats of a cell: one tier alone has a residual buffer."""
        return [name for name in self.formats if not (cell.get("ring") and "+" in name)]

    def need_bytes(self, cell: dict, device: str) -> int:
        """Peak memory of a cell: all its variants, the probe, and the larger of two temporaries.

        These are a buffer while it is copied, and one sequence in fp64 with its exact attention.
        """
        queries, heads, dim = parse_shape(cell["shape"])
        length, batch = cell["length"], cell["batch"]
        numbers = 2 * heads * dim * length * batch  # of keys and values

        def of_buffers(size: float) -> float:
            return size * caches.num_buffers(size, self.working_set(device), self.max_buffers)

        dense = [numbers * DTYPES[name].itemsize for name in self.dense]
        paged = []
        ring, lists, prepared = cell.get("ring", 0), batch * heads, 0.0
        for name in self._formats(cell):
            with suppress(ValueError):  # of tokens that fill no whole groups: its own rows are refused
                layout = caches.lay_out(name, length - ring, dim, device.split(":")[0])
                read = layout.token_bytes * lists * length
                count = caches.num_buffers(read, self.working_set(device), self.max_buffers)
                paged.append((lists * (layout.list_pages * layout.page_bytes + 4 * ring * dim), count))
                prepared += count * sum(
                    self._prepared_bytes(layout, lists, queries // heads, dim, scores) for scores in self.scores
                )
        prepared *= len(self.decodes) - 1
        held = 4 * numbers + sum(map(of_buffers, dense)) + sum(size * count for size, count in paged) + prepared
        if device != "cpu" and self.peers:
            for peer in filter(lambda each: each.is_there, peers.PEERS):
                size = numbers * peer.kind.itemsize
                count = caches.num_buffers(size, self.working_set(device), self.max_buffers)
                held += size + peer.need_bytes(numbers, count)  # its buffers and their originals
        on_its_way = max([0, *(size for size, count in paged if count > 1)])
        exact = 8 * (numbers // batch + 3 * queries * length)
        return int(held + max(on_its_way, exact) + machine.PROBE_BYTES + machine.PROBE_STEP_BYTES)

    @staticmethod
    def _prepared_bytes(layout: caches.Layout, lists: int, group: int, dim: int, scores: str) -> float:
        """Bytes that prepared CUDA C++ attention keeps per buffer: results of parts, and weights of slots."""
        slots = [width * fmt.tokens_per_page for fmt, width in zip(layout.formats, layout.widths, strict=True)]
        parts = sum(min(MOST_PARTS, -(-each // LEAST_SLOTS)) for each in slots)
        weights = 0 if scores == "none" else 2 * sum(slots) * (1 + 2 / TURN)
        return lists * group * (4 * parts * (dim + 2) + weights)

    def _check_memory(self, cell: dict, device: str) -> None:
        """Raises Skipped where a cell does not fit in memory."""
        need, free = self.need_bytes(cell, device), machine.available_bytes(device)
        if free is not None and need >= FITS * free:
            raise Skipped(f"needs about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")

    def _dense(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Variant]:
        """Two dense forms of the attention in torch: the group as query heads, as in models, or as query tokens.

        The second reads every key once.
        """
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

    def _paged(self, name: str, q: Tensor, k: Tensor, v: Tensor, bench: Bench, cell: dict) -> list[Variant]:
        """Attention over pages of a format, with and without scores, by everything that can attend to it."""
        batch, heads, length, dim = k.shape
        parts, device = name.split("+"), k.device.type
        read = sum(caches.slot_read_bytes(caches.slot_format(part, dim)) for part in parts) / len(parts)
        count = caches.num_buffers(read * batch * heads * length, self.working_set(device), self.max_buffers)
        kind, held = DTYPES["fp16" if device == "cpu" else self.queries], None
        if cell.get("lists"):
            held = unlike_lengths(batch, heads, length, self.seed)
        made = caches.build_caches(
            name, k, v, bench.backend, num_buffers=count, seed=self.seed, kind=kind,
            ring_tokens=cell.get("ring", 0), held=held,
        )  # fmt: skip
        variants = []
        for decode, scores in product(self.decodes, self.scores):
            is_fp32 = device == "cpu" and decode != HOST
            query, group = q if is_fp32 else q.to(kind), GROUPS[scores]
            label = name + (f", {decode}" if decode != self.decodes[0] else "")
            try:
                call = self._call(decode, bench, made, query, group)
            except Exception as problem:  # such as a form that the kernels do not take
                variants.append(failed_variant(label + SCORES[scores], problem))
                continue
            check = partial(caches.paged_error, bench.backend, made, query, dim**-0.5, group, count - 1, call)
            tolerance = TOLERANCE["cpu" if is_fp32 else "cuda"] if kind != torch.bfloat16 else BF16_TOLERANCE
            extra = {"kind": "paged", "format": name, "scores": scores, "token_bytes": made.token_bytes}
            variants.append(
                Variant(
                    name=label + SCORES[scores],
                    call=call,
                    num_buffers=count,
                    bytes_per_call=made.read_bytes,
                    check=check,
                    tolerance=tolerance,
                    versus=label if group else None,
                    extra=extra if decode == TRITON else extra | {"decode": decode},
                )
            )
        return variants

    def _call(
        self, decode: str, bench: Bench, made: caches.PagedCaches, query: Tensor, group: Reduce | None
    ) -> caches.Call:
        """Attention over a buffer. That in CUDA C++ is prepared before, as a step does it once for all layers.

        Raises:
            ValueError: The kernels do not take such a form; Triton would stand in.
        """
        scale = query.shape[-1] ** -0.5
        if decode == TRITON:
            backend = bench.backend
            return lambda index: backend.paged_decode(
                query, made.pages, made.buffers[index], made.rings[index], scale, group=group
            )
        kernels = gpu_backend(bench.device, decode)
        buffers = zip(made.buffers, made.rings, strict=True)
        prepared = [kernels.prepared_decode(query, made.pages, tiers, ring, group=group) for tiers, ring in buffers]
        if stood_in := [said for said in kernels.decodes if said.startswith(TRITON)]:
            raise ValueError(stood_in[0])
        return lambda index: prepared[index](query, made.rings[index], scale)


def unlike_lengths(batch: int, heads: int, length: int, seed: int) -> Tensor:
    """Lengths of lists, int64 [S, H], log-uniform from an eighth of `length` to all of it, in whole groups.

    One list has all of it.
    """
    share = LEAST_LIST ** torch.rand(batch * heads, generator=torch.Generator().manual_seed(seed))
    share[0] = 1.0
    return (
        ((share * length / GROUP_TOKENS).round().clamp(min=1).long() * GROUP_TOKENS)
        .clamp(max=length)
        .view(batch, heads)
    )


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
