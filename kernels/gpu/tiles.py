"""GPU backend: the tiles of decode attention, as functions that kernels call on the device.

Codes of a plane are dequantised by operations on single elements alone, so that the compiler can load them in the form
that the tensor cores take; putting planes side by side first sends every code through shared memory.
"""

import triton
import triton.language as tl

from kvbench.kernels.gpu.coding import level_values, load_codes, metadata, plane_codes, scales
from kvbench.kernels.gpu.parts import e4m3_values


@triton.jit
def query_planes(
    q, start, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr
):
    """The queries of one list, a tile [GP, WP] per plane of key codes: channels plane * W + w."""
    g, w = tl.arange(0, GP), tl.arange(0, WP)
    asked = (g < G)[:, None] & (w < W)[None, :]
    planes = (tl.load(q + start + g[:, None] * D + w[None, :], mask=asked, other=0.0),)
    for plane in tl.static_range(1, P):
        planes = planes + (tl.load(q + start + g[:, None] * D + (plane * W + w)[None, :], mask=asked, other=0.0),)
    return planes


@triton.jit
def key_logits(
    q, q_sum, base, start, held, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    BITS: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, OFF: tl.constexpr, SCALE: tl.constexpr,
    ZERO: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, CODE: tl.constexpr, ELEM: tl.constexpr,
):  # fmt: skip
    """q . k for BT slots of a page from `start` on, fp32 [GP, BT], the scales folded in after the product.

    Reads whole runs of slots that begin before `held`, because a mask that may change from slot to slot makes every
    load a single byte; the logits of slots from `held` on are anything.
    """
    t = start + tl.arange(0, BT)
    w = tl.arange(0, WP)
    RUN: tl.constexpr = 16 if T % 16 == 0 else 8
    live = ((t // RUN) * RUN < held) & (t < T)
    rows = (w < W)[:, None] & live[None, :]
    if BITS >= 16:
        k = tl.load((base + OFF).to(tl.pointer_type(ELEM)) + w[:, None] * T + t[None, :], mask=rows, other=0.0)
        return tl.dot(q[0].to(OP), k.to(OP), input_precision="ieee")
    elif BITS == 0:
        k = e4m3_values(tl.load(base + OFF + w[:, None] * T + t[None, :], mask=rows, other=0))
        if CODE > 0 and GROUPS > 1:
            k = k * scales(base, (w // (D // GROUPS))[:, None] * T + t[None, :], rows, SCALE, CODE)
        dots = tl.dot(q[0].to(OP), k.to(OP), input_precision="ieee")
        if CODE > 0 and GROUPS == 1:
            dots = dots * scales(base, t, live, SCALE, CODE)[None, :]
        return dots
    else:
        raw = load_codes(base + OFF + w[:, None] * T + t[None, :], T, rows, W, BITS)
        width = tl.where(start < held, W, 0)  # nothing of a group of tokens that was never written
        dots = tl.zeros([q_sum.shape[0], BT], tl.float32)
        constant = tl.zeros_like(q_sum)
        for plane in tl.static_range(P):
            codes = plane_codes(raw, plane, BITS)
            channel = plane * W + w
            if CHANNEL > 0 and CHANNEL % BT == 0:  # the block lies within one group of tokens: scale the query instead
                index = (start // CHANNEL) * D + channel
                scale, zero = metadata(base, index, w < width, SCALE, ZERO, BITS, CODE)
                wide = q[plane].to(tl.float32)
                constant += tl.sum(wide * zero[None, :], 1)
                left, right = (wide * scale[None, :]).to(OP), level_values(codes, BITS, CODE, OP)
            elif CHANNEL > 0 or GROUPS > 1:
                if CHANNEL > 0:
                    index = (t // CHANNEL)[None, :] * D + channel[:, None]
                else:
                    index = (channel // (D // GROUPS))[:, None] * T + t[None, :]
                scale, zero = metadata(base, index, rows, SCALE, ZERO, BITS, CODE)
                left, right = q[plane].to(OP), (level_values(codes, BITS, CODE, tl.float32) * scale + zero).to(OP)
            else:
                left, right = q[plane].to(OP), level_values(codes, BITS, CODE, OP)
            dots += tl.dot(left, right, input_precision="ieee")
        if CHANNEL > 0 or GROUPS > 1:
            return dots + constant[:, None]
        else:
            scale, zero = metadata(base, t, live, SCALE, ZERO, BITS, CODE)
            return dots * scale[None, :] + q_sum[:, None] * zero[None, :]


@triton.jit
def _keys(
    base, channel, wanted, t, live, D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
    OFF: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr,
    CODE: tl.constexpr, ELEM: tl.constexpr,
):  # fmt: skip
    """Keys fp32 [channels, slots], whichever planes the channels lie in; 0 where not wanted or not live."""
    cells = wanted[:, None] & live[None, :]
    if BITS >= 16:
        place = (base + OFF).to(tl.pointer_type(ELEM)) + channel[:, None] * T + t[None, :]
        return tl.load(place, mask=cells, other=0.0).to(tl.float32)
    elif BITS == 0:
        k = e4m3_values(tl.load(base + OFF + channel[:, None] * T + t[None, :], mask=cells, other=0))
        if CODE > 0:
            k = k * scales(base, (channel // (D // GROUPS))[:, None] * T + t[None, :], cells, SCALE, CODE)
        return k
    else:
        raw = load_codes(base + OFF + (channel % W)[:, None] * T + t[None, :], T, cells, W, BITS)
        codes = plane_codes(raw.to(tl.int32), (channel // W)[:, None], BITS)
        if CHANNEL > 0:
            index = (t // CHANNEL)[None, :] * D + channel[:, None]
        else:
            index = (channel // (D // GROUPS))[:, None] * T + t[None, :]
        scale, zero = metadata(base, index, cells, SCALE, ZERO, BITS, CODE)
        return level_values(codes, BITS, CODE, tl.float32) * scale + zero


@triton.jit
def key_angles(
    angles, frequencies, seen, seq, held, token, live, angle_row, HALF: tl.constexpr, HP: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """The angles of the given slots' keys, fp32 [HP, BT]: as they are given (TURN = 1), by their ages, seen from the
    newest of the list's `held` tokens (2), or by their own numbers (3)."""
    h = tl.arange(0, HP)
    turned = h < HALF
    if TURN == 1:
        place = angles + seq * angle_row + token[None, :] * HALF + h[:, None]
        return tl.load(place, mask=turned[:, None] & live[None, :], other=0.0)
    else:
        position = token.to(tl.int64)
        if TURN == 2:
            age = tl.load(angles + seq * angle_row + token, mask=live, other=0)
            position = age + tl.load(seen + seq) - (held - 1)
        return position.to(tl.float32)[None, :] * tl.load(frequencies + h, mask=turned, other=0.0)[:, None]


@triton.jit
def rotated_logits(
    q, at, angle, base, t, live, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, OFF: tl.constexpr,
    SCALE: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, CODE: tl.constexpr,
    ELEM: tl.constexpr,
):  # fmt: skip
    """q . R(angle) k for the live slots of a page, fp32 [GP, BT]; channel i turns with channel i + HALF.

    Keys are dequantised before the product, since a rotation mixes channels whose scales differ. All in fp32: rotated
    values are no codes, and what a 16-bit operand would cut off is what tells positions apart.
    """
    g, h = tl.arange(0, GP), tl.arange(0, HP)
    turned, asked = h < HALF, (g < G)[:, None] & (h < HALF)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    first = _keys(base, h, turned, t, live, D, T, BITS, W, OFF, SCALE, ZERO, GROUPS, CHANNEL, CODE, ELEM)
    second = _keys(base, HALF + h, turned, t, live, D, T, BITS, W, OFF, SCALE, ZERO, GROUPS, CHANNEL, CODE, ELEM)
    left = tl.load(q + at + g[:, None] * D + h[None, :], mask=asked, other=0.0).to(tl.float32)
    right = tl.load(q + at + g[:, None] * D + (HALF + h)[None, :], mask=asked, other=0.0).to(tl.float32)
    dots = tl.dot(left, first * cos - second * sin, input_precision="ieee")
    dots += tl.dot(right, second * cos + first * sin, input_precision="ieee")
    if REST > 0:  # channels without a position
        r = 2 * HALF + tl.arange(0, REST)
        rest = _keys(base, r, r < D, t, live, D, T, BITS, W, OFF, SCALE, ZERO, GROUPS, CHANNEL, CODE, ELEM)
        asked = (g < G)[:, None] & (r < D)[None, :]
        still = tl.load(q + at + g[:, None] * D + r[None, :], mask=asked, other=0.0).to(tl.float32)
        dots += tl.dot(still, rest, input_precision="ieee")
    return dots


@triton.jit
def _scaled_weights(p, scale, zero, OP: tl.constexpr):
    """Weights for codes, the factor that goes back on their sums, and the sum of the zeros.

    In 16 bits codes are exact in fp16; the scales, as shares of the block's largest, keep the weights in its range.
    """
    constant = tl.sum(p * zero[None, :], 1)
    if OP == tl.float32:  # noqa: SIM300
        return p * scale[None, :], 1.0, constant
    else:
        top = tl.maximum(tl.max(tl.abs(scale), 0), 1e-30)
        return (p * (scale / top)[None, :]).to(tl.float16), top, constant


@triton.jit
def _plane_values(
    p, raw, base, t, live, plane: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    BITS: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    GROUPS: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Sum of p[g, t] * v[t] over BT slots for the channels of one plane of value codes, fp32 [GP, WP]."""
    codes = plane_codes(raw, plane, BITS)
    SIZE: tl.constexpr = D // GROUPS  # channels per scale
    EXACT: tl.constexpr = tl.float32 if OP == tl.float32 else tl.float16  # noqa: SIM300
    if SIZE % W == 0:  # one scale per slot serves the whole plane
        scale, zero = metadata(base, (plane * W // SIZE) * T + t, live, SCALE, ZERO, BITS, CODE)
        weight, factor, constant = _scaled_weights(p, scale, zero, OP)
        return (
            tl.dot(weight, level_values(codes, BITS, CODE, EXACT), input_precision="ieee") * factor + constant[:, None]
        )
    elif W == WP and W % SIZE == 0 and (SIZE & (SIZE - 1)) == 0:  # one load per group, not per channel
        r = plane * (W // SIZE) + tl.arange(0, W // SIZE)
        scale, zero = metadata(base, r[None, :] * T + t[:, None], live[:, None], SCALE, ZERO, BITS, CODE)
        grouped = tl.reshape(level_values(codes, BITS, CODE, tl.float32), [BT, W // SIZE, SIZE])
        v = tl.reshape(grouped * scale[:, :, None] + zero[:, :, None], [BT, WP])
        return tl.dot(p.to(OP), v.to(OP), input_precision="ieee")
    else:
        w = tl.arange(0, WP)
        index = ((plane * W + w) // SIZE)[None, :] * T + t[:, None]
        scale, zero = metadata(base, index, live[:, None] & (w < W)[None, :], SCALE, ZERO, BITS, CODE)
        v = level_values(codes, BITS, CODE, tl.float32) * scale + zero
        return tl.dot(p.to(OP), v.to(OP), input_precision="ieee")


@triton.jit
def add_values(
    acc, shrink, p, base, t, live, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    BITS: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, OFF: tl.constexpr, SCALE: tl.constexpr,
    ZERO: tl.constexpr, GROUPS: tl.constexpr, CODE: tl.constexpr, ELEM: tl.constexpr,
):  # fmt: skip
    """The sums so far, shrunk, with p[g, t] * v[t] of BT slots of a page added: a tile fp32 [GP, WP] per plane."""
    w = tl.arange(0, WP)
    cells = live[:, None] & (w < W)[None, :]
    S: tl.constexpr = W * 3 if BITS == 3 else W  # bytes of a slot
    EXACT: tl.constexpr = tl.float32 if OP == tl.float32 else tl.float16  # noqa: SIM300
    if BITS >= 16:
        v = tl.load((base + OFF).to(tl.pointer_type(ELEM)) + t[:, None] * W + w[None, :], mask=cells, other=0.0)
        return (acc[0] * shrink[:, None] + tl.dot(p.to(OP), v.to(OP), input_precision="ieee"),)
    elif BITS == 0:
        raw = tl.load(base + OFF + t[:, None] * W + w[None, :], mask=cells, other=0)
        v = e4m3_values(raw)
        if CODE > 0 and GROUPS == 1:
            scale = scales(base, t, live, SCALE, CODE)
            weight, factor, constant = _scaled_weights(p, scale, scale * 0.0, OP)
            sums = tl.dot(weight, v.to(EXACT), input_precision="ieee") * factor
            return (acc[0] * shrink[:, None] + sums,)
        else:
            if CODE > 0:
                v = v * scales(base, (w // (D // GROUPS))[None, :] * T + t[:, None], cells, SCALE, CODE)
            return (acc[0] * shrink[:, None] + tl.dot(p.to(OP), v.to(OP), input_precision="ieee"),)
    elif GROUPS == 1 and P > 1:  # the same weights for all planes
        raw = load_codes(base + OFF + t[:, None] * S + w[None, :], 1, cells, W, BITS)
        scale, zero = metadata(base, t, live, SCALE, ZERO, BITS, CODE)
        weight, factor, constant = _scaled_weights(p, scale, zero, OP)
        sums = tl.dot(weight, level_values(plane_codes(raw, 0, BITS), BITS, CODE, EXACT), input_precision="ieee")
        out = (acc[0] * shrink[:, None] + sums * factor + constant[:, None],)
        for plane in tl.static_range(1, P):
            codes = plane_codes(raw, plane, BITS)
            sums = tl.dot(weight, level_values(codes, BITS, CODE, EXACT), input_precision="ieee")
            out = out + (acc[plane] * shrink[:, None] + sums * factor + constant[:, None],)
        return out
    else:
        raw = load_codes(base + OFF + t[:, None] * S + w[None, :], 1, cells, W, BITS)
        sums = _plane_values(p, raw, base, t, live, 0, D, T, BT, OP, BITS, W, WP, SCALE, ZERO, GROUPS, CODE)
        out = (acc[0] * shrink[:, None] + sums,)
        for plane in tl.static_range(1, P):
            sums = _plane_values(p, raw, base, t, live, plane, D, T, BT, OP, BITS, W, WP, SCALE, ZERO, GROUPS, CODE)
            out = out + (acc[plane] * shrink[:, None] + sums,)
        return out


@triton.jit
def _ring_tile(ring, start, token, live, plane: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
               WP: tl.constexpr):  # fmt: skip
    """Rows of a residual buffer for the given tokens, the channels of one plane, [BT, WP]; 0 where not live."""
    w = tl.arange(0, WP)
    mask = live[:, None] & (w < W)[None, :]
    return tl.load(ring + start + (token % LENGTH)[:, None] * D + (plane * W + w)[None, :], mask=mask, other=0.0)


@triton.jit
def ring_logits(
    q, ring, start, token, live, GP: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, LENGTH: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """q . k for tokens in a residual buffer, fp32 [GP, BT]."""
    dots = tl.zeros([GP, BT], tl.float32)
    for plane in tl.static_range(P):
        key = _ring_tile(ring, start, token, live, plane, LENGTH, D, W, WP)
        dots += tl.dot(q[plane].to(OP), tl.trans(key).to(OP), input_precision="ieee")
    return dots


@triton.jit
def add_ring_values(
    acc, p, ring, start, token, live, OP: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """The sums so far with the values of tokens in a residual buffer added."""
    weight = tl.where(live[None, :], p, 0.0).to(OP)
    value = _ring_tile(ring, start, token, live, 0, LENGTH, D, W, WP).to(OP)
    out = (acc[0] + tl.dot(weight, value, input_precision="ieee"),)
    for plane in tl.static_range(1, P):
        value = _ring_tile(ring, start, token, live, plane, LENGTH, D, W, WP).to(OP)
        out = out + (acc[plane] + tl.dot(weight, value, input_precision="ieee"),)
    return out


@triton.jit
def sum_channels(planes, P: tl.constexpr):
    """Sum over the channels of all planes, fp32 [GP]."""
    total = tl.sum(planes[0].to(tl.float32), 1)
    for plane in tl.static_range(1, P):
        total += tl.sum(planes[plane].to(tl.float32), 1)
    return total


@triton.jit
def zero_planes(P: tl.constexpr, GP: tl.constexpr, WP: tl.constexpr):
    """A tile of zeros per plane."""
    planes = (tl.zeros([GP, WP], tl.float32),)
    for _ in tl.static_range(1, P):
        planes = planes + (tl.zeros([GP, WP], tl.float32),)
    return planes
