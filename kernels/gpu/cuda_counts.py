"""Counts registers and instructions of the decode kernel in CUDA C++: `python -m kvbench.kernels.gpu.cuda_counts`.

No GPU is needed. Every form is compiled and disassembled (with the tools in triton's package), and what a part of a
list takes is counted along the paths that its warps go, by loops: each warp takes its turns, the first of which raises
the running maximum; the producer copies the pages; the last block of a list merges its parts.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from kvbench.kernels.bench.caches import slot_format
from kvbench.kernels.format import PageFormat, choose_page_bytes
from kvbench.kernels.gpu.compile import nvidia_tool, parse_sass
from kvbench.kernels.gpu.cuda_build import compiled, nvrtc_version
from kvbench.kernels.gpu.cuda_form import LEAST_SLOTS, MOST_PARTS, TURN, WARPS, Form

TARGETS = ("sm_80", "sm_90")
BARS = {"registers": 104, "per_token": 20.0}  # of the forms that are timed against FlashAttention
GOALS: tuple[tuple[str, int, dict], ...] = tuple(
    (name, dim, {}) for dim in (64, 128) for name in ("K8V4", "K4V4", "K4V2", "KIVI2")
)
OTHERS: tuple[tuple[str, int, dict], ...] = (
    *((name, dim, {}) for dim in (64, 128) for name in ("K8V8", "KIVI4")),
    *((name, dim, {"scores": True}) for dim in (64, 128) for name in ("K4V4", "K8V4+K4V2")),
    *(("KIVI2", dim, {"ring": "bf16", **more}) for dim in (64, 128) for more in ({}, {"scores": True})),
    ("K8V4+K4V2", 128, {}),
    *((name, 256, {}) for name in ("K8V8", "K8V4", "K4V4", "K4V2", "KIVI2", "K8V4+K4V2")),
    *((name, 256, {"scores": True}) for name in ("K4V4", "K8V4+K4V2")),
    ("KIVI2", 256, {"ring": "bf16", "scores": True}),
)
# Lists of so many tokens, 8 heads of 8 sequences, on a card of so many multiprocessors with so many blocks each.
_TOKENS, _LISTS, _PROCESSORS, _BLOCKS = 16_384, 64, 132, 3
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_COPY = "UBLKCP|LDGSTS"


@dataclass(frozen=True)
class Usage:
    """Resources of a build of the decode kernel.

    Registers per thread, spilled bytes, bytes of code; warp instructions per token and KV head, and of those in loops.
    """

    registers: int
    spilled: int
    code: int
    per_token: float
    in_turns: float


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order, and where its labels are."""

    lines: tuple[str, ...]
    labels: dict[str, int]

    @staticmethod
    def of(disassembled: str, kernel: str) -> "Code":
        """One kernel of what nvdisasm prints."""
        part = re.split(r"\n//-{10,}", disassembled.split(f".text.{kernel}:")[1])[0]
        lines, labels = parse_sass(part)
        return Code(tuple(lines), labels)

    @cached_property
    def successors(self) -> list[tuple[int, ...]]:
        """Instructions that can come next; a converged warp takes no BRA.DIV."""
        successors: list[tuple[int, ...]] = []
        for at, line in enumerate(self.lines):
            bare = _PREDICATE.sub("", line)
            follows: tuple[int, ...] = (at + 1,) if at + 1 < len(self.lines) else ()
            if bare.startswith(("EXIT", "RET")):
                successors.append(follows if bare != line else ())
            elif bare.startswith("BRA") and "BRA.DIV" not in bare and (to := re.search(r"`\((\.L_x_\d+)\)", bare)):
                conditional = bare != line or re.match(r"BRA\S*\s+!?U?P\d", bare)
                successors.append((self.labels[to[1]], *(follows if conditional else ())))
            else:
                successors.append(follows)
        return successors

    @cached_property
    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of each loop, inner ones first.

        The code after the kernel's, where warps wait for a barrier, is no loop.
        """
        end = next(at for at in reversed(range(len(self.lines))) if self.lines[at].endswith("EXIT"))
        pairs = {(to, at) for at, follows in enumerate(self.successors) for to in follows if to <= at <= end}
        latest = {head: max(at for to, at in pairs if to == head) for head, _ in pairs}
        return sorted(latest.items(), key=lambda loop: loop[1] - loop[0])

    def count(self, loop: tuple[int, int], pattern: str) -> int:
        """Instructions of a loop that match."""
        return sum(bool(re.search(pattern, line)) for line in self.lines[loop[0] : loop[1] + 1])

    def path(
        self, loop: tuple[int, int], value: Callable[[int], tuple[float, ...]], closed: Iterable[tuple[int, int]] = ()
    ) -> tuple[float, ...]:
        """Largest sum of values along a path from the first to the last instruction of a loop.

        Inner loops that are `closed` are skipped as a whole.
        """
        first, last = loop
        behind = {head: end for head, end in closed if first <= head and end <= last and (head, end) != loop}
        best: dict[int, tuple[float, ...]] = {last: value(last)}
        for at in range(last - 1, first - 1, -1):
            targets = (behind[at] + 1,) if at in behind else self.successors[at]
            options = [best[to] for to in targets if at < to <= last and to in best]
            if options:
                best[at] = tuple(a + b for a, b in zip(value(at), max(options), strict=True))
        return best[first]


def _instructions(code: Code, form: Form, tokens: int) -> tuple[float, float]:
    """Warp instructions of a list of so many tokens in the first tier, and those in turns.

    A path goes through all that its loop is there for (products, barriers, stores), and is else the shortest one.
    """

    def along(loop: tuple[int, int], wanted: str, closed: Iterable[tuple[int, int]] = ()) -> float:
        counts = [len(re.findall(wanted, line)) for line in code.lines]
        return -code.path(loop, lambda at: (counts[at], -1), closed)[-1]

    turns = next(loop for loop in code.loops if code.count(loop, "HMMA") > 8)
    pages = next(loop for loop in code.loops if code.count(loop, _COPY) and code.count(loop, "SHFL"))
    items = next(loop for loop in code.loops if loop[0] < turns[0] and loop[1] > turns[1])
    producer = next(loop for loop in code.loops if loop[0] < pages[0] and loop[1] > pages[1])
    products = r"HMMA\.16816\.F32 " + ("|STG" if form.scores else "")  # with what lies in pages: a buffer's are few
    usual, first = along(turns, products), along(turns, products + "|SHFL")
    fmt = form.tiers[0]
    share = max(ceil(LEAST_SLOTS / fmt.tokens_per_page), ceil(ceil(tokens / fmt.tokens_per_page) / MOST_PARTS))
    parts = tokens / fmt.tokens_per_page / share
    in_turns = tokens / TURN * usual + parts * WARPS * (first - usual)
    within = [loop for loop in code.loops if items[0] < loop[0] and loop[1] < items[1]]
    outer = [loop for loop in within if not any(a < loop[0] and loop[1] < b for a, b in within)]
    merging = [loop for loop in within if code.count(loop, r"LDG\S*STRONG")]
    item = along(items, "BAR.SYNC|ATOMG|STS", outer)
    merge = 0.0
    for loop in outer:
        if loop in merging:
            inner = [each for each in merging if loop[0] < each[0] and each[1] < loop[1]]
            merge += along(loop, "STRONG|STG", inner)
            for each in inner:  # one looks at a part a turn, the other (of three loads a part) is unrolled
                loads = code.count(each, "STRONG")
                merge += along(each, "STRONG") * parts * (3 / loads if loads > 1 else 1)
        elif loop != turns:
            item += along(loop, "LDS|STG")
    copied, work = along(pages, f"{_COPY}|SHFL"), f"{_COPY}|SHFL|STS|SYNCS"
    made = along(producer, work, [pages]) + (share - 1) * copied
    # Until the first item: one warp prepares the barriers, the others wait for it.
    begun = (items[0] + WARPS * along((0, items[0]), "BAR.SYNC")) * _PROCESSORS * _BLOCKS / _LISTS
    return in_turns + parts * (WARPS * item + made) + WARPS * merge + begun, in_turns


def usage(form: Form, target: str, tokens: int = _TOKENS) -> Usage:
    """Compiles a form and counts, for lists of so many tokens."""
    cubin = compiled(form, target)
    said = nvidia_tool("cuobjdump", "-res-usage", binary=cubin)
    code = Code.of(nvidia_tool("nvdisasm", "-c", binary=cubin), "kvb_decode")
    match = re.search(r"Function kvb_decode:\s*REG:(\d+) STACK:(\d+)", said)
    assert match is not None
    all_of_them, in_turns = _instructions(code, form, tokens)
    return Usage(int(match[1]), int(match[2]), 16 * len(code.lines), all_of_them / tokens, in_turns / tokens)


def form_named(name: str, head_dim: int, **more: Any) -> Form:
    """Form of a format of `bench.caches.slot_format`, or of two joined by +, on pages as a GPU has them.

    4 bf16 query heads per KV head, unless `more` says otherwise.
    """
    slots = [slot_format(part, head_dim) for part in name.split("+")]
    size = choose_page_bytes(slots, tiled=True)
    tiers = tuple(PageFormat(slot, size) for slot in slots)
    return Form(tiers=tiers, **{"queries": 4, "query": "bf16", "out": "bf16", **more})


def main(argv: list[str] | None = None) -> int:
    """Prints a table per target; 0 when no kernel spills, and those that are timed keep their bars on sm_90."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.kernels.gpu.cuda_counts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--target", nargs="*", default=list(TARGETS))
    missed = 0
    print(f"NVRTC {nvrtc_version()}, lists of {_TOKENS} tokens, 4 query heads per KV head in bf16")
    print("| target | form | head dim | registers | spilled, B | code, B | instructions per token | in turns |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for target in parser.parse_args(argv).target:
        for name, dim, more in (*GOALS, *OTHERS):
            counts = usage(form_named(name, dim, **more), target)
            shown = " ".join([name, *(key if value is True else f"{key} {value}" for key, value in more.items())])
            print(
                f"| {target} | {shown} | {dim} | {counts.registers} | {counts.spilled} | {counts.code} "
                f"| {counts.per_token:.1f} | {counts.in_turns:.1f} |"
            )
            over = counts.registers > BARS["registers"] or counts.per_token > BARS["per_token"]
            missed += counts.spilled > 0 or (over and (name, dim, more) in GOALS and target == "sm_90")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
