"""Triton backend: the kernels for NVIDIA and AMD GPUs, written once.

Operations that are not here are the torch reference's: they index by tensors and do not synchronise either, or
(gathering dense keys for a chunked prompt) are on no hot path.
"""

import os
from types import SimpleNamespace

import torch

from kvbench.kernels import triton_decode, triton_pages


def refusal(device: torch.device) -> str:
    """Why the kernels cannot run on a device, with a remedy; empty where they can."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return (
        f"backend=triton needs an NVIDIA or AMD GPU, but this model is on {device}; set model.device=cuda where there "
        "is one, choose backend=cpu or backend=torch, or set TRITON_INTERPRET=1 in the environment to run the kernels "
        "in Triton's interpreter, slowly, for tests"
    )


def backend(reference: SimpleNamespace) -> SimpleNamespace:
    """The backend's operations; those without a kernel are the reference's."""
    own = {
        "name": "triton",
        "is_reference": False,
        "refusal": refusal,
        "paged_decode": triton_decode.paged_decode,
        "add_scores": triton_decode.add_scores,
        "write_keys": triton_pages.write_keys,
        "write_values": triton_pages.write_values,
        "read_slots": triton_pages.read_slots,
        "move_slots": triton_pages.move_slots,
        "demote": triton_pages.demote,
    }
    return SimpleNamespace(**{**vars(reference), **own})
