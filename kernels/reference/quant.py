"""Quantisers and planar bit packing: the reference meaning of every code in a page."""

import torch
from torch import Tensor


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
        bits: 1, 2, 4 or 8 (symmetric: not 1).
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
    """Inverse of `quantize` in fp32, with the stored fp16 scale and zero (broadcast against `codes`); symmetric codes
    need no zero."""
    values = codes.float()
    if symmetric:
        return (values - 2 ** (bits - 1)) * scale.float()
    assert zero is not None, "asymmetric codes have a zero"
    return values * scale.float() + zero.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes along the last axis, planar: byte w holds elements w, w + W, w + 2W, ... from the low bits up.

    Args:
        codes: uint8 [..., n], values < 2^bits, n a multiple of 8 / bits.

    Returns:
        uint8 [..., W] with W = n * bits / 8.
    """
    if bits == 8:
        return codes
    planes = codes.unflatten(-1, (8 // bits, -1))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (planes << shifts[:, None]).sum(-2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Inverse of `pack` along any axis: uint8 [.., W, ..] to uint8 [.., W * 8 / bits, ..]."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim)


def to_fp8(x: Tensor) -> Tensor:
    """e4m3 bytes of `x`, saturating at +-448."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(raw: Tensor) -> Tensor:
    """fp32 values of e4m3 bytes."""
    return raw.view(torch.float8_e4m3fn).float()
