"""GPU backend: slots of pages written, read, moved within a tier and demoted into another one; whole pages copied.

Page ids below 0 are passed over, so that a plan over all lists needs no compaction into the lists that it concerns.
Every function here is capture-safe, `byte_map` once it was called for a format: it copies a small table to the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes import SCALE_BYTES
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.coding import (
    NVFP4,
    codes_of,
    encode_group,
    encode_up,
    level_values,
    load_codes,
    metadata,
    plane_codes,
    scale_of,
    scales,
    store_codes,
    store_metadata,
    store_scale,
)
from kvbench.kernels.gpu.parts import e4m3_bytes, e5m2_bytes, elements, float8_values, launch, power_of_two, side_layout

TILE = 2048  # entries of a program's tile
BLOCK = 256  # slots of a program that writes tracked fields


@triton.jit
def _slot_values(base, slot, channel, mask, KEYS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    """Channels of single slots, fp32, in the broadcast shape of `base`, `slot` and `channel`.

    0 where masked, and for channels that keys are stored without.

    A code times its fp16 scale is exact in fp32, so nothing depends on whether the zero is added in the same step.
    """
    if SIDE.BITS >= 16:
        if KEYS:
            cell = channel * T + slot
        else:
            cell = slot * D + channel
        held = mask & (channel < SIDE.W)
        return tl.load((base + SIDE.OFF).to(tl.pointer_type(SIDE.ELEM)) + cell, mask=held, other=0.0).to(tl.float32)
    else:
        if KEYS:
            cell = (channel % SIDE.W) * T + slot
        else:
            cell = slot * SIDE.ROW + channel % SIDE.W
        raw = load_codes(base + SIDE.OFF + cell, T if KEYS else 1, mask, SIDE)
        if SIDE.BITS == 0:
            if SIDE.CODE <= 0:
                return float8_values(raw, SIDE.CODE)
            else:
                return float8_values(raw, SIDE.CODE) * scales(
                    base, (channel // (D // SIDE.GROUPS)) * T + slot, mask, SIDE
                )
        else:
            codes = plane_codes(raw.to(tl.int64 if SIDE.BITS == 5 else tl.int32), channel // SIDE.W, SIDE)
            if SIDE.CHANNEL > 0:
                index = (slot // SIDE.CHANNEL) * D + channel
            else:
                index = (channel // (D // SIDE.GROUPS)) * T + slot
            scale, zero = metadata(base, index, mask, SIDE)
            return level_values(codes, SIDE, tl.float32) * scale + zero


@triton.jit(do_not_specialize=["count", "per_row", "offset"])
def _write_side(
    x, pages, source_page, source_slot, page, slot, cos, sin, count, page_bytes, heads, per_row, offset, x_row,
    BM: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, META_FIRST: tl.constexpr,
    FROM: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr, S_T: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Encodes one side of BM slots that have scales of their own.

    From dense vectors (FROM = 0), from slots of another format (1), or from the rows of x that `source_page` names (2).
    With `per_row` lists of a sequence, `heads` of them are written here, from `offset` on. The dense vectors of
    successive sequences are `x_row` apart; they are rotated first where HALF is not 0.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    list_index = (row // heads) * per_row + offset + row % heads
    target = tl.load(page + list_index, mask=row < count, other=-1).to(tl.int64)
    live = target >= 0
    at = tl.load(slot + list_index, mask=row < count, other=0).to(tl.int32)
    base = (pages + target * page_bytes)[:, None, None]
    plane, w = tl.arange(0, SIDE.P), tl.arange(0, SIDE.WP)
    channel = (plane[:, None] * SIDE.W + w[None, :])[None, :, :]
    real = live[:, None, None] & (w < SIDE.W)[None, None, :]
    if FROM == 1:
        origin = tl.load(source_page + row, mask=row < count, other=0).to(tl.int64)
        there = tl.load(source_slot + row, mask=row < count, other=0).to(tl.int32)
        source = (pages + origin * page_bytes)[:, None, None]
        values = _slot_values(source, there[:, None, None], channel, real, KEYS, D, S_T, SOURCE)
    else:
        begin = (row // heads) * x_row + (row % heads) * D
        if FROM == 2:
            begin = tl.load(source_page + row, mask=row < count, other=0).to(tl.int64) * D
        values = tl.load(x + begin[:, None, None] + channel, mask=real, other=0.0).to(tl.float32)
        if HALF > 0:
            rotated = real & (channel < 2 * HALF)
            partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
            other = tl.load(x + begin[:, None, None] + partner, mask=rotated, other=0.0).to(tl.float32)
            angle = (row // heads)[:, None, None] * HALF + channel % HALF
            by_cos = values * tl.load(cos + angle, mask=rotated, other=1.0).to(tl.float32)
            by_sin = other * tl.load(sin + angle, mask=rotated, other=0.0).to(tl.float32)
            values = tl.where(channel < HALF, by_cos - by_sin, by_cos + by_sin)
    if KEYS:
        step, stride = T, 1
    else:
        step, stride = 1, SIDE.ROW
    cell = at[:, None, None] * stride + w[None, None, :] * step
    if SIDE.BITS >= 16:
        tl.store((base + SIDE.OFF).to(tl.pointer_type(SIDE.ELEM)) + cell, elements(values, SIDE.ELEM), mask=real)
    elif SIDE.BITS == 0 and SIDE.CODE <= 0:
        if SIDE.CODE < 0:
            tl.store(base + SIDE.OFF + cell, e5m2_bytes(values), mask=real)
        else:
            tl.store(base + SIDE.OFF + cell, e4m3_bytes(values), mask=real)
    elif SIDE.BITS == 0 or SIDE.CODE > 1 or SIDE.FIT > 0:
        codes = tl.zeros_like(values).to(tl.int32)
        for r in range(SIDE.GROUPS):
            mine = ((channel // (D // SIDE.GROUPS)) == r) & real
            if SIDE.FIT > 0 and SIDE.CODE < NVFP4:
                its_codes, its_scale, its_zero = encode_up(values, channel, mine, SIDE)
                store_metadata(pages + target * page_bytes, r * T + at, its_scale, its_zero, live, SIDE)
            else:
                its_codes, its_scale = encode_group(values, mine, D // SIDE.GROUPS, SIDE)
                store_scale(pages + target * page_bytes, r * T + at, its_scale, live, SIDE)
            codes = tl.where(mine, its_codes, codes)
        if SIDE.BITS == 0:
            tl.store(base + SIDE.OFF + cell, codes.to(tl.uint8), mask=real)
        else:
            address = (pages + target * page_bytes)[:, None] + SIDE.OFF + at[:, None] * stride + w[None, :] * step
            store_codes(address, codes, plane, step, live[:, None] & (w < SIDE.W)[None, :], SIDE)
    else:
        flat = base + tl.zeros([BM, 1, 1], tl.int32)
        if SIDE.CODE:
            below, above = values, tl.abs(values)
        else:
            below, above = values, values
        scale, zero = tl.zeros_like(values), tl.zeros_like(values)
        for r in range(SIDE.GROUPS):
            mine = ((channel // (D // SIDE.GROUPS)) == r) & real
            low = tl.min(tl.min(tl.where(mine, below, float("inf")), 2), 1)
            high = tl.max(tl.max(tl.where(mine, above, float("-inf")), 2), 1)
            its_scale, its_zero = scale_of(
                tl.where(live, low, 0.0)[:, None, None], tl.where(live, high, 0.0)[:, None, None], SIDE
            )
            store_metadata(flat, r * T + at[:, None, None], its_scale, its_zero, live[:, None, None], SIDE)
            scale, zero = tl.where(mine, its_scale, scale), tl.where(mine, its_zero, zero)
        codes = codes_of(values, scale, zero, SIDE, META_FIRST)
        address = (pages + target * page_bytes)[:, None] + SIDE.OFF + at[:, None] * stride + w[None, :] * step
        store_codes(address, codes, plane, step, live[:, None] & (w < SIDE.W)[None, :], SIDE)


@triton.jit
def _write_key_groups(
    x, source, pages, page, slot, page_bytes, D: tl.constexpr, T: tl.constexpr, GT: tl.constexpr, BW: tl.constexpr,
    NAMED: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Encodes the keys of one group of tokens with one scale per channel, BW bytes of every slot.

    NAMED: from the rows of x that `source` names.
    """
    first = tl.program_id(0).to(tl.int64) * SIDE.CHANNEL
    target = tl.load(page + first).to(tl.int64)
    start = tl.load(slot + first).to(tl.int32)
    i, plane = tl.arange(0, GT), tl.arange(0, SIDE.P)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    width, tokens = tl.where(target >= 0, SIDE.W, 0), tl.where(target >= 0, SIDE.CHANNEL, 0)
    base = pages + target * page_bytes
    channel = plane[:, None] * SIDE.W + w[None, :]
    real = (i < tokens)[:, None, None] & (w < SIDE.W)[None, None, :]
    where = first + i
    if NAMED:
        where = tl.load(source + where, mask=i < tokens, other=0).to(tl.int64)
    values = tl.load(x + where[:, None, None] * D + channel[None, :, :], mask=real, other=0.0).to(tl.float32)
    low = tl.min(tl.where(real, values, float("inf")), 0)
    if SIDE.CODE:
        high = tl.max(tl.where(real, tl.abs(values), float("-inf")), 0)
    else:
        high = tl.max(tl.where(real, values, float("-inf")), 0)
    held = (w < width)[None, :] & (plane >= 0)[:, None]
    scale, zero = scale_of(tl.where(held, low, 0.0), tl.where(held, high, 0.0), SIDE)
    store_metadata(base, (start // SIDE.CHANNEL) * D + channel, scale, zero, held, SIDE)
    grown = tl.zeros_like(values)
    codes = codes_of(values, grown + scale[None, :, :], grown + zero[None, :, :], SIDE, True)
    put = base + SIDE.OFF + w[None, :] * T + (start + i)[:, None]
    store_codes(put, codes, plane, T, (i < tokens)[:, None] & (w < SIDE.W)[None, :], SIDE)


@triton.jit(do_not_specialize=["count"])
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


@triton.jit(do_not_specialize=["count"])
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


@triton.jit(do_not_specialize=["count", "num_bytes"])
def _move_bytes(
    pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes,
    BM: tl.constexpr, BB: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies bytes of BM slots, BB of each, or with COLUMNS a column of BB.

    Byte j of slot i is at map[j, 0] + i * map[j, 1] in its page.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    j = tl.arange(0, BB)
    if COLUMNS > 0:
        j += tl.program_id(1) * BB
    target = tl.load(page + row, mask=row < count, other=-1).to(tl.int64)
    origin = tl.load(source_page + row, mask=row < count, other=-1).to(tl.int64)
    at = tl.load(slot + row, mask=row < count, other=0).to(tl.int32)
    there = tl.load(source_slot + row, mask=row < count, other=0).to(tl.int32)
    wanted = j < num_bytes
    mask = ((target >= 0) & (origin >= 0))[:, None] & wanted[None, :]
    source = (
        tl.load(source_map + 2 * j, mask=wanted, other=0)[None, :]
        + there[:, None] * tl.load(source_map + 2 * j + 1, mask=wanted, other=0)[None, :]
    )
    target_bytes = (
        tl.load(target_map + 2 * j, mask=wanted, other=0)[None, :]
        + at[:, None] * tl.load(target_map + 2 * j + 1, mask=wanted, other=0)[None, :]
    )
    moved = tl.load(pages + origin[:, None] * page_bytes + source, mask=mask, other=0)
    tl.store(pages + target[:, None] * page_bytes + target_bytes, moved, mask=mask)


@triton.jit(do_not_specialize=["count", "num_bytes"])
def _demote_both(
    pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes, BK: tl.constexpr,
    BV: tl.constexpr, D: tl.constexpr, META_FIRST: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, T: tl.constexpr,
    S_T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
):  # fmt: skip
    """Re-quantises keys (programs of the first column) and values (of the second) into another format.

    The other programs copy the tracked fields.
    """
    part = tl.program_id(1)
    if part == 0:
        _write_side(
            pages, pages, source_page, source_slot, page, slot, pages, pages, count, page_bytes, count, 0, 0, 0, BK,
            True, D, T, META_FIRST, 1, 0, K, S_T, SK,
        )  # fmt: skip
    elif part == 1:
        _write_side(
            pages, pages, source_page, source_slot, page, slot, pages, pages, count, page_bytes, count, 0, 0, 0, BV,
            False, D, T, META_FIRST, 1, 0, V, S_T, SV,
        )  # fmt: skip
    else:
        _move_bytes(pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes,
                    BM, BB, 0)  # fmt: skip


@cache
def byte_map(fmt: PageFormat, names: tuple[str, ...], device: torch.device) -> Tensor:
    """Positions of a slot's bytes in some regions of a format of independent slots, int32 [bytes, 2].

    Byte j of slot i is at first[j] + i * step[j] within its page.
    """
    slot, table = fmt.slot, []
    for name in names:
        offset, length = fmt.regions[name]
        if not length:
            continue
        per_slot = length // fmt.tokens_per_page
        if name in ("v_codes", "score", "pos"):  # slot after slot
            table += [(offset + j, per_slot) for j in range(per_slot)]
            continue
        unit = 1 if name.endswith("where") else 2  # of zeros, most scales, and what is kept apart
        if name == "k_codes":
            unit = slot.dtype.itemsize if slot.k_bits >= 16 else 1
        elif name.endswith("scale"):
            code = slot.keys if name == "k_scale" else slot.values
            unit = SCALE_BYTES[code.scale] if code is not None else unit
        row = fmt.tokens_per_page * unit  # all slots' first element, then all slots' second, ..
        table += [(offset + j // unit * row + j % unit, unit) for j in range(per_slot)]
    return torch.tensor(table, dtype=torch.int32, device=device)


def write_part(
    name: str, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, source: Tensor | None = None
) -> None:
    """Encodes one side (`k` or `v`) of slots from the rows of x [.., D], or from the rows that `source` [M] names."""
    if name == "v" or not fmt.slot.channel_keys:
        _write(name, pages, fmt, page, slot, x, source=source)
        return
    side = side_layout(fmt, "k", least=1)
    group, num_bytes = fmt.slot.k_channel_group, side.W
    tokens = power_of_two(group)
    width = min(power_of_two(num_bytes), power_of_two(max(1, 2 * TILE // (tokens * side.P))))
    launch(
        _write_key_groups, (page.numel() // group, -(-num_bytes // width)), x.contiguous(),
        page if source is None else source, pages, page.contiguous(), slot.contiguous(), pages.shape[1],
        D=fmt.slot.head_dim, T=fmt.tokens_per_page, GT=tokens, BW=width, NAMED=source is not None,
        SIDE=side, enable_fp_fusion=False,
    )  # fmt: skip


def slots_per_program(fmt: PageFormat, side: str) -> int:
    """Slots that one program of `_write_side` encodes."""
    layout = side_layout(fmt, side, least=1)
    return min(64, max(1, TILE // (layout.P * layout.WP)))


def _write(
    side: str, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, source: Tensor | None = None
) -> None:
    """Launches `_write_side` from dense vectors, or from the rows named by `source`."""
    layout, rows, count = side_layout(fmt, side, least=1), slots_per_program(fmt, side), page.numel()
    page, slot = page.contiguous(), slot.contiguous()
    launch(
        _write_side, (-(-count // rows),), x.contiguous(), pages, page if source is None else source.contiguous(), slot,
        page, slot, pages, pages, count, pages.shape[1], count, 0, 0, 0, BM=rows, KEYS=side == "k", D=fmt.slot.head_dim,
        T=fmt.tokens_per_page, META_FIRST=fmt.slot.channel_keys, FROM=0 if source is None else 2, HALF=0,
        S_T=fmt.tokens_per_page, SIDE=layout, SOURCE=layout,
        enable_fp_fusion=False,  # a product that is rounded only with the sum after it can round a code the other way
    )  # fmt: skip
