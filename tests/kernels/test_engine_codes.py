"""Codes as engines write them: llama.cpp's against the gguf package, the others against formulas from their sources."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_decode
from gguf.quants import quantize as gguf_encode
from scipy import linalg

from kvbench.kernels.codes import Code, code_of
from kvbench.kernels.format import SlotFormat
from kvbench.kernels.reference.quant import decode, encode
from kvbench.models.load import LoadedModel
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


def assert_equal_to_llama_cpp(x: torch.Tensor, name: str) -> None:
    """Codes, scales and zeros, and the numbers that come back, bit for bit as the gguf package has them. It has no
    quantiser of iq4_nl, whose scales are sums in fp64, which all backends agree on: now and then they round to another
    fp16 number than those of fp32."""
    if name == "iq4_nl":
        want, right = nl_codes(x.numpy())
        codes, scale, _ = encoded(x, code_of(name, 4))
        live = right != 0
        assert np.array_equal(codes[live], want[live]) and live.mean() > 0.9 and np.array_equal(scale == 0, ~live)
        apart = np.abs(scale.view(np.int16).astype(int) - right.view(np.int16).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 0.01
        return
    code, kind = code_of(name, GGML[name]), GGMLQuantizationType[name.upper()]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        raw = gguf_encode(x.numpy(), kind)
    found, want = encoded(x, code), ggml_parts(raw, name)
    for got, right in zip(found, want, strict=True):
        assert (got is None) == (right is None) and (got is None or np.array_equal(got, right))
    back = decode(*encode(x, code), code).numpy()
    assert np.array_equal(back, gguf_decode(raw, kind))


@pytest.mark.parametrize("name", GGML)
def test_codes_are_llama_cpp_s(name: str):
    """Some thousand blocks of all sizes."""
    assert_equal_to_llama_cpp(blocks(3000), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GGML)
def test_a_million_codes_are_llama_cpp_s(name: str):
    """A million vectors, of normal numbers and of others with heavy tails."""
    for seed in range(10):
        make = torch.Generator().manual_seed(seed)
        x = torch.randn(100_000, GGML_BLOCK, generator=make)
        assert_equal_to_llama_cpp(x if seed % 2 else x * x * x, name)


@pytest.fixture(scope="module")
def real_blocks(embedded_model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the embedded model over the documentation that ships with Python, a million blocks each."""
    loaded = embedded_model
    ids = loaded.tokenizer.encode("\n".join(topics.values()), add_special_tokens=False)
    sides: tuple[list, list] = ([], [])
    for first in range(0, 5600, 700):  # 180 blocks of a side to a token
        with torch.no_grad():
            held = loaded.model(
                torch.tensor([ids[first : first + 700]]), use_cache=True, logits_to_keep=1
            ).past_key_values
        for layer in held.layers:
            for side, x in zip(sides, (layer.keys, layer.values), strict=True):
                side.append(x.float().reshape(-1, GGML_BLOCK))
    keys, values = (torch.cat(side) for side in sides)
    return keys, values


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("name", GGML)
def test_a_million_codes_of_real_keys_and_values_are_llama_cpp_s(name: str, is_rotated: bool, real_blocks):
    """As a model makes them, and rotated by a Hadamard matrix over the 64 channels of a head, as llama.cpp does."""
    for x in real_blocks:
        assert len(x) >= 1_000_000
        if is_rotated:
            x = (x.view(-1, 64) @ (torch.from_numpy(linalg.hadamard(64)) / 8).float()).view(-1, GGML_BLOCK)
        for part in x.split(100_000):
            assert_equal_to_llama_cpp(part, name)


@pytest.mark.parametrize("name", GGML)
def test_bytes_are_those_of_ggml_s_tables(name: str):
    """A key and a value of 64 channels take two blocks each."""
    slot = SlotFormat(64, *[GGML[name]] * 2, k_groups=2, v_groups=2, k_code=name, v_code=name)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert elements == GGML_BLOCK and slot.slot_bytes == 2 * 2 * size


def nl_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales as `quantize_row_iq4_nl_ref` of ggml-quants.c makes them, its sums one number after the other in
    fp32."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    live = np.abs(largest) >= 1e-15
    scaled = F32(1) / np.where(live, largest / F32(NL[0]), F32(1)) * x
    above, levels = np.searchsorted(NL, scaled, "right").clip(1, 15), NL.astype(F32)
    codes = np.where(scaled - levels[above - 1] < levels[above] - scaled, above - 1, above)
    codes = np.where(scaled <= NL[0], 0, np.where(scaled >= NL[-1], 15, codes))
    dots, squares = np.zeros(len(x), F32), np.zeros(len(x), F32)
    for number, level in zip(x.T, levels[codes].T, strict=True):
        weight = number * number
        dots, squares = dots + weight * level * number, squares + weight * level * level
    return codes, np.where(live[:, 0], dots / np.where(live[:, 0], squares, 1), 0).astype(np.float16)


def test_the_levels_of_iq4_nl_are_ggml_s():
    """kvalues_iq4nl of ggml-common.h."""
    assert NL.tolist() == [level - code_of("iq4_nl", 4).centre for level in code_of("iq4_nl", 4).levels]


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
