"""Codes: how the numbers of a key or value vector are written, declared once for all backends.

A group of channels has one scale, and each of its numbers is a code. A code stands for a whole number (its *level*) or
for a small float:

- `min_max`: level = code, value = scale * level + zero; scale and zero span the group's smallest and largest number.
- `symmetric`: level = code - half, value = scale * level.
- `e4m3`: the code is a float of 8 bits, without a scale. `e4m3_scaled`: with one, so that the largest number is 448.
- `lloyd`: the top bit of a code is the sign, the others choose a magnitude from a table; value = scale * magnitude.
  The tables are the best ones for numbers from a normal distribution, which channels follow once they are rotated. The
  scale gives the decoded vector the length of the vector that was stored.
- `nvfp4`, `mxfp4`: e2m1, floats of 4 bits, as a table of halves: value = scale * magnitude / 2. NVFP4 has an e4m3
  scale, MXFP4 a power of two.
- `book`: a code stands for a level of a table in ascending order, whole numbers from 0 to 255 that are not equally far
  apart; value = scale * level + zero, where level 0 is the group's smallest number and 255 its largest. The table is
  the format's (`SlotFormat.k_table`, `v_table`), found by calibration; without one, levels are equally far apart.
- `book_channels`: the same without scales in the page: what is written is levels already, nearest ones are stored.
  Scales belong to a channel for good and lie beside the pages (`backend.Channels`).

Magnitudes are whole numbers below 128, so that a backend may multiply them in 8 bits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

Scale = Literal["none", "fp16", "e4m3", "e8m0"]
Fit = Literal["range", "largest", "norm"]
SCALE_BYTES: dict[Scale, int] = {"none": 0, "fp16": 2, "e4m3": 1, "e8m0": 1}
E4M3_LARGEST = 448.0
BITS = (1, 2, 3, 4, 8)

# Best levels for a normal distribution (Lloyd 1957, Max 1960), times so many units per standard deviation that all of
# them come close to whole numbers: at most 0.008 deviations off, and 0.06 % more mean square error than the best. The
# units are fp32 numbers, so that every backend has the same ones.
_LLOYD: dict[int, tuple[tuple[int, ...], float]] = {
    2: ((30, 100), 66.203125),
    3: ((10, 31, 55, 88), 40.90625),
    4: ((5, 15, 25, 36, 48, 62, 79, 104), 38.140625),
}
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves


@dataclass(frozen=True, kw_only=True)
class Code:
    """How numbers are written.

    Args:
        name: One of `NAMES`.
        bits: Bits per number.
        scale: Type of a group's scale.
        zero: A zero point in fp16 is stored beside it.
        fit: What the scale is made from: the group's `range`, its `largest` magnitude, or its `norm`.
        magnitudes: Of signed tables: what the lower bits of a code stand for, in ascending order.
        unit: Factor on a scale that turns levels into values.
        deviation: With `norm`: levels per standard deviation of the group.
        centre: What is taken off a level.
        levels: Of calibrated tables: what each code stands for, in ascending order.
    """

    name: str
    bits: int
    scale: Scale = "fp16"
    zero: bool = False
    fit: Fit = "largest"
    magnitudes: tuple[int, ...] = ()
    unit: float = 1.0
    deviation: float = 0.0
    centre: int = 0
    levels: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        """Every code is an e4m3 float."""
        return self.name.startswith("e4m3")

    @property
    def is_uniform(self) -> bool:
        """Levels are equally far apart."""
        return not (self.magnitudes or self.levels or self.is_float)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale with its zero point."""
        return SCALE_BYTES[self.scale] + 2 * self.zero

    @property
    def table(self) -> tuple[int, ...]:
        """The level of every code, a whole number below 256; value = (level - centre) * unit * scale + zero."""
        if not self.magnitudes:
            return self.levels or tuple(range(2**self.bits))
        return tuple(self.centre + sign * size for sign in (1, -1) for size in self.magnitudes)

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Where one magnitude (or level) ends and the next begins; a number on the border takes the even code."""
        sizes = self.magnitudes or self.levels
        return tuple((a + b) / 2 for a, b in zip(sizes, sizes[1:], strict=False))


NAMES = ("min_max", "symmetric", "e4m3", "e4m3_scaled", "lloyd", "nvfp4", "mxfp4", "book", "book_channels")
BOOK_TOP = 255  # the largest level of a calibrated table


@cache
def code_of(name: str, bits: int, levels: tuple[int, ...] = ()) -> Code:
    """The code of a name and a number of bits.

    Args:
        name: One of `NAMES`.
        bits: Bits per number.
        levels: Of `book` and `book_channels`: the table, 2^bits whole numbers from 0 to 255 in ascending order; empty =
            equally far apart.

    Raises:
        ValueError: There is none, with what there is; or the table is none for it.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} names no code; choose one of {', '.join(NAMES)}")
    allowed = {"min_max": BITS, "symmetric": BITS[1:], "lloyd": tuple(_LLOYD), "nvfp4": (4,), "mxfp4": (4,)}
    allowed |= dict.fromkeys(("book", "book_channels"), (2, 3, 4))
    if bits not in (wanted := allowed.get(name, (8,))):
        raise ValueError(f"{name} codes of {bits} bits do not exist; choose {' or '.join(map(str, wanted))} bits")
    if name == "min_max":
        return Code(name=name, bits=bits, zero=True, fit="range")
    if name == "symmetric":
        return Code(name=name, bits=bits, centre=2 ** (bits - 1))
    if name.startswith("book"):
        return _book(name, bits, levels)
    if name == "lloyd":
        magnitudes, deviation = _LLOYD[bits]
        return Code(name=name, bits=bits, fit="norm", magnitudes=magnitudes, deviation=deviation, centre=magnitudes[-1])
    if name in ("nvfp4", "mxfp4"):
        scale: Scale = "e4m3" if name == "nvfp4" else "e8m0"
        return Code(name=name, bits=bits, scale=scale, magnitudes=_E2M1, unit=0.5, centre=_E2M1[-1])
    return Code(name=name, bits=bits, scale="none" if name == "e4m3" else "fp16")


def _book(name: str, bits: int, levels: tuple[int, ...]) -> Code:
    """A code of a calibrated table.

    Raises:
        ValueError: The levels are none.
    """
    last = 2**bits - 1
    levels = levels or tuple(round(BOOK_TOP * code / last) for code in range(last + 1))
    rises = all(low < high for low, high in zip(levels, levels[1:], strict=False))
    if len(levels) != last + 1 or not rises or levels[0] < 0 or levels[-1] > BOOK_TOP:
        raise ValueError(
            f"a table of {bits} bits has {last + 1} whole numbers from 0 to {BOOK_TOP} in ascending order, but this "
            f"one is {levels}"
        )
    if name == "book_channels":
        return Code(name=name, bits=bits, scale="none", levels=levels)
    return Code(name=name, bits=bits, zero=True, fit="range", levels=levels)
