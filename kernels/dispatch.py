"""Chooses the backend whose operations the store calls."""

import importlib.util
import warnings
from functools import cache
from types import SimpleNamespace

import torch

from kvbench.kernels.cpu import backend as cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.reference import attention as torch_attention
from kvbench.kernels.reference import pages as torch_pages

_TORCH = SimpleNamespace(
    name="torch",
    is_reference=True,
    region=torch_pages.region,
    write_keys=torch_pages.write_keys,
    write_values=torch_pages.write_values,
    write_tracked=torch_pages.write_tracked,
    widen_bounds=torch_pages.widen_bounds,
    read_slots=torch_pages.read_slots,
    read_tracked=torch_pages.read_tracked,
    move_slots=torch_pages.move_slots,
    paged_decode=torch_attention.paged_decode,
    choose_pages=torch_attention.choose_pages,
    add_scores=torch_attention.add_scores,
    gather_dense=torch_attention.gather_dense,
    prefill_attention=torch_attention.prefill_attention,
    chunk_attention=torch_attention.chunk_attention,
    prompt_scores=torch_attention.prompt_scores,
    prompt_low_counts=torch_attention.prompt_low_counts,
    open_step=None,  # one layer of a decode step in one call (cpu_step.open_step); None: operation by operation
    slot_extreme=None,  # reductions of tracked fields where they lie (cpu_pages.slot_extreme); None: gathered
)


def _triton() -> SimpleNamespace:
    """The GPU kernels' operations; imported here, because triton is an optional package."""
    if importlib.util.find_spec("triton") is None:
        raise BuildError(
            "the package triton is not installed; run pip install triton (or pip install 'kvbench[gpu]'), or choose "
            "backend=torch"
        )
    from kvbench.kernels.gpu import backend as triton_backend

    return triton_backend.backend(_TORCH)


# Name -> what gives the operations, or raises BuildError where they cannot be had.
BACKENDS = {"torch": lambda: _TORCH, "cpu": lambda: cpu.backend(_TORCH), "triton": _triton}


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> SimpleNamespace:
    """The operations of a backend.

    Args:
        name: A key of `BACKENDS`, or `auto`, the fastest one present: `triton` on a GPU with that package, `cpu` on a
            CPU with a compiler, else `torch`, with a warning that says why.
        device: Where the cache lies.

    Raises:
        ValueError: No such backend, or it cannot run here; with the reason and a remedy.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        if not on_cpu:
            return _auto_gpu(torch.device(device).type)
        try:
            return BACKENDS["cpu"]()
        except BuildError as error:
            cpu.warn_absent(str(error))
            return _TORCH
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} does not exist; choose auto or one of {', '.join(sorted(BACKENDS))}")
    if name == "cpu" and not on_cpu:
        raise ValueError(
            f"backend=cpu works in main memory, but this model is on {device}; choose backend=torch or model.device=cpu"
        )
    if name == "triton":
        operations = _triton()
        if reason := operations.refusal(torch.device(device)):
            raise ValueError(reason)
        return operations
    return BACKENDS[name]()


@cache
def _auto_gpu(kind: str) -> SimpleNamespace:
    """`triton` on CUDA and ROCm devices, else the reference; says once per kind why."""
    if kind != "cuda":
        warnings.warn(f"no kernels for {kind}; going on with backend=torch, the plain reference", stacklevel=4)
        return _TORCH
    try:
        return _triton()
    except BuildError as error:
        warnings.warn(
            f"no GPU kernels: {error}; going on with backend=torch, the plain reference, which is much slower",
            stacklevel=4,
        )
        return _TORCH
