"""GPU backend, decode attention in CUDA C++: the arguments of its kernels, and the kernels built for a CPU."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvbench.kernels.cpu.build import build_library, cache_dir
from kvbench.kernels.gpu.cuda_form import Form

SOURCE_DIR = Path(__file__).parent / "csrc"
MAIN = "decode.cu"
HEADERS = tuple(sorted(path.name for path in SOURCE_DIR.glob("*.h") if path.name != "host.h"))
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


# These mirror the structs of the same names in csrc/call.h.
class Tier(ctypes.Structure):
    """One tier of the lists of a call."""

    _fields_ = [
        *((name, _P) for name in ("table", "num_k", "num_v", "weights", "tops", "scores")),
        *((name, _I) for name in ("columns", "entries", "reversed", "wide_table", "wide_counts", "unused")),
    ]


class Call(ctypes.Structure):
    """The arguments of every kernel."""

    _fields_ = [
        *((name, _P) for name in ("q", "pages", "rows", "seen", "sinks", "out", "lse", "lse2", "part_top", "part_sum")),
        *((name, _P) for name in ("part_out", "arrived", "starts", "ring_k", "ring_v", "ring_tokens")),
        *((name, _L) for name in ("rk_row", "rk_head", "rv_row", "rv_head")),
        ("tiers", Tier * 2),
        ("scale2", ctypes.c_float),
        *((name, _I) for name in ("lists", "heads", "per_row", "offset", "rk", "rv", "in_table", "counts_in_table")),
        *((name, _I) for name in ("wide_rings", "power", "rule", "replace", "near", "unused")),
    ]


class Kernels(Protocol):
    """The kernels of one form, wherever they run."""

    def plan(self, call: Call, layers: int) -> None:
        """Numbers the parts of the lists of so many layers, the first of which is the call's."""

    def decode(self, call: Call) -> None:
        """Attends over the lists of a layer."""

    def scores(self, call: Call, blocks: int) -> None:
        """Makes the scores of a layer's slots, 256 a block."""


class HostKernels:
    """The kernels on a CPU, thread after thread: slow, to compare their source with the reference.

    Args:
        form: The form that they are built for.
        blocks: That share the lists; the result does not depend on it.

    Raises:
        BuildError: There is no C++ compiler.
    """

    def __init__(self, form: Form, blocks: int = 3) -> None:
        self._library, self._blocks = _host_library(form), blocks

    def plan(self, call: Call, layers: int) -> None:
        self._library.kvb_run_plan(ctypes.byref(call), layers)

    def decode(self, call: Call) -> None:
        self._library.kvb_run_decode(ctypes.byref(call), self._blocks)

    def scores(self, call: Call, blocks: int) -> None:
        self._library.kvb_run_scores(ctypes.byref(call), blocks)


@cache
def _host_library(form: Form) -> ctypes.CDLL:
    header = form.header("host")
    folder = cache_dir() / f"form-{hashlib.sha256(header.encode()).hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "form.h").write_text(header)
    sources = ("host.cpp", MAIN, "host.h", *HEADERS)
    library = ctypes.CDLL(str(build_library("decode-host", sources, SOURCE_DIR, flags=("-O1", f"-I{folder}"))))
    assert library.kvb_call_bytes() == ctypes.sizeof(Call), "Call differs from the struct in csrc/call.h"
    return library


def address(x: Tensor | None) -> int | None:
    """Data pointer of a tensor; None (null) without one."""
    return None if x is None else x.data_ptr()
