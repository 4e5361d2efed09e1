"""The machine that numbers were measured on, and the speed of its memory."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import roofline
from kvbench.kernels.bench.rounds import Variant

PROBE_BYTES = 1 << 30  # far larger than any cache that one process has to itself
PROBE_STEP_BYTES = 1 << 28
QUEUED = 8  # copies of a GPU that are timed together, so that its launches are hidden
PROBE_PAGE = 4096  # bytes of memory that a machine's host takes back at once
# Rows, columns and outputs of a product that no memory holds up, nor, on a GPU, its launch.
PROBE_PRODUCT, GPU_PRODUCT = (1024, 1024, 4096), (8192, 8192, 8192)
BUSY_SHARE = 0.5  # load average per core above which timings are called into question


def num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """The load average of the last minute; None where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def available_bytes(device: str) -> int | None:
    """Memory that can be taken on a device; None where it cannot be told."""
    if device != "cpu":
        return memory.free_bytes(device)
    return next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line[:12] == "MemAvailable"), None)


def cache_bytes() -> int | None:
    """The CPU's last-level cache as the system reports it; a virtual machine may share it or misreport it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=None)


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    """The lines of a file of the system; none where it has none."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def pick_device(name: str) -> str:
    """Device of this machine named by `auto`, `cpu` or `cuda[:N]`; raises ValueError where there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device={name} is no device; choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA or ROCm devices here; "
            "choose cpu or auto"
        )
    return name


def describe(device: str, backend: Backend) -> dict:
    """The machine, the libraries and the load at this moment, in JSON types."""
    versions: dict[str, str | None] = {}
    for name in ("triton", "transformers", "flash-attn", "flashinfer-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device != "cpu" else _processor(),
        "host": f"{platform.system()} {platform.machine()}",
        "num_cpus": num_cpus(),
        "cpu_cache_bytes": cache_bytes(),
        "available_bytes": available_bytes(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "libraries": versions,
        "backend": backend.name,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", ""),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "load_average": load_average(),
        **roofline.peaks(device),
    }


def doubts(environment: dict, clock: str, backend: Backend) -> list[str]:
    """Warnings to read before trusting the numbers; empty on a quiet machine with compiled kernels."""
    notes = []
    load, cpus = environment["load_average"], environment["num_cpus"]
    if load is not None and load > BUSY_SHARE * cpus:
        remedy = "" if clock == "cpu" else "; clock=cpu with threads=[1] is less disturbed"
        notes.append(
            f"Loaded machine: load average {load:.1f} on {cpus} cores at the start; absolute times are upper bounds, "
            f"and ratios carry more spread than on a quiet machine{remedy}."
        )
    sleeps = environment["omp_wait_policy"].upper() == "PASSIVE" and environment["gomp_spincount"] in ("", "0")
    if environment["device"] == "cpu" and sleeps:
        notes.append(
            "OMP_WAIT_POLICY=PASSIVE: threads sleep between parallel regions, which costs up to 2.5x in tiny steps on "
            "an idle machine; let them wait a little there (GOMP_SPINCOUNT=1000)."
        )
    if backend.name == "triton" and environment["device"] == "cpu":
        notes.append("Backend triton without a GPU is interpreted: its speed is no claim for anything.")
    if backend.is_reference:
        notes.append("Backend torch is the plain reference, made to be right: its speed is no claim for any format.")
    return notes


class Bandwidth:
    """Reads (and on a GPU copies) parts of a buffer far larger than the caches, in turn."""

    def __init__(self, device: str) -> None:
        self.step = min(PROBE_STEP_BYTES, PROBE_BYTES)
        whole = memory.empty(PROBE_BYTES // 8, dtype=torch.int64, device=device).fill_(1)
        self.parts = list(whole.split(self.step // 8))
        self.turn = 0
        self._target = torch.empty_like(self.parts[0]) if device != "cpu" else None

    def variant(self) -> Variant:
        """The probe of a cell: a read on a CPU, a copy (bytes read and written both count) on a GPU."""
        name, passes, queued = ("read bandwidth", 1, 1) if self._target is None else ("copy bandwidth", 2, QUEUED)
        size = self.step * passes
        return Variant(name=name, call=self._go, bytes_per_call=size, num_buffers=queued, before_round=self._touch)

    def _touch(self) -> None:
        """Advances to the next buffer and reads a number of each of its pages.

        A virtual machine's host may have reclaimed idle pages; faulting them in takes many times as long as the read
        that is timed.
        """
        self.turn = (self.turn + 1) % len(self.parts)
        self.parts[self.turn][:: PROBE_PAGE // 8].sum()

    def _go(self, index: int) -> Tensor:
        part = self.parts[(self.turn + index) % len(self.parts)]
        return part.sum() if self._target is None else self._target.copy_(part)


def product(device: str, dtype: torch.dtype) -> Variant:
    """Matrix product of many rows in torch: its `flops_per_call` per second bound the arithmetic of this machine."""
    rows, columns, outputs = PROBE_PRODUCT if device == "cpu" else GPU_PRODUCT
    make = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, columns, generator=make).to(device, dtype) for n in (rows, outputs))
    extra = {"flops_per_call": 2 * rows * columns * outputs}
    return Variant(name="torch's product", call=lambda _: torch.nn.functional.linear(x, weight), extra=extra)


def tell_limits(figures: dict) -> None:
    """Adds the least time per row of a cell, from its bytes and `flops_per_token`.

    It is the longer of two: the bytes at the probe's bandwidth, or the operations at the rate of `product`, whose row
    becomes a figure of the cell.
    """
    for row in [row for row in figures["variants"] if "flops_per_call" in row]:
        figures["variants"].remove(row)
        figures["product"] = {"name": row["name"], "flops_per_s": row["flops_per_call"] / row["median"]}
    if not figures.get("product") or not figures["probe"]:
        return
    for row in figures["variants"]:
        read_s = row["bytes_per_call"] / figures["probe"]["bytes_per_s"]
        multiply_s = row["flops_per_token"] * row["tokens_per_call"] / figures["product"]["flops_per_s"]
        row["limit_tokens_per_s"] = row["tokens_per_call"] / max(read_s, multiply_s)
