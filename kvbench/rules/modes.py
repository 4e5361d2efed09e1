"""Global modes of torch and of its libraries that change how numbers come out.

A mode holds for a whole process. One that the user's script or environment sets before a run counts in the run's
identity (`counted`). One that a method's module, a plan or a grader switches would change the runs of every other
method under their usual hashes: `kept` and `changed_since` find it, put the mode back, and name it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

from kvbench.errors import KvbenchError

# Variables by which MKL, oneDNN and cuBLAS compute otherwise on one machine: with other instructions, in other sums, at
# another precision. torch's own choice is read from torch (`torch_isa`).
VARIABLES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *(f"{prefix}_{name}" for prefix in ("ONEDNN", "DNNL") for name in ("MAX_CPU_ISA", "DEFAULT_FPMATH_MODE")),
)
_FULL = ("none", "ieee")  # two words for sums of float32 in float32
# Attribute of torch -> the values at which it counts in no identity; none for a mode that counts nowhere: threads and
# gradients move last digits at most.
_ATTRIBUTES: dict[str, tuple[Any, ...] | None] = {
    "backends.fp32_precision": _FULL,
    "backends.cuda.matmul.fp32_precision": _FULL,
    "backends.cuda.matmul.allow_fp16_accumulation": (False,),
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (True,),
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (True,),
    "backends.cudnn.enabled": (True,),
    "backends.cudnn.benchmark": (False,),
    "backends.cudnn.deterministic": (False,),
    "backends.cudnn.conv.fp32_precision": ("tf32", "none"),
    "backends.cudnn.rnn.fp32_precision": None,
    "backends.mkldnn.enabled": (True,),
    "backends.mkldnn.deterministic": (False,),
    "backends.mkldnn.matmul.fp32_precision": _FULL,
    "backends.mkldnn.conv.fp32_precision": _FULL,
}
# Function of torch that reads a mode -> the one that sets it, and the values as above.
_FUNCTIONS: dict[str, tuple[str, tuple[Any, ...] | None]] = {
    "get_default_dtype": ("set_default_dtype", ("torch.float32",)),
    "get_num_threads": ("set_num_threads", None),
    "is_grad_enabled": ("set_grad_enabled", None),
    "get_deterministic_debug_mode": ("set_deterministic_debug_mode", (0,)),
    "is_autocast_cache_enabled": ("set_autocast_cache_enabled", None),
    "backends.cuda.flash_sdp_enabled": ("backends.cuda.enable_flash_sdp", (True,)),
    "backends.cuda.mem_efficient_sdp_enabled": ("backends.cuda.enable_mem_efficient_sdp", (True,)),
    "backends.cuda.math_sdp_enabled": ("backends.cuda.enable_math_sdp", (True,)),
    "backends.cuda.cudnn_sdp_enabled": ("backends.cuda.enable_cudnn_sdp", (True,)),
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": (
        "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        (False,),
    ),
    "backends.cuda.preferred_blas_library": ("backends.cuda.preferred_blas_library", None),
    "backends.cuda.preferred_linalg_library": ("backends.cuda.preferred_linalg_library", None),
    "backends.mha.get_fastpath_enabled": ("backends.mha.set_fastpath_enabled", (True,)),
}
_FLUSH = "torch.set_flush_denormal"  # which torch has nothing to read by
_TINY = 1e-40  # a denormal number of float32
_refused: dict[str, str] = {}  # what runs once in a process -> what it changed

Modes = Mapping[str, object]


class ChangedMode(KvbenchError, code="mode-changed"):
    """Code of the user's own changed a global mode of torch."""


def read(quick: bool = False) -> Modes:
    """Every mode by name, with its value; the variables of the environment alone where torch is not loaded.

    Args:
        quick: Leave out the variables, and modes that only a sum shows; for checks at every step.
    """
    values: dict[str, object] = {} if quick else {name: os.environ.get(name) for name in VARIABLES}
    if "torch" in sys.modules:
        for name, mode in _torch_modes().items():
            if not (quick and name == _FLUSH):
                values[name] = mode.read()
    return values


def counted() -> dict[str, str]:
    """The modes that are not as usual and can change an answer, for the identity of a run."""
    return {
        name: str(value)
        for name, value in read().items()
        if (value if name in VARIABLES else _torch_modes()[name].counts(value))
    }


def changed_since(before: Modes) -> str:
    """Modes that changed since `read`, with both values, once all are restored; empty where none did."""
    now = read(quick=_FLUSH not in before)
    changed = [name for name in before if now[name] != before[name] and not {now[name], before[name]} <= {*_FULL}]
    for name in changed:
        _write(name, before[name])
    return ", ".join(f"{name} from {before[name]} to {now[name]}" for name in changed)


@contextmanager
def kept(who: str, once: str = "") -> Iterator[None]:
    """Runs a block of the user's code with every global mode restored afterwards.

    It loads torch, since the code may do so.

    Args:
        once: Names code that Python runs once, such as a module: it is refused again where the block comes again.

    Raises:
        ChangedMode: Names the code, as `who` does, and the modes.
    """
    if once in _refused:
        raise ChangedMode(f"{who} {_refused[once]}")
    import_module("torch")
    before = read()
    try:
        yield
    finally:
        changed = changed_since(before)
        if changed and once:
            _refused[once] = rule(changed)
    if changed:
        raise ChangedMode(f"{who} {rule(changed)}")


def rule(changed: str) -> str:
    """The end of an error about what `changed_since` found."""
    return (
        f"changed {changed}: a mode of the whole process, in which every other method would be computed too, under its "
        "usual hash; leave it as it is, or put it back behind the lines that need it"
    )


def _write(name: str, value: object) -> None:
    if name not in VARIABLES:
        _torch_modes()[name].write(value)
    elif value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = str(value)


@dataclass(frozen=True)
class _Mode:
    """A mode of torch.

    Args:
        read, write: Its value, and a new one.
        usual: The values at which it counts in no identity; None where it never does.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    usual: tuple[Any, ...] | None

    def counts(self, value: object) -> bool:
        return self.usual is not None and value not in self.usual and str(value) not in self.usual


@cache
def _torch_modes() -> dict[str, _Mode]:
    """Every mode by the name that torch's documentation has for it."""
    import torch

    def of_attribute(path: str, usual: tuple[Any, ...] | None) -> _Mode:
        owner, _, name = path.rpartition(".")
        parent = attrgetter(owner)(torch)
        return _Mode(lambda: getattr(parent, name), lambda value: setattr(parent, name, value), usual)

    def of_autocast(device: str, usual: torch.dtype) -> _Mode:
        def write(value: tuple[bool, torch.dtype]) -> None:
            torch.set_autocast_enabled(device, value[0])
            torch.set_autocast_dtype(device, value[1])

        return _Mode(
            lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), write, ((False, usual),)
        )

    def flushes() -> bool:
        return float(torch.tensor(_TINY, dtype=torch.float32, device="cpu") * 1) == 0

    def set_device(value: torch.device) -> None:
        torch.set_default_device(None if value.type == "cpu" else value)  # None costs nothing at every call

    by_path = {path: of_attribute(path, usual) for path, usual in _ATTRIBUTES.items()}
    for path, (setter, usual) in _FUNCTIONS.items():
        by_path[path] = _Mode(attrgetter(path)(torch), attrgetter(setter)(torch), usual)
    by_path["get_default_device"] = _Mode(torch.get_default_device, set_device, ("cpu",))
    by_path["set_autocast_enabled.cpu"] = of_autocast("cpu", torch.bfloat16)
    by_path["set_autocast_enabled.cuda"] = of_autocast("cuda", torch.float16)
    by_path["set_flush_denormal"] = _Mode(flushes, torch.set_flush_denormal, (False,))
    return {f"torch.{name}": mode for name, mode in by_path.items()}
