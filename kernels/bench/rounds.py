"""Interleaved timing: every variant once per round, in an order drawn anew for each round, and what follows from it.

A machine that is shared or that changes its clock makes timings taken minutes apart incomparable. Here all variants of
a cell meet the same conditions, and a ratio is formed within each round before its median and quartiles are taken. No
variant is timed before its output has been compared with a reference.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

Timer = Callable[[Callable[[], object]], float]


@dataclass(kw_only=True)
class Variant:
    """One thing to time.

    Args:
        name: Unique in its cell.
        call: Does the work once on buffer i; buffers exist so that data comes from memory and not from a cache.
        num_buffers: Buffers; one timing goes over all of them once.
        bytes_per_call: Bytes that one call has to move, for its share of the measured bandwidth; 0 = not stated.
        check: Compares the output with a reference and returns the largest error; None = nothing to compare.
        tolerance: Largest error that may be timed.
        before_round: Untimed work before each timing, such as resetting state.
        versus: Another variant of the cell that this one is a change of; its time over this one's goes on record too.
        extra: Further figures for the record.
        replay: Goes over all buffers in place of `call`, as `capture_sweeps` made it.
    """

    name: str
    call: Callable[[int], object]
    num_buffers: int = 1
    bytes_per_call: int = 0
    check: Callable[[], float] | None = None
    tolerance: float = 0.0
    before_round: Callable[[], object] | None = None
    versus: str | None = None
    extra: dict = field(default_factory=dict)
    replay: Callable[[], object] | None = None


def wall_timer(work: Callable[[], object]) -> float:
    """Seconds by the clock on the wall."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def thread_timer(work: Callable[[], object]) -> float:
    """CPU seconds of the calling thread: blind to other processes' turns on the core, but not to their use of caches
    and memory."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def cuda_timer(work: Callable[[], object]) -> float:
    """Seconds between two events on the current stream; includes waiting for the host when it is the slower one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def cuda_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Captures work in a CUDA graph, after two warm-up runs; returns its replay.

    Args:
        work: Launches kernels on the current stream, always on the same tensors, and waits for nothing.

    Raises:
        RuntimeError: It cannot be captured; torch says what it did.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and makes what only a first call makes
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def failed_variant(name: str, problem: Exception) -> Variant:
    """A variant that could not even be prepared: it is refused with the reason."""

    def check() -> float:
        raise problem

    return Variant(name=name, call=lambda _: None, check=check)


def choose_timer(clock: str, device: str, threads: int) -> Timer:
    """The timer for a setting.

    Args:
        clock: `wall`, or `cpu` = CPU time of the calling thread.
        device: Where the work runs.
        threads: Threads of the work on a CPU.

    Raises:
        ValueError: `cpu` with several threads or on a GPU, or an unknown clock.
    """
    if clock not in ("wall", "cpu"):
        raise ValueError(f"clock={clock} does not exist; choose wall or cpu")
    if clock == "cpu" and (device != "cpu" or threads != 1):
        raise ValueError(f"clock=cpu counts one thread, but {device} runs with threads={threads}; set threads=[1]")
    if device != "cpu":
        return cuda_timer
    return wall_timer if clock == "wall" else thread_timer


def refuse_wrong(variants: Sequence[Variant]) -> tuple[list[Variant], list[dict]]:
    """Separates the variants whose output is right from those that must not be timed.

    Returns:
        The right ones, with `max_error` in their `extra`; and name and reason of each refused one.
    """
    right: list[Variant] = []
    refused: list[dict] = []
    for variant in variants:
        if variant.check is None:
            right.append(variant)
            continue
        try:
            error = float(variant.check())
        except Exception as problem:  # compilers and drivers have kinds of their own; one variant must not end the run
            text = " ".join(str(problem).split())[:300]
            refused.append({"name": variant.name, "reason": f"failed: {type(problem).__name__}: {text}"})
            continue
        if error <= variant.tolerance:  # a NaN is not
            variant.extra["max_error"] = error
            right.append(variant)
        else:
            refused.append(
                {"name": variant.name, "reason": f"wrong: error {error:.3g} exceeds {variant.tolerance:.3g}; not timed"}
            )
    return right, refused


def time_rounds(
    variants: Sequence[Variant],
    *,
    rounds: int,
    seed: int,
    timer: Timer,
    warmup: int = 1,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per call of every variant in every round.

    Args:
        variants: What to time, names distinct.
        rounds: Timed rounds.
        seed: Of the orders.
        timer: Returns the seconds that a function takes.
        warmup: Rounds before them whose times are thrown away.
        on_round: Called after each round.

    Returns:
        Name -> one number per round.
    """
    order = random.Random(seed)
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    if len(found) != len(variants):
        raise AssertionError("two variants of a cell have the same name")
    for turn in range(-warmup, rounds):
        queue = list(variants)
        order.shuffle(queue)
        for variant in queue:
            if variant.before_round is not None:
                variant.before_round()
            seconds = timer(partial(_sweep, variant)) / variant.num_buffers
            if turn >= 0:
                found[variant.name].append(seconds)
        on_round()
    return found


def capture_sweeps(
    variants: Sequence[Variant], capture: Callable[[Callable[[], object]], Callable[[], object]]
) -> None:
    """Puts the replay of a graph in place of each variant's calls, so that kernels are timed and not their launches.

    Args:
        variants: Those that only launch kernels on the same tensors each time.
        capture: `cuda_graph`, or what stands for it.

    A variant that cannot be captured is timed as it is; `extra["graph"]` says which, and `extra["no_graph"]` why.
    """
    for variant in variants:
        try:
            variant.replay = capture(partial(_sweep, variant))
        except Exception as problem:  # drivers have kinds of their own; one variant must not end the run
            variant.extra["no_graph"] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        variant.extra["graph"] = variant.replay is not None


def _sweep(variant: Variant) -> None:
    if variant.replay is not None:
        variant.replay()
        return
    for index in range(variant.num_buffers):
        variant.call(index)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles (inclusive method) of at least one number."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def ratios(baseline: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times faster `other` is: baseline / other in each round, then median and quartiles."""
    return spread([b / o for b, o in zip(baseline, other, strict=True)])


def measure_cell(
    cell: dict,
    variants: Sequence[Variant],
    *,
    baselines: Sequence[str],
    rounds: int,
    seed: int,
    timer: Timer,
    warmup: int = 1,
    probe: Variant | None = None,
    on_round: Callable[[], object] = lambda: None,
    capture: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> dict:
    """Checks, times and summarises the variants of one cell.

    Args:
        cell: What the cell is (shape, length, ...), for the record.
        variants: What to time.
        baselines: Names of the variants that the others are divided by.
        rounds: Timed rounds.
        seed: Of the orders.
        timer: See `choose_timer`.
        warmup: Rounds that are thrown away.
        probe: Measures the bandwidth within the same rounds; its `bytes_per_call` per second is the 100 %.
        on_round: Called after each round.
        capture: Makes each variant's calls one replay, see `capture_sweeps`; None times the calls.

    Returns:
        JSON types: `cell`, `variants` (seconds per round, median, quartiles, ratios per baseline, bytes per second,
        share of the probe's), `probe`, `refused`, `reuse_distance_bytes` (bytes that pass between uses of a
        buffer), and `twice`: the first baseline beside itself, timed a second time in each round. Its `name`, its ratio
        (median and quartiles), and `noise`, how far the quartiles are from 1: a ratio of two variants that is no
        farther from 1 says nothing.
    """
    right, refused = refuse_wrong(variants)
    again = [replace(variant, name=f"{variant.name} (again)") for variant in _first(right, baselines)]
    if capture is not None:
        capture_sweeps([*right, *again], capture)
    timed = [*right, *([probe] if probe else []), *again]
    seconds = time_rounds(timed, rounds=rounds, seed=seed, timer=timer, warmup=warmup, on_round=on_round)
    rows = []
    for variant in timed:
        span = spread(seconds[variant.name])
        row: dict[str, object] = {"name": variant.name, "seconds": seconds[variant.name], **span}
        row["bytes_per_call"], row["num_buffers"] = variant.bytes_per_call, variant.num_buffers
        if variant.bytes_per_call:
            row["bytes_per_s"] = variant.bytes_per_call / span["median"]
            if probe:
                rate = [probe.bytes_per_call / s for s in seconds[probe.name]]
                own = [variant.bytes_per_call / s for s in seconds[variant.name]]
                row["bandwidth_share"] = spread([a / b for a, b in zip(own, rate, strict=True)])
        row["ratios"] = {
            name: ratios(seconds[name], seconds[variant.name])
            for name in baselines
            if name in seconds and variant is not probe
        }
        if variant.versus is not None and variant.versus in seconds:
            row["versus"] = {"name": variant.versus, **ratios(seconds[variant.versus], seconds[variant.name])}
        rows.append(row | variant.extra)
    hidden = {variant.name for variant in (*again, *([probe] if probe else []))}
    return {
        "cell": cell,
        "variants": [row for row in rows if row["name"] not in hidden],
        "twice": _beside_itself(seconds, again),
        "probe": next((row for row in rows if probe and row["name"] == probe.name), None),
        "refused": refused,
        "reuse_distance_bytes": sum(v.bytes_per_call * v.num_buffers for v in timed if v not in again),
    }


def _first(variants: Sequence[Variant], baselines: Sequence[str]) -> list[Variant]:
    """The variant to time twice: the first baseline that is there, else the first of all; none where there is none."""
    by_name = {variant.name: variant for variant in variants}
    named = [by_name[name] for name in baselines if name in by_name]
    return [*named, *variants][:1]


def _beside_itself(seconds: dict[str, list[float]], again: Sequence[Variant]) -> dict | None:
    """The A/A pair of a cell; None where nothing was timed."""
    for variant in again:
        name = variant.name.removesuffix(" (again)")
        ratio = ratios(seconds[name], seconds[variant.name])
        return {"name": name, **ratio, "noise": max(abs(ratio["q1"] - 1.0), abs(ratio["q3"] - 1.0))}
    return None
