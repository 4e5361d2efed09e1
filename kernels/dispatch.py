"""Chooses the backend whose operations the store calls."""

from types import SimpleNamespace

import torch

from kvbench.kernels import cpu, torch_attention, torch_pages
from kvbench.kernels.build import BuildError

_TORCH = SimpleNamespace(
    name="torch",
    is_reference=True,
    region=torch_pages.region,
    write_keys=torch_pages.write_keys,
    write_values=torch_pages.write_values,
    write_tracked=torch_pages.write_tracked,
    read_slots=torch_pages.read_slots,
    read_tracked=torch_pages.read_tracked,
    move_slots=torch_pages.move_slots,
    paged_decode=torch_attention.paged_decode,
    add_scores=torch_attention.add_scores,
    gather_dense=torch_attention.gather_dense,
    prefill_attention=torch_attention.prefill_attention,
    chunk_attention=torch_attention.chunk_attention,
    prompt_scores=torch_attention.prompt_scores,
    prompt_low_counts=torch_attention.prompt_low_counts,
)

# Name -> what gives the operations, or raises BuildError where they cannot be had.
BACKENDS = {"torch": lambda: _TORCH, "cpu": lambda: cpu.backend(_TORCH)}


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> SimpleNamespace:
    """The operations of a backend.

    Args:
        name: A key of `BACKENDS`, or `auto`, the fastest one present: `cpu` on a CPU with a compiler, else `torch`,
            with a warning that says why.
        device: Where the cache lies.

    Raises:
        ValueError: No such backend, or it cannot run here; with the reason and a remedy.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        if not on_cpu:
            return _TORCH
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
    return BACKENDS[name]()
