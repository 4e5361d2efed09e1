"""Random calls of the CPU kernels, in and out of contract, for `make fuzz` and for test_cpu_fuzz.py.

    python tests/kernels/cpu/kernel_fuzz.py [cases=300] [seed=0] [first=0] [sanitize=portable]

Case n of a seed is always the same call: `first=n cases=1` repeats it. In contract, the result equals the reference's
bytes or a float64 oracle's numbers. Out of contract, one thing of such a call is made wrong, and the call must raise
and leave the pool as it was. `sanitize` names the build (KVBENCH_CPU_ISA's words) that is compiled anew with the
sanitizers of GCC, in build/fuzz; a finding of theirs ends the process, and build/fuzz/last_case says where.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fuzz_attention import Columns, Decode, Step
from fuzz_calls import Call, Wrong
from fuzz_pages import AddScores, Move, Read, Search, Write
from fuzz_products import Layers, Products

from kvbench.kernels.cpu import abi as cpu_abi
from kvbench.kernels.cpu import build

CALLS: dict[str, type[Call]] = {
    "write": Write,
    "read": Read,
    "move": Move,
    "search": Search,
    "add_scores": AddScores,
    "decode": Decode,
    "step": Step,
    "columns": Columns,
    "products": Products,
    "layers": Layers,
}

SCRATCH = Path(__file__).parents[3] / "build" / "fuzz"
# Checks as calls, not inlined: the wide builds then compile in two minutes instead of the better part of an hour.
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "--param=asan-instrumentation-with-call-threshold=0",
)
REFUSALS = (AssertionError, ValueError, KeyError, IndexError, AttributeError, TypeError)


@dataclass
class Tally:
    """What became of the cases.

    Args:
        calls: (operation, what was made wrong or `in contract`) -> cases.
        findings: One sentence each.
    """

    calls: Counter = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def one_case(seed: int, number: int, tally: Tally) -> None:
    """Makes and judges one case."""
    dice = random.Random(f"{seed}:{number}")
    name = dice.choice(sorted(CALLS))
    call = CALLS[name](dice)
    wrongs: list[Wrong] = call.wrongs()
    if dice.random() < 0.5 or not wrongs:
        tally.calls[name, "in contract"] += 1
        if found := call.judge():
            tally.findings.append(f"case {number}: {name} {call.said()}: {found}")
        return
    wrong = dice.choice(wrongs)
    tally.calls[name, wrong.name] += 1
    before = call.pages.clone()
    try:
        wrong.make()
        call.run()
    except REFUSALS:
        pass
    else:
        tally.findings.append(f"case {number}: {name} {call.said()}: {wrong.name} was accepted")
    if not wrong.late and call.pages.shape == before.shape and not torch.equal(call.pages, before):
        tally.findings.append(f"case {number}: {name} {call.said()}: {wrong.name} changed the pool")
    if not call.guarded():
        tally.findings.append(f"case {number}: {name} {call.said()}: {wrong.name} wrote beside the pool")


def run(cases: int, seed: int, first: int = 0, note: Callable[[int], None] = lambda _: None) -> Tally:
    """Runs cases `first` to `first + cases` of a seed.

    Args:
        cases: How many.
        seed: Of everything random.
        first: Number of the first case.
        note: Called with each case's number before it runs.
    """
    tally, library, threads = Tally(), cpu_abi.load(), torch.get_num_threads()
    library.kvb_set_work_per_thread(1.0)
    library.kvb_spoil_scratch(1)
    try:
        for number in range(first, first + cases):
            note(number)
            torch.set_num_threads(1 + number % 3)
            one_case(seed, number, tally)
    finally:
        torch.set_num_threads(threads)
        library.kvb_set_work_per_thread(1e6)
        library.kvb_spoil_scratch(0)
    return tally


def sanitized(isa: str) -> Path:
    """The C++ of a build with sanitizers, compiled where its sources are newer."""
    target, sources = SCRATCH / f"{isa}.so", sorted(build.SOURCE_DIR.iterdir())
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        SCRATCH.mkdir(parents=True, exist_ok=True)
        flags = [flag for flag in build.FLAGS if not flag.startswith("-O")] + ["-O1", "-g1", "-fopenmp"]
        flags += [*cpu_abi.ISA_FLAGS[isa], *SANITIZERS, "-fno-omit-frame-pointer"]
        units = [str(build.SOURCE_DIR / unit) for unit in cpu_abi.UNITS]
        command = [build.find_compiler(), *flags, *units, "-o", str(target) + ".new"]
        subprocess.run(command, check=True)
        os.replace(str(target) + ".new", target)
    return target


def with_sanitizers(words: list[str], isa: str) -> None:
    """Begins this program anew with the sanitizers' library in front of all others, as it must be."""
    target = sanitized(isa)
    found = [[build.find_compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    ahead = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() for command in found]
    os.environ |= {"LD_PRELOAD": " ".join(ahead), "ASAN_OPTIONS": "detect_leaks=0"}  # Python frees nothing at its end
    os.execv(sys.executable, [sys.executable, __file__, *words, f"library={target}"])


def main(words: list[str]) -> int:
    """Runs the command line's cases; 1 when something was found."""
    settings = {"cases": "300", "seed": "0", "first": "0", "library": "", "sanitize": ""}
    settings |= dict(word.split("=", 1) for word in words)
    if settings["sanitize"] and not settings["library"]:
        with_sanitizers(words, settings["sanitize"])
    if settings["library"]:
        library = cpu_abi.Library(settings["library"])
        cpu_abi.library_for = lambda _: library  # type: ignore[assignment]
    cases, seed, first = (int(settings[name]) for name in ("cases", "seed", "first"))
    SCRATCH.mkdir(parents=True, exist_ok=True)

    def note(number: int) -> None:
        (SCRATCH / "last_case").write_text(f"first={number} cases=1 seed={seed}\n")

    print(f"{cpu_abi.load().kvb_path().decode()}: cases {first} to {first + cases - 1} of seed {seed}", flush=True)
    tally = run(cases, seed, first, note)
    inside = sum(n for (_, kind), n in tally.calls.items() if kind == "in contract")
    print(f"{inside} in contract, {cases - inside} out of it, {len(tally.calls)} kinds, {len(tally.findings)} findings")
    for finding in tally.findings:
        print(finding)
    return bool(tally.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
