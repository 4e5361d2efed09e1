"""Chooses the backend whose operations the store calls."""

from types import SimpleNamespace

from kvbench.kernels import torch_attention, torch_pages

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
)

BACKENDS = {"torch": _TORCH}


def get_backend(name: str = "auto") -> SimpleNamespace:
    """The operations of a backend.

    Args:
        name: `auto` (the fastest one present) or a key of `BACKENDS`.

    Raises:
        ValueError: No such backend.
    """
    if name == "auto":
        return _TORCH
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} does not exist; choose auto or one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
