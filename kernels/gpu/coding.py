"""GPU backend: codes to numbers and back, as functions that kernels call on the device.

`kernels/codes.py` says what codes mean. A kernel knows one by two constants: BITS, 0 for e4m3, and CODE, a number of
`CODES`. Eight codes of 3 bits lie in three bytes, W apart: the lower bits of even planes, those of odd planes, and the
third bits of all.
"""

import triton
import triton.language as tl

from kvbench.kernels.codes import Code, code_of
from kvbench.kernels.gpu.parts import CODES, code_values, e4m3_bytes, e4m3_values, round_even

MIN_MAX, SYMMETRIC, LLOYD, NVFP4 = (tl.constexpr(CODES[name]) for name in ("min_max", "symmetric", "lloyd", "nvfp4"))


def _words(code: Code) -> tuple[int, int]:
    """Magnitudes as bytes of two words of 32 bits."""
    words = [0, 0]
    for i, magnitude in enumerate(code.magnitudes):
        words[i // 4] |= magnitude << (i % 4 * 8)
    return words[0], words[1]


_L2, _L3 = (tl.constexpr(_words(code_of("lloyd", bits))[0]) for bits in (2, 3))
_L4, _L4_HIGH = (tl.constexpr(word) for word in _words(code_of("lloyd", 4)))
_E2M1, _E2M1_HIGH = (tl.constexpr(word) for word in _words(code_of("nvfp4", 4)))
_D2, _D3, _D4 = (tl.constexpr(code_of("lloyd", bits).deviation) for bits in (2, 3, 4))


@triton.jit
def load_codes(place, step, mask, SIDE: tl.constexpr):
    """The bytes of codes from their first ones on, `step` between the bytes of a slot; of 3 bits, three in one word."""
    raw = tl.load(place, mask=mask, other=0)
    if SIDE.BITS == 3:
        odd = tl.load(place + SIDE.W * step, mask=mask, other=0).to(tl.int32)
        third = tl.load(place + 2 * SIDE.W * step, mask=mask, other=0).to(tl.int32)
        raw = raw.to(tl.int32) | (odd << 8) | (third << 16)
    return raw


@triton.jit
def plane_codes(raw, plane, SIDE: tl.constexpr):
    """The codes of one plane, or of a plane for each element."""
    if SIDE.BITS == 3:
        lower = (raw >> (8 * (plane % 2) + 2 * (plane // 2))) & 3
        return lower | (((raw >> (16 + plane)) & 1) << 2)
    else:
        return (raw >> (plane * SIDE.BITS)) & ((1 << SIDE.BITS) - 1)


@triton.jit
def store_codes(place, codes, plane, step, mask, SIDE: tl.constexpr):
    """Packs codes [n, P, m] over their planes and stores them from `place` [n, m] on."""
    wide, p = codes.to(tl.int32), plane[None, :, None]
    if SIDE.BITS == 3:
        lower = (wide & 3) << (2 * (p // 2))
        tl.store(place, tl.sum(tl.where(p % 2 == 0, lower, 0), 1).to(tl.uint8), mask=mask)
        tl.store(place + SIDE.W * step, tl.sum(tl.where(p % 2 == 1, lower, 0), 1).to(tl.uint8), mask=mask)
        tl.store(place + 2 * SIDE.W * step, tl.sum((wide >> 2) << p, 1).to(tl.uint8), mask=mask)
    else:
        tl.store(place, tl.sum(wide << (p * SIDE.BITS), 1).to(tl.uint8), mask=mask)


@triton.jit
def _magnitudes(index, SIDE: tl.constexpr):
    """Entries int32 of a table, which is two words of 32 bits."""
    index = index.to(tl.int32)
    if SIDE.CODE != LLOYD:
        word = tl.where(index < 4, _E2M1, _E2M1_HIGH)
    elif SIDE.BITS == 4:
        word = tl.where(index < 4, _L4, _L4_HIGH)
    elif SIDE.BITS == 3:
        word = index * 0 + _L3
    else:
        word = index * 0 + _L2
    return (word >> ((index & 3) * 8)) & 255


@triton.jit
def level_values(codes, SIDE: tl.constexpr, dtype: tl.constexpr):
    """What codes stand for before scale and zero, without rounding; those of tables are signed."""
    if SIDE.CODE >= LLOYD:
        half: tl.constexpr = 1 << (SIDE.BITS - 1)
        size = code_values(_magnitudes(codes & (half - 1), SIDE), 8, dtype)
        return tl.where(codes >= half, -size, size)
    else:
        return code_values(codes, SIDE.BITS, dtype)


@triton.jit
def scales(base, index, mask, SIDE: tl.constexpr):
    """Factors fp32 of levels at an index of their region."""
    if SIDE.CODE < NVFP4:
        return tl.load((base + SIDE.SCALE).to(tl.pointer_type(tl.float16)) + index, mask=mask, other=0.0).to(tl.float32)
    else:
        return _byte_scale(tl.load(base + SIDE.SCALE + index, mask=mask, other=0), SIDE.CODE)


@triton.jit
def _byte_scale(raw, CODE: tl.constexpr):
    if CODE == NVFP4:
        return e4m3_values(raw) * 0.5
    else:
        power = (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        return tl.where(raw == 255, float("nan"), power) * 0.5


@triton.jit
def metadata(base, index, mask, SIDE: tl.constexpr):
    """Scale and zero fp32 at an index of their regions; only `min_max` stores a zero."""
    scale = scales(base, index, mask, SIDE)
    if SIDE.CODE == MIN_MAX:
        zero = tl.load((base + SIDE.ZERO).to(tl.pointer_type(tl.float16)) + index, mask=mask, other=0.0).to(tl.float32)
    elif SIDE.CODE == SYMMETRIC:
        zero = scale * (-(2.0 ** (SIDE.BITS - 1)))
    else:
        zero = scale * 0.0
    return scale, zero


@triton.jit
def scale_of(low, high, SIDE: tl.constexpr):
    """Scale and zero fp32 of vectors between two bounds; for symmetric codes `high` is the largest magnitude.

    Adding 0 makes -0 into 0: which of the two a minimum gives is not defined.
    """
    if SIDE.CODE == SYMMETRIC:
        return tl.div_rn(high, high * 0.0 + (2.0 ** (SIDE.BITS - 1) - 1.0)), low * 0.0
    else:
        zero = low + 0.0
        return tl.div_rn(high - zero + 0.0, high * 0.0 + (2.0**SIDE.BITS - 1.0)), zero


@triton.jit
def codes_of(x, scale, zero, SIDE: tl.constexpr, META_FIRST: tl.constexpr):
    """Codes uint8 of fp32 values under scales of the same shape, as `quant.quantize` rounds and clamps them."""
    dead = scale.to(tl.float16) == 0.0
    if META_FIRST:
        by = tl.where(dead, 1.0, scale.to(tl.float16).to(tl.float32))
        code = tl.div_rn(x - zero.to(tl.float16).to(tl.float32), by)
    else:
        code = (x - zero) * tl.div_rn(scale * 0.0 + 1.0, tl.where(dead, 1.0, scale))
    code = tl.where(dead, 0.0, round_even(code))
    HALF: tl.constexpr = 2.0 ** (SIDE.BITS - 1)
    if SIDE.CODE == SYMMETRIC:
        code = tl.minimum(tl.maximum(code, -HALF), HALF - 1.0) + HALF
    else:
        code = tl.minimum(tl.maximum(code, 0.0), 2.0**SIDE.BITS - 1.0)
    return code.to(tl.int32).to(tl.uint8)


@triton.jit
def store_metadata(base, index, scale, zero, mask, SIDE: tl.constexpr):
    """Writes the fp16 scales of integer codes, and their zeros where they have any."""
    tl.store((base + SIDE.SCALE).to(tl.pointer_type(tl.float16)) + index, scale.to(tl.float16), mask=mask)
    if SIDE.CODE == MIN_MAX:
        tl.store((base + SIDE.ZERO).to(tl.pointer_type(tl.float16)) + index, zero.to(tl.float16), mask=mask)


@triton.jit
def _nearest(x, SIDE: tl.constexpr):
    """Codes int32 of the magnitudes nearest to |x|, the even one on a border, without their sign."""
    size = tl.abs(x)
    index = tl.zeros_like(x).to(tl.int32)
    for j in tl.static_range((1 << (SIDE.BITS - 1)) - 1):
        border = (_magnitudes(index * 0 + j, SIDE) + _magnitudes(index * 0 + (j + 1), SIDE)).to(tl.float32) * 0.5
        if j % 2 == 0:
            index += (size > border).to(tl.int32)
        else:
            index += (size >= border).to(tl.int32)
    return index


@triton.jit
def encode_group(x, mine, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Codes int32 of the channels `mine` of vectors [n, P, m] under one scale, and that scale's bits as they are stored
    ([n] fp16, or int32 of a byte); as `quant.encode` makes them."""
    most = tl.max(tl.max(tl.where(mine, tl.abs(x), 0.0), 2), 1)
    bad = tl.sum(tl.sum((mine & (x != x)).to(tl.int32), 2), 1) > 0
    most = tl.where(bad, float("nan"), most)
    if SIDE.CODE == LLOYD and SIDE.BITS > 0:
        wide = tl.where(mine, x, 0.0).to(tl.float64)
        square = tl.sum(tl.sum(wide * wide, 2), 1)
        dead = ~((square > 0) & (square < float("inf")))
        ratio = tl.sqrt(SIZE / tl.where(dead, 1.0, square))
        if SIDE.BITS == 2:
            factor = (ratio * _D2).to(tl.float32)
        elif SIDE.BITS == 3:
            factor = (ratio * _D3).to(tl.float32)
        else:
            factor = (ratio * _D4).to(tl.float32)
        index = _nearest(x * factor[:, None, None], SIDE)
        size = _magnitudes(index, SIDE)
        coded = tl.sum(tl.sum(tl.where(mine, size * size, 0), 2), 1).to(tl.float64)
        length = tl.sqrt(tl.where(dead, 1.0, square) / tl.where(dead, 1.0, coded))
        stored = tl.where(dead, square, length).to(tl.float32).to(tl.float16)
        by = stored.to(tl.float32)
    elif SIDE.BITS == 0:
        stored = tl.div_rn(most, most * 0.0 + 448.0).to(tl.float16)
        by = stored.to(tl.float32)
    elif SIDE.CODE == NVFP4:
        stored = e4m3_bytes(tl.div_rn(most, most * 0.0 + 6.0)).to(tl.int32)
        by = _byte_scale(stored, SIDE.CODE)
    else:
        exponent = (most.to(tl.int32, bitcast=True) >> 23) - 2
        stored = tl.where(most < float("inf"), tl.minimum(tl.maximum(exponent, 2), 254), 255)
        by = _byte_scale(stored, SIDE.CODE)
    dead = ~((by > 0) & (by < float("inf")))
    shown = tl.where(dead, 1.0, by)[:, None, None] + x * 0.0
    if SIDE.BITS == 0:
        codes = e4m3_bytes(tl.div_rn(x, shown)).to(tl.int32)
    else:
        if SIDE.CODE != LLOYD:
            index = _nearest(tl.div_rn(x, shown), SIDE)
        sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
        codes = index | (sign << (SIDE.BITS - 1))
    return tl.where(dead[:, None, None], 0, codes), stored


@triton.jit
def store_scale(base, index, stored, mask, SIDE: tl.constexpr):
    """Writes scales as `encode_group` gives them."""
    if SIDE.CODE < NVFP4:
        tl.store((base + SIDE.SCALE).to(tl.pointer_type(tl.float16)) + index, stored, mask=mask)
    else:
        tl.store(base + SIDE.SCALE + index, stored.to(tl.uint8), mask=mask)
