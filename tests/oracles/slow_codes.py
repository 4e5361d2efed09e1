"""A slow oracle of codes that are no plain integers: one number at a time, nearest value by trying all of them."""

import math

import numpy as np
from oracles.slow_numbers import F32, POSITIVE, e4m3_value, to_e4m3

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP MX specification 1.0, table of FP4
LLOYD = {2: (30, 100), 3: (10, 31, 55, 88), 4: (5, 15, 25, 36, 48, 62, 79, 104)}
UNITS = {2: 66.203125, 3: 40.90625, 4: 38.140625}  # of them in a standard deviation


def nearest(size: float, values: tuple) -> int:
    """The index of the nearest value; the even one where two are equally near."""
    return min(range(len(values)), key=lambda index: (abs(values[index] - size), index % 2))


def signed(x: float, index: int, bits: int) -> int:
    """A code: the sign above the index of a magnitude."""
    return index | (int(np.signbit(F32(x))) << (bits - 1))


def slow_encode(x: list[float], name: str, bits: int) -> tuple[list[int], bytes]:
    """Codes of one group of channels, and its scale as it is stored; by the definitions, for finite numbers."""
    x = [F32(e) for e in x]
    if name == "e4m3_scaled":
        scale = np.float16(max(abs(e) for e in x) / F32(448))
        return [to_e4m3(float(e / F32(scale))) if scale > 0 else 0 for e in x], scale.tobytes()
    if name == "lloyd":
        square = math.fsum(float(e) ** 2 for e in x)
        if square == 0:
            return [0] * len(x), np.float16(0).tobytes()
        by = F32(UNITS[bits] * math.sqrt(len(x) / square))
        indices = [nearest(float(abs(e * by)), LLOYD[bits]) for e in x]
        scale = np.float16(F32(math.sqrt(square / sum(LLOYD[bits][i] ** 2 for i in indices))))
        codes = [signed(e, i, bits) for e, i in zip(x, indices, strict=True)]
        return codes if scale > 0 else [0] * len(x), scale.tobytes()
    largest = float(max(abs(e) for e in x))
    if name == "nvfp4":
        byte = to_e4m3(float(F32(largest) / F32(6)))
        scale = POSITIVE[byte]
    else:
        byte = min(max((math.frexp(largest)[1] - 1 if largest else -127) - 2 + 127, 2), 254)
        scale = 2.0 ** (byte - 127)
    codes = [signed(e, nearest(float(abs(e) / F32(scale / 2)) / 2, E2M1), 4) if scale else 0 for e in x]
    return codes, bytes([byte])


def slow_decode(codes: list[int], raw: bytes, name: str, bits: int) -> list[np.float32]:
    """What codes and a stored scale stand for, fp32."""
    if name in ("e4m3_scaled", "lloyd"):
        scale = F32(np.frombuffer(raw, np.float16)[0])
    else:
        scale = F32(POSITIVE[raw[0]] if name == "nvfp4" else 2.0 ** (raw[0] - 127))
    if name == "e4m3_scaled":
        return [F32(e4m3_value(code)) * scale for code in codes]
    values, half = LLOYD[bits] if name == "lloyd" else E2M1, 2 ** (bits - 1)
    return [F32(-values[code - half] if code >= half else values[code]) * scale for code in codes]
