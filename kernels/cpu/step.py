"""CPU backend, part 3: a layer of a decode step in one C++ call, with everything else prepared once per step."""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.backend import Reduce, StepRing, TierPages
from kvbench.kernels.cpu.abi import (
    ELEMENT_KINDS,
    CallStruct,
    RingStruct,
    StepStruct,
    TierStruct,
    check,
    fill_tier,
    load,
)

REDUCE = {None: 0, "sum": 1, "mean": 2, "max": 3}
_UPDATE = {None: 0, "add": 1, "replace": 2}


class LayerSteps:
    """A prepared decode step; see `open_step`."""

    def __init__(self, struct: StepStruct, keep: list, num_heads: int) -> None:
        self._struct, self._keep, self._num_heads = struct, keep, num_heads
        self._address, self._call = ctypes.addressof(struct), load().kvb_step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Writes one layer's new token, attends over everything held, and updates the tracked scores.

        Args:
            q: [S, Hq, D]; k, v: [S, H, D], any float dtype.

        Returns:
            fp32 [S, Hq, D].

        Raises:
            MemoryError: No room for the partial results.
        """
        q, k, v = (x.float().contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        check(self._call(self._address, layer, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), scale))
        return out


def open_step(
    pages: Tensor,
    tiers: list[TierPages],
    *,
    num_q_heads: int,
    seen: Tensor,
    target: tuple[int, Tensor, Tensor] | None,
    ring: StepRing | None = None,
    power: int = 1,
    group: Reduce | None = None,
    update: Literal["add", "replace"] | None = None,
    skip_near: int = 0,
) -> LayerSteps | None:
    """Prepares one decode step for all layers.

    Args:
        pages: uint8 [P, page_bytes]; it must not be moved while the step is open.
        tiers: What each tier holds with the new token in it, with `ids` [S, L, H, m] and counts [S, L, H]; `rotation`
            [S, m * T, D / 2] for all layers alike.
        num_q_heads: Query heads.
        seen: int64 [S] tokens before the incoming one.
        target: Tier, page and slot (int64 [S, L, H]) that the new token is written to; None behind a ring.
        ring: Residual buffers, or None.
        power: Probabilities are raised to this power before the group is reduced.
        group: How query heads are reduced into scores.
        update: Add each layer's scores to the tracked ones, or replace them; None leaves them alone.
        skip_near: A slot nearer to the query than this gets no score.

    Returns:
        The prepared step, or None where the C++ code does not cover it.
    """
    num_seq, num_layers, num_heads, _ = tiers[0].ids.shape
    head_dim = tiers[0].fmt.slot.head_dim
    if pages.device.type != "cpu" or not pages.is_contiguous() or head_dim > load().max_channels:
        return None
    if ring is not None and (len(tiers) > 1 or ring.k.dtype not in ELEMENT_KINDS):
        return None
    keep: list = [pages]
    table = (TierStruct * len(tiers))()
    for entry, tier in zip(table, tiers, strict=True):
        fill_tier(entry, tier, None, keep)
    seen = seen.long().contiguous()
    rotations = [2 * tier.rotation.shape[-1] for tier in tiers if tier.rotation is not None]
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
            reduce=REDUCE[group if update else None],
            num_threads=torch.get_num_threads(),
            rotated=rotations[0] if rotations else 0,
            update=_UPDATE[update],
            skip_near=skip_near,
        ),
        num_layers=num_layers,
    )
    keep += [table, seen]
    if ring is not None:
        _add_ring(struct, ring, keep)
    else:
        struct.tier = target[0]
        where = [x.long().contiguous() for x in target[1:]]
        struct.page, struct.slot = (x.data_ptr() for x in where)
        keep += where
    return LayerSteps(struct, keep, num_heads)


def _add_ring(struct: StepStruct, ring: StepRing, keep: list) -> None:
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
    )
    struct.call.ring = ctypes.addressof(entry)
    keep += [*counts, rows, num_tokens, entry, ring.k, ring.v]
