"""Compiles the Triton kernels for NVIDIA and AMD without a GPU: `python -m kvbench.kernels.gpu.compile`.

The operations are called on small tensors in main memory; every launch they would make is taken down with its
arguments' types and compile-time constants, and compiled for the targets by Triton's own compilers.
"""

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import fields
from kvbench.kernels.gpu import manager as triton_manager
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.choice import choose
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.gpu.parts import Kernel, recording
from kvbench.kernels.operands import ColumnSums, Reduce, Ring, ScoreUpdate, StepRing, StepScores, TierPages
from kvbench.kernels.tier_table import KeyRotation, SlotSearch

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
_BINARY = {"cuda": "cubin", "hip": "hsaco"}
_TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.bool: "*i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: its binary's bytes, shared memory in bytes, what a thread spills, and the seconds it
    took. `spilled` counts bytes of local memory on NVIDIA and registers on AMD; None where it cannot be told."""

    kernel: str
    target: str
    binary_bytes: int
    shared_bytes: int
    spilled: int | None
    seconds_s: float


def _signature(kernel: Kernel, arguments: tuple, constants: dict) -> tuple[dict, dict, dict]:
    """Types, constants and alignments of a launch, as Triton itself would infer them."""
    signature, values, alignments = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if index >= len(arguments):
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        value = arguments[index]
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], values[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, Tensor) or (isinstance(value, int) and value != 1 and value % 16 == 0):
            alignments[(index,)] = [["tt.divisibility", 16]]
    return signature, values, alignments


def compile_launches(run: Callable[[], object], target: str) -> Iterator[Compiled]:
    """Compiles every distinct kernel that a call launches.

    Args:
        run: Calls operations of the GPU backend on tensors in main memory; nothing is computed.
        target: A key of `TARGETS`.

    Raises:
        RuntimeError: The kernels were imported under TRITON_INTERPRET=1 and cannot be compiled.
    """
    launches: dict[str, tuple] = {}

    def note(kernel: Kernel, _: tuple, arguments: tuple, constants: dict) -> None:
        launches.setdefault(
            f"{kernel.__name__} {_signature(kernel, arguments, constants)}", (kernel, arguments, constants)
        )

    with recording(note):
        run()
    for kernel, arguments, constants in launches.values():
        if not isinstance(kernel, triton.JITFunction):
            raise RuntimeError("kernels imported under TRITON_INTERPRET=1 cannot be compiled; unset it")
        signature, values, alignments = _signature(kernel, arguments, constants)
        options = {name: constants[name] for name in _OPTIONS if name in constants}
        begin = time.perf_counter()
        source = ASTSource(kernel, signature, values, alignments)
        built = triton.compile(source, target=TARGETS[target], options=options)
        binary = built.asm[_BINARY[TARGETS[target].backend]]
        took_s, spilled = time.perf_counter() - begin, _spilled(built.asm)
        yield Compiled(kernel.__name__, target, len(binary), built.metadata.shared, spilled, took_s)


def _spilled(asm: Mapping[str, Any]) -> int | None:
    """What a thread keeps in memory because its registers do not suffice: bytes of stack in a cubin, as the tool in
    triton's own package reads it, or spilled registers as AMD's assembly says."""
    if "amdgcn" in asm:
        return sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", asm["amdgcn"]))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = [int(size) for size in re.findall(r"STACK:(\d+)", said)]
    return max(found) if found else None


# What a thread may keep in memory: the reduction of a large angle before its cosine takes a table of 28 bytes there.
SPILLS_AT_MOST = {"sm_90": 32, "gfx942": 0}

# What the representative calls below are made of.
_HEADS, _GROUP, _DIM, _PAGE_BYTES = 2, 4, 128, 16896
_TRACK = ("score", "pos")


def _format(k_bits: int, v_bits: int, **fields: Any) -> PageFormat:
    slot = SlotFormat(_DIM, k_bits, v_bits, track=_TRACK, **fields)
    return PageFormat(slot, _PAGE_BYTES)


def _decode(
    dtype: torch.dtype,
    *formats: PageFormat,
    ring: bool = False,
    power: int = 1,
    group: Reduce | None = None,
    accumulate: bool = False,
    rotated: bool = False,
) -> Callable[[], object]:
    """Attention of one sequence of a Llama-3-8B-like layer, two of its eight heads; `rotated` turns its keys."""
    held = torch.full((1, _HEADS), 9)
    tiers = [TierPages(fmt, torch.zeros(1, _HEADS, 2, dtype=torch.int64), held, held) for fmt in formats]
    for tier in tiers if rotated else []:
        tier.rotation = torch.zeros(1, 2 * tier.fmt.tokens_per_page, _DIM // 2)
    q = torch.zeros(1, _HEADS * _GROUP, _DIM, dtype=dtype)
    buffer = torch.zeros(1, _HEADS, 32, _DIM, dtype=dtype)
    pages, rings = torch.zeros(8, _PAGE_BYTES, dtype=torch.uint8), Ring(buffer, buffer, held + 4) if ring else None
    return lambda: Gpu().paged_decode(q, pages, tiers, rings, 0.1, power=power, group=group, accumulate=accumulate)


def _write(fmt: PageFormat, lower: PageFormat | None, dtype: torch.dtype) -> Callable[[], object]:
    """Writing, reading and, with a lower tier, demoting and moving a group of slots."""
    count = max(16, fmt.slot.group_tokens)
    page, slot = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    x, pages = torch.zeros(count, _DIM, dtype=dtype), torch.zeros(2, _PAGE_BYTES, dtype=torch.uint8)

    def run() -> None:
        Gpu().write_keys(pages, fmt, page, slot, x)
        Gpu().write_values(pages, fmt, page, slot, x)
        Gpu().read_slots(pages, fmt, page, slot)
        if lower is not None:
            Gpu().demote(pages, fmt, lower, page, slot, page, slot)
            Gpu().move_slots(pages, lower, page, slot, page, slot)

    return run


def _step(dtype: torch.dtype, *formats: PageFormat, ring: bool = False, turned: bool = False) -> None:
    """One layer of a prepared decode step, with its tracked fields or its residual buffers; `turned` rotates keys."""
    held, page = torch.full((1, 1, _HEADS), 9), torch.zeros(1, 1, _HEADS, dtype=torch.int64)
    sizes, lists = tuple(fmt.tokens_per_page for fmt in formats), torch.arange(_HEADS)
    _, table = Gpu().tables(_PAGE_BYTES, 8, sizes, (1, 1, _HEADS), 4, "cpu")
    pages, seen = table.held.pages, torch.full((1,), 9)
    buffer, rows = torch.zeros(1, 1, _HEADS, 32, _DIM, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    frequencies = torch.zeros(_DIM // 2)
    turn = KeyRotation(frequencies, torch.zeros(1, 2 * sizes[0], dtype=torch.int64)) if turned else None
    for at_once in (True, False):
        tracked: ScoreUpdate | None = None if ring or turned else "add" if at_once else "replace"
        opened = Gpu().open_tables(
            pages,
            [table.tier(tier, fmt, 2, turn) for tier, fmt in enumerate(formats)],
            (1, _HEADS),
            rows,
            num_q_heads=_HEADS * _GROUP,
            seen=seen,
            target=None if ring else (0, page, page),
            held=(held, held) if ring else None,
            ring=StepRing(
                k=buffer,
                v=buffer,
                rows=rows,
                num_tokens=held,
                before=(held, held),
                after=(held, held),
                flush_first=at_once,
            )
            if ring
            else None,
            scores=StepScores(group="sum", update=tracked, skip_near=0 if at_once else 2),
            strip=(frequencies[None], frequencies[None]) if turned else None,
        )
        assert opened is not None
        q, k = (torch.zeros(1, heads, _DIM, dtype=dtype) for heads in (_HEADS * _GROUP, _HEADS))
        opened.attend(0, q, k, k, 0.1)
    if ring or turned:
        return
    for tier, fmt in enumerate(formats):
        near = SlotSearch(by="mean", seen=seen, before=seen, first=seen)
        table.find_extreme(rows, tier, fmt, near)
        table.find_extreme(rows, tier, fmt, replace(near, by="score"), over_layer=True)
        table.find_extreme(rows, tier, fmt, SlotSearch(by="mean", seen=seen, floor=seen, exact=seen))
        table.tracked_slots(lists, tier, fmt, fmt.tokens_per_page)
    to = None if len(formats) == 1 else page
    table.take(lists, 0, page, to, to, acts=True, own_all=False, done=[])
    table.take(lists, 0, None, None, None, acts=False, own_all=False, done=[])
    table.count_rows(rows)
    Gpu().write_tracked(pages, formats[0], page.flatten(), page.flatten(), seen.float(), page.flatten())
    fields.copy_pages(pages, page.flatten(), page.flatten())


def _one_of_each() -> None:
    """One kernel of every kind."""
    _step(torch.bfloat16, _format(8, 4), _format(4, 2))
    _step(torch.bfloat16, _format(2, 2, k_channel_group=32), ring=True)
    _step(torch.bfloat16, _format(16, 16), turned=True)
    fmt = _format(4, 2)
    _decode(torch.bfloat16, _format(8, 4), group="max")()
    channel = _format(2, 2, k_channel_group=32)
    page, x = torch.zeros(32, dtype=torch.int64), torch.zeros(32, _DIM, dtype=torch.bfloat16)
    pages = torch.zeros(2, _PAGE_BYTES, dtype=torch.uint8)
    Gpu().write_keys(pages, channel, page, page, x)
    Gpu().write_values(pages, fmt, page, page, x)
    Gpu().move_slots(pages, fmt, page, page, page, page)
    Gpu().demote(pages, _format(8, 4), fmt, page, page, page, page)
    size = fmt.tokens_per_page
    for count in (1024, 2 * triton_manager.AT_ONCE):
        lists = torch.arange(count)
        held = triton_manager.DevicePages(_PAGE_BYTES, 16, (size,), count, 4, "cpu")
        held.reserve(lists, 0, lists)
        held.compact(lists, 0, torch.ones(count, 64, dtype=torch.bool), fmt)
    q, k = (torch.zeros(h, 100, _DIM, dtype=torch.bfloat16) for h in (_HEADS * _GROUP, _HEADS))
    Gpu().column_scores(q, k, 0.1, ColumnSums(queries=-1))
    slot = SlotFormat(_DIM, 16, 16)
    bounded, slots = PageFormat(slot, 16 * int(slot.slot_bytes) + 4 * _DIM, bounds=True), torch.full((1, _HEADS), 9)
    tier = TierPages(bounded, torch.zeros(1, _HEADS, 2, dtype=torch.int64), slots, slots)
    pages = torch.zeros(2, bounded.page_bytes, dtype=torch.uint8)
    Gpu().choose_pages(torch.zeros(1, _HEADS * _GROUP, _DIM, dtype=torch.bfloat16), pages, tier, slots[:, 0], 2, "max")
    wide = TierPages(
        bounded, torch.zeros(1, _HEADS, 9000, dtype=torch.int64), slots, slots
    )  # its bounds are read twice
    choose(torch.zeros(wide.ids.shape), ListTier.of(wide), Lists.of(wide), slots[:, 0], 2)
    _step(torch.bfloat16, bounded)
    keys, at = torch.zeros(16, _DIM, dtype=torch.bfloat16), torch.arange(16)
    for distinct in (True, False):
        Gpu().widen_bounds(pages, bounded, at // 16, at, keys, distinct=distinct)


def _manage() -> None:
    """Taking, returning and compacting pages of many lists."""
    fmt = _format(4, 2)
    for count in (1024, 2 * triton_manager.AT_ONCE):
        lists, size = torch.arange(count), fmt.tokens_per_page
        pages = triton_manager.DevicePages(_PAGE_BYTES, 16, (size, size), count, 4, "cpu")
        pages.reserve(lists, 0, lists)
        pages.truncate(lists, 1, lists)
        pages.compact(lists, 1, torch.ones(count, 64, dtype=torch.bool), fmt)


def _prompt() -> None:
    """Attention with its log-sum-exp, column scores of all queries and of a window, and attention of a chunk."""
    q, k = (torch.zeros(h, 100, _DIM, dtype=torch.bfloat16) for h in (_HEADS * _GROUP, _HEADS))
    Gpu().attention_with_lse(q, k, k, 0.1)
    Gpu().column_scores(q, k, 0.1, ColumnSums(queries=-1))
    Gpu().column_scores(q, k, 0.1, ColumnSums(queries=64, skip_near=8, power=2))
    Gpu().column_scores(q, k, 0.1, ColumnSums(queries=64, below_uniform=True))
    past = torch.zeros(_HEADS, 64, _DIM)
    Gpu().chunk_attention(q, k, k, (past, past, torch.ones(_HEADS, 64, dtype=torch.bool)), 0.1)


_NVFP4 = _format(4, 4, k_code="nvfp4", v_code="nvfp4", k_groups=_DIM // 16, v_groups=_DIM // 16)
CASES: dict[str, Callable[[], object]] = {
    "decode-k16": _decode(torch.float16, _format(16, 16)),
    "decode-k8v4-k4v2-scores": _decode(torch.bfloat16, _format(8, 4), _format(4, 2), group="max"),
    "decode-kivi2-ring": _decode(torch.float16, _format(2, 2, k_channel_group=32, v_groups=4), ring=True),
    "decode-k4v2-fp32": _decode(torch.float32, _format(4, 2), group="mean", power=2, accumulate=True),
    "decode-k16-rotated": _decode(torch.bfloat16, _format(16, 16), rotated=True),
    "decode-k4v4-rotated": _decode(torch.float16, _format(4, 4, k_channel_group=64), ring=True, rotated=True),
    "write-k8v4": _write(_format(8, 4), _format(4, 2), torch.bfloat16),
    "write-k16": _write(_format(16, 16), None, torch.float16),
    "write-kivi2": _write(_format(2, 2, k_channel_group=32, v_groups=4), None, torch.float16),
    "write-e4m3": _write(_format(8, 8, fp8=True), None, torch.float16),
    "decode-turboquant3": _decode(torch.bfloat16, _format(3, 3, k_code="lloyd")),
    "decode-nvfp4": _decode(torch.bfloat16, _NVFP4),
    "decode-e4m3-scaled": _decode(torch.float16, _format(8, 8, k_code="e4m3_scaled", v_code="e4m3_scaled")),
    "write-lloyd3": _write(_format(3, 3, k_code="lloyd"), None, torch.bfloat16),
    "write-nvfp4": _write(_NVFP4, None, torch.bfloat16),
    "manager": _manage,
    "prompt": _prompt,
    "one-of-each": _one_of_each,
}


def _shown(built: Compiled) -> str:
    unit = "registers" if built.target.startswith("gfx") else "B"
    return "spills not known" if built.spilled is None else f"{built.spilled:5} {unit} spilled"


def main(argv: list[str] | None = None) -> int:
    """Compiles cases for targets and prints one line per kernel; 0 when all compiled and none spills registers."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.kernels.gpu.compile", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args(argv)
    count, failed, spilling = 0, 0, 0
    for case in chosen.case:
        for target in chosen.target:
            try:
                for built in compile_launches(CASES[case], target):
                    count += 1
                    spilling += (built.spilled or 0) > SPILLS_AT_MOST[target]
                    print(
                        f"{case:24} {target:7} {built.kernel:18} {built.binary_bytes:7} B "
                        f"{built.shared_bytes:6} B shared {_shown(built)} {built.seconds_s:5.1f} s"
                    )
            except Exception as error:  # a compiler's errors have no common type
                failed += 1
                print(f"{case:24} {target:7} FAILED: {error}")
    print(f"{count} kernels compiled, {failed} cases failed, {spilling} kernels spill (triton {triton.__version__})")
    return 1 if failed or spilling else 0


if __name__ == "__main__":
    raise SystemExit(main())
