"""GPU backend: writing, demoting and moving slots in pages.

Page ids below 0 are passed over, so that a plan over all lists needs no compaction into the lists that it concerns.
Every function here is capture-safe once it was called for a format: the first `move_slots` and `demote` of a format
copy a small table to the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.codes import SCALE_BYTES
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.coding import (
    codes_of,
    encode_group,
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
from kvbench.kernels.gpu.parts import (
    e4m3_bytes,
    e4m3_values,
    elements,
    launch,
    power_of_two,
    side_constants,
    side_layout,
)

SLOT_REGIONS = ("k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero", "score", "pos")
TILE = 2048  # entries of a program's tile


@triton.jit
def _slot_values(
    base, slot, channel, mask, KEYS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, OFF: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    GROUPS: tl.constexpr, CHANNEL: tl.constexpr, CODE: tl.constexpr, ELEM: tl.constexpr,
):  # fmt: skip
    """Channels of single slots, fp32, in the broadcast shape of `base`, `slot` and `channel`; 0 where masked.

    A code times its fp16 scale is exact in fp32, so nothing depends on whether the zero is added in the same step.
    """
    if BITS >= 16:
        if KEYS:
            cell = channel * T + slot
        else:
            cell = slot * D + channel
        return tl.load((base + OFF).to(tl.pointer_type(ELEM)) + cell, mask=mask, other=0.0).to(tl.float32)
    else:
        if KEYS:
            cell = (channel % W) * T + slot
        else:
            cell = slot * (W * 3 if BITS == 3 else W) + channel % W
        raw = load_codes(base + OFF + cell, T if KEYS else 1, mask, W, BITS)
        if BITS == 0:
            if CODE == 0:
                return e4m3_values(raw)
            else:
                return e4m3_values(raw) * scales(base, (channel // (D // GROUPS)) * T + slot, mask, SCALE, CODE)
        else:
            codes = plane_codes(raw.to(tl.int32), channel // W, BITS)
            if CHANNEL > 0:
                index = (slot // CHANNEL) * D + channel
            else:
                index = (channel // (D // GROUPS)) * T + slot
            scale, zero = metadata(base, index, mask, SCALE, ZERO, BITS, CODE)
            return level_values(codes, BITS, CODE, tl.float32) * scale + zero


@triton.jit
def _write_side(
    x, pages, source_page, source_slot, page, slot, count, page_bytes,
    BM: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, META_FIRST: tl.constexpr,
    FROM: tl.constexpr,
    BITS: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, OFF: tl.constexpr, SCALE: tl.constexpr,
    ZERO: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, CODE: tl.constexpr, ELEM: tl.constexpr,
    S_T: tl.constexpr, S_BITS: tl.constexpr, S_P: tl.constexpr, S_W: tl.constexpr, S_WP: tl.constexpr,
    S_OFF: tl.constexpr, S_SCALE: tl.constexpr, S_ZERO: tl.constexpr, S_GROUPS: tl.constexpr, S_CHANNEL: tl.constexpr,
    S_CODE: tl.constexpr, S_ELEM: tl.constexpr,
):  # fmt: skip
    """Encodes one side of BM slots whose scales are their own: from dense vectors (FROM = 0), from slots of another
    format (1), or from the rows of x that `source_page` names (2)."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    target = tl.load(page + row, mask=row < count, other=-1).to(tl.int64)
    live = target >= 0
    at = tl.load(slot + row, mask=row < count, other=0).to(tl.int32)
    base = (pages + target * page_bytes)[:, None, None]
    plane, w = tl.arange(0, P), tl.arange(0, WP)
    channel = (plane[:, None] * W + w[None, :])[None, :, :]
    real = live[:, None, None] & (w < W)[None, None, :]
    if FROM == 1:
        origin = tl.load(source_page + row, mask=row < count, other=0).to(tl.int64)
        there = tl.load(source_slot + row, mask=row < count, other=0).to(tl.int32)
        values = _slot_values(
            (pages + origin * page_bytes)[:, None, None], there[:, None, None], channel, real, KEYS, D, S_T, S_BITS,
            S_P, S_W, S_WP, S_OFF, S_SCALE, S_ZERO, S_GROUPS, S_CHANNEL, S_CODE, S_ELEM,
        )  # fmt: skip
    else:
        where = row
        if FROM == 2:
            where = tl.load(source_page + row, mask=row < count, other=0).to(tl.int64)
        values = tl.load(x + where[:, None, None] * D + channel, mask=real, other=0.0).to(tl.float32)
    if KEYS:
        step, stride = T, 1
    else:
        step, stride = 1, (W * 3 if BITS == 3 else W)
    cell = at[:, None, None] * stride + w[None, None, :] * step
    if BITS >= 16:
        tl.store((base + OFF).to(tl.pointer_type(ELEM)) + cell, elements(values, ELEM), mask=real)
    elif BITS == 0 and CODE == 0:
        tl.store(base + OFF + cell, e4m3_bytes(values), mask=real)
    elif BITS == 0 or CODE > 1:
        codes = tl.zeros_like(values).to(tl.int32)
        for r in range(GROUPS):
            mine = ((channel // (D // GROUPS)) == r) & real
            its_codes, its_scale = encode_group(values, mine, D // GROUPS, BITS, CODE)
            store_scale(pages + target * page_bytes, r * T + at, its_scale, live, SCALE, CODE)
            codes = tl.where(mine, its_codes, codes)
        if BITS == 0:
            tl.store(base + OFF + cell, codes.to(tl.uint8), mask=real)
        else:
            place = (pages + target * page_bytes)[:, None] + OFF + at[:, None] * stride + w[None, :] * step
            store_codes(place, codes, plane, step, live[:, None] & (w < W)[None, :], W, BITS)
    else:
        flat = base + tl.zeros([BM, 1, 1], tl.int32)
        if CODE:
            below, above = values, tl.abs(values)
        else:
            below, above = values, values
        scale, zero = tl.zeros_like(values), tl.zeros_like(values)
        for r in range(GROUPS):
            mine = ((channel // (D // GROUPS)) == r) & real
            low = tl.min(tl.min(tl.where(mine, below, float("inf")), 2), 1)
            high = tl.max(tl.max(tl.where(mine, above, float("-inf")), 2), 1)
            its_scale, its_zero = scale_of(
                tl.where(live, low, 0.0)[:, None, None], tl.where(live, high, 0.0)[:, None, None], BITS, CODE
            )
            store_metadata(flat, r * T + at[:, None, None], its_scale, its_zero, live[:, None, None], SCALE, ZERO, CODE)
            scale, zero = tl.where(mine, its_scale, scale), tl.where(mine, its_zero, zero)
        codes = codes_of(values, scale, zero, BITS, CODE, META_FIRST)
        place = (pages + target * page_bytes)[:, None] + OFF + at[:, None] * stride + w[None, :] * step
        store_codes(place, codes, plane, step, live[:, None] & (w < W)[None, :], W, BITS)


@triton.jit
def _write_key_groups(
    x, place, pages, page, slot, page_bytes, D: tl.constexpr, T: tl.constexpr, GT: tl.constexpr, BW: tl.constexpr,
    NAMED: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, OFF: tl.constexpr,
    SCALE: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, CODE: tl.constexpr,
    ELEM: tl.constexpr,
):  # fmt: skip
    """Encodes the keys of one group of tokens with one scale per channel, BW bytes of every slot; NAMED: from the rows
    of x that `place` names."""
    first = tl.program_id(0).to(tl.int64) * CHANNEL
    target = tl.load(page + first).to(tl.int64)
    start = tl.load(slot + first).to(tl.int32)
    i, plane = tl.arange(0, GT), tl.arange(0, P)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    width, tokens = tl.where(target >= 0, W, 0), tl.where(target >= 0, CHANNEL, 0)
    base = pages + target * page_bytes
    channel = plane[:, None] * W + w[None, :]
    real = (i < tokens)[:, None, None] & (w < W)[None, None, :]
    where = first + i
    if NAMED:
        where = tl.load(place + where, mask=i < tokens, other=0).to(tl.int64)
    values = tl.load(x + where[:, None, None] * D + channel[None, :, :], mask=real, other=0.0).to(tl.float32)
    low = tl.min(tl.where(real, values, float("inf")), 0)
    if CODE:
        high = tl.max(tl.where(real, tl.abs(values), float("-inf")), 0)
    else:
        high = tl.max(tl.where(real, values, float("-inf")), 0)
    held = (w < width)[None, :] & (plane >= 0)[:, None]
    scale, zero = scale_of(tl.where(held, low, 0.0), tl.where(held, high, 0.0), BITS, CODE)
    store_metadata(base, (start // CHANNEL) * D + channel, scale, zero, held, SCALE, ZERO, CODE)
    grown = tl.zeros_like(values)
    codes = codes_of(values, grown + scale[None, :, :], grown + zero[None, :, :], BITS, CODE, True)
    put = base + OFF + w[None, :] * T + (start + i)[:, None]
    store_codes(put, codes, plane, T, (i < tokens)[:, None] & (w < W)[None, :], W, BITS)


@triton.jit
def _move_bytes(
    pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes,
    BM: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Copies bytes of BM slots; byte j of slot i lies at map[j, 0] + i * map[j, 1] in its page."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BB + tl.arange(0, BB)
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
    place = (
        tl.load(target_map + 2 * j, mask=wanted, other=0)[None, :]
        + at[:, None] * tl.load(target_map + 2 * j + 1, mask=wanted, other=0)[None, :]
    )
    moved = tl.load(pages + origin[:, None] * page_bytes + source, mask=mask, other=0)
    tl.store(pages + target[:, None] * page_bytes + place, moved, mask=mask)


def write_keys(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
    """Encodes keys [M, D] and writes them to their slots; the bytes are the reference's, to the last one.

    Args:
        page: int64 or int32 [M] page ids; below 0 = nothing is written (with per-channel keys: by the first of a
            group).
        slot: [M] slots within the page.
        k: [M, D], any float dtype.
    """
    checks.write(pages, fmt, page, slot, k, keys=True)
    write_part("k", pages, fmt, page, slot, k)


def write_part(
    name: str, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, place: Tensor | None = None
) -> None:
    """Encodes one side (`k` or `v`) of slots from the rows of x [.., D], or from those that `place` int64 [M] names."""
    if name == "v" or not fmt.slot.channel_keys:
        _write(name, pages, fmt, page, slot, x, place=place)
        return
    side = side_layout(fmt, "k", least=1)
    group, num_bytes = fmt.slot.k_channel_group, side.W
    tokens = power_of_two(group)
    width = min(power_of_two(num_bytes), power_of_two(max(1, 2 * TILE // (tokens * side.P))))
    launch(
        _write_key_groups, (page.numel() // group, -(-num_bytes // width)), x.contiguous(),
        page if place is None else place, pages, page.contiguous(), slot.contiguous(), pages.shape[1],
        D=fmt.slot.head_dim, T=fmt.tokens_per_page, GT=tokens, BW=width, NAMED=place is not None,
        **side_constants(fmt, "k", least=1), enable_fp_fusion=False,
    )  # fmt: skip


def write_values(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
    """Encodes values [M, D] and writes them to their slots; arguments as in `write_keys`, any slots."""
    checks.write(pages, fmt, page, slot, v, keys=False)
    write_part("v", pages, fmt, page, slot, v)


def slots_per_program(fmt: PageFormat, side: str) -> int:
    """Slots that one program of `_write_side` encodes."""
    layout = side_layout(fmt, side, least=1)
    return min(64, max(1, TILE // (layout.P * layout.WP)))


def _write(
    side: str, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor | None,
    source: tuple[PageFormat, Tensor, Tensor] | None = None, place: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches `_write_side` from dense vectors, from (format, pages, slots), or from the rows named by `place`."""
    rows = slots_per_program(fmt, side)
    page, slot, count = page.contiguous(), slot.contiguous(), page.numel()
    origin, from_page, from_slot = source if source is not None else (fmt, page if place is None else place, slot)
    launch(
        _write_side, (-(-count // rows),), pages if x is None else x.contiguous(), pages,
        from_page.contiguous(), from_slot.contiguous(), page, slot, count, pages.shape[1], BM=rows,
        KEYS=side == "k", D=fmt.slot.head_dim, T=fmt.tokens_per_page, META_FIRST=fmt.slot.channel_keys,
        FROM=1 if source is not None else 2 if place is not None else 0, S_T=origin.tokens_per_page,
        **side_constants(fmt, side, least=1), **side_constants(origin, side, "S_", least=1),
        enable_fp_fusion=False,  # a product that is rounded only with the sum behind it can round a code the other way
    )  # fmt: skip


def demote(
    pages: Tensor, source: PageFormat, target: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor,
    dst_slot: Tensor,
) -> None:  # fmt: skip
    """Re-quantises slots into another format, score and position included, without a dense copy in between.

    Args:
        source: Format of the slots read; target: of those written.
        src_page, src_slot, dst_page, dst_slot: [M]; entries with a target page below 0 are passed over. No target slot
            is also a source.

    Raises:
        ValueError: The target's keys share scales over tokens, or the formats track different fields.

    Source: DiffKV (tokens go down a tier as they are quantised, not from the original vectors).
    """
    if target.slot.channel_keys:
        raise ValueError(
            f"slots cannot be demoted into per-channel keys (group {target.slot.k_channel_group}) one by one; give the "
            "lower tier k_axis=token"
        )
    if source.slot.track != target.slot.track:
        raise ValueError(
            f"the tiers track {source.slot.track} and {target.slot.track}; demotion needs the same fields in both"
        )
    checks.slots(pages, source, src_page, src_slot)
    checks.slots(pages, target, dst_page, dst_slot)
    for side in "kv":
        _write(side, pages, target, dst_page, dst_slot, None, (source, src_page, src_slot))
    if source.slot.track:
        maps = [byte_map(fmt, ("score", "pos"), pages.device) for fmt in (source, target)]
        _move(pages, src_page, src_slot, dst_page, dst_slot, *maps)


def move_slots(
    pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
) -> None:
    """Copies the bytes of slots as they are; sources and targets must not overlap.

    Raises:
        ValueError: See `checks.movable`.
    """
    checks.move(pages, fmt, src_page, src_slot, dst_page, dst_slot)
    table = byte_map(fmt, SLOT_REGIONS, pages.device)
    _move(pages, src_page, src_slot, dst_page, dst_slot, table, table)


def _move(
    pages: Tensor, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor, source: Tensor,
    target: Tensor,
) -> None:  # fmt: skip
    """Launches `_move_bytes`."""
    count, width = dst_page.numel(), min(64, power_of_two(len(source)))
    rows = TILE // 2 // width
    launch(
        _move_bytes, (-(-count // rows), -(-len(source) // width)), pages, src_page.contiguous(),
        src_slot.contiguous(), dst_page.contiguous(), dst_slot.contiguous(), source, target, count, len(source),
        pages.shape[1], BM=rows, BB=width,
    )  # fmt: skip


@cache
def byte_map(fmt: PageFormat, names: tuple[str, ...], device: torch.device) -> Tensor:
    """Where the bytes of a slot lie: int32 [bytes, 2], byte j of slot i at first[j] + i * step[j] within its page.

    Args:
        fmt: A format whose slots stand alone (no per-channel keys).
        names: Which of `SLOT_REGIONS`.
        device: Where the table is wanted.
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
        unit = 2  # of zeros and most scales
        if name == "k_codes":
            unit = slot.dtype.itemsize if slot.k_bits >= 16 else 1
        elif name.endswith("scale"):
            code = slot.keys if name == "k_scale" else slot.values
            unit = SCALE_BYTES[code.scale] if code is not None else unit
        row = fmt.tokens_per_page * unit  # all slots' first element, then all slots' second, ..
        table += [(offset + j // unit * row + j % unit, unit) for j in range(per_slot)]
    return torch.tensor(table, dtype=torch.int32, device=device)
