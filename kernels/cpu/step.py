"""A layer of a decode step in one C++ call, with everything else prepared once per step."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.cpu.abi import ELEMENT_KINDS, RingStruct, StepStruct, check, load, plain
from kvbench.kernels.operands import StepRing

Kept = list[Tensor | ctypes.Structure | ctypes.Array]  # what a struct points at, and must not be freed before it


class CompiledStep(FusedStep):
    """A prepared decode step; `Cpu.open_step` makes it.

    Args:
        struct: What the C++ side is told of the step.
        keep: What the struct points at.
    """

    def __init__(self, struct: StepStruct, keep: Kept) -> None:
        self._struct, self._keep = struct, keep
        call = struct.call
        self._q = call.num_seq, call.num_heads * call.group_size, call.head_dim
        self._kv = call.num_seq, call.num_heads, call.head_dim
        self._address, self._call = ctypes.addressof(struct), load().kvb_step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        checks.layer(q, k, v, self._q, self._kv)
        q, k, v = plain(q), plain(k), plain(v)
        out = torch.empty_like(q)
        check(self._call(self._address, layer, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), scale))
        return out


def add_ring(struct: StepStruct, ring: StepRing, keep: Kept) -> None:
    """Points a step at its residual buffers."""
    counts = [x.long().contiguous() for x in (*ring.before, *ring.after)]
    rows, num_tokens = ring.rows.long().contiguous(), ring.num_tokens.long().contiguous()
    struct.old_k, struct.old_v, struct.new_k, struct.new_v = (x.data_ptr() for x in counts)
    struct.flush_first = int(ring.flush_first)
    unit = ring.k.element_size()
    entry = RingStruct(
        k=ring.k.data_ptr(),
        v=ring.v.data_ptr(),
        num_tokens=num_tokens.data_ptr(),
        rows=rows.data_ptr(),
        k_row_stride=ring.k.stride(0) * unit,
        k_head_stride=ring.k.stride(2) * unit,
        v_row_stride=ring.v.stride(0) * unit,
        v_head_stride=ring.v.stride(2) * unit,
        k_length=ring.k.shape[3],
        v_length=ring.v.shape[3],
        kind=ELEMENT_KINDS[ring.k.dtype],
        num_rows=ring.k.shape[0],
    )
    struct.call.ring = ctypes.addressof(entry)
    keep += [*counts, rows, num_tokens, entry, ring.k, ring.v]
