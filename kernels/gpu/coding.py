"""GPU backend: codes to numbers and back, as functions that kernels call on the device.

`kernels/codes.py` says what codes mean. A kernel's constants for a code are BITS, 0 for floats of 8 bits, CODE, a
number of `CODES`, and FIT, one of `FITS`. Eight codes of 3 bits lie in three bytes, W apart: the lower bits of even
planes, those of odd planes, and the third bits of all. Of 5 bits they lie in five: the lower bits of planes p and p + 4
for p from 0 to 3, and the fifth bits of all.
"""

import triton
import triton.language as tl

from kvbench.kernels.codes import Code, code_of
from kvbench.kernels.gpu.parts import CODES, FITS, code_values, e4m3_bytes, e4m3_values, float8_values, round_even

MIN_MAX, SYMMETRIC, LLOYD, NVFP4 = (tl.constexpr(CODES[name]) for name in ("min_max", "symmetric", "lloyd", "nvfp4"))
IQ4_NL = tl.constexpr(CODES["iq4_nl"])
_UP, _RANGE, _ZERO_POINT, _EXTREME, _SQUARES, _EITHER = (tl.constexpr(number) for number in FITS.values())


def _words(code: Code) -> tuple[int, ...]:
    """Magnitudes, or levels, as bytes of words of 32 bits, which are signed."""
    sizes = bytes(code.magnitudes or code.levels).ljust(8, b"\0")
    return tuple(int.from_bytes(sizes[i : i + 4], "little", signed=True) for i in range(0, len(sizes), 4))


_L2, _L3 = (tl.constexpr(_words(code_of("lloyd", bits))[0]) for bits in (2, 3))
_L4, _L4_HIGH = (tl.constexpr(word) for word in _words(code_of("lloyd", 4)))
_NL0, _NL1, _NL2, _NL3 = (tl.constexpr(word) for word in _words(code_of("iq4_nl", 4)))
_NL_CENTRE = tl.constexpr(code_of("iq4_nl", 4).centre)
_E2M1, _E2M1_HIGH = (tl.constexpr(word) for word in _words(code_of("nvfp4", 4)))
_D2, _D3, _D4 = (tl.constexpr(code_of("lloyd", bits).deviation) for bits in (2, 3, 4))


@triton.jit
def load_codes(base, step, mask, SIDE: tl.constexpr):
    """Bytes of codes, `step` bytes from slot to slot; for 3 and 5 bits several bytes in one word."""
    raw = tl.load(base, mask=mask, other=0)
    if SIDE.BITS == 3:
        odd = tl.load(base + SIDE.W * step, mask=mask, other=0).to(tl.int32)
        third = tl.load(base + 2 * SIDE.W * step, mask=mask, other=0).to(tl.int32)
        raw = raw.to(tl.int32) | (odd << 8) | (third << 16)
    elif SIDE.BITS == 5:
        raw = raw.to(tl.int64)
        for j in tl.static_range(1, 5):
            raw |= tl.load(base + j * SIDE.W * step, mask=mask, other=0).to(tl.int64) << (8 * j)
    return raw


@triton.jit
def plane_codes(raw, plane, SIDE: tl.constexpr):
    """The codes of one plane, or of a plane for each element."""
    if SIDE.BITS == 3:
        lower = (raw >> (8 * (plane % 2) + 2 * (plane // 2))) & 3
        return lower | (((raw >> (16 + plane)) & 1) << 2)
    elif SIDE.BITS == 5:
        lower = (raw >> (8 * (plane % 4) + 4 * (plane // 4))) & 15
        return (lower | (((raw >> (32 + plane)) & 1) << 4)).to(tl.int32)
    else:
        return (raw >> (plane * SIDE.BITS)) & ((1 << SIDE.BITS) - 1)


@triton.jit
def store_codes(base, codes, plane, step, mask, SIDE: tl.constexpr):
    """Packs codes [n, P, m] over their planes and stores them from `base` [n, m] on."""
    wide, p = codes.to(tl.int32), plane[None, :, None]
    if SIDE.BITS == 3:
        lower = (wide & 3) << (2 * (p // 2))
        tl.store(base, tl.sum(tl.where(p % 2 == 0, lower, 0), 1).to(tl.uint8), mask=mask)
        tl.store(base + SIDE.W * step, tl.sum(tl.where(p % 2 == 1, lower, 0), 1).to(tl.uint8), mask=mask)
        tl.store(base + 2 * SIDE.W * step, tl.sum((wide >> 2) << p, 1).to(tl.uint8), mask=mask)
    elif SIDE.BITS == 5:
        lower = (wide & 15) << (4 * (p // 4))
        for j in tl.static_range(4):
            tl.store(base + j * SIDE.W * step, tl.sum(tl.where(p % 4 == j, lower, 0), 1).to(tl.uint8), mask=mask)
        tl.store(base + 4 * SIDE.W * step, tl.sum((wide >> 4) << p, 1).to(tl.uint8), mask=mask)
    else:
        tl.store(base, tl.sum(wide << (p * SIDE.BITS), 1).to(tl.uint8), mask=mask)


@triton.jit
def _magnitudes(index, SIDE: tl.constexpr):
    """Entries int32 of a table, which is words of 32 bits."""
    index = index.to(tl.int32)
    if SIDE.CODE == IQ4_NL:
        word = tl.where(index < 8, tl.where(index < 4, _NL0, _NL1), tl.where(index < 12, _NL2, _NL3))
    elif SIDE.CODE != LLOYD:
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
    """Values of codes before scale and zero, without rounding; those of tables are signed."""
    if SIDE.CODE == IQ4_NL:
        return code_values(_magnitudes(codes, SIDE), 8, dtype) - _NL_CENTRE
    elif SIDE.CODE >= LLOYD:
        half: tl.constexpr = 1 << (SIDE.BITS - 1)
        size = code_values(_magnitudes(codes & (half - 1), SIDE), 8, dtype)
        return tl.where(codes >= half, -size, size)
    else:
        return code_values(codes, SIDE.BITS, dtype)


@triton.constexpr_function
def _unpacked(bits, plane):
    """Instructions that unpack four codes of a plane, in the bytes of a word, to fp16.

    Each code is placed in the mantissa of 1024, as far left as it is in its byte; one fused multiply-add then yields
    its value.
    """
    shift = bits * plane
    part = "" if bits == 8 else f"and.b32 t, t, {((2**bits - 1) << shift) * 0x01010101};"
    factor, below = (f"0x{half << 16 | half:08x}" for half in ((15 - shift) << 10, (25 - shift) << 10 | 0x8000))
    return (
        f"{{ .reg .b32 t, h, f, b; mov.b32 h, 0x64646464; mov.b32 f, {factor}; mov.b32 b, {below}; mov.b32 t, $2; "
        f"{part} prmt.b32 $0, t, h, 0x4140; prmt.b32 $1, t, h, 0x4342; "
        "fma.rn.f16x2 $0, $0, f, b; fma.rn.f16x2 $1, $1, f, b; }"
    )


_E5M2_HALVES = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0; prmt.b32 $0, $2, z, 0x1404; prmt.b32 $1, $2, z, 0x3424; }")
_E4M3_HALVES = tl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


@triton.jit
def _halves(raw, asm: tl.constexpr):
    """Converts bytes to fp16, four at a time.

    Declared to have side effects; otherwise the compiler reorders single bytes through shared memory for the matrix
    product, instead of fp16 by whole rows.
    """
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [raw], dtype=tl.float16, is_pure=False, pack=4)


@triton.jit
def plane_levels(raw, plane: tl.constexpr, SIDE: tl.constexpr, dtype: tl.constexpr):
    """Values of the codes of a plane before scale and zero, without rounding."""
    if SIDE.PTX > 0 and dtype == tl.float16 and SIDE.CODE < LLOYD and SIDE.BITS != 3 and SIDE.BITS != 5:
        return _halves(raw, _unpacked(SIDE.BITS, plane))
    else:
        return level_values(plane_codes(raw, plane, SIDE), SIDE, dtype)


@triton.jit
def float8_levels(raw, SIDE: tl.constexpr, dtype: tl.constexpr):
    """Values of 8-bit floats before their scale; all of them are exact in fp16."""
    if SIDE.PTX > 0 and dtype == tl.float16 and SIDE.CODE < 0:
        return _halves(raw, _E5M2_HALVES)
    elif SIDE.PTX >= 89 and dtype == tl.float16:
        return _halves(raw, _E4M3_HALVES)
    else:
        return float8_values(raw, SIDE.CODE).to(dtype)


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
    """Codes int32 of the magnitudes nearest to |x|, without their sign; on a border the even one, or the larger one."""
    size = tl.abs(x)
    index = tl.zeros_like(x).to(tl.int32)
    for j in tl.static_range((1 << (SIDE.BITS - 1)) - 1):
        border = (_magnitudes(index * 0 + j, SIDE) + _magnitudes(index * 0 + (j + 1), SIDE)).to(tl.float32) * 0.5
        if j % 2 == 0 and SIDE.FIT != _UP:
            index += (size > border).to(tl.int32)
        else:
            index += (size >= border).to(tl.int32)
    return index


@triton.jit
def encode_group(x, mine, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """Codes int32 of channels `mine` of vectors [n, P, m] under one scale, and the bits of that scale.

    The scale's bits are [n], fp16 or int32 of a byte, as `quant.encode` makes them.
    """
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
    elif SIDE.FIT == _UP:
        sixth = tl.maximum(tl.div_rn(most, most * 0.0 + 6.0), 1e-10)
        exponent = (sixth.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        stored = tl.where(most < float("inf"), tl.minimum(tl.maximum(exponent, 2), 254), 255)
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
        if SIDE.FIT == _UP:
            sign = (x < 0).to(tl.int32)
        else:
            sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
        codes = index | (sign << (SIDE.BITS - 1))
    codes = tl.where(dead[:, None, None], 0, codes)
    if SIDE.FIT == _EITHER:  # the largest number at 4, where that loses less
        other = e4m3_bytes(tl.div_rn(most * 1.5, most * 0.0 + 6.0)).to(tl.int32)
        factor = _byte_scale(other, SIDE.CODE)
        dead = ~((factor > 0) & (factor < float("inf")))[:, None, None]
        others = _nearest(tl.div_rn(x, tl.where(dead, 1.0, factor[:, None, None]) + x * 0.0), SIDE)
        others = tl.where(dead, 0, others | (sign << (SIDE.BITS - 1)))
        less = _lost_by(x, mine, others, factor, SIDE) < _lost_by(x, mine, codes, by, SIDE)
        codes, stored = tl.where(less[:, None, None], others, codes), tl.where(less, other, stored)
    return codes, stored


@triton.jit
def _lost_by(x, mine, codes, by, SIDE: tl.constexpr):
    """The squares fp64 [n] that codes lose under a scale."""
    missed = (x - level_values(codes, SIDE, tl.float32) * by[:, None, None]).to(tl.float64)
    return tl.sum(tl.sum(tl.where(mine, missed * missed, 0.0), 2), 1)


@triton.jit
def encode_up(x, channel, mine, SIDE: tl.constexpr):
    """Codes int32 of channels `mine` of vectors [n, P, m], rounded as in llama.cpp and vLLM.

    With their scale and zero, fp32 [n]; as `quant.encode` makes them.
    """
    size = tl.abs(x)
    most = tl.max(tl.max(tl.where(mine, size, 0.0), 2), 1)
    bad = tl.sum(tl.sum((mine & (x != x)).to(tl.int32), 2), 1) > 0
    TOP: tl.constexpr = 2.0**SIDE.BITS - 1.0
    HALF: tl.constexpr = 2.0 ** (SIDE.BITS - 1)
    low = most * 0.0
    if SIDE.CODE == MIN_MAX:
        low = tl.min(tl.min(tl.where(mine, x, float("inf")), 2), 1) + 0.0
        high = tl.max(tl.max(tl.where(mine, x, float("-inf")), 2), 1)
        scale = tl.div_rn(high - low + 0.0, most * 0.0 + TOP)
    elif SIDE.FIT == _UP:
        scale = tl.div_rn(most, most * 0.0 + (HALF - 1.0))
    else:  # of several that are alike, the first one
        position = tl.where(mine & (size == most[:, None, None]), channel, 65536)
        first = tl.min(tl.min(position, 2), 1)
        extreme = tl.sum(tl.sum(tl.where(mine & (position == first[:, None, None]), x, 0.0), 2), 1)
        if SIDE.FIT == _SQUARES:
            scale = tl.div_rn(extreme, most * 0.0 - _NL_CENTRE)
        else:
            scale = tl.div_rn(extreme, most * 0.0 - HALF)
    scale = tl.where(bad, float("nan"), scale)
    if SIDE.FIT == _ZERO_POINT:
        scale = tl.where(scale < 1e-6, 1e-6, scale)
    finite = tl.abs(scale) < float("inf")
    dead = (scale == 0.0) | ~finite
    by = tl.where(dead, 0.0, tl.div_rn(scale * 0.0 + 1.0, tl.where(dead, 1.0, scale)))[:, None, None]
    zero = tl.where(bad, float("nan"), low)
    if SIDE.FIT == _ZERO_POINT:
        point = tl.floor(tl.maximum(tl.div_rn(-low, tl.where(finite, scale, 1.0)) + 0.5, 0.0))
        point = tl.minimum(point, TOP)
        zero = tl.where(finite, (0.0 - point) * scale, scale)
        level = x * by + point[:, None, None] + 0.5
    elif SIDE.FIT == _SQUARES:
        level = x * 0.0
        for j in tl.static_range(15):
            border = (_magnitudes(channel * 0 + j, SIDE) + _magnitudes(channel * 0 + (j + 1), SIDE)).to(
                tl.float32
            ) * 0.5
            level += (x * by >= border - _NL_CENTRE).to(tl.float32)
    elif SIDE.FIT == _UP:
        whole = tl.floor(tl.abs(x * by))
        whole += tl.floor(2.0 * (tl.abs(x * by) - whole))
        level = HALF + tl.where(x * by < 0, -whole, whole)
    elif SIDE.CODE == MIN_MAX:
        level = (x - low[:, None, None]) * by + 0.5
    else:
        level = x * by + (HALF + 0.5)
    level = tl.minimum(tl.maximum(tl.floor(level), 0.0), TOP)
    codes = tl.where(mine & finite[:, None, None], level, 0.0).to(tl.int32)
    if SIDE.FIT == _SQUARES:  # weighted by their squares, in fp64 as norms are
        wide = tl.where(mine, x, 0.0).to(tl.float64)
        kept = level_values(codes, SIDE, tl.float32).to(tl.float64)
        dots = tl.sum(tl.sum(wide * wide * kept * wide, 2), 1)
        squares = tl.sum(tl.sum(wide * wide * (kept * kept), 2), 1)
        scale = tl.where(dead, scale + 0.0, (dots / tl.where(dead, 1.0, squares)).to(tl.float32))
    return codes, scale, zero


@triton.jit
def store_scale(base, index, stored, mask, SIDE: tl.constexpr):
    """Writes scales as `encode_group` gives them."""
    if SIDE.CODE < NVFP4:
        tl.store((base + SIDE.SCALE).to(tl.pointer_type(tl.float16)) + index, stored, mask=mask)
    else:
        tl.store(base + SIDE.SCALE + index, stored.to(tl.uint8), mask=mask)
