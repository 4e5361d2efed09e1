"""Times decode attention at other tile sizes, warps, stages and page sizes than the kernels have, each verified first.

All kernels are compiled before the first one is timed, by several processes: `python -m kvbench.kernels.bench.sweep`.
"""

import dataclasses
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import caches
from kvbench.kernels.bench.attention import BF16_TOLERANCE, TOLERANCE
from kvbench.kernels.bench.bench import DTYPES, Bench, Common, main, parse_shape, read_words, setting
from kvbench.kernels.bench.rounds import Variant, cuda_graph, failed_variant, refuse_wrong
from kvbench.kernels.dispatch import HOST
from kvbench.kernels.names import TRITON

DEFAULT = "as it is"  # the variant that the others are compared with
DECODES = (TRITON, "cuda", HOST)


@dataclass(kw_only=True)
class Settings(Common):
    """Decode attention at other tile sizes, warps, stages and page sizes than the kernels have."""

    what = "sweep"
    quick = {"formats": ["K4V4"], "lengths": [4096], "batches": [1], "rounds": 3}

    formats: list[str] = setting(["K8V4", "K4V4", "KIVI2"], "Page formats, names of `caches.slot_format`.")
    shapes: list[str] = setting(["32x8x128"], "Query heads x KV heads x head dim of one layer.")
    lengths: list[int] = setting([4096, 16384], "Tokens held per sequence.", 1)
    batches: list[int] = setting([1, 8], "Sequences.", 1)
    queries: str = setting("bf16", "Type of the queries, on a GPU: fp16, bf16.", among=("fp16", "bf16"))
    decodes: list[str] = setting([TRITON, "cuda"], "What attends: triton, cuda, host.", among=DECODES)
    block_slots: list[int] = setting([16, 32, 64], "Of Triton: slots of a turn.", 16)
    warps: list[int] = setting([1, 2, 4], "Of Triton: warps of a program.", 1)
    stages: list[int] = setting([2, 3, 4], "Of Triton: turns whose loads are under way.", 1)
    stage_kb: list[int] = setting([24, 36, 48, 72], "Of CUDA C++: KiB of pages under way in a block.", 1)
    page_slots: list[int] = setting([0, 64, 128, 256], "Slots of a page; 0 = as a run has them.", 0)
    jobs: int = setting(16, "Processes that compile before anything is timed; 0 = none does.", 0)
    share: str = setting("", "I/N: compiles and verifies every N-th variant from I on, and times nothing.")

    def check(self) -> None:
        super().check()
        for text in self.shapes:
            parse_shape(text)
        for name in self.formats:
            caches.slot_format(name, 64)
        number, _, total = self.share.partition("/")
        if self.share and not (number.isdigit() and total.isdigit() and int(number) < int(total)):
            raise ValueError(f"share={self.share} is no I/N with I below N, such as 0/16")
        if sizes := [size for size in self.block_slots if size & (size - 1)]:
            raise ValueError(f"block_slots={sizes[0]} must be a power of two")

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(self.formats, self.shapes, self.batches, self.lengths)
        names = ("format", "shape", "batch", "length")
        return [dict(zip(names, cell, strict=True)) | {"threads": threads[-1]} for cell in every]

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        capture = cuda_graph if self.graph and bench.device != "cpu" else None
        baselines = [f"{decode}, {DEFAULT}" for decode in self.decodes]
        return {"baselines": baselines, "probe": bench.bandwidth.variant(), "capture": capture}

    def prepare(self, bench: Bench) -> None:
        """Compiles all variants, in processes of their own."""
        if not self.jobs:
            return
        bench.stage(f"compiling in {self.jobs} processes")
        shared = dataclasses.asdict(self) | {"jobs": 0, "max_buffers": 1}
        words = [f"{name}={_word(value)}" for name, value in shared.items() if name != "share"]
        command = [sys.executable, "-m", "kvbench.kernels.bench.sweep", *words]
        running = [
            subprocess.Popen(
                [*command, f"share={index}/{self.jobs}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for index in range(self.jobs)
        ]
        try:
            for process in running:
                _, said = process.communicate()
                if process.returncode:  # what it would have compiled is compiled when it is verified
                    bench.notes.append(f"a process that compiles ended: {''.join(said.splitlines()[-1:])[:200]}")
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        queries, heads, dim = parse_shape(cell["shape"])
        generator, device = torch.Generator(device=bench.device).manual_seed(self.seed), bench.device
        sizes = (cell["batch"], queries, dim), *[(cell["batch"], heads, cell["length"], dim)] * 2
        q, k, v = (torch.randn(size, generator=generator, device=device) for size in sizes)
        kind = DTYPES["fp16" if device == "cpu" else self.queries]
        q = (2 * q).to(kind)
        made: list[Variant] = []
        for slots in self.page_slots:
            slot = caches.slot_format(cell["format"], dim)
            if slots % slot.group_tokens:
                continue
            read = caches.slot_read_bytes(slot) * cell["batch"] * heads * cell["length"]
            count = caches.num_buffers(read, self.working_set(device), self.max_buffers)
            held = caches.build_caches(
                cell["format"], k, v, bench.backend, num_buffers=count, seed=self.seed, kind=kind, page_slots=slots
            )
            options = [option for decode in self.decodes for option in self._options(decode, slots, slot.group_tokens)]
            for label, backend, sizes_of in options:
                try:
                    made.append(_variant(label, backend(device), sizes_of, held, q, count))
                except Exception as problem:  # a form that the kernels do not take
                    made.append(failed_variant(label, problem))
        return made

    def _options(self, decode: str, page_slots: int, group_tokens: int) -> list[tuple[str, Any, Any]]:
        """Options of a page size: their names, the constructor of a device's backend, and the sizes of Triton's kernel.

        Other sizes of the kernel are tried with a run's default pages only.
        """
        from kvbench.kernels.gpu.cuda_form import STAGE_BYTES
        from kvbench.kernels.gpu.parts import Tuning

        pages = DEFAULT if not page_slots else f"pages of {page_slots} slots"
        first = [(f"{decode}, {pages}", partial(_backend, decode, STAGE_BYTES), Tuning())]
        if page_slots:
            return first
        if decode != TRITON:
            sizes = [kb << 10 for kb in self.stage_kb if kb << 10 != STAGE_BYTES]
            return first + [
                (f"{decode}, {s >> 10} KiB under way", partial(_backend, decode, s), Tuning()) for s in sizes
            ]
        fits = [size for size in self.block_slots if group_tokens == 1 or size <= group_tokens]
        every = product(fits, self.warps, self.stages)
        return first + [
            (
                f"{decode}, {size} slots, {warps} warps, {stages} stages",
                partial(_backend, decode, 0),
                Tuning(size, warps, stages),
            )
            for size, warps, stages in every
        ]


def _backend(decode: str, stage_bytes: int, device: str) -> Backend:
    """The GPU kernels, those in CUDA C++ with so many bytes of pages under way."""
    from kvbench.kernels.gpu.backend import Gpu
    from kvbench.kernels.gpu.cuda_call import HostKernels
    from kvbench.kernels.gpu.cuda_load import cuda_kernels

    if decode == TRITON:
        return Gpu()
    if decode == HOST:
        return Gpu(lambda form, _: HostKernels(dataclasses.replace(form, stage_bytes=stage_bytes)))
    return Gpu(lambda form, where: cuda_kernels(dataclasses.replace(form, stage_bytes=stage_bytes), where))


def _variant(
    label: str, backend: Any, sizes: Any, held: caches.PagedCaches, q: torch.Tensor, count: int
) -> Variant:  # fmt: skip
    """Attention prepared for every buffer; raises ValueError where Triton would stand in."""
    from kvbench.kernels.gpu.parts import tuned

    scale, prepared = q.shape[-1] ** -0.5, []
    for tiers, ring in zip(held.buffers, held.rings, strict=True):
        with tuned(sizes):
            prepared.append(backend.prepared_decode(q, held.pages, tiers, ring))
    if stood_in := [said for said in backend.decodes if said.startswith("triton: ")]:
        raise ValueError(stood_in[0])

    def call(index: int) -> tuple:
        return prepared[index](q, None, scale)

    tolerance = BF16_TOLERANCE if q.dtype == torch.bfloat16 else TOLERANCE["cuda"]
    check = partial(caches.paged_error, backend, held, q, scale, None, count - 1, call)
    return Variant(
        name=label, call=call, num_buffers=count, bytes_per_call=held.read_bytes, check=check, tolerance=tolerance
    )


def _word(value: Any) -> str:
    """A value as a word of the command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def compile_share(settings: Settings) -> None:
    """Compiles and verifies a share of the variants of every cell."""
    number, total = map(int, settings.share.split("/"))
    bench, begin = Bench(settings), 0
    for cell in bench.cells:
        variants = settings.variants(bench, cell)
        refuse_wrong([each for index, each in enumerate(variants, begin) if index % total == number])
        begin += len(variants)


def run(words: list[str]) -> int:
    """Carries out the command; exit status as of `bench.main`."""
    settings = None
    with suppress(ValueError):  # which `main` says
        settings = read_words(Settings, words)
    if settings is None or not settings.share:
        return main(Settings, words)
    compile_share(settings)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
