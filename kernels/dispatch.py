"""Chooses the backend whose operations the store calls."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.cpu.backend import Cpu, warn_absent
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.names import TRITON

if TYPE_CHECKING:
    from kvbench.kernels.gpu.backend import Decode, Gpu

HOST = "host"  # the kernels in CUDA C++ built for a CPU, for checks


def gpu_backend(device: torch.device | str, decode: str = TRITON) -> "Gpu":
    """The GPU kernels for a device, typed with what they have beyond `Backend`.

    Args:
        device: Device of the cache.
        decode: One of `names.DECODES`, or `HOST`.

    Raises:
        ValueError: The package triton is not installed (a BuildError), or its kernels cannot run there; with a remedy.
    """
    backend = _triton(decode)
    if reason := backend.refusal(torch.device(device)):
        raise ValueError(reason)
    return backend


def _triton(decode: str) -> "Gpu":
    """The GPU kernels, imported here because triton is an optional package."""
    if importlib.util.find_spec("triton") is None:
        raise BuildError(
            "the package triton is not installed; run pip install triton (or pip install -e '.[gpu]'), or choose "
            "backend=torch"
        )
    from kvbench.kernels.gpu.backend import Gpu

    if decode == HOST:
        from kvbench.kernels.gpu.cuda_call import HostKernels

        return Gpu(lambda form, _: HostKernels(form))
    return Gpu(cast("Decode", decode))


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
    TRITON: gpu_backend,
}


def get_backend(name: str = "auto", device: torch.device | str = "cpu", decode: str = TRITON) -> Backend:
    """Backend by name.

    Args:
        name: A key of `BACKENDS`, or `auto`, the fastest one present: `triton` on a GPU with that package, `cpu` on a
            CPU with a compiler, else `torch`, with a warning that says why.
        device: Device of the cache.
        decode: Kernels for the attention of decode steps on a GPU: one of `names.DECODES`, or `HOST`.

    Raises:
        ValueError: No such backend, it has no such choice, or it cannot run here; with the reason and a remedy.
    """
    device, backend = torch.device(device), REFERENCE
    if name == "auto" and device.type != "cpu":
        backend = _triton(decode) if _auto_gpu(device.type) else REFERENCE
    elif name == "auto":
        try:
            backend = Cpu()
        except BuildError as error:
            warn_absent(str(error))
    elif name == TRITON:
        backend = gpu_backend(device, decode)
    elif name not in BACKENDS:
        raise ValueError(f"backend={name!r} does not exist; choose auto or one of {', '.join(sorted(BACKENDS))}")
    else:
        backend = BACKENDS[name](device)
    if decode != TRITON and backend.name != TRITON:
        raise ValueError(
            f"backend.decode={decode} is of the GPU kernels, and backend={backend.name} runs here; leave "
            f"backend.decode={TRITON}, or choose backend={TRITON} and a GPU"
        )
    return backend


@cache
def _auto_gpu(kind: str) -> bool:
    """True if a kind of device gets the GPU kernels, as CUDA and ROCm devices do; else warns once why not."""
    if kind != "cuda":
        warnings.warn(f"no kernels for {kind}; going on with backend=torch, the plain reference", stacklevel=4)
        return False
    try:
        _triton(TRITON)
    except BuildError as error:
        warnings.warn(
            f"no GPU kernels: {error}; going on with backend=torch, the plain reference, which is much slower",
            stacklevel=4,
        )
        return False
    return True
