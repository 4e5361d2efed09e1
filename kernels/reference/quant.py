"""Quantisers and planar bit packing: the reference meaning of every code in a page."""

import math
from functools import cache

import torch
from torch import Tensor

from kvbench.kernels.codes import BOOK_TOP, E4M3_LARGEST, Code


def quantize(
    x: Tensor, bits: int, *, symmetric: bool = False, metadata_first: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises the last axis of `x` with one scale (and zero) per vector.

    Asymmetric: scale = (max - min) / (2^bits - 1), zero = min, code = round((x - zero) / scale).
    Symmetric: scale = max|x| / (2^(bits-1) - 1), code = round(x / scale) clamped to [-2^(bits-1), 2^(bits-1) - 1],
        stored with offset 2^(bits-1).
    Rounding is half to even. A scale that is 0 in fp16 gives codes 0 (asymmetric) or the code of 0 (symmetric).

    Args:
        x: [..., n], any float dtype; computed in fp32.
        bits: 1, 2, 3, 4 or 8 (symmetric: not 1).
        metadata_first: Round scale and zero to fp16 before coding (KIVI); otherwise code with the fp32 values and round
            both for storage (DiffKV).

    Returns:
        codes uint8 [..., n], scale fp16 [..., 1], zero fp16 [..., 1] (zero is 0 when symmetric).

    Source: DiffKV artefact uint4_quant.cuh; KIVI new_pack.py; guard for constant vectors is kvbench's (KIVI divides by
        0).
    """
    x = x.float()
    top = 2**bits - 1
    if symmetric:
        if bits < 2:
            raise ValueError("symmetric=True needs at least 2 bits: with 1 bit the largest code is 0")
        half = 2 ** (bits - 1)
        scale = x.abs().amax(-1, keepdim=True) / (half - 1)
        zero = torch.zeros_like(scale)
    else:
        low = x.amin(-1, keepdim=True) + 0.0  # -0 and 0 are equal: which is smallest or largest may not show
        scale = (x.amax(-1, keepdim=True) - low + 0.0) / top
        zero = low
    scale16, zero16 = scale.half(), zero.half()
    dead = scale16 == 0
    if metadata_first:
        codes = (x - zero16.float()) / torch.where(dead, 1.0, scale16.float())
    else:
        codes = (x - zero) * (1.0 / torch.where(dead, 1.0, scale))
    codes = torch.where(dead, 0.0, codes.round())
    codes = (codes.clamp(-half, half - 1) + half) if symmetric else codes.clamp(0, top)
    return codes.to(torch.uint8), scale16, zero16


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, *, symmetric: bool = False) -> Tensor:
    """Inverse of `quantize` in fp32, with stored fp16 scale and zero (broadcast against `codes`).

    Symmetric codes need no zero.
    """
    values = codes.float()
    if symmetric:
        return (values - 2 ** (bits - 1)) * scale.float()
    assert zero is not None, "asymmetric codes have a zero"
    return values * scale.float() + zero.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes along the last axis, planar: byte w holds elements w, w + W, w + 2W, ... from the low bits up.

    Codes of 3 bits are packed as their two lower bits, and after those the third; codes of 5 bits as their 4 lower
    bits and the fifth.

    Args:
        codes: uint8 [..., n], values < 2^bits, n a multiple of 8 / bits (of 8 for 3 and 5 bits).

    Returns:
        uint8 [..., W] with W = n * bits / 8.
    """
    if bits == 8:
        return codes
    if bits in (3, 5):
        return torch.cat([pack(codes & (2 ** (bits - 1) - 1), bits - 1), pack(codes >> (bits - 1), 1)], -1)
    planes = codes.unflatten(-1, (8 // bits, -1))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (planes << shifts[:, None]).sum(-2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Inverse of `pack` along any axis: uint8 [.., W, ..] to uint8 [.., W * 8 / bits, ..]."""
    if bits == 8:
        return packed
    if bits in (3, 5):
        each = packed.shape[dim] // bits
        lower, upper = packed.split([(bits - 1) * each, each], dim)
        return unpack(lower, bits - 1, dim) | (unpack(upper, 1, dim) << (bits - 1))
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim)


def to_fp8(x: Tensor) -> Tensor:
    """e4m3 bytes of `x`, saturating at +-448."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(raw: Tensor) -> Tensor:
    """Decode e4m3 bytes to fp32."""
    return raw.view(torch.float8_e4m3fn).float()


def to_e5m2(x: Tensor) -> Tensor:
    """e5m2 bytes of `x`, saturating at +-57344."""
    return x.float().clamp(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8)


def encode(x: Tensor, code: Code, *, metadata_first: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes of the last axis of `x` with one scale (and zero) per vector, as `kernels/codes.py` says.

    A vector whose scale comes to 0, or is not finite, gets codes 0.

    Args:
        x: [..., n], any float dtype; computed in fp32, except norms, which are summed in fp64: whatever the order, the
            same fp32 comes out.
        code: How.
        metadata_first: See `quantize`.

    Returns:
        codes uint8 [..., n], scale [..., 1] (fp16, or uint8 where it is a byte), zero fp16 [..., 1]; None where the
        code has none.

    Source: lloyd: TurboQuant (Zandieh et al. 2025), algorithm 1, and the norm correction of vLLM's turboquant (DRIVE
        and EDEN, Vargaftik et al.), made once on writing. nvfp4: NVIDIA's recipe. mxfp4: OCP MX specification 1.0.
        q8_0, .., iq4_nl: ggml-quants.c of llama.cpp, the reference quantisers. zero_point: vLLM's int4_per_token_head.
        nvfp4_4over6: Four Over Six (Cook et al. 2025). mxfp4_up: SGLang's fp4_mx_block16.
    """
    if code.rounding == "up" and code.scale == "fp16":
        return _encode_up(x.float(), code)
    if code.is_plain:
        codes, scale, zero = quantize(x, code.bits, symmetric=not code.zero, metadata_first=metadata_first)
        return codes, scale, zero if code.zero else None
    x = x.float()
    if code.levels:
        return _encode_levels(x, code)
    if code.scale == "none":
        return (to_e5m2(x) if code.name == "e5m2" else to_fp8(x)), None, None
    if code.is_float:
        scale = (x.abs().amax(-1, keepdim=True) / E4M3_LARGEST).half()
        by = scale.float()
        dead = ~((by > 0) & (by < math.inf))
        return torch.where(dead, 0, to_fp8(x / torch.where(dead, 1.0, by))), scale, None
    if code.fit == "norm":
        square = x.double().square().sum(-1, keepdim=True)
        dead = ~((square > 0) & (square < math.inf))
        factor = (code.deviation * (x.shape[-1] / torch.where(dead, 1.0, square)).sqrt()).float()
        levels, codes = _nearest(x * factor, code)
        coded = levels.double().square().sum(-1, keepdim=True)
        scale = torch.where(dead, square, (square / coded).sqrt()).float().half()
        dead |= ~((scale > 0) & (scale < math.inf))
        return torch.where(dead, 0, codes), scale, None
    largest = x.abs().amax(-1, keepdim=True)
    codes, scale = _encode_table(x, store_scale(largest, code), code)
    if code.fit == "either":
        others, other = _encode_table(x, store_scale(largest * 1.5, code), code)
        lost, less = (
            (x - decode(which, by, None, code)).double().square().sum(-1, keepdim=True)
            for which, by in ((codes, scale), (others, other))
        )
        codes, scale = torch.where(less < lost, others, codes), torch.where(less < lost, other, scale)
    return codes, scale, None


def _encode_table(x: Tensor, scale: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Codes of signed tables under stored scales, and these."""
    by = load_scale(scale, code)
    dead = ~((by > 0) & (by < math.inf))
    _, codes = _nearest(x / torch.where(dead, 1.0, by), code)
    return torch.where(dead, 0, codes), scale


def _encode_up(x: Tensor, code: Code) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes rounded as in llama.cpp and vLLM: times the reciprocal of the fp32 scale, halves up.

    A scale that is not finite gives codes 0.
    """
    low, top = torch.zeros_like(x[..., :1]), 2**code.bits - 1
    if code.zero:
        low = x.amin(-1, keepdim=True) + 0.0
        scale = (x.amax(-1, keepdim=True) - low + 0.0) / top
    elif code.fit == "largest":
        scale = x.abs().amax(-1, keepdim=True) / (code.centre - 1)
    else:  # of several that are alike, the first one
        scale = (x.gather(-1, x.abs().argmax(-1, keepdim=True)) + 0.0) / -code.centre
    if code.fit == "zero_point":
        scale = torch.where(scale < 1e-6, 1e-6, scale)
    by = torch.where(scale == 0, 0.0, 1 / scale)
    zero = low
    if code.fit == "zero_point":
        point = (-low / scale + 0.5).trunc().clamp(0, top)
        levels, zero = (x * by + point + 0.5).trunc(), torch.where(scale.isfinite(), (0.0 - point) * scale, scale)
    elif code.fit == "squares":
        levels = torch.zeros_like(x)
        for border in code.midpoints:
            levels += x * by >= border - code.centre
    elif code.fit == "largest":
        levels = x * by
        levels = code.centre + (levels.abs().floor() + (2 * levels.abs().frac()).floor()) * levels.sign()
    else:
        levels = ((x - low) * by + (code.centre + 0.5)).trunc()
    codes = torch.where(scale.isfinite(), levels, 0.0).clamp(0, top).to(torch.uint8)
    if code.fit == "squares":  # weighted by their squares, in fp64 as norms are
        wide, kept = x.double(), _numbers(code.table, x.device)[codes.int()].double() - code.centre
        weight = wide.square()
        best = (weight * kept * wide).sum(-1, keepdim=True) / (weight * kept.square()).sum(-1, keepdim=True)
        scale = torch.where((scale == 0) | ~scale.isfinite(), scale + 0.0, best.float())
    return codes, scale.half(), zero.half() if code.zero else None


def decode(codes: Tensor, scale: Tensor | None, zero: Tensor | None, code: Code) -> Tensor:
    """Inverse of `encode` in fp32; `scale` and `zero` are broadcast against `codes`."""
    if code.is_uniform:
        assert scale is not None, "integer codes have scales"
        return dequantize(codes, scale, zero, code.bits, symmetric=not code.zero)
    if code.name == "e5m2":
        return codes.view(torch.float8_e5m2).float()
    levels = from_fp8(codes) if code.is_float else _numbers(code.table, codes.device)[codes.int()]
    if zero is not None:
        assert scale is not None, "what has a zero has a scale"
        return levels * scale.float() + zero.float()
    return levels if scale is None else (levels - code.centre) * load_scale(scale, code)


def encode_apart(x: Tensor, code: Code, count: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """`encode` with a calibrated table, and the remainders of some elements.

    With a scale these are the largest elements, which the scale then does not span; else those with the largest coding
    errors.

    Args:
        x: [..., n].
        code: `book` or `book_channels`.
        count: Number of elements of a vector; where several are alike, the first ones.

    Returns:
        codes, scale and zero; which elements, uint8 [..., count]; what they have beyond their codes, fp16 [..., count].
    """
    x = x.float()
    if code.scale != "none":
        where = x.abs().argsort(dim=-1, descending=True, stable=True)[..., :count]
        codes, scale, zero = _encode_levels(x, code, where)
    else:
        codes, scale, zero = _encode_levels(x, code)
        missed = (x - decode(codes, scale, zero, code)).abs()
        where = missed.argsort(dim=-1, descending=True, stable=True)[..., :count]
    rest = (x - decode(codes, scale, zero, code)).gather(-1, where)
    return codes, scale, zero, where.to(torch.uint8), rest.half()


def _encode_levels(x: Tensor, code: Code, apart: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes of a calibrated table, with fp16 scale and zero [..., 1] where it has them.

    Numbers are coded with the stored, rounded scale and zero. Elements `apart` (int64 [..., count]) do not enter them.
    """
    scale = zero = None
    if code.scale != "none":
        low, high = (x if apart is None else x.scatter(-1, apart, end) for end in (math.inf, -math.inf))
        low = low.amin(-1, keepdim=True) + 0.0
        scale, zero = ((high.amax(-1, keepdim=True) - low + 0.0) / BOOK_TOP).half(), low.half()
        by = scale.float()
        dead = ~((by > 0) & (by < math.inf))
        x = torch.where(dead, 0.0, (x - zero.float()) / torch.where(dead, 1.0, by))
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, border in enumerate(code.midpoints):
        codes += (x > border) if lower % 2 == 0 else (x >= border)
    return codes, scale, zero


@cache
def _numbers(table: tuple[float, ...], device: torch.device) -> Tensor:
    """A code's numbers, fp32, made once on each device: one that a step is captured on could not fetch them."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def _nearest(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """The magnitudes nearest to fp32 `x`, fp32, and their codes, uint8; borders go where rounding says."""
    size, index = x.abs(), torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, border in enumerate(code.midpoints):
        index += (size > border) if lower % 2 == 0 and code.rounding == "even" else (size >= border)
    levels = _numbers(code.magnitudes, x.device)[index.int()]
    sign = x.signbit() if code.rounding == "even" else x < 0
    return levels, index | (sign.to(torch.uint8) << (code.bits - 1))


def store_scale(largest: Tensor, code: Code) -> Tensor:
    """The byte of the scale that puts the largest magnitude of a table at `largest`, fp32 and not negative.

    A power of two is the largest one below it, over that below the table's largest (OCP MX), so that numbers in the top
    quarter may be clipped; at least 2^-125, so that neither it nor its half is a denormal number.
    """
    if code.scale == "e4m3":
        return torch.where(largest.isnan(), 0x7F, to_fp8(largest / (code.magnitudes[-1] * code.unit))).to(torch.uint8)
    if code.rounding == "up":  # the least one that clips nothing, down to SGLang's bound
        sixth = (largest / (code.magnitudes[-1] * code.unit)).clamp(min=1e-10)
        exponent = (sixth.view(torch.int32) + 0x7FFFFF) >> 23
    else:
        exponent = (largest.view(torch.int32) >> 23) - 2  # of the largest e2m1, 6 = 1.5 * 2^2
    return torch.where(largest < math.inf, exponent.clamp(2, 254), 255).to(torch.uint8)


def load_scale(scale: Tensor, code: Code) -> Tensor:
    """Factors fp32 of levels, from stored scales."""
    if code.scale == "fp16":
        return scale.float()
    if code.scale == "e4m3":
        return from_fp8(scale) * code.unit
    power = (scale.to(torch.int32) << 23).view(torch.float32)
    return torch.where(scale == 255, math.nan, power) * code.unit
