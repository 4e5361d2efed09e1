"""GPU backend: row operations between a model's matrix products (`model.linear=fused`), one launch each.

Numbers are rounded to the rows' type where transformers' modules round them, except a rotation, which is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.parts import launch, power_of_two

_BLOCK = 1024


@triton.jit(do_not_specialize=["x_row"])
def _norm_row(x, weight, out, x_row, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Divides a row by its root mean square, and multiplies it by the weights."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < WIDTH
    values = tl.load(x + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = (values * by).to(out.dtype.element_ty).to(tl.float32)
    scaled = scaled * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_rows(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """SiLU of the first half of a row times the second half."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    gate = tl.load(x + row * (2 * WIDTH) + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def turn_heads(x, out, cos, sin, token, x_row, first, heads, BH: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):
    """Rotates BH heads of a token from `first` on; x holds a token's heads in a row of `x_row` numbers."""
    head, d = first + tl.arange(0, BH)[:, None], tl.arange(0, HP)[None, :]
    mask = (head < heads) & (d < HALF)
    low = tl.load(x + token * x_row + head * (2 * HALF) + d, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + token * x_row + head * (2 * HALF) + HALF + d, mask=mask, other=0.0).to(tl.float32)
    by_cos = tl.load(cos + token * HALF + d, mask=d < HALF, other=1.0).to(tl.float32)
    by_sin = tl.load(sin + token * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * (2 * HALF) + d
    tl.store(to, (low * by_cos - high * by_sin).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (high * by_cos + low * by_sin).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_row", "k_row"])
def _turn_both(
    q, k, q_out, k_out, cos, sin, q_row, k_row, q_heads, k_heads, BH: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Rotates a token's queries (the first Q programs of the second axis) and keys."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < Q:
        turn_heads(q, q_out, cos, sin, token, q_row, part * BH, q_heads, BH, HALF, HP)
    else:
        turn_heads(k, k_out, cos, sin, token, k_row, (part - Q) * BH, k_heads, BH, HALF, HP)


@triton.jit
def _angles(position, frequencies, cos, sin, scale, HALF: tl.constexpr, HP: tl.constexpr):
    """Cosines and sines of a token's angles."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, HP)
    angle = tl.load(position + token).to(tl.float32) * tl.load(frequencies + d, mask=d < HALF, other=0.0)
    tl.store(cos + token * HALF + d, (tl.cos(angle) * scale).to(cos.dtype.element_ty), mask=d < HALF)
    tl.store(sin + token * HALF + d, (tl.sin(angle) * scale).to(sin.dtype.element_ty), mask=d < HALF)


def angles(position: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, D / 2] times a scale, of positions int64 [N] and frequencies fp32 [D / 2]."""
    cos, sin = (torch.empty(len(position), len(frequencies), dtype=dtype, device=position.device) for _ in range(2))
    launch(
        _angles, (len(position),), position, frequencies, cos, sin, scale, HALF=len(frequencies),
        HP=power_of_two(len(frequencies)),
    )  # fmt: skip
    return cos, sin


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension of [..., W], whose numbers lie next to one another; in x's dtype.

    Source: RMSNorm (Zhang and Sennrich 2019), rounded as in transformers' LlamaRMSNorm.
    """
    width = x.shape[-1]
    if x.dim() > 2 and not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _norm_row, (x.numel() // width,), x, weight, out, x.stride(-2) if x.dim() == 2 else width, eps, WIDTH=width,
        BLOCK=power_of_two(width), num_warps=8 if width > 1024 else 4,
    )  # fmt: skip
    return out


def gate_rows(x: Tensor) -> Tensor:
    """SwiGLU's gate: [..., 2 W], contiguous, to [..., W], SiLU of the first half times the second."""
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    launch(
        _gate_rows, (out.numel() // width, -(-width // _BLOCK)), x, out, WIDTH=width,
        BLOCK=min(_BLOCK, power_of_two(width)),
    )  # fmt: skip
    return out


def heads_at_once(heads: int, half: int) -> int:
    """Heads that a program rotates."""
    return min(power_of_two(heads), max(1, 2048 // power_of_two(half)))


def turn_rows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys, in one launch.

    Args:
        q: [N, Hq, D], the heads of a token contiguous; k: [N, H, D], the heads of a token contiguous.
        cos: [N, D / 2], contiguous; sin has the same form.

    Returns:
        Contiguous [N, Hq, D] and [N, H, D].
    """
    half = q.shape[2] // 2
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    size = heads_at_once(max(q.shape[1], k.shape[1]), half)
    parts = [-(-x.shape[1] // size) for x in (q, k)]
    launch(
        _turn_both, (len(q), sum(parts)), q, k, *out, cos, sin, q.stride(0), k.stride(0), q.shape[1], k.shape[1],
        BH=size, HALF=half, HP=power_of_two(half), Q=parts[0],
    )  # fmt: skip
    return out[0], out[1]
