"""GPU backend: the bounds of pages, by which a decode step chooses what it reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.parts import ELEMENT, MIN_DOT, launch, power_of_two
from kvbench.kernels.operands import Reduce, TierPages

_REDUCE: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}
_PAGES = 32  # of a list that one program bounds


@triton.jit
def _bound_pages(
    q, pages, ids, bounds, page_bytes, num_columns, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ELEM: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """The bounds of one block of a list's pages, the query heads of the group reduced."""
    pid = tl.program_id(0).to(tl.int64)
    g, d, column = tl.arange(0, GP), tl.arange(0, DP), tl.program_id(1) * BP + tl.arange(0, BP)
    there = column < num_columns
    page = tl.load(ids + pid * num_columns + column, mask=there, other=0).to(tl.int64)
    cells = there[:, None] & (d < D)[None, :]
    base = pages + page * page_bytes
    low = tl.load((base + LOW).to(tl.pointer_type(ELEM))[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
    high = tl.load((base + HIGH).to(tl.pointer_type(ELEM))[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
    asked = (g < G)[:, None] & (d < D)[None, :]
    query = tl.load(q + pid * G * D + g[:, None] * D + d[None, :], mask=asked, other=0.0).to(tl.float32)
    bound = tl.dot(tl.maximum(query, 0.0), tl.trans(high), input_precision="ieee")
    bound += tl.dot(tl.minimum(query, 0.0), tl.trans(low), input_precision="ieee")
    if RULE == 2:
        reduced = tl.max(tl.where((g < G)[:, None], bound, float("-inf")), 0)
    else:
        reduced = tl.sum(tl.where((g < G)[:, None], bound, 0.0), 0)
        if RULE == 1:
            reduced = reduced / G
    tl.store(bounds + pid * num_columns + column, reduced, mask=there)


def page_bounds(q: Tensor, pages: Tensor, tier: TierPages, group: Reduce) -> Tensor:
    """What no logit in a page exceeds; arguments and result of `reference.attention.page_bounds`. Capture-safe."""
    num_seq, heads, columns = tier.ids.shape
    head_dim, group_size = q.shape[-1], q.shape[1] // heads
    bounds = torch.empty(tier.ids.shape, device=q.device)
    low, high = (tier.fmt.regions[name][0] for name in ("k_low", "k_high"))
    launch(
        _bound_pages, (num_seq * heads, -(-columns // _PAGES)), q.contiguous(), pages, tier.ids.contiguous(), bounds,
        pages.shape[1], columns, G=group_size, GP=power_of_two(group_size, MIN_DOT), D=head_dim,
        DP=power_of_two(head_dim, MIN_DOT), BP=_PAGES, LOW=low, HIGH=high, ELEM=ELEMENT[tier.fmt.slot.dtype],
        RULE=_REDUCE[group],
    )  # fmt: skip
    return bounds
