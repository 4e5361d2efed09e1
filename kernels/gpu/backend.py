"""Triton backend: the kernels for NVIDIA and AMD GPUs, written once.

Operations that are not here are the torch reference's: tracked fields are written by indexing, which does not
synchronise; prompt attention is torch's own fused kernel; gathering dense keys for a chunked prompt is on no hot path.

Capture-safe, once warmed up: `paged_decode`, `add_scores`, `write_keys`, `write_values`, `write_tracked`,
`read_slots`, `demote`, `move_slots`, `prompt_scores`, `prefill_attention`, and of `DevicePages` `reserve`, `truncate`,
`lookup`, `page_ids` and `compact`. Not: `chunk_attention`, `gather_dense` behind a residual buffer (it reads how long
the lists are), `DevicePages.check`, `stats` and `free_ids`.
"""

import os
from types import SimpleNamespace

import torch

from kvbench.kernels.gpu import decode as triton_decode
from kvbench.kernels.gpu import manager as triton_manager
from kvbench.kernels.gpu import pages as triton_pages
from kvbench.kernels.gpu import prefill as triton_prefill


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
        "prompt_scores": triton_prefill.prompt_scores,
        "attention_with_lse": triton_prefill.attention_with_lse,
        "DevicePages": triton_manager.DevicePages,
    }
    return SimpleNamespace(**{**vars(reference), **own})
