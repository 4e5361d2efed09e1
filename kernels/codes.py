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
- `q8_0`, `q4_0`, `q4_1`, `q5_0`, `q5_1`, `iq4_nl`: integers and a table as llama.cpp (ggml) makes them: halves are
  rounded up, numbers are multiplied by the reciprocal of the fp32 scale, and the scale of `q4_0`, `q5_0` and `iq4_nl`
  has the sign that gives the number farthest from 0 the lowest code. Of `iq4_nl` it is fitted to the codes afterwards.
- `zero_point`: integers with a whole zero point: value = scale * level + zero, where zero is a multiple of the scale.
- `e5m2`: the code is a float of 8 bits, the upper half of an fp16, without a scale.
- `nvfp4_4over6`: as `nvfp4`, with the largest number at 6 or at 4, whichever loses less. `mxfp4_up`: as `mxfp4`, with a
  power of two that clips nothing.
- `book`: a code stands for a level of a table in ascending order, whole numbers from 0 to 255 that are not equally far
  apart; value = scale * level + zero, where level 0 is the group's smallest number and 255 its largest. The table is
  the format's (`SlotFormat.k_table`, `v_table`), found by calibration; without one, levels are equally far apart.
- `book_channels`: the same without scales in the page: what is written is levels already, nearest ones are stored.
  Scales belong to a channel for good and are stored outside the pages (`backend.Channels`).

Magnitudes are whole numbers below 128, so that a backend may multiply them in 8 bits.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

Scale = Literal["none", "fp16", "e4m3", "e8m0"]
Fit = Literal["range", "zero_point", "largest", "extreme", "norm", "squares", "either"]
Rounding = Literal["even", "up"]
SCALE_BYTES: dict[Scale, int] = {"none": 0, "fp16": 2, "e4m3": 1, "e8m0": 1}
E4M3_LARGEST = 448.0
BITS = (1, 2, 3, 4, 5, 8)

# Best levels for a normal distribution (Lloyd 1957, Max 1960), times so many units per standard deviation that all of
# them come close to whole numbers: at most 0.008 deviations off, and 0.06 % more mean square error than the best. The
# units are fp32 numbers, so that every backend has the same ones.
_LLOYD: dict[int, tuple[tuple[int, ...], float]] = {
    2: ((30, 100), 66.203125),
    3: ((10, 31, 55, 88), 40.90625),
    4: ((5, 15, 25, 36, 48, 62, 79, 104), 38.140625),
}
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves
_NL_CENTRE = 127  # of llama.cpp's kvalues_iq4nl: -127, -104, ..
_NL = (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240)
_UNIFORM_BITS = (1, 2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code of stored numbers.

    Args:
        name: One of `NAMES`.
        bits: Bits per number.
        scale: Type of a group's scale.
        zero: An fp16 zero point is stored with it.
        fit: Statistic of the group that sets the scale: the group's `range` (`zero_point`: with a whole zero point),
            its `largest` magnitude, its number farthest from 0 with its sign (`extreme`), its `norm`, least `squares`,
            or `either` of two.
        rounding: Rounding of ties: to the `even` code, or `up`, away from 0.
        magnitudes: Magnitudes of a signed table, by the lower bits of a code, in ascending order.
        unit: Factor on a scale that turns levels into values.
        deviation: With `norm`: levels per standard deviation of the group.
        centre: Offset subtracted from a level.
        levels: Level of each code of a calibrated table, in ascending order.
    """

    name: str
    bits: int
    scale: Scale = "fp16"
    zero: bool = False
    fit: Fit = "largest"
    rounding: Rounding = "even"
    magnitudes: tuple[int, ...] = ()
    unit: float = 1.0
    deviation: float = 0.0
    centre: int = 0
    levels: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        """Every code is a float of 8 bits."""
        return self.name.startswith(("e4m3", "e5m2"))

    @property
    def is_uniform(self) -> bool:
        """Levels are equally far apart."""
        return not (self.magnitudes or self.levels or self.is_float)

    @property
    def is_plain(self) -> bool:
        """Integers rounded to even: those whose scale tokens may share."""
        return self.is_uniform and self.rounding == "even"

    @property
    def is_book(self) -> bool:
        """Levels are a table that calibration found."""
        return self.name.startswith("book")

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
        """Borders between neighbouring magnitudes (or levels); a number on the border takes the even code."""
        sizes = self.magnitudes or self.levels
        return tuple((a + b) / 2 for a, b in zip(sizes, sizes[1:], strict=False))


# Codes of which there is one number of bits.
_FIXED: dict[str, Code] = {
    code.name: code
    for code in (
        Code(name="q8_0", bits=8, rounding="up", centre=128),
        Code(name="q4_0", bits=4, fit="extreme", rounding="up", centre=8),
        Code(name="q4_1", bits=4, zero=True, fit="range", rounding="up"),
        Code(name="q5_0", bits=5, fit="extreme", rounding="up", centre=16),
        Code(name="q5_1", bits=5, zero=True, fit="range", rounding="up"),
        Code(name="iq4_nl", bits=4, fit="squares", rounding="up", centre=_NL_CENTRE, levels=_NL),
        Code(name="zero_point", bits=4, zero=True, fit="zero_point", rounding="up"),
        Code(name="e4m3", bits=8, scale="none"),
        Code(name="e4m3_scaled", bits=8),
        Code(name="e5m2", bits=8, scale="none"),
        Code(name="nvfp4", bits=4, scale="e4m3", magnitudes=_E2M1, unit=0.5, centre=12),
        Code(name="nvfp4_4over6", bits=4, scale="e4m3", fit="either", magnitudes=_E2M1, unit=0.5, centre=12),
        Code(name="mxfp4", bits=4, scale="e8m0", magnitudes=_E2M1, unit=0.5, centre=12),
        Code(name="mxfp4_up", bits=4, scale="e8m0", rounding="up", magnitudes=_E2M1, unit=0.5, centre=12),
    )
}
NAMES = ("min_max", "symmetric", "lloyd", "book", "book_channels", *_FIXED)
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
    allowed = {"min_max": _UNIFORM_BITS, "symmetric": _UNIFORM_BITS[1:], "lloyd": tuple(_LLOYD)}
    allowed |= dict.fromkeys(("book", "book_channels"), (2, 3, 4))
    allowed |= {fixed.name: (fixed.bits,) for fixed in _FIXED.values()}
    if bits not in (wanted := allowed[name]):
        raise ValueError(f"{name} codes of {bits} bits do not exist; choose {' or '.join(map(str, wanted))} bits")
    if name == "min_max":
        return Code(name=name, bits=bits, zero=True, fit="range")
    if name == "symmetric":
        return Code(name=name, bits=bits, centre=2 ** (bits - 1))
    if name == "lloyd":
        magnitudes, deviation = _LLOYD[bits]
        return Code(name=name, bits=bits, fit="norm", magnitudes=magnitudes, deviation=deviation, centre=magnitudes[-1])
    return _FIXED[name] if name in _FIXED else _book(name, bits, levels)


def every_code() -> Iterator[Code]:
    """All codes that there are, those of calibrated tables with levels that are equally far apart."""
    for name in NAMES:
        for bits in (_FIXED[name].bits,) if name in _FIXED else _UNIFORM_BITS:
            with suppress(ValueError):
                yield code_of(name, bits)


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
