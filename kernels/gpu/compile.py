"""Compiles the Triton kernels for NVIDIA and AMD without a GPU: `python -m kvbench.kernels.gpu.compile`.

The checks of a device are called on small tensors in main memory; every launch that they would make is taken down with
its arguments' types and compile-time constants, and compiled for the targets by Triton's own compilers.
"""

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench.kernels.device_checks import CHECKS
from kvbench.kernels.device_inputs import QUICK, SHORT, Kinds, Plan, bounded_format, format_of
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.bounds import choose
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.gpu.pages import copy_pages
from kvbench.kernels.gpu.parts import Kernel, compiled_for, recording
from kvbench.kernels.gpu.table import AT_ONCE
from kvbench.kernels.operands import KeyRotation, PageChoice, ScoreUpdate, SlotSearch, StepRing, StepScores, TierPages

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 89, 90, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
# Bytes of shared memory that one block of threads may take.
# Source: NVIDIA, CUDA C++ Programming Guide, "Technical specifications per compute capability"; AMD, CDNA 3 ISA.
SHARED_AT_MOST = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
_BINARY = {"cuda": "cubin", "hip": "hsaco"}
_TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.bool: "*i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one target: binary, shared memory (bytes), registers, spills, seconds of compilation.

    `spilled` counts bytes of local memory on NVIDIA and registers on AMD; it and `registers` are None where the binary
    does not say. `constants` are those of the launch.
    """

    kernel: str
    target: str
    binary: bytes = field(repr=False)
    shared_bytes: int
    registers: int | None
    spilled: int | None
    seconds_s: float
    constants: dict[str, Any] = field(repr=False)


def unspecialised(kernel: Any) -> set[str]:
    """Arguments that must not be specialised by value: sizes that the host counts.

    Triton would compile one kernel for 1, one for multiples of 16, and one for other values.
    """
    if isinstance(kernel, triton.JITFunction):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs.get("do_not_specialize") or ())


def launch_signature(kernel: Kernel, arguments: tuple, constants: dict) -> tuple[dict, dict, dict]:
    """Types, constants and alignments of a launch, as Triton itself would infer them."""
    signature, values, alignments = {}, {}, {}
    any_value = unspecialised(kernel)
    for index, name in enumerate(kernel.arg_names):
        if index >= len(arguments):
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        value = arguments[index]
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in any_value:
            signature[name], values[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if name in any_value:
            assert not isinstance(value, Tensor), f"{name} of {kernel.__name__} is a tensor, whose alignment is wanted"
        elif isinstance(value, Tensor) or (isinstance(value, int) and value != 1 and value % 16 == 0):
            alignments[(index,)] = [["tt.divisibility", 16]]
    return signature, values, alignments


def compile_launches(
    run: Callable[[], object], target: str, kernels: Collection[str] | None = None
) -> Iterator[Compiled]:
    """Compiles every distinct kernel that a call launches on tensors in main memory; nothing is computed.

    Args:
        run: The call.
        target: A name of `TARGETS`.
        kernels: Names of those to compile; None = all.

    Raises:
        RuntimeError: The kernels were imported under TRITON_INTERPRET=1 and cannot be compiled.
    """
    launches: dict[str, tuple] = {}

    def note(kernel: Kernel, _: tuple, arguments: tuple, constants: dict) -> None:
        if kernels is not None and kernel.__name__ not in kernels:
            return
        launches.setdefault(
            f"{kernel.__name__} {launch_signature(kernel, arguments, constants)}", (kernel, arguments, constants)
        )

    arch = TARGETS[target].arch
    with recording(note), compiled_for(arch if isinstance(arch, int) else 0):
        run()
    for kernel, arguments, constants in launches.values():
        if not isinstance(kernel, triton.JITFunction):
            raise RuntimeError("kernels imported under TRITON_INTERPRET=1 cannot be compiled; unset it")
        signature, values, alignments = launch_signature(kernel, arguments, constants)
        options = {name: constants[name] for name in _OPTIONS if name in constants}
        begin = time.perf_counter()
        source = ASTSource(kernel, signature, values, alignments)
        built = triton.compile(source, target=TARGETS[target], options=options)
        binary = built.asm[_BINARY[TARGETS[target].backend]]
        took_s, (registers, spilled) = time.perf_counter() - begin, _usage(built.asm)
        shared_bytes = built.metadata.shared
        yield Compiled(kernel.__name__, target, binary, shared_bytes, registers, spilled, took_s, constants)


def _usage(asm: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Registers of a thread and its spills.

    Spills are bytes of stack in a cubin, or spilled registers as AMD's assembly states.
    """
    if "amdgcn" in asm:
        registers, spilled = (
            [int(count) for count in re.findall(rf"\.vgpr_{name}:\s*(\d+)", asm["amdgcn"])]
            for name in ("count", "spill_count")
        )
        return max(registers, default=None), sum(spilled)
    said = nvidia_tool("cuobjdump", "-res-usage", binary=asm["cubin"])
    matches = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return (max(int(count) for count, _ in matches), max(int(size) for _, size in matches)) if matches else (None, None)


def nvidia_tool(name: str, *options: str, binary: bytes) -> str:
    """Output of a binary tool of the triton package on a cubin; empty if the tool is missing."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not tool.is_file():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False).stdout


def parse_sass(sass: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in a disassembly by nvdisasm, and of each label the index of the instruction after it."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif match := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            lines.append(match[1].strip())
    return lines, labels


# Bytes that a thread may keep in memory: the reduction of a large angle before its cosine takes a table of 28 bytes
# there; one warp that attends over two tiers of codes keeps 64 (80 on sm_120), and on sm_80 quest's choice of pages 72.
SPILLS_AT_MOST = {target: 0 if target.startswith("gfx") else 64 for target in TARGETS} | {"sm_80": 72, "sm_120": 80}

# The device checks of these, at the head dim of Llama 3 8B, and what has no check of its own.
_FORMATS = ("k16v16", "k8v4", "k4v2", "k8v8", "e4m3 scaled", "turboquant 3 bits", "nvfp4", "kivi 2 bits")
_HEADS, _GROUP, _DIM = 2, 4, 128


# Checks of a device are compiled here and not run: what they find means nothing.
_WIDE: Kinds = ((_DIM, torch.float32, ("k4v2",)), (_DIM, torch.bfloat16, _FORMATS))


def _step(dtype: torch.dtype, *names: str, ring: bool = False, rotated: bool = False, chosen: bool = False) -> None:
    """One layer of a prepared decode step: tracked fields, a residual buffer, key rotation, or pages chosen by bounds.

    `rotated` keys are rotated on reading. Also the sizes of its tables.
    """
    formats = [format_of(name, _DIM) for name in names]
    if chosen:
        formats = [bounded_format(_DIM)]
    held, page = torch.full((1, 1, _HEADS), 9), torch.zeros(1, 1, _HEADS, dtype=torch.int64)
    sizes, lists = tuple(fmt.tokens_per_page for fmt in formats), torch.arange(_HEADS)
    page_bytes = max(fmt.page_bytes for fmt in formats)
    formats = [PageFormat(fmt.slot, page_bytes, bounds=fmt.bounds) for fmt in formats]
    _, table = Gpu().tables(page_bytes, 8, sizes, (1, 1, _HEADS), 4, "cpu")
    pages, seen = table.pool.pages, torch.full((1,), 9)
    buffer, rows = torch.zeros(1, 1, _HEADS, 32, _DIM, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    frequencies = torch.zeros(_DIM // 2)
    turn = KeyRotation(frequencies, torch.zeros(1, 2 * sizes[0], dtype=torch.int64)) if rotated else None
    tracks = not (ring or rotated or chosen)
    updates: tuple[ScoreUpdate, ScoreUpdate] = ("add", "replace")
    for at_once, update in zip((True, False), updates, strict=True):
        counts = (held, held)
        opened = Gpu().open_tables(
            pages,
            [table.tier(tier, fmt, 2, turn) for tier, fmt in enumerate(formats)],
            (1, _HEADS),
            rows,
            num_q_heads=_HEADS * _GROUP,
            seen=seen,
            target=None if ring else (0, page, page),
            held=counts if ring else None,
            ring=StepRing(
                k=buffer, v=buffer, rows=rows, num_tokens=held, before=counts, after=counts, flush_first=at_once
            )
            if ring
            else None,
            scores=StepScores(group="sum", update=update if tracks else None, skip_near=0 if at_once else 2),
            strip=(frequencies[None], frequencies[None]) if rotated else None,
            choice=PageChoice(count=seen, width=1, group="max", dense_layers=0) if chosen else None,
        )
        assert opened is not None
        q, k = (torch.zeros(1, heads, _DIM, dtype=dtype) for heads in (_HEADS * _GROUP, _HEADS))
        opened.attend(0, q, k, k, 0.1)
    if not tracks:
        return
    for tier, fmt in enumerate(formats):
        near = SlotSearch(by="mean", seen=seen, before=seen, first=seen)
        table.find_extreme(rows, tier, fmt, near)
        table.find_extreme(rows, tier, fmt, replace(near, by="score"), over_layer=True)
        table.find_extreme(rows, tier, fmt, SlotSearch(by="mean", seen=seen, floor=seen, exact=seen))
        table.tracked_slots(lists, tier, fmt, fmt.tokens_per_page)
    to = None if len(formats) == 1 else page
    table.take(lists, 0, page, to, to, acts=True, unshare_all=False, done=[])
    table.take(lists, 0, None, None, None, acts=False, unshare_all=False, done=[])
    table.count_rows(rows)
    Gpu().write_tracked(pages, formats[0], page.flatten(), page.flatten(), 0.0, page.flatten())
    copy_pages(pages, page.flatten(), page.flatten())


def _steps(plan: Plan) -> None:
    """Every kind of step, and the choice of pages whose bounds are read twice."""
    _step(torch.bfloat16, "k8v4", "k4v2")
    _step(torch.bfloat16, "kivi 2 bits", ring=True)
    _step(torch.bfloat16, "k16v16", rotated=True)
    _step(torch.bfloat16, chosen=True)
    slots = torch.full((1, _HEADS), 9)
    wide = TierPages(bounded_format(_DIM), torch.zeros(1, _HEADS, 9000, dtype=torch.int64), slots, slots)
    choose(torch.zeros(wide.ids.shape), ListTier.of(wide), Lists.of(wide), slots[:, 0], 2)


def _pages_of_many_lists(plan: Plan) -> None:
    """Taking, returning and compacting pages of more lists than one program takes."""
    fmt, count = format_of("k4v2", _DIM), 2 * AT_ONCE
    lists, size = torch.arange(count), fmt.tokens_per_page
    _, table = Gpu().tables(fmt.page_bytes, 2 * count, (size, size), (count, 1, 1), 4, "cpu")
    table.reserve(lists, 0, lists, at_most=0)
    table.truncate(lists, 1, lists)
    table.compact(lists, 1, torch.ones(count, 64, dtype=torch.bool), fmt)


CASES: dict[str, Callable[[Plan], Iterable[object] | None]] = {
    **CHECKS,
    "step": _steps,
    "many-lists": _pages_of_many_lists,
}


def _run(case: str, plan: Plan) -> None:
    """Calls a case; a check is a generator, of which only the requested part runs."""
    for _ in CASES[case](plan) or ():
        pass


def _shown(built: Compiled) -> str:
    unit = "registers" if built.target.startswith("gfx") else "B"
    return "spills not known" if built.spilled is None else f"{built.spilled:5} {unit} spilled"


def main(argv: list[str] | None = None) -> int:
    """Compiles cases for targets and prints one line per kernel.

    Returns 0 when all compiled, none spills registers and each fits into shared memory.
    """
    parser = argparse.ArgumentParser(prog="python -m kvbench.kernels.gpu.compile", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="four formats, head dim 64 and fp32 queries in the checks; prompts at 128 in bf16 too",
    )
    chosen = parser.parse_args(argv)
    kinds, tokens = ((*QUICK, (_DIM, torch.bfloat16, ())), SHORT) if chosen.quick else (_WIDE, Plan.tokens)
    plan = Plan(torch.device("cpu"), Gpu(), kinds, tokens)
    count, failed, spilling, large = 0, 0, 0, 0
    for case in chosen.case:
        for target in chosen.target:
            try:
                for built in compile_launches(partial(_run, case, plan), target):
                    count += 1
                    spilling += (built.spilled or 0) > SPILLS_AT_MOST[target]
                    large += built.shared_bytes > SHARED_AT_MOST[target]
                    print(
                        f"{case:24} {target:7} {built.kernel:18} {len(built.binary):7} B "
                        f"{built.shared_bytes:6} B shared {_shown(built)} {built.seconds_s:5.1f} s"
                    )
            except Exception as error:  # a compiler's errors have no common type
                failed += 1
                print(f"{case:24} {target:7} FAILED: {error}")
    print(
        f"{count} kernels compiled, {failed} cases failed, {spilling} kernels spill, {large} need more shared memory "
        f"than there is (triton {triton.__version__})"
    )
    return int(bool(failed or spilling or large))


if __name__ == "__main__":
    raise SystemExit(main())
