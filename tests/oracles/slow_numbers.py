"""Floats of 8, 16 and 32 bits by their definitions, one number at a time."""

import numpy as np

F32 = np.float32


def e4m3_value(code: int) -> float:
    """The number that an e4m3 byte stands for (NaN for 0x7f and 0xff)."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


POSITIVE = [e4m3_value(code) for code in range(127)]


def to_e4m3(x: float) -> int:
    """The nearest e4m3 byte, ties to the even code, saturating at 448."""
    size = min(abs(x), 448.0)
    best = min(range(127), key=lambda code: (abs(POSITIVE[code] - size), code & 1))
    return best | (128 if np.signbit(F32(x)) else 0)


def half_bytes(x: float) -> bytes:
    """fp16, little-endian."""
    with np.errstate(over="ignore"):
        return np.float16(x).tobytes()


def element_bytes(x: float, kind: str) -> bytes:
    """One element as fp16, bf16 (round to nearest, ties to even) or fp32, little-endian."""
    if kind == "fp16":
        return half_bytes(x)
    raw = int(np.frombuffer(F32(x).tobytes(), np.uint32)[0])
    if kind == "fp32":
        return raw.to_bytes(4, "little")
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).to_bytes(2, "little")


def read_element(raw: bytes, kind: str) -> np.float32:
    """Inverse of `element_bytes`."""
    if kind == "fp16":
        return F32(np.frombuffer(raw, np.float16)[0])
    return np.frombuffer(raw if kind == "fp32" else b"\0\0" + raw, F32)[0]
