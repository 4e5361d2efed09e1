"""Counts what kernels take of a GPU, compiled without one: `python -m kvbench.kernels.gpu.registers`.

A row is one kernel in one form that runs have: registers of a thread, what it spills, shared memory, the programs that
a multiprocessor holds by them, and the machine instructions of its main loop: of a warp for a slot of a list in decode
attention, of a thread for a pair of query and key in column scores. Times are a GPU's to say.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from kvbench.kernels.bench.caches import slot_format
from kvbench.kernels.format import PageFormat, choose_page_bytes
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.compile import TARGETS, Compiled, compile_launches, nvidia_tool, parse_sass
from kvbench.kernels.gpu.decode import programs_by_size
from kvbench.kernels.operands import ColumnSums, StepRing, StepScores

_HEADS, _GROUP, _PAGES = 2, 4, 64  # KV heads, query heads of each, and pages of a list: enough for many parts
_RING = 128  # tokens of a residual buffer, as KIVI has it
_SHARED = 228 << 10  # bytes of a multiprocessor of compute capability 9.0
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Form:
    """A decode step's attention as runs have it, or the column scores of a prompt.

    Args:
        formats: Names of `caches.slot_format` joined by +, a tier each; `columns` = column scores.
        dim: Channels of a head.
        kind: Type of the queries, a name of `KINDS`, and of elements that are not coded.
        ring: With a residual buffer.
        scores: With scores that are added to what pages track.
    """

    formats: str
    dim: int
    kind: str = "bf16"
    ring: bool = False
    scores: bool = False

    @property
    def label(self) -> str:
        """Label of a row of the table."""
        more = " ring" * self.ring + " scores" * self.scores
        return f"{self.formats}{more}, D={self.dim}, {self.kind}"


def forms(dims: tuple[int, ...] = DIMS, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Form]:
    """All forms of these head dims and types.

    Every format of the attention bench without and with scores, and those with scales per channel with a ring.
    """
    plain = ("K16V16", "K8V8", "K8V4", "K4V4", "K4V2", "K2V2", "K8V4+K4V2")
    forms = []
    for dim in dims:
        for kind in kinds:
            forms += [Form(name, dim, kind, scores=scores) for name in plain for scores in (False, True)]
            forms += [Form(name, dim, kind, ring=True) for name in ("KIVI4", "KIVI2")]
            forms.append(Form("columns", dim, kind))
    return forms


def _columns(form: Form) -> None:
    q, k = (torch.zeros(heads, 300, form.dim, dtype=KINDS[form.kind]) for heads in (_HEADS * _GROUP, _HEADS))
    Gpu().column_scores(q, k, 0.1, ColumnSums(queries=-1), lse=torch.zeros(len(q), 300))


def page_formats(form: Form) -> list[PageFormat]:
    """The tiers of a decode step in pages as a GPU has them."""
    slots = [slot_format(part, form.dim) for part in form.formats.split("+")]
    track = ("score",) if form.scores else ()
    slots = [
        replace(slot, track=track, dtype=KINDS[form.kind] if max(slot.k_bits, slot.v_bits) >= 16 else slot.dtype)
        for slot in slots
    ]
    size = choose_page_bytes(slots, tiled=True)
    return [PageFormat(slot, size) for slot in slots]


def _step(form: Form) -> None:
    """Launches one layer of a decode step over page tables."""
    formats, dtype = page_formats(form), KINDS[form.kind]
    held, page = torch.full((1, 1, _HEADS), 9), torch.zeros(1, 1, _HEADS, dtype=torch.int64)
    sizes = tuple(fmt.tokens_per_page for fmt in formats)
    _, table = Gpu().tables(formats[0].page_bytes, 2, sizes, (1, 1, _HEADS), _PAGES, "cpu")
    rows, seen, ring = torch.zeros(1, dtype=torch.int64), torch.full((1,), 9), None
    if form.ring:
        buffer, counts = torch.zeros(1, 1, _HEADS, _RING, form.dim, dtype=dtype), (held, held)
        ring = StepRing(k=buffer, v=buffer, rows=rows, num_tokens=held, before=counts, after=counts, flush_first=False)
    opened = Gpu().open_tables(
        table.pool.pages,
        [table.tier(tier, fmt, _PAGES, None) for tier, fmt in enumerate(formats)],
        (1, _HEADS),
        rows,
        num_q_heads=_HEADS * _GROUP,
        seen=seen,
        target=None if ring else (0, page, page),
        held=(held, held) if ring else None,
        ring=ring,
        scores=StepScores(group="max", update="add") if form.scores else StepScores(),
    )
    assert opened is not None
    q, k = (torch.zeros(1, heads, form.dim, dtype=dtype) for heads in (_HEADS * _GROUP, _HEADS))
    opened.attend(0, q, k, k, 0.1)


KERNELS = ("_attend", "_finish", "_sum_columns")


def compiled(form: Form, target: str, kernels: tuple[str, ...] = KERNELS) -> Iterator[Compiled]:
    """The kernels of a form, of those named, compiled for a target."""
    run = partial(_columns if form.formats == "columns" else _step, form)
    return compile_launches(run, target, kernels)


def loops(sass: str) -> list[list[str]]:
    """The instructions of the innermost loops with matrix products, as the disassembly of a cubin has them."""
    lines, labels = parse_sass(sass)
    spans = []
    for index, line in enumerate(lines):
        target = re.search(r"BRA(?!\.DIV).*`\((\.L_x_\d+)\)", line)
        begin = labels.get(target[1], index + 1) if target else index + 1
        if begin <= index and any(re.search(r"\bHG?MMA\b", one) for one in lines[begin : index + 1]):
            spans.append((begin, index + 1))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [lines[begin:end] for begin, end in inner]


def loop_instructions(built: Compiled) -> float | None:
    """Machine instructions of the main loop: of a warp per slot, or of a thread per query and key.

    With two tiers, the mean per slot of each; branches taken in some iterations only, as into a ring, count. None where
    the kernel has no matrix products, or is not NVIDIA's.
    """
    if not built.target.startswith("sm_") or built.kernel not in ("_attend", "_sum_columns"):
        return None
    sizes = [len(lines) for lines in loops(nvidia_tool("nvdisasm", "-c", binary=built.binary))]
    has = built.constants
    if not sizes:
        return None
    if built.kernel == "_sum_columns":  # the loop that is masked, and the one that is not
        return min(sizes) * 32 * has.get("num_warps", 4) / (has["BM"] * has["BN"])
    sides = "AB" if has["TWO"] else "A"
    turns = [has[f"{side}_BT"] if has[f"{side}_LAST"] == has[f"{side}_BT"] else has[f"{side}_T"] for side in sides]
    return sum(sizes) * has["num_warps"] / sum(turns)


def row(form: Form, built: Compiled) -> str:
    """One row of the table."""
    count, warps = loop_instructions(built), built.constants.get("num_warps", 4)
    resident = (
        None if built.registers is None else programs_by_size(built.registers, built.shared_bytes, warps, _SHARED)
    )
    cells = [
        form.label,
        f"`{built.kernel}`",
        built.registers,
        built.spilled,
        built.shared_bytes,
        resident,
        None if count is None else f"{count:.1f}",
    ]
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


HEADER = (
    "| form | kernel | registers | spilled, B | shared, B | programs on a multiprocessor of 228 KB | instructions |\n"
    "|---|---|---|---|---|---|---|"
)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 where a kernel could not be compiled, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.kernels.gpu.registers", description=__doc__.split("\n")[0])
    nvidia = [name for name in TARGETS if name.startswith("sm_")]
    parser.add_argument("--target", choices=nvidia, default="sm_90")
    parser.add_argument("--dims", nargs="*", type=int, choices=DIMS, default=list(DIMS))
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--formats", nargs="*", help="of which forms: K4V4, K8V4+K4V2, columns; all by default")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS))
    chosen = parser.parse_args(argv)
    print(f"{chosen.target}, triton {triton.__version__}\n\n{HEADER}", flush=True)
    failed = 0
    for form in forms(tuple(chosen.dims), tuple(chosen.kinds)):
        if chosen.formats and form.formats not in chosen.formats:
            continue
        try:
            for built in compiled(form, chosen.target, tuple(chosen.kernels)):
                print(row(form, built), flush=True)
        except Exception as error:  # a compiler's errors have no common type
            failed += 1
            print(f"| {form.label} | FAILED: {error} | | | | | |")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
