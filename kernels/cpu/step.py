"""CPU backend: a layer of a decode step in one C++ call, with everything else prepared once per step."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import FusedStep
from kvbench.kernels.cpu.abi import (
    ELEMENT_KINDS,
    REDUCE_KINDS,
    CallStruct,
    RingStruct,
    StepStruct,
    TierStruct,
    check,
    fill_tier,
    load,
    plain,
)
from kvbench.kernels.operands import Reduce, ScoreUpdate, StepRing, StepTarget, TierPages

_UPDATE: dict[ScoreUpdate | None, int] = {None: 0, "add": 1, "replace": 2}
Kept = list[Tensor | ctypes.Structure | ctypes.Array]  # what a struct points at, and must not be freed before it


class CompiledStep(FusedStep):
    """A prepared decode step; see `open_step`.

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


def open_step(
    pages: Tensor,
    tiers: list[TierPages],
    *,
    num_q_heads: int,
    seen: Tensor,
    target: StepTarget | None,
    ring: StepRing | None = None,
    power: int = 1,
    group: Reduce | None = None,
    update: ScoreUpdate | None = None,
    skip_near: int = 0,
) -> CompiledStep | None:
    """Prepares one decode step for all layers; arguments as `Backend.open_step`.

    Returns:
        The prepared step, or None where the C++ code does not cover it.
    """
    checks.step(
        pages,
        tiers,
        num_q_heads=num_q_heads,
        seen=seen,
        target=target,
        ring=ring,
        power=power,
        group=group,
        update=update,
        skip_near=skip_near,
    )
    num_seq, num_layers, num_heads, _ = tiers[0].ids.shape
    head_dim = tiers[0].fmt.slot.head_dim
    if pages.device.type != "cpu" or not pages.is_contiguous() or head_dim > load().max_channels:
        return None
    if any(tier.channels is not None for tier in tiers):  # which are a layer's
        return None
    if ring is not None and not (ring.k.dtype in ELEMENT_KINDS and ring.k.is_contiguous() and ring.v.is_contiguous()):
        return None
    tensors = [pages]
    table = (TierStruct * len(tiers))()
    for entry, tier in zip(table, tiers, strict=True):
        fill_tier(entry, tier, None, tensors)
    seen = seen.long().contiguous()
    struct = StepStruct(
        call=CallStruct(
            pages=pages.data_ptr(),
            tiers=ctypes.addressof(table),
            seen=seen.data_ptr(),
            page_bytes=pages.shape[1],
            num_pages=pages.shape[0],
            seq_stride=num_layers * num_heads,
            num_seq=num_seq,
            num_heads=num_heads,
            group_size=num_q_heads // num_heads,
            head_dim=head_dim,
            num_tiers=len(tiers),
            power=power,
            reduce=REDUCE_KINDS[group if update else None],
            num_threads=torch.get_num_threads(),
            rotated=2 * max(tier.half for tier in tiers),
            update=_UPDATE[update],
            skip_near=skip_near,
        ),
        num_layers=num_layers,
    )
    keep: Kept = [*tensors, table, seen]
    if ring is not None:
        _add_ring(struct, ring, keep)
    else:
        assert target is not None, "checks.step wants one of them"
        struct.tier, *places = target
        where = [x.long().contiguous() for x in places]
        struct.page, struct.slot = (x.data_ptr() for x in where)
        keep += where
    return CompiledStep(struct, keep)


def _add_ring(struct: StepStruct, ring: StepRing, keep: Kept) -> None:
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
