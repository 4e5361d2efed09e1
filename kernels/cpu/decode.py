"""CPU backend: attention of one decode step over pages in C++, operation by operation; see `step` for whole layers."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.cpu.abi import (
    ELEMENT_KINDS,
    REDUCE_KINDS,
    CallStruct,
    TierStruct,
    check,
    fill_tier,
    load,
    plain,
    ring_struct,
)
from kvbench.kernels.operands import Reduce, Ring, TierPages
from kvbench.kernels.reference import attention as torch_attention


def takes(q: Tensor, tiers: list[TierPages], ring: Ring | None) -> bool:
    """Whether the C++ code covers a call of `paged_decode`; the reference takes the others."""
    if q.device.type != "cpu" or q.shape[-1] > load().max_channels:
        return False
    return ring is None or (tiers[0].rotation is None and ring.k.dtype in ELEMENT_KINDS)


def paged_decode(
    q: Tensor,
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | None,
    scale: float,
    *,
    power: int = 1,
    group: Reduce | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of one query token per sequence over all tiers and the residual buffer, dequantising as it goes.

    Arguments and results are those of `Backend.paged_decode`. Results do not depend on the number of threads
    (torch.get_num_threads() are used) nor on the other sequences of the call.

    Raises:
        MemoryError: No room for the partial results.

    Source: kvbench's own; folding the scales into the products as in KIVI's and DiffKV's kernels.
    """
    checks.decode(q, pages, tiers, ring, power, group)
    library = load()
    if not takes(q, tiers, ring):
        return torch_attention.paged_decode(q, pages, tiers, ring, scale, power=power, group=group)
    num_seq, num_q_heads, head_dim = q.shape
    heads = tiers[0].ids.shape[1]
    q = plain(q)
    pages = pages.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(num_seq, num_q_heads)
    keep: list[Tensor] = []
    scores: list[Tensor] = []
    table = (TierStruct * len(tiers))()
    for entry, tier in zip(table, tiers, strict=True):
        if group:
            scores.append(torch.empty(num_seq, heads, tier.ids.shape[-1] * tier.fmt.tokens_per_page))
        fill_tier(entry, tier, scores[-1] if group else None, keep)
    call = CallStruct(
        q=q.data_ptr(),
        pages=pages.data_ptr(),
        tiers=ctypes.addressof(table),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        page_bytes=pages.shape[1],
        num_pages=pages.shape[0],
        seq_stride=heads,
        num_seq=num_seq,
        num_heads=heads,
        group_size=num_q_heads // heads,
        head_dim=head_dim,
        num_tiers=len(tiers),
        power=power,
        reduce=REDUCE_KINDS[group],
        num_threads=torch.get_num_threads(),
        rotated=2 * max(tier.half for tier in tiers),
        scale=scale,
    )
    if ring is not None:
        buffers = ring_struct(ring, keep)
        call.ring = ctypes.addressof(buffers)
    check(library.kvb_paged_decode(ctypes.addressof(call)))
    return out, lse, scores


def add_scores(pages: Tensor, tier: TierPages, scores: Tensor) -> None:
    """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots, in place."""
    checks.scores(pages, tier, scores)
    if not pages.is_contiguous():  # a copy would take the sums and be thrown away
        torch_attention.add_scores(pages, tier, scores)
        return
    keep: list[Tensor] = []
    entry = TierStruct()
    fill_tier(entry, tier, plain(scores), keep)
    check(
        load().kvb_add_scores(
            pages.data_ptr(),
            pages.shape[1],
            pages.shape[0],
            ctypes.addressof(entry),
            tier.num_k.numel(),
            torch.get_num_threads(),
        )
    )
