"""GPU backend: shared parts of its kernels, on both sides of a launch.

The kernels are written once for NVIDIA and AMD. A page's layout reaches them as compile-time constants, so every
format is a kernel of its own. Tiles have power-of-two sides: where a slot has W bytes of codes, tiles have WP, the
power of two above. A byte holds one channel of each plane: byte w has channel plane * W + w at bit plane * BITS.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes import Fit, Rounding
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.interpreter import patch_once

Item = TypeVar("Item")
ELEMENT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LOWEST = tl.constexpr(-1.0e30)  # stands for minus infinity, whose difference from itself would be NaN
# Kinds of codes: integers with a zero point, and without; tables, from `lloyd` on; scales of a byte, from `nvfp4`
# on. Of floats: without a scale, with one, and of another kind.
CODES = {"min_max": 0, "symmetric": 1, "lloyd": 2, "iq4_nl": 3, "nvfp4": 4, "mxfp4": 5}
CODES |= {"e4m3": 0, "e4m3_scaled": 1, "e5m2": -1}
CODES |= {"q4_1": 0, "q5_1": 0, "zero_point": 0, "q8_0": 1, "q4_0": 1, "q5_0": 1, "nvfp4_4over6": 4, "mxfp4_up": 5}
# How scales are made and numbers rounded, where that is not what a code of `CODES` says.
FITS: dict[tuple[Fit, Rounding], int] = {
    ("largest", "up"): 1,
    ("range", "up"): 2,
    ("zero_point", "up"): 3,
    ("extreme", "up"): 4,
    ("squares", "up"): 5,
    ("either", "even"): 6,
}
LOG2_E = 1.4426950408889634  # exponentials are of base 2: logits carry this factor
MOST_ALONG = 65_535  # programs along a grid's second and third axis; the first one takes 2^31
MIN_DOT = 16  # the smallest side of a matrix product on tensor cores
MIN_COLUMNS = 8  # of NVIDIA's


class Kernel(Protocol):
    """Function under `triton.jit`, compiled or interpreted."""

    __name__: str
    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The kernel as a call that runs on a grid."""


Receiver = Callable[[Kernel, tuple[int, ...], tuple[object, ...], dict[str, object]], None]

# Receiver of launches in place of a GPU: `compile` and the test of host synchronisation set it.
_recorder: list[Receiver] = []
_compiled_for: list[int] = []  # what `ptx_level` says in place of the machine


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Runs a kernel on the device of its first tensor; a grid with a zero in it is no launch.

    Args:
        kernel: A function under `triton.jit`.
        grid: Programs along up to three axes.
        arguments: Tensors and numbers, in the kernel's order.
        constants: Its compile-time constants, and `num_warps`, `num_stages`, `enable_fp_fusion`.
    """
    if 0 in grid:
        return
    assert all(programs <= MOST_ALONG for programs in grid[1:]), f"{kernel.__name__}: a GPU takes no grid of {grid}"
    constants.setdefault("enable_fp_fusion", True)
    if _recorder:
        _recorder[-1](kernel, grid, arguments, constants)
        return
    first = next(a for a in arguments if isinstance(a, Tensor))
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)


@contextmanager
def _while_open(stack: list[Item], item: Item) -> Iterator[None]:
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()


def recording(receive: Receiver) -> AbstractContextManager[None]:
    """Context in which launches go to `receive(kernel, grid, arguments, constants)` and nothing is computed."""
    return _while_open(_recorder, receive)


def compiled_for(level: int) -> AbstractContextManager[None]:
    """Context in which kernels are made for this level of NVIDIA's instructions, whatever the machine has."""
    return _while_open(_compiled_for, level)


@dataclass(frozen=True)
class Tuning:
    """Sizes of the kernel of decode attention in place of those that it is launched with otherwise; 0 = those.

    Args:
        block_slots: Slots that a turn of the loop reads, a power of two from 16 on; of keys with a scale per group of
            tokens no more than a group has.
        warps: Warps of a program.
        stages: Turns whose loads are under way.
    """

    block_slots: int = 0
    warps: int = 0
    stages: int = 0


_tunings = [Tuning()]


def tuning() -> Tuning:
    """The sizes in force."""
    return _tunings[-1]


def tuned(sizes: Tuning) -> AbstractContextManager[None]:
    """Context in which decode attention is prepared with these sizes."""
    return _while_open(_tunings, sizes)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, triton.next_power_of_2(max(1, n)))


@dataclass(frozen=True, kw_only=True)
class SideLayout:
    """Compile-time layout of one side (keys or values) of a page, one constexpr of kernels.

    Args:
        BITS: 1 to 8 of codes, 0 for floats of 8 bits, 16 or 32 of elements.
        P: Planes.
        W: Bytes or elements of a slot and plane.
        WP: The power of two above W.
        ROW: Bytes or elements of a slot.
        OFF: Byte offset of the codes; SCALE and ZERO: those of the metadata.
        GROUPS: Scales per vector.
        CHANNEL: Tokens that share a channel's scale; 0 = scales per token.
        CODE: Kind of code, an index of `CODES`.
        FIT: Rule of their scale, an index of `FITS`, or 0.
        ELEM: Element type.
        PTX: Uses of NVIDIA's instructions, as `ptx_level`.
    """

    BITS: int
    P: int
    W: int
    WP: int
    ROW: int
    OFF: int
    SCALE: int
    ZERO: int
    GROUPS: int
    CHANNEL: int
    CODE: int
    FIT: int
    ELEM: tl.dtype
    PTX: int


def ptx_level() -> int:
    """The compute capability, times ten, whose instructions kernels may name; 0 on AMD and in the interpreter."""
    if _compiled_for:
        return _compiled_for[-1]
    if INTERPRETED or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def side_layout(fmt: PageFormat, side: str, least: int = MIN_DOT) -> SideLayout:
    """One side, `k` or `v`, of a page; `least`: the least WP."""
    return _side_layout(fmt, side, least, ptx_level())


@cache
def _side_layout(fmt: PageFormat, side: str, least: int, ptx: int) -> SideLayout:
    slot = fmt.slot
    code, bits, groups = (
        (slot.keys, slot.k_bits, slot.k_groups) if side == "k" else (slot.values, slot.v_bits, slot.v_groups)
    )
    planes = 1 if code is None else 8 if bits in (3, 5) else 8 // bits
    width = (slot.key_channels if side == "k" else slot.head_dim) // planes
    return SideLayout(
        BITS=0 if code is not None and code.is_float else bits,
        P=planes,
        W=width,
        WP=power_of_two(width, least),
        ROW=width * bits if bits in (3, 5) else width,
        OFF=fmt.regions[f"{side}_codes"][0],
        SCALE=fmt.regions[f"{side}_scale"][0],
        ZERO=fmt.regions[f"{side}_zero"][0],
        GROUPS=groups if code is not None and code.scale != "none" else 1,
        CHANNEL=slot.k_channel_group if side == "k" and slot.channel_keys else 0,
        CODE=0 if code is None else CODES[code.name],
        FIT=0 if code is None else FITS.get((code.fit, code.rounding), 0),
        ELEM=ELEMENT[slot.dtype],
        PTX=ptx,
    )


@triton.jit
def code_values(codes, BITS: tl.constexpr, dtype: tl.constexpr):
    """Integers below 2^BITS as floats: set into the mantissa of a power of two, which is then taken off.

    Exact, and at the full rate of bit operations; casts from integers run at a quarter of it or less.
    """
    if dtype == tl.float16:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif dtype == tl.bfloat16 and BITS <= 4:
        return (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    else:
        return ((codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0).to(dtype)


# The interpreter holds bf16 as bare bits and multiplies those: there, bf16 products run in fp32.
INTERPRETED = not isinstance(code_values, triton.JITFunction)
if INTERPRETED:
    patch_once()


@triton.jit
def e4m3_values(raw):
    """Decode e4m3 bytes to fp32: the same bits as an fp16 with its exponent 8 lower; 0x7f and 0xff are NaN."""
    wide = raw.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def float8_values(raw, CODE: tl.constexpr):
    """Decode float bytes to fp32: e5m2 where CODE is negative, else e4m3."""
    if CODE < 0:
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return e4m3_values(raw)


@triton.jit
def capped(logit, CAP: tl.constexpr):
    """Logits of base 2 after a soft cap, CAP * tanh(logit / CAP)."""
    shrunk = tl.exp2(tl.abs(logit) * (-2.0 * 1.4426950408889634 / CAP))
    return tl.where(logit < 0, -CAP, CAP) * (1.0 - shrunk) / (1.0 + shrunk)


@triton.jit
def round_even(x):
    """Rounds to the nearest integer, halves to even; exact below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bytes(x):
    """e4m3 bytes of fp32 values, halves to even, saturating at +-448; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = ((bits >> 24) & 0x80).to(tl.uint8)
    size = tl.minimum(tl.abs(x), 448.0)
    raw = size.to(tl.uint32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3: from one bias to the other
    small = round_even(size * 512.0).to(tl.int32).to(tl.uint32)  # below 2^-6 the codes are multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal).to(tl.uint8)
    return tl.where(x != x, 0x7F, code).to(tl.uint8) | sign


@triton.jit
def e5m2_bytes(x):
    """e5m2 bytes of fp32 values, halves to even, saturating at +-57344; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = ((bits >> 24) & 0x80).to(tl.uint8)
    size = tl.minimum(tl.abs(x), 57344.0)
    raw = size.to(tl.uint32, bitcast=True)
    normal = ((raw + 0xFFFFF + ((raw >> 21) & 1)) >> 21) - 448  # 448 = (127 - 15) << 2: from one bias to the other
    small = round_even(size * 65536.0).to(tl.int32).to(tl.uint32)  # below 2^-14 the codes are multiples of 2^-16
    code = tl.where(size < 6.103515625e-05, small, normal).to(tl.uint8)
    return tl.where(x != x, 0x7F, code).to(tl.uint8) | sign


@triton.jit
def elements(x, ELEM: tl.constexpr):
    """Cast fp32 values to elements, halves to even; to bf16 by their bits, since the interpreter's cast truncates."""
    if ELEM == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(ELEM)
