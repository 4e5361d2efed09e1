"""Codes as engines write them: llama.cpp's against the gguf package, the others against formulas from their sources."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_decode
from gguf.quants import quantize as gguf_encode

from kvbench.kernels.codes import Code, code_of
from kvbench.kernels.format import SlotFormat
from kvbench.kernels.reference.quant import decode, encode
from kvbench.policy.tiers import GGML, GGML_BLOCK

F32 = np.float32
# Of 16 bytes of a block: which of its channels lie in the low and high halves (ggml-common.h).
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    """Vectors of 32 channels of many sizes, some with ties, an outlier, or nothing but zeros and one number."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(count, GGML_BLOCK, generator=make) * torch.logspace(-4, 3, count)[:, None]
    x[::17] = torch.randint(-9, 10, x[::17].shape, generator=make) / 4
    x[::23, 3] = 300.0
    x[::29] = torch.where(x[::29] > 0, x[::29, :1], -x[::29, :1])  # two numbers of one size
    x[0], x[1] = 0.0, 2.5
    return x


def ggml_parts(raw: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes [n, 32], scales and zeros (fp16 [n]) of blocks as they lie in a GGUF file (ggml-common.h)."""
    scale, raw = raw[:, :2].copy().view(np.float16)[:, 0], raw[:, 2:]
    zero = None
    if name in ("q4_1", "q5_1"):
        zero, raw = raw[:, :2].copy().view(np.float16)[:, 0], raw[:, 2:]
    if name == "q8_0":
        return raw.view(np.int8).astype(int) + 128, scale, zero
    fifth = 0
    if name.startswith("q5"):
        bits, raw = raw[:, :4].copy().view(np.uint32), raw[:, 4:]
        fifth = (bits >> np.arange(32, dtype=np.uint32) & 1).astype(int) << 4
    return np.concatenate([raw & 15, raw >> 4], 1).astype(int) + fifth, scale, zero


def encoded(x: torch.Tensor, code: Code) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The same of kvbench."""
    codes, scale, zero = encode(x, code)
    assert scale is not None
    return codes.numpy().astype(int), scale.numpy()[:, 0], None if zero is None else zero.numpy()[:, 0]


def assert_equal_to_gguf(x: torch.Tensor, name: str) -> None:
    """Codes, scales and zeros, and the numbers that come back, bit for bit."""
    code, kind = code_of(name, GGML[name]), GGMLQuantizationType[name.upper()]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        raw = gguf_encode(x.numpy(), kind)
    found, want = encoded(x, code), ggml_parts(raw, name)
    for got, right in zip(found, want, strict=True):
        assert (got is None) == (right is None) and (got is None or np.array_equal(got, right))
    back = decode(*encode(x, code), code).numpy()
    assert np.array_equal(back, gguf_decode(raw, kind))


@pytest.mark.parametrize("name", [name for name in GGML if name != "iq4_nl"])
def test_codes_are_those_of_the_gguf_package(name: str):
    """Some thousand blocks of all sizes."""
    assert_equal_to_gguf(blocks(3000), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in GGML if name != "iq4_nl"])
def test_a_million_codes_are_those_of_the_gguf_package(name: str):
    """A million vectors, of normal numbers and of others with heavy tails."""
    for seed in range(10):
        make = torch.Generator().manual_seed(seed)
        x = torch.randn(100_000, GGML_BLOCK, generator=make)
        assert_equal_to_gguf(x if seed % 2 else x * x * x, name)


@pytest.mark.parametrize("name", GGML)
def test_bytes_are_those_of_ggml_s_tables(name: str):
    """A key and a value of 64 channels take two blocks each."""
    slot = SlotFormat(64, *[GGML[name]] * 2, k_groups=2, v_groups=2, k_code=name, v_code=name)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert elements == GGML_BLOCK and slot.slot_bytes == 2 * 2 * size


def nl_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales as `quantize_row_iq4_nl_ref` of ggml-quants.c makes them, one after the other in fp32."""
    codes, scales = np.zeros(x.shape, int), np.zeros(len(x), np.float16)
    for block, row in enumerate(x):
        largest = row[np.abs(row).argmax()]
        if abs(largest) < 1e-15:
            continue
        by = F32(1) / (largest / F32(NL[0]))
        dots = squares = F32(0)
        for i, number in enumerate(row):
            scaled = by * number
            above = int(np.searchsorted(NL, scaled, "right"))
            best = min(max(above, 1), 15)
            index = best - 1 if scaled - F32(NL[best - 1]) < F32(NL[best]) - scaled else best
            codes[block, i] = 0 if scaled <= NL[0] else 15 if scaled >= NL[-1] else index
            level, weight = F32(NL[codes[block, i]]), number * number
            dots, squares = dots + weight * level * number, squares + weight * level * level
        scales[block] = np.float16(dots / squares)
    return codes, scales


def test_iq4_nl_codes_are_llama_cpp_s_and_scales_within_a_rounding():
    """The gguf package has no such quantiser. Sums in fp64, which all backends agree on, round to another fp16 scale
    than fp32's now and then."""
    x, code = blocks(600), code_of("iq4_nl", 4)
    want_codes, want = nl_codes(x.numpy())
    codes, scales, _ = encoded(x, code)
    live = want != 0
    assert np.array_equal(codes[live], want_codes[live]) and live.mean() > 0.9 and np.array_equal(scales == 0, ~live)
    apart = np.abs(scales.view(np.int16).astype(int) - want.view(np.int16).astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01
    assert NL.tolist() == [level - code.centre for level in code.levels]


def test_whole_zero_points_are_vllm_s():
    """`_reshape_cache_int4_kernel` of vLLM: codes; scale and zero are what it hides in 4 bytes, rounded to fp16."""
    x = blocks(2000).numpy()
    low, high = x.min(1), x.max(1)
    scale = np.maximum((high - low) / F32(15), F32(1e-6))
    point = np.clip(np.trunc(-low / scale + F32(0.5)), 0, 15)
    level = x * (F32(1) / scale)[:, None] + point[:, None]
    want = np.clip(np.trunc(level + np.copysign(F32(0.5), level)), 0, 15)
    codes, found, zero = encoded(torch.from_numpy(x), code_of("zero_point", 4))
    with np.errstate(over="ignore"):
        assert np.array_equal(codes, want) and np.array_equal(found, scale.astype(np.float16))
        assert np.array_equal(zero, (-point * scale).astype(np.float16))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_scales_that_clip_nothing_are_sglang_s():
    """`FP4MXBlock16KVQuantizeUtil`: the exponent is rounded up, borders go to the larger number, and so does no -0."""
    x = blocks(2000)[:, :16].numpy()
    exponent = np.ceil(np.log2(np.maximum(np.abs(x).max(1).astype(float) / 6, 1e-10)))
    scaled = x / 2.0 ** exponent[:, None]
    borders = (E2M1[1:] + E2M1[:-1]) / 2
    want = np.searchsorted(borders, np.abs(scaled), "right") + 8 * (scaled < 0)
    codes, scales, _ = encoded(torch.from_numpy(x), code_of("mxfp4_up", 4))
    assert np.array_equal(codes, want) and np.array_equal(scales, exponent + 127)
    assert np.array_equal(np.abs(scaled).max(1) <= 6, np.ones(len(x), bool))


def test_four_over_six_takes_what_loses_less():
    """Both ways by themselves, and the smaller loss; each comes out somewhere."""
    x = blocks(800, seed=1)[:, :16]
    code, six = code_of("nvfp4_4over6", 4), code_of("nvfp4", 4)
    wide = torch.cat([x, 1.5 * x.abs().amax(1, keepdim=True)], 1)  # a further number of 6 puts the largest one at 4
    ways = []
    for codes, scale, _ in (encode(x, six), encode(wide, six)):
        codes = codes[:, :16]
        ways.append((codes, scale, (decode(codes, scale, None, six) - x).double().square().sum(1)))
    codes, scale, _ = encode(x, code)
    four = ways[1][2] < ways[0][2]
    assert torch.equal(codes, torch.where(four[:, None], ways[1][0], ways[0][0]))
    assert torch.equal(scale, torch.where(four[:, None], ways[1][1], ways[0][1]))
    assert 0.1 < four.float().mean() < 0.9


def test_e5m2_is_the_nearest_float():
    """All bytes come back; numbers between go to the nearest, the even one on a border; those beyond to the largest."""
    code = code_of("e5m2", 8)
    finite = list(range(0x7C))
    size = np.array([np.frombuffer(bytes([0, byte]), np.float16)[0] for byte in finite], float)
    middle = (size[1:] + size[:-1]) / 2
    x = np.concatenate([size, middle, middle * (1 + 1e-6), [1e9, np.inf]])
    want = [*finite, *(byte + byte % 2 for byte in finite[:-1]), *finite[1:], 0x7B, 0x7B]
    for sign in (1, -1):
        codes, _, _ = encode(torch.from_numpy((sign * x).astype(F32)), code)
        assert codes.tolist() == [byte + (0x80 if sign < 0 else 0) for byte in want]
    assert decode(codes[: len(size)], None, None, code).tolist() == (-size).tolist()


@pytest.mark.parametrize("name", [*GGML, "zero_point"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e9])
def test_what_is_not_finite_stays_visible(name: str, bad: float):
    """A vector with such a number, or with one whose scale fp16 does not hold, reads as no finite one; codes exist."""
    code, x = code_of(name, GGML.get(name, 4)), torch.ones(1, 32)
    x[0, 5] = bad
    codes, scale, zero = encode(x, code)
    assert not decode(codes, scale, zero, code).isfinite().all() and int(codes.max()) < 2**code.bits
