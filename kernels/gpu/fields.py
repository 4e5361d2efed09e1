"""GPU backend: slots read, their tracked fields written, whole pages copied. Page ids below 0 are passed over."""

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.pages import _slot_values
from kvbench.kernels.gpu.parts import launch

BLOCK = 256


@triton.jit
def _write_fields(
    pages, page, slot, score, pos, score_value, page_bytes, count, SCORE: tl.constexpr, SCORES: tl.constexpr,
    POS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score and position of a block of slots; SCORE and POS are their byte offsets in a page, -1 where not tracked."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(page + row, mask=row < count, other=-1).to(tl.int64)
    live = target >= 0
    at = tl.load(slot + row, mask=live, other=0)
    base = pages + target * page_bytes
    if SCORE >= 0:
        value = tl.zeros([BLOCK], tl.float32) + score_value
        if SCORES:
            value = tl.load(score + row, mask=live, other=0.0).to(tl.float32)
        tl.store((base + SCORE).to(tl.pointer_type(tl.float32)) + at, value, mask=live)
    if POS >= 0:
        where = tl.load(pos + row, mask=live, other=0).to(tl.int32)
        tl.store((base + POS).to(tl.pointer_type(tl.int32)) + at, where, mask=live)


@triton.jit
def _read_side(
    pages, out, page, slot, count, page_bytes, BM: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    T: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Dequantises one side of BM slots."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    channel = tl.arange(0, DP)[None, :]
    source = tl.load(page + row, mask=row < count, other=-1).to(tl.int64)
    at = tl.load(slot + row, mask=row < count, other=0).to(tl.int32)
    mask = (source >= 0)[:, None] & (channel < D)
    values = _slot_values((pages + source * page_bytes)[:, None], at[:, None], channel, mask, KEYS, D, T, SIDE)
    values = tl.where(mask, values, 0.0)
    tl.store(out + row[:, None] * D + channel, values, mask=(row < count)[:, None] & (channel < D))


@triton.jit
def _copy_pages(pages, source, target, page_bytes, BLOCK: tl.constexpr):
    """Copies a block of bytes of one page to another."""
    pid = tl.program_id(0)
    to = tl.load(target + pid).to(tl.int64)
    if to >= 0:
        origin = tl.load(source + pid).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(pages + origin * page_bytes + i, mask=i < page_bytes, other=0)
        tl.store(pages + to * page_bytes + i, value, mask=i < page_bytes)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies whole pages, int64 [M] to int64 [M]; a target below 0 is passed over, and none is also a source."""
    block = 1024
    launch(
        _copy_pages, (source.numel(), -(-pages.shape[1] // block)), pages, source.contiguous(), target.contiguous(),
        pages.shape[1], BLOCK=block,
    )  # fmt: skip
