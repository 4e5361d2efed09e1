"""GPU backend: the tiles of decode attention, as functions that kernels call on the device.

Keys and values are the left sides of the products, and the queries of a group the right one, of which tensor cores
take eight at a time: a tile has no more columns than that for most models. Codes of a plane are dequantised by
operations on single elements alone; putting planes side by side first sends every code through shared memory.
"""

import triton
import triton.language as tl

from kvbench.kernels.gpu.coding import (
    NVFP4,
    float8_levels,
    level_values,
    load_codes,
    metadata,
    plane_codes,
    plane_levels,
    scales,
)
from kvbench.kernels.gpu.parts import float8_values


@triton.jit
def query_planes(q, start, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr):
    """The queries of one list, a tile [WP, GP] per plane of key codes: channels plane * W + w."""
    g, w = tl.arange(0, GP), tl.arange(0, SIDE.WP)
    mask = (w < SIDE.W)[:, None] & (g < G)[None, :]
    planes = (tl.load(q + start + g[None, :] * D + w[:, None], mask=mask, other=0.0),)
    P: tl.constexpr = SIDE.P
    for plane in tl.static_range(1, P):
        planes = planes + (tl.load(q + start + g[None, :] * D + (plane * SIDE.W + w)[:, None], mask=mask, other=0.0),)
    return planes


@triton.jit
def scaled_query(planes, SIDE: tl.constexpr):
    """Queries whose products are with codes, as fp16: over a power of two, [GP], which keeps bf16 in its range."""
    P: tl.constexpr = SIDE.P
    top = tl.max(tl.abs(planes[0].to(tl.float32)), 0)
    for plane in tl.static_range(1, P):
        top = tl.maximum(top, tl.max(tl.abs(planes[plane].to(tl.float32)), 0))
    power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where((power > 0) & (power < float("inf")), power, 1.0)
    scaled = ((planes[0].to(tl.float32) / power[None, :]).to(tl.float16),)
    for plane in tl.static_range(1, P):
        scaled = scaled + ((planes[plane].to(tl.float32) / power[None, :]).to(tl.float16),)
    return scaled, power


@triton.jit
def _live_runs(t, held, T: tl.constexpr):
    """Mask of whole runs of slots that begin before `held`.

    A mask that may change from slot to slot makes every load a single byte.
    """
    RUN: tl.constexpr = 16 if T % 16 == 0 else 8
    return ((t // RUN) * RUN < held) & (t < T)


@triton.jit
def _key_scales(
    base, start, t, w, live, width, plane: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Scale and zero of the keys in one plane of a block: per channel, per slot and channel, or per slot."""
    channel = plane * SIDE.W + w
    cells = live[:, None] & (w < SIDE.W)[None, :]
    if SIDE.CHANNEL > 0 and SIDE.CHANNEL % BT == 0:  # the block lies within one group of tokens
        return metadata(base, (start // SIDE.CHANNEL) * D + channel, w < width, SIDE)
    elif SIDE.CHANNEL > 0:
        return metadata(base, (t // SIDE.CHANNEL)[:, None] * D + channel[None, :], cells, SIDE)
    elif SIDE.GROUPS > 1:
        return metadata(base, (channel // (D // SIDE.GROUPS))[None, :] * T + t[:, None], cells, SIDE)
    else:
        return metadata(base, t, live, SIDE)


@triton.jit
def key_metadata(base, start, held, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SIDE: tl.constexpr):
    """Scales and zeros of a block's keys, (scale, zero) plane after plane, or of the block where a slot has one scale.

    They are loaded before the block's first product: 2 bytes each cannot be loaded ahead by the pipeline, and after a
    product's barriers each would be waited for by itself.
    """
    t, w = start + tl.arange(0, BT), tl.arange(0, SIDE.WP)
    live = _live_runs(t, held, T)
    width = tl.where(start < held, SIDE.W, 0)  # nothing of a group of tokens that was never written
    if SIDE.BITS >= 16 or (SIDE.BITS == 0 and SIDE.CODE <= 0):
        return (t,)  # elements and plain floats have none
    else:
        scales = _key_scales(base, start, t, w, live, width, 0, D, T, BT, SIDE)
        if SIDE.CHANNEL > 0 or SIDE.GROUPS > 1:
            P: tl.constexpr = SIDE.P
            for plane in tl.static_range(1, P):
                scales = scales + _key_scales(base, start, t, w, live, width, plane, D, T, BT, SIDE)
        return scales


@triton.jit
def _value_scales(base, t, live, plane: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    """Scale and zero of the values in one plane: per slot, per group and slot, or per channel and slot."""
    SIZE: tl.constexpr = D // SIDE.GROUPS  # channels per scale
    if SIZE % SIDE.W == 0:  # one scale per slot serves the whole plane
        return metadata(base, (plane * SIDE.W // SIZE) * T + t, live, SIDE)
    elif SIDE.BITS > 0 and SIDE.W == SIDE.WP and SIDE.W % SIZE == 0 and (SIZE & (SIZE - 1)) == 0:  # one per group
        r = plane * (SIDE.W // SIZE) + tl.arange(0, SIDE.W // SIZE)
        return metadata(base, r[:, None] * T + t[None, :], live[None, :], SIDE)
    else:
        w = tl.arange(0, SIDE.WP)
        index = ((plane * SIDE.W + w) // SIZE)[:, None] * T + t[None, :]
        return metadata(base, index, (w < SIDE.W)[:, None] & live[None, :], SIDE)


@triton.jit
def value_metadata(base, t, live, D: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    """Scales and zeros of a block's values, plane after plane, loaded as `key_metadata` does."""
    if SIDE.BITS >= 16 or (SIDE.BITS == 0 and SIDE.CODE <= 0):
        return (t,)
    else:
        scales = _value_scales(base, t, live, 0, D, T, SIDE)
        P: tl.constexpr = SIDE.P
        for plane in tl.static_range(1, P):
            scales = scales + _value_scales(base, t, live, plane, D, T, SIDE)
        return scales


@triton.jit
def key_logits(
    q, q_sum, base, start, held, meta, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Products k . q for BT slots of a page from `start` on, fp32 [BT, GP], with slot scales folded in.

    `meta` is as loaded by `key_metadata`. The logits of slots from `held` on are arbitrary.
    """
    t = start + tl.arange(0, BT)
    w = tl.arange(0, SIDE.WP)
    live = _live_runs(t, held, T)
    cells = live[:, None] & (w < SIDE.W)[None, :]
    EXACT: tl.constexpr = tl.float32 if OP == tl.float32 else tl.float16  # noqa: SIM300 - in which codes are exact
    if SIDE.BITS >= 16:
        k = tl.load(
            (base + SIDE.OFF).to(tl.pointer_type(SIDE.ELEM)) + w[None, :] * T + t[:, None], mask=cells, other=0.0
        )
        return tl.dot(k.to(OP), q[0].to(OP), input_precision="ieee")
    elif SIDE.BITS == 0:
        k = float8_levels(tl.load(base + SIDE.OFF + w[None, :] * T + t[:, None], mask=cells, other=0), SIDE, EXACT)
        if SIDE.CODE > 0 and SIDE.GROUPS > 1:
            k = k * meta[0].to(EXACT)
        dots = tl.dot(k, q[0].to(EXACT), input_precision="ieee")
        if SIDE.CODE > 0 and SIDE.GROUPS == 1:
            dots = dots * meta[0][:, None]
        return dots
    else:
        raw = load_codes(base + SIDE.OFF + w[None, :] * T + t[:, None], T, cells, SIDE)
        KIND: tl.constexpr = EXACT if SIDE.CODE < NVFP4 else tl.float32  # a power of two may be no fp16
        P: tl.constexpr = SIDE.P
        dots = tl.zeros([BT, q_sum.shape[0]], tl.float32)
        for plane in tl.static_range(P):
            if SIDE.CHANNEL > 0 or SIDE.GROUPS > 1:
                scale, zero = meta[2 * plane], meta[2 * plane + 1]
                if SIDE.CHANNEL > 0 and SIDE.CHANNEL % BT == 0:  # the block lies within one group of tokens
                    scale, zero = scale[None, :], zero[None, :]
                k = (plane_levels(raw, plane, SIDE, KIND) * scale.to(KIND) + zero.to(KIND)).to(EXACT)
            else:
                k = plane_levels(raw, plane, SIDE, EXACT)
            dots = tl.dot(k, q[plane].to(EXACT), dots, input_precision="ieee")
        if SIDE.CHANNEL > 0 or SIDE.GROUPS > 1:
            return dots
        else:
            return dots * meta[0][:, None] + q_sum[None, :] * meta[1][:, None]


@triton.jit
def _keys(base, channel, wanted, t, live, D: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    """Keys fp32 [slots, channels], whichever planes the channels lie in; 0 where not wanted or not live."""
    cells = live[:, None] & wanted[None, :]
    if SIDE.BITS >= 16:
        address = (base + SIDE.OFF).to(tl.pointer_type(SIDE.ELEM)) + channel[None, :] * T + t[:, None]
        return tl.load(address, mask=cells, other=0.0).to(tl.float32)
    elif SIDE.BITS == 0:
        k = float8_values(tl.load(base + SIDE.OFF + channel[None, :] * T + t[:, None], mask=cells, other=0), SIDE.CODE)
        if SIDE.CODE > 0:
            k = k * scales(base, (channel // (D // SIDE.GROUPS))[None, :] * T + t[:, None], cells, SIDE)
        return k
    else:
        raw = load_codes(base + SIDE.OFF + (channel % SIDE.W)[None, :] * T + t[:, None], T, cells, SIDE)
        codes = plane_codes(raw.to(tl.int64 if SIDE.BITS == 5 else tl.int32), (channel // SIDE.W)[None, :], SIDE)
        if SIDE.CHANNEL > 0:
            index = (t // SIDE.CHANNEL)[:, None] * D + channel[None, :]
        else:
            index = (channel // (D // SIDE.GROUPS))[None, :] * T + t[:, None]
        scale, zero = metadata(base, index, cells, SIDE)
        return level_values(codes, SIDE, tl.float32) * scale + zero


@triton.jit
def key_angles(
    angles, frequencies, seen, seq, held, token, live, angle_row, HALF: tl.constexpr, HP: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Angles of the slots' keys, fp32 [BT, HP], by TURN.

    Stored (1), by age, relative to the newest of the list's `held` tokens (2), or by slot number (3).
    """
    h = tl.arange(0, HP)
    mask = h < HALF
    if TURN == 1:
        address = angles + seq * angle_row + token[:, None] * HALF + h[None, :]
        return tl.load(address, mask=live[:, None] & mask[None, :], other=0.0)
    else:
        position = token.to(tl.int64)
        if TURN == 2:
            age = tl.load(angles + seq * angle_row + token, mask=live, other=0)
            position = age + tl.load(seen + seq) - (held - 1)
        return position.to(tl.float32)[:, None] * tl.load(frequencies + h, mask=mask, other=0.0)[None, :]


@triton.jit
def rotated_logits(
    q, at, angle, base, t, live, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """R(angle) k . q for the live slots of a page, fp32 [BT, GP]; channel i turns with channel i + HALF.

    Keys are dequantised before the product, since a rotation mixes channels whose scales differ. All in fp32: rotated
    values are no codes, and a 16-bit operand would round away the difference of neighbouring positions.
    """
    g, h = tl.arange(0, GP), tl.arange(0, HP)
    rotated, mask = h < HALF, (h < HALF)[:, None] & (g < G)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    first = _keys(base, h, rotated, t, live, D, T, SIDE)
    second = _keys(base, HALF + h, rotated, t, live, D, T, SIDE)
    upper = tl.load(q + at + g[None, :] * D + h[:, None], mask=mask, other=0.0).to(tl.float32)
    lower = tl.load(q + at + g[None, :] * D + (HALF + h)[:, None], mask=mask, other=0.0).to(tl.float32)
    dots = tl.dot(first * cos - second * sin, upper, input_precision="ieee")
    dots = tl.dot(second * cos + first * sin, lower, dots, input_precision="ieee")
    if REST > 0:  # channels without a position
        r = 2 * HALF + tl.arange(0, REST)
        rest = _keys(base, r, r < D, t, live, D, T, SIDE)
        mask = (r < D)[:, None] & (g < G)[None, :]
        still = tl.load(q + at + g[None, :] * D + r[:, None], mask=mask, other=0.0).to(tl.float32)
        dots = tl.dot(rest, still, dots, input_precision="ieee")
    return dots


@triton.jit
def _plane_values(
    raw, meta, plane: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, SIDE: tl.constexpr
):
    """The values of BT slots in the channels of one plane of codes, [WP, BT] in the type of the products' operands.

    Where that is fp16, codes are exact in it and scales are stored in it: a value is rounded once.
    """
    SIZE: tl.constexpr = D // SIDE.GROUPS  # channels per scale
    KIND: tl.constexpr = OP if SIDE.CODE < NVFP4 else tl.float32  # a scale that is a power of two may exceed fp16
    WP: tl.constexpr = SIDE.WP
    codes, scale, zero = plane_levels(raw, plane, SIDE, KIND), meta[2 * plane], meta[2 * plane + 1]
    if SIZE % SIDE.W == 0:  # one scale per slot serves the whole plane
        return (codes * scale.to(KIND)[None, :] + zero.to(KIND)[None, :]).to(OP)
    elif SIDE.W == SIDE.WP and SIDE.W % SIZE == 0 and (SIZE & (SIZE - 1)) == 0:  # one load per group, not per channel
        SCALES: tl.constexpr = SIDE.W // SIZE
        grouped = tl.reshape(codes, [SCALES, SIZE, BT])
        return tl.reshape(grouped * scale.to(KIND)[:, None, :] + zero.to(KIND)[:, None, :], [WP, BT]).to(OP)
    else:
        return (codes * scale.to(KIND) + zero.to(KIND)).to(OP)


@triton.jit
def add_values(
    acc, shrink, p, base, t, live, meta, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """The sums so far, shrunk, with v[t] * p[t, g] of BT slots of a page added: a tile fp32 [WP, GP] per plane."""
    w = tl.arange(0, SIDE.WP)
    cells = (w < SIDE.W)[:, None] & live[None, :]
    P: tl.constexpr = SIDE.P
    EXACT: tl.constexpr = tl.float32 if OP == tl.float32 else tl.float16  # noqa: SIM300
    if SIDE.BITS >= 16:
        v = tl.load(
            (base + SIDE.OFF).to(tl.pointer_type(SIDE.ELEM)) + t[None, :] * SIDE.W + w[:, None], mask=cells, other=0.0
        )
        return (tl.dot(v.to(OP), p.to(OP), acc[0] * shrink[None, :], input_precision="ieee"),)
    elif SIDE.BITS == 0:
        v = float8_levels(tl.load(base + SIDE.OFF + t[None, :] * SIDE.W + w[:, None], mask=cells, other=0), SIDE, EXACT)
        if SIDE.CODE > 0 and SIDE.GROUPS == 1:
            v = v * meta[0].to(EXACT)[None, :]
        elif SIDE.CODE > 0:
            v = v * meta[0].to(EXACT)
        return (tl.dot(v, p.to(EXACT), acc[0] * shrink[None, :], input_precision="ieee"),)
    else:
        raw = load_codes(base + SIDE.OFF + t[None, :] * SIDE.ROW + w[:, None], 1, cells, SIDE)
        weight = p.to(EXACT)
        v = _plane_values(raw, meta, 0, D, BT, EXACT, SIDE)
        out = (tl.dot(v, weight, acc[0] * shrink[None, :], input_precision="ieee"),)
        for plane in tl.static_range(1, P):
            v = _plane_values(raw, meta, plane, D, BT, EXACT, SIDE)
            out = out + (tl.dot(v, weight, acc[plane] * shrink[None, :], input_precision="ieee"),)
        return out


@triton.jit
def _ring_tile(
    ring, start, token, live, plane: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr
):
    """Rows of a residual buffer for the given tokens, the channels of one plane, [BT, WP]; 0 where not live."""
    w = tl.arange(0, SIDE.WP)
    mask = live[:, None] & (w < SIDE.W)[None, :]
    return tl.load(ring + start + (token % LENGTH)[:, None] * D + (plane * SIDE.W + w)[None, :], mask=mask, other=0.0)


@triton.jit
def ring_logits(
    q, ring, start, token, live, GP: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, LENGTH: tl.constexpr,
    D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Products k . q for tokens in a residual buffer, fp32 [BT, GP]."""
    dots = tl.zeros([BT, GP], tl.float32)
    P: tl.constexpr = SIDE.P
    for plane in tl.static_range(P):
        key = _ring_tile(ring, start, token, live, plane, LENGTH, D, SIDE)
        dots = tl.dot(key.to(OP), q[plane].to(OP), dots, input_precision="ieee")
    return dots


@triton.jit
def add_ring_values(
    acc, p, ring, start, token, live, OP: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The sums so far with the values of tokens in a residual buffer added."""
    weight = tl.where(live[:, None], p, 0.0).to(OP)
    value = tl.trans(_ring_tile(ring, start, token, live, 0, LENGTH, D, SIDE)).to(OP)
    out = (tl.dot(value, weight, acc[0], input_precision="ieee"),)
    P: tl.constexpr = SIDE.P
    for plane in tl.static_range(1, P):
        value = tl.trans(_ring_tile(ring, start, token, live, plane, LENGTH, D, SIDE)).to(OP)
        out = out + (tl.dot(value, weight, acc[plane], input_precision="ieee"),)
    return out


@triton.jit
def sum_channels(planes, SIDE: tl.constexpr):
    """Sum over the channels of all planes, fp32 [GP]."""
    total = tl.sum(planes[0].to(tl.float32), 0)
    P: tl.constexpr = SIDE.P
    for plane in tl.static_range(1, P):
        total += tl.sum(planes[plane].to(tl.float32), 0)
    return total


@triton.jit
def zero_planes(SIDE: tl.constexpr, GP: tl.constexpr):
    """A tile of zeros per plane."""
    P: tl.constexpr = SIDE.P
    WP: tl.constexpr = SIDE.WP  # triton 3.6 takes no attribute in a shape
    planes = (tl.zeros([WP, GP], tl.float32),)
    for _ in tl.static_range(1, P):
        planes = planes + (tl.zeros([WP, GP], tl.float32),)
    return planes
