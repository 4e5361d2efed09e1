"""Times decode attention over pages of every format next to dense attention, with and without scores.

Runs with torch (and triton on a GPU) alone: `python -m kvbench.kernels.bench.attention lengths=[4096]`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import caches, machine, peers, report
from kvbench.kernels.bench.rounds import Variant, choose_timer, cuda_graph, failed_variant, measure_cell
from kvbench.kernels.bench.settings import Common, check_list, parse_shape
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.operands import Reduce

SCORES = {"none": "", "return": " + scores"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest exact element. The kernels are held to 1e-5 by their own tests; here only a wrong one must be caught.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
DENSE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}
QUICK = {"lengths": [4096], "batches": [1], "rounds": 5, "formats": ["K16V16", "K8V4", "K4V2", "KIVI2"], "threads": [1]}


@dataclass(kw_only=True)
class Settings(Common):
    """What to measure.

    Args:
        formats: Page formats, names of `caches.slot_format`, or two joined by + with half of the tokens each.
        shapes: Query heads x KV heads x head dim of one layer.
        lengths: Tokens held per sequence.
        batches: Sequences.
        scores: none, return = the largest probability of the group's query heads per token.
        dense: Element types of dense attention: fp32, bf16, fp16.
        peers: Time FlashAttention and FlashInfer where they can be imported.
    """

    formats: list[str] = field(default_factory=lambda: "K16V16 K8V8 K8V4 K4V4 K4V2 K2V2 KIVI4 KIVI2 K8V4+K4V2".split())
    shapes: list[str] = field(default_factory=lambda: ["9x3x64", "32x8x128"])
    lengths: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    batches: list[int] = field(default_factory=lambda: [1, 4])
    scores: list[str] = field(default_factory=lambda: ["none", "return"])
    dense: list[str] = field(default_factory=lambda: ["fp32", "bf16", "fp16"])
    peers: bool = True

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        check_list("lengths", self.lengths, 1)
        check_list("batches", self.batches, 1)
        for text in self.shapes:
            parse_shape(text)
        for name in self.formats:
            for part in name.split("+"):
                caches.slot_format(part, 64)
        for name, values, known in (("scores", self.scores, SCORES), ("dense", self.dense, DTYPES)):
            for value in values:
                if value not in known:
                    raise ValueError(f"{name}={value} does not exist; choose among {', '.join(known)}")


def cells(settings: Settings, device: str) -> list[dict]:
    """The cells in order: each is a setting that is measured on its own."""
    threads = [n or machine.num_cpus() for n in settings.threads] if device == "cpu" else [0]
    return [
        {"shape": shape, "length": length, "batch": batch, "threads": count}
        for shape in settings.shapes
        for count in dict.fromkeys(threads)
        for batch in settings.batches
        for length in settings.lengths
    ]


def run(settings: Settings, progress: report.Progress = report.quiet) -> dict:
    """Measures every cell.

    Args:
        settings: What to measure.
        progress: Told what is done.

    Returns:
        The document that `report.document` describes.
    """
    device = machine.pick_device(settings.device)
    backend = get_backend(settings.kernels, device)
    bench = report.begin("attention", settings, device, backend, cells(settings, device))
    baselines = [f"sdpa {dtype}{way}" for dtype in settings.dense for way in ("", " grouped")] + ["K16V16"]
    for cell in bench.todo(progress):
        timer = choose_timer(settings.clock, device, cell["threads"])
        if reason := _too_large(cell, settings, device):
            bench.skip(cell, reason)
            continue
        variants = _variants(cell, settings, device, backend)
        bench.add(
            measure_cell(
                cell,
                variants,
                baselines=baselines,
                rounds=settings.rounds,
                seed=settings.seed,
                timer=timer,
                probe=bench.bandwidth.variant(),
                on_round=bench.on_round,
                capture=cuda_graph if settings.graph and device != "cpu" else None,
            )
        )
    return bench.document()


def _sizes(cell: dict) -> tuple[int, int, int, int, int]:
    queries, heads, dim = parse_shape(cell["shape"])
    return queries, heads, dim, cell["length"], cell["batch"]


def _too_large(cell: dict, settings: Settings, device: str) -> str | None:
    """Why a cell does not fit in memory; None when it does."""
    _, heads, dim, length, batch = _sizes(cell)
    elements = 2 * heads * dim * length * batch
    each = settings.working_set(device) * 1e6
    kinds = len(settings.formats) + len(settings.dense)
    need = 4 * elements * 3 + sum(max(each, elements * DTYPES[d].itemsize) for d in settings.dense) + kinds * each
    need += 8 * elements * 2 + elements * 2 * len(settings.formats)
    free = machine.available_bytes(device)
    if free is None or need < 0.8 * free:
        return None
    return f"needs about {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"


def _variants(cell: dict, settings: Settings, device: str, backend: Backend) -> list[Variant]:
    queries, heads, dim, length, batch = _sizes(cell)
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    # Queries twice as large make attention about as peaked as in real models.
    q = 2 * torch.randn(batch, queries, dim, generator=generator, device=device)
    k, v = (torch.randn(batch, heads, length, dim, generator=generator, device=device) for _ in range(2))
    scale = dim**-0.5
    variants = []
    for name in settings.dense:
        variants += _dense(name, q, k, v, scale, settings)
    for name in settings.formats:
        try:
            variants += _paged(name, q, k, v, scale, settings, backend)
        except Exception as problem:  # a writer that does not compile, memory: the other formats are still measured
            variants.append(failed_variant(name, problem))
    if device != "cpu" and settings.peers:
        variants += peers.variants(q, k, v, scale, settings.working_set(device), settings.max_buffers)
    return variants


def _dense(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings) -> list[Variant]:
    """Two ways to ask torch for the same attention: the group as query heads, as models do, and as query tokens, which
    reads every key once."""
    dtype = DTYPES[name]
    size = (k.numel() + v.numel()) * dtype.itemsize
    count = caches.num_buffers(size, settings.working_set(k.device.type), settings.max_buffers)
    # One array, from the same kind of memory as the pages.
    keys, values = (memory.empty(count, *x.shape, dtype=dtype, device=x.device).copy_(x) for x in (k, v))
    by_head = q.to(dtype)[:, :, None]
    by_token = q.to(dtype).unflatten(1, (k.shape[1], -1))

    def grouped(index: int) -> Tensor:
        return F.scaled_dot_product_attention(by_token, keys[index], values[index], scale=scale).flatten(1, 2)

    def models(index: int) -> Tensor:
        return F.scaled_dot_product_attention(by_head, keys[index], values[index], scale=scale, enable_gqa=True)[
            :, :, 0
        ]

    def error(call: Callable[[int], Tensor]) -> float:
        found = call(count - 1)
        pairs = zip(found, by_head[:, :, 0], keys[-1], values[-1], strict=True)
        return caches.worst(
            [caches.relative_error(o, caches.exact_attention(a, b, c, scale)[0]) for o, a, b, c in pairs]
        )

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


def _paged(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings, backend: Backend
) -> list[Variant]:
    batch, heads, length, dim = k.shape
    read = sum(caches.slot_read_bytes(caches.slot_format(part, dim)) for part in name.split("+")) / (
        name.count("+") + 1
    )
    size = read * batch * heads * length
    count = caches.num_buffers(size, settings.working_set(k.device.type), settings.max_buffers)
    held = caches.build_caches(name, k, v, backend, num_buffers=count, seed=settings.seed)
    query = q if q.device.type == "cpu" else q.half()
    made = []
    for wanted in settings.scores:
        group: Reduce | None = None if wanted == "none" else "max"

        def call(index: int, group: Reduce | None = group) -> object:
            return backend.paged_decode(query, held.pages, held.buffers[index], None, scale, group=group)

        made.append(
            Variant(
                name=name + SCORES[wanted],
                call=call,
                num_buffers=count,
                bytes_per_call=round(held.token_bytes * batch * heads * length),
                check=partial(caches.paged_error, backend, held, query, scale, group, count - 1),
                tolerance=TOLERANCE[q.device.type],
                versus=name if group else None,
                extra={"kind": "paged", "format": name, "scores": wanted, "token_bytes": held.token_bytes},
            )
        )
    return made


if __name__ == "__main__":
    sys.exit(report.main("attention", Settings, QUICK, run, sys.argv[1:]))
