"""A slow oracle of the page layout: Python integers and numpy fp32 scalars, one slot and one byte at a time.

It knows the layout only from its description (regions in order, planar packing, transposed keys).
"""

from dataclasses import dataclass

import numpy as np
from oracles.slow_codes import slow_decode, slow_encode
from oracles.slow_numbers import F32, element_bytes, read_element, to_e4m3


def slow_quantize(
    x: list[float], bits: int, symmetric: bool = False, metadata_first: bool = False
) -> tuple[list[int], np.float16, np.float16]:
    """Stored codes (offset when symmetric), scale and zero of one vector, by the definition in fp32."""
    x = [F32(e) for e in x]
    top, half = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale, zero = max(abs(e) for e in x) / F32(half - 1), F32(0)
    else:
        zero = min(x)
        scale = (max(x) - zero) / F32(top)
    scale16, zero16 = np.float16(scale), np.float16(zero)
    codes = []
    for e in x:
        if scale16 == 0:
            code = 0
        elif metadata_first:
            code = int(np.rint((e - F32(zero16)) / F32(scale16)))
        else:
            code = int(np.rint((e - zero) * (F32(1) / scale)))
        codes.append(min(max(code, -half), half - 1) + half if symmetric else min(max(code, 0), top))
    return codes, scale16, zero16


def slow_dequantize(
    codes: list[int], scale: float, zero: float, bits: int, symmetric: bool = False
) -> list[np.float32]:
    """fp32 values of stored codes."""
    if symmetric:
        return [F32(c - 2 ** (bits - 1)) * F32(scale) for c in codes]
    return [F32(c) * F32(scale) + F32(zero) for c in codes]


def slow_pack(codes: list[int], bits: int) -> bytes:
    """Planar: byte w holds elements w, w + W, w + 2W, ..., the first of them in the lowest bits; 3 bits are 2 and 1, 5
    are 4 and 1."""
    if bits in (3, 5):
        low = bits - 1
        return slow_pack([code % 2**low for code in codes], low) + slow_pack([code >> low for code in codes], 1)
    width = len(codes) * bits // 8
    return bytes(sum(codes[w + plane * width] << (plane * bits) for plane in range(8 // bits)) for w in range(width))


@dataclass
class Layout:
    """A slot's format in plain words: bits per side, element type, scales per vector or per channel group.

    Args:
        dim: Channels.
        k_bits: 1, 2, 3, 4, 8, or the element's 16 or 32.
        v_bits: Likewise.
        page_bytes: Page size.
        kind: Element type of uncoded sides.
        k_channel_group: Tokens per channel scale, 0 for token scales.
        k_groups: Scales per key.
        v_groups: Scales per value.
        symmetric: No zero points.
        fp8: 8-bit sides are e4m3.
        score: A score per slot.
        pos: A position per slot.
        k_code: How keys are coded where they are no integers, as in `slow_codes`.
        v_code: Likewise.
        k_apart: Elements of a key whose rest is kept apart, in 16 bits beside a byte that says which one.
        v_apart: Likewise of a value.
        k_channels: Channels that are stored of a key, 0 for all.
    """

    dim: int
    k_bits: int
    v_bits: int
    page_bytes: int
    kind: str = "fp16"
    k_channel_group: int = 0
    k_groups: int = 1
    v_groups: int = 1
    symmetric: bool = False
    fp8: bool = False
    score: bool = False
    pos: bool = False
    k_code: str = ""
    v_code: str = ""
    k_apart: int = 0
    v_apart: int = 0
    k_channels: int = 0

    def coded(self, bits: int) -> bool:
        """The side holds integer codes."""
        return bits < 16 and not (self.fp8 and bits == 8)

    @property
    def channel(self) -> bool:
        """Keys have scales per channel."""
        return self.coded(self.k_bits) and self.k_channel_group > 0

    def sizes(self, tokens: int) -> dict[str, int]:
        """Bytes of every region for a number of slots, in page order."""
        k_scales = self.dim * (tokens // self.k_channel_group) if self.channel else tokens * self.k_groups
        k, v = self.coded(self.k_bits), self.coded(self.v_bits)
        k_unit, v_unit = (1 if code in ("nvfp4", "mxfp4") else 2 for code in (self.k_code, self.v_code))
        if self.k_code == "book_channels":  # their scales belong to a channel for good and lie in no page
            k_unit = 0
        k_zero, v_zero = (not self.symmetric and code in ("", "book") for code in (self.k_code, self.v_code))
        return {
            "k_codes": tokens * (self.k_channels or self.dim) * self.k_bits // 8,
            "v_codes": tokens * self.dim * self.v_bits // 8,
            "k_scale": k_unit * k_scales if k else 0,
            "k_zero": 2 * k_scales if k and k_zero else 0,
            "v_scale": v_unit * tokens * self.v_groups if v else 0,
            "v_zero": 2 * tokens * self.v_groups if v and v_zero else 0,
            "k_apart": 2 * tokens * self.k_apart,
            "k_where": tokens * self.k_apart,
            "v_apart": 2 * tokens * self.v_apart,
            "v_where": tokens * self.v_apart,
            "score": 4 * tokens if self.score else 0,
            "pos": 4 * tokens if self.pos else 0,
        }

    @property
    def tokens(self) -> int:
        """Slots per page: the largest whole number of quanta that fits, found by counting up."""
        quantum = max(8, self.k_channel_group if self.channel else 0)
        tokens = 0
        while sum(self.sizes(tokens + quantum).values()) <= self.page_bytes:
            tokens += quantum
        return tokens

    def start(self, name: str) -> int:
        """Offset of a region."""
        offset = 0
        for region, size in self.sizes(self.tokens).items():
            if region == name:
                return offset
            offset += size
        raise KeyError(name)


class SlowPage:
    """One page of bytes, written slot by slot."""

    def __init__(self, layout: Layout, raw: bytes) -> None:
        self.layout, self.raw = layout, bytearray(raw)

    def put(self, name: str, index: int, value: bytes) -> None:
        """Writes item number `index` of a region of equal items."""
        at = self.layout.start(name) + index * len(value)
        self.raw[at : at + len(value)] = value

    def _side(self, x: list[float], bits: int, groups: int, code: str) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Bytes (or elements) of one vector, and its scales and zeros."""
        lay = self.layout
        if bits >= 16:
            return [element_bytes(e, lay.kind) for e in x], [], []
        if lay.fp8 and bits == 8 and not code:
            return [bytes([to_e4m3(e)]) for e in x], [], []
        size, codes, scales, zeros = len(x) // groups, [], [], []
        for g in range(groups):
            if code:
                part, scale = slow_encode(x[g * size : (g + 1) * size], code, bits)
                codes += part
                scales.append(scale)
                continue
            part, scale, zero = slow_quantize(x[g * size : (g + 1) * size], bits, lay.symmetric, lay.channel)
            codes += part
            scales.append(scale.tobytes())
            zeros.append(zero.tobytes())
        return [bytes([b]) for b in slow_pack(codes, bits)], scales, zeros

    def write_value(self, slot: int, x: list[float]) -> None:
        """Values are token-major; metadata [groups, T]."""
        codes, scales, zeros = self._side(x, self.layout.v_bits, self.layout.v_groups, self.layout.v_code)
        for w, item in enumerate(codes):
            self.put("v_codes", slot * len(codes) + w, item)
        self._meta("v", slot, scales, zeros)

    def write_key(self, slot: int, x: list[float]) -> None:
        """Keys are transposed; metadata [groups, T]."""
        codes, scales, zeros = self._side(x, self.layout.k_bits, self.layout.k_groups, self.layout.k_code)
        for w, item in enumerate(codes):
            self.put("k_codes", w * self.layout.tokens + slot, item)
        self._meta("k", slot, scales, zeros)

    def _meta(self, side: str, slot: int, scales: list[bytes], zeros: list[bytes]) -> None:
        for g, scale in enumerate(scales):
            self.put(f"{side}_scale", g * self.layout.tokens + slot, scale)
        for g, zero in enumerate([] if self.layout.symmetric else zeros):
            self.put(f"{side}_zero", g * self.layout.tokens + slot, zero)

    def write_key_group(self, first: int, xs: list[list[float]]) -> None:
        """A group of keys with one scale per channel; metadata [T / group, D]."""
        lay, codes = self.layout, []
        for channel in range(lay.dim):
            part, scale, zero = slow_quantize([x[channel] for x in xs], lay.k_bits, lay.symmetric, True)
            codes.append(part)
            index = first // lay.k_channel_group * lay.dim + channel
            self.put("k_scale", index, scale.tobytes())
            if not lay.symmetric:
                self.put("k_zero", index, zero.tobytes())
        for i in range(len(xs)):
            for w, byte in enumerate(slow_pack([codes[c][i] for c in range(lay.dim)], lay.k_bits)):
                self.put("k_codes", w * lay.tokens + first + i, bytes([byte]))


def stored_vector(
    x: list[float],
    bits: int,
    *,
    kind: str = "fp16",
    groups: int = 1,
    symmetric: bool = False,
    metadata_first: bool = False,
    code: str = "",
) -> np.ndarray:
    """What a vector reads as after it was stored; fp32."""
    if bits >= 16:
        return np.array([read_element(element_bytes(e, kind), kind) for e in x], F32)
    size, out = len(x) // groups, []
    for g in range(groups):
        if code:
            out += slow_decode(*slow_encode(x[g * size : (g + 1) * size], code, bits), code, bits)
            continue
        codes, scale, zero = slow_quantize(x[g * size : (g + 1) * size], bits, symmetric, metadata_first)
        out += slow_dequantize(codes, scale, zero, bits, symmetric)
    return np.array(out, F32)
