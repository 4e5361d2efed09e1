"""Quantisers and packing against golden numbers and against the definition."""

import pytest
import torch
from oracles.slow_numbers import e4m3_value, to_e4m3
from oracles.slow_pages import slow_pack, slow_quantize
from store_helpers import golden

from kvbench.kernels.reference.quant import dequantize, from_fp8, pack, quantize, to_fp8, unpack

KEY = [-1.0, 0.0, 1.2, 3.0]
VALUE = [0.0, 0.1, 0.25, 0.9]


@pytest.mark.parametrize(
    ("case", "vector", "bits", "metadata_first"),
    [(f"k{b}", KEY, b, False) for b in (8, 4, 2)]
    + [(f"v{b}", VALUE, b, False) for b in (8, 4, 2)]
    + [("kivi_chan", [-1.0, 0.2, 0.5, 2.0], 2, True), ("const", [0.5] * 4, 4, False), ("const", [0.5] * 4, 4, True)],
)
def test_asymmetric_codes_scales_and_values_are_golden(case: str, vector: list, bits: int, metadata_first: bool):
    """Codes, fp16 scale and zero, and dequantised values equal the golden ones."""
    want = golden("quant")[case]
    codes, scale, zero = quantize(torch.tensor(vector), bits, metadata_first=metadata_first)
    assert codes.tolist() == want["codes"]
    assert (float(scale), float(zero)) == (want["scale"], want["zero"])
    assert dequantize(codes, scale, zero, bits).tolist() == pytest.approx(want["deq"], abs=1e-6)


def test_requantising_eight_bits_to_four_is_golden():
    """A demoted vector is quantised from what its eight-bit codes stand for."""
    want = golden("quant")["requant_8to4"]
    high = dequantize(*quantize(torch.tensor(KEY), 8), 8)
    codes, scale, zero = quantize(high, 4)
    assert codes.tolist() == want["codes"]
    assert (float(scale), float(zero)) == (want["scale"], want["zero"])
    assert dequantize(codes, scale, zero, 4).tolist() == pytest.approx(want["deq"], abs=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_codes_are_golden(bits: int):
    """Signed codes equal the golden ones; the golden scale is fp32, the stored one its fp16 rounding."""
    want = golden("quant")[f"sym_int{bits}"]
    codes, scale, zero = quantize(torch.tensor(KEY), bits, symmetric=True)
    assert (codes.int() - 2 ** (bits - 1)).tolist() == want["codes"]
    assert float(scale) == pytest.approx(want["scale"], rel=2**-11)
    assert float(zero) == 0.0
    values = dequantize(codes, scale, None, bits, symmetric=True)
    # The fp16 scale is off by at most 2^-11 of itself, so is every value.
    assert values.tolist() == pytest.approx(want["deq"], rel=2**-11, abs=1e-6)


@pytest.mark.parametrize("metadata_first", [False, True])
@pytest.mark.parametrize(
    ("bits", "symmetric"), [(b, s) for b in (1, 2, 4, 8) for s in (False, True) if (b, s) != (1, True)]
)
def test_codes_equal_the_definition_and_the_error_is_bounded(bits: int, symmetric: bool, metadata_first: bool):
    """On vectors of wild scales, codes equal a scalar oracle; the error is within half a step plus fp16 rounding."""
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-6, 3, 40)[:, None]
    x[3], x[4], x[5, 0] = 0.7, 0.0, 100.0
    codes, scale, zero = quantize(x, bits, symmetric=symmetric, metadata_first=metadata_first)
    for row in range(len(x)):
        want = slow_quantize(x[row].tolist(), bits, symmetric, metadata_first)
        assert codes[row].tolist() == want[0]
        assert (float(scale[row]), float(zero[row])) == (float(want[1]), float(want[2]))
    error = (dequantize(codes, scale, zero, bits, symmetric=symmetric) - x).abs()
    top = 2**bits - 1
    spread = x.abs().amax(-1) / (2 ** (bits - 1) - 1) if symmetric else (x.amax(-1) - x.amin(-1)) / top
    rounding = top * (scale[:, 0].float() - spread).abs() + (
        0 if symmetric else (zero[:, 0].float() - x.amin(-1)).abs()
    )
    dead = scale[:, 0] == 0
    bound = torch.where(dead, top * spread, spread / 2) + rounding + 1e-6 * x.abs().amax(-1)
    assert (error <= bound[:, None]).all()
    assert (error[~dead].amax(-1) > spread[~dead] / 8).any(), "the bound is never approached: the data test nothing"


@pytest.mark.parametrize("symmetric", [False, True])
def test_vectors_without_spread_stay_finite(symmetric: bool):
    """Constant vectors, and vectors whose scale vanishes in fp16, get valid codes and no NaN."""
    x = torch.stack([torch.full((8,), 0.5), torch.zeros(8), torch.linspace(0, 1e-9, 8)])
    codes, scale, zero = quantize(x, 4, symmetric=symmetric)
    values = dequantize(codes, scale, zero, 4, symmetric=symmetric)
    assert values.isfinite().all()
    assert torch.equal(values[1], torch.zeros(8))
    if symmetric:
        assert codes[1].tolist() == codes[2].tolist() == [8] * 8
    else:
        assert codes.eq(0).all()
        assert torch.equal(values[0], x[0])


def test_one_symmetric_bit_is_refused():
    """One bit around zero has no positive code, and the message says so."""
    with pytest.raises(ValueError, match="symmetric=True needs at least 2 bits"):
        quantize(torch.zeros(8), 1, symmetric=True)


@pytest.mark.parametrize("size", [8, 16, 64, 80])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packing_is_planar_from_the_low_bits_up_and_reversible(bits: int, size: int):
    """Byte w holds elements w, w + W, ...; unpacking along any axis gives the codes back."""
    codes = torch.randint(2**bits, (3, size), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, size * bits // 8)
    for row in range(3):
        assert bytes(packed[row].tolist()) == slow_pack(codes[row].tolist(), bits)
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(unpack(packed.T.contiguous(), bits, dim=0), codes.T)


def test_bit_order_of_a_byte_by_hand():
    """Two-bit codes 0, 1, 2, 3 of one byte lie as 0b11100100, and the planes of two bytes interleave."""
    assert pack(torch.tensor([0, 1, 2, 3], dtype=torch.uint8), 2).tolist() == [0b11100100]
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x31, 0x42]
    assert pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [0b10000001]


def test_fp8_rounds_to_nearest_even_and_saturates():
    """Every e4m3 byte survives a round trip, and random numbers get the byte of a table search."""
    codes = [c for c in range(256) if c & 127 != 127]
    values = torch.tensor([e4m3_value(c) for c in codes])
    assert torch.equal(from_fp8(torch.tensor(codes, dtype=torch.uint8)), values)
    assert to_fp8(values).tolist() == codes
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 200)
    x[:4] = torch.tensor([17.0, 19.0, -1e9, 0.0])  # two ties, saturation, zero
    assert to_fp8(x).tolist() == [to_e4m3(v) for v in x.tolist()]
