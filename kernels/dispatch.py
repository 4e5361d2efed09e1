"""Chooses the backend whose operations the store calls."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.cpu.backend import Cpu, warn_absent
from kvbench.kernels.cpu.build import BuildError

if TYPE_CHECKING:
    from kvbench.kernels.gpu.backend import Gpu


def gpu_backend(device: torch.device | str) -> "Gpu":
    """The GPU kernels for a device, typed with what they have beyond `Backend`.

    Raises:
        ValueError: The package triton is not installed (a BuildError), or its kernels cannot run there; with a remedy.
    """
    backend = _triton()
    if reason := backend.refusal(torch.device(device)):
        raise ValueError(reason)
    return backend


def _triton() -> "Gpu":
    """The GPU kernels, imported here because triton is an optional package."""
    if importlib.util.find_spec("triton") is None:
        raise BuildError(
            "the package triton is not installed; run pip install triton (or pip install -e '.[gpu]'), or choose "
            "backend=torch"
        )
    from kvbench.kernels.gpu.backend import Gpu

    return Gpu()


def _cpu(device: torch.device) -> Cpu:
    if device.type != "cpu":
        raise ValueError(
            f"backend=cpu works in main memory, but this model is on {device}; choose backend=torch or model.device=cpu"
        )
    return Cpu()


# Name -> what makes the backend for a device, or raises ValueError where it cannot be had.
BACKENDS: dict[str, Callable[[torch.device], Backend]] = {
    "torch": lambda device: REFERENCE,
    "cpu": _cpu,
    "triton": gpu_backend,
}


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> Backend:
    """The operations of a backend.

    Args:
        name: A key of `BACKENDS`, or `auto`, the fastest one present: `triton` on a GPU with that package, `cpu` on a
            CPU with a compiler, else `torch`, with a warning that says why.
        device: Where the cache lies.

    Raises:
        ValueError: No such backend, or it cannot run here; with the reason and a remedy.
    """
    device = torch.device(device)
    if name == "auto":
        if device.type != "cpu":
            return _auto_gpu(device.type)
        try:
            return Cpu()
        except BuildError as error:
            warn_absent(str(error))
            return REFERENCE
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} does not exist; choose auto or one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](device)


@cache
def _auto_gpu(kind: str) -> Backend:
    """`triton` on CUDA and ROCm devices, else the reference; says once per kind why."""
    if kind != "cuda":
        warnings.warn(f"no kernels for {kind}; going on with backend=torch, the plain reference", stacklevel=4)
        return REFERENCE
    try:
        return _triton()
    except BuildError as error:
        warnings.warn(
            f"no GPU kernels: {error}; going on with backend=torch, the plain reference, which is much slower",
            stacklevel=4,
        )
        return REFERENCE
