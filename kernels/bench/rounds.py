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
from typing import Any

import torch

from kvbench.kernels.graphs import capturing

Work = Callable[[], object]
Timer = Callable[[Work], float]
# The thread's clock is blind to other processes' turns on the core, but not to their use of caches and memory.
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


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
    before_round: Work | None = None
    versus: str | None = None
    extra: dict = field(default_factory=dict)
    replay: Work | None = None

    def sweep(self) -> None:
        """Does the work on every buffer once."""
        if self.replay is not None:
            self.replay()
            return
        for index in range(self.num_buffers):
            self.call(index)


def cuda_timer(work: Work) -> float:
    """Seconds between two events on the current stream; includes waiting for the host when it is the slower one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def cuda_graph(work: Work) -> Work:
    """Captures `work` after two warm-up runs and returns its replay.

    `work` launches kernels on the same tensors and does not synchronise.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and makes what only a first call makes
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        work()
    return graph.replay


class Absent(Exception):
    """A dependency of a variant is not installed; the message says how to install it."""


def failed_variant(name: str, problem: Exception) -> Variant:
    """A variant that could not even be prepared: it is refused with the reason."""

    def check() -> float:
        raise problem

    return Variant(name=name, call=lambda _: None, check=check)


def choose_timer(clock: str, device: str) -> Timer:
    """The timer of a clock on a device; raises ValueError for a GPU's time on a clock of the calling thread."""
    if device != "cpu":
        if clock == "cpu":
            raise ValueError(f"clock=cpu counts one thread, but the work is done by {device}; set clock=wall")
        return cuda_timer
    now = CLOCKS[clock]

    def host_timer(work: Work) -> float:
        begin = now()
        work()
        return now() - begin

    return host_timer


def refuse_wrong(variants: Sequence[Variant]) -> tuple[list[Variant], list[dict]]:
    """Variants with correct output, and name and reason of each other one.

    Each variant's `extra` gets `max_error`; `absent` lists peers that are not installed.
    """
    right: list[Variant] = []
    refused: list[dict] = []
    for variant in variants:
        if variant.check is None:
            right.append(variant)
            continue
        try:
            error = float(variant.check())
        except Absent as problem:
            refused.append({"name": variant.name, "reason": str(problem), "absent": True})
            continue
        except Exception as problem:  # compilers and drivers have kinds of their own; one variant must not end the run
            refused.append({"name": variant.name, "reason": f"failed: {_in_line(problem, 300)}"})
            continue
        if error <= variant.tolerance:  # a NaN is not
            variant.extra["max_error"] = error
            right.append(variant)
        else:
            reason = f"wrong: error {error:.3g} exceeds {variant.tolerance:.3g}; not timed"
            refused.append({"name": variant.name, "reason": reason})
    return right, refused


def _in_line(problem: Exception, most: int) -> str:
    """An error in one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:most]}"


def time_rounds(
    variants: Sequence[Variant], *, rounds: int, seed: int, timer: Timer, warmup: int = 1, on_round: Work = lambda: None
) -> dict[str, list[float]]:
    """Seconds per call of every variant in every round, by name.

    `seed` decides the orders; the times of `warmup` rounds before them are discarded.
    """
    order = random.Random(seed)
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    assert len(samples) == len(variants), "two variants of a cell have the same name"
    for index in range(-warmup, rounds):
        queue = list(variants)
        order.shuffle(queue)
        for variant in queue:
            if variant.before_round is not None:
                variant.before_round()
            seconds = timer(variant.sweep) / variant.num_buffers
            if index >= 0:
                samples[variant.name].append(seconds)
        on_round()
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles (inclusive method) of at least one number."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def ratios(baseline: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The speed of `other` as a multiple: baseline / other in each round, then median and quartiles."""
    return spread([b / o for b, o in zip(baseline, other, strict=True)])


def measure_cell(
    cell: dict,
    variants: Sequence[Variant],
    *,
    baselines: Sequence[str],
    probe: Variant | None = None,
    capture: Callable[[Work], Work] | None = None,
    twice: bool = True,
    **how: Any,
) -> dict:
    """Checks, times and summarises the variants of one cell.

    Args:
        cell: Description of the cell (shape, length, ...), for the record.
        baselines: Names of the variants that the others are divided by.
        probe: Measures the bandwidth within the same rounds; its `bytes_per_call` per second is the 100 %.
        capture: Makes each variant's sweep one replay (`cuda_graph`), so that kernels are timed and not their launches;
            None times the calls. A variant that cannot be captured is timed eagerly: `graph` of its row is false, and
            `no_graph` has the reason.
        twice: Time the first baseline twice in each round.
        how: Rounds, seed, timer, warmup and on_round, as `time_rounds` takes them.

    Returns:
        JSON types: `cell`, `variants` (seconds per round, median, quartiles, ratios per baseline, bytes per second,
        share of the probe's), `probe`, `refused`, `reuse_distance_bytes` (bytes that pass between uses of a
        buffer), and `twice`: the first baseline, timed a second time in each round. Its `name`, its ratio
        (median and quartiles), and `noise`, how far the quartiles are from 1: a ratio of two variants that is no
        farther from 1 says nothing. `twice` is None where nothing was timed twice.
    """
    right, refused = refuse_wrong(variants)
    by_name = {variant.name: variant for variant in right}
    first = [by_name[name] for name in [*baselines, *by_name] if name in by_name][: int(twice)]
    repeats = [replace(variant, name=f"{variant.name} (again)") for variant in first]
    for variant in [*right, *repeats]:
        if capture is None:
            break
        try:
            variant.replay = capture(variant.sweep)
        except Exception as problem:  # as in `refuse_wrong`
            variant.extra["no_graph"] = _in_line(problem, 200)
        variant.extra["graph"] = variant.replay is not None
    probes = [probe] if probe else []
    timed = [*right, *probes, *repeats]
    seconds = time_rounds(timed, **how)
    rates = [probe.bytes_per_call / s for s in seconds[probe.name]] if probe else []
    known = [name for name in baselines if name in seconds]
    rows = {variant.name: _row(variant, seconds, rates, known) for variant in [*right, *probes]}
    noise = None
    for variant in first:
        ratio = ratios(seconds[variant.name], seconds[f"{variant.name} (again)"])
        noise = {"name": variant.name, **ratio, "noise": max(abs(ratio["q1"] - 1.0), abs(ratio["q3"] - 1.0))}
    return {
        "cell": cell,
        "variants": [rows[name] for name in by_name],
        "twice": noise,
        "probe": rows[probe.name] | {"ratios": {}} if probe else None,
        "refused": refused,
        "reuse_distance_bytes": sum(v.bytes_per_call * v.num_buffers for v in [*right, *probes]),
    }


def _row(
    variant: Variant, seconds: dict[str, list[float]], rates: Sequence[float], baselines: Sequence[str]
) -> dict[str, object]:
    """The figures of one variant; `rates` are the probe's bytes per second in each round, empty without one."""
    samples = seconds[variant.name]
    span = spread(samples)
    row = {"name": variant.name, "seconds": samples, **span}
    row |= {"bytes_per_call": variant.bytes_per_call, "num_buffers": variant.num_buffers}
    if variant.bytes_per_call:
        row["bytes_per_s"] = variant.bytes_per_call / span["median"]
        if rates:
            shares = [variant.bytes_per_call / s / rate for s, rate in zip(samples, rates, strict=True)]
            row["bandwidth_share"] = spread(shares)
    row["ratios"] = {name: ratios(seconds[name], samples) for name in baselines}
    if variant.versus in seconds:
        row["versus"] = {"name": variant.versus, **ratios(seconds[variant.versus], samples)}
    return row | variant.extra
