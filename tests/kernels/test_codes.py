"""Tables of codes: those of normal distributions against Lloyd's algorithm, and e2m1 and the scales of its blocks."""

import math
from itertools import pairwise

import pytest
import torch

from kvbench.kernels.codes import NAMES, code_of
from kvbench.kernels.reference.quant import decode, encode
from kvbench.policy.tiers import CodeName

# Max (1960), table I, which the paper of TurboQuant and vLLM's centroids follow: levels above 0 and mean square error.
PUBLISHED = {
    2: ((0.4528, 1.510), 0.1175),
    3: ((0.2451, 0.7560, 1.344, 2.152), 0.03454),
    4: ((0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733), 0.009497),
}


def density(x: float) -> float:
    """Of the standard normal distribution."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    """Probability of less than x."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def lloyd(count: int) -> list[float]:
    """The best levels above 0 for a normal distribution: every one the mean of what lies nearest to it."""
    levels = [0.3 * (i + 1) for i in range(count)]
    for _ in range(2000):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in pairwise(edges)]
    return levels


def distortion(levels: list[float]) -> float:
    """Mean square error of numbers from a normal distribution, each put to its nearest level."""
    edges, error = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf], 1.0
    for level, (a, b) in zip(levels, pairwise(edges), strict=True):
        error += 2 * (level**2 * (below(b) - below(a)) - 2 * level * (density(a) - density(b)))
    return error


@pytest.mark.parametrize("bits", PUBLISHED)
def test_codebooks_are_those_of_lloyd_and_max(bits: int):
    """The published levels come out of the algorithm; the whole numbers stand for them, at 0.06 % more error."""
    levels, error = PUBLISHED[bits]
    best, code = lloyd(len(levels)), code_of("lloyd", bits)
    assert best == pytest.approx(levels, abs=6e-4)
    assert distortion(best) == pytest.approx(error, rel=2e-3)
    stored = [magnitude / code.deviation for magnitude in code.magnitudes]
    assert stored == pytest.approx(best, abs=0.008)
    assert distortion(best) <= distortion(stored) <= 1.0006 * distortion(best)


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
@pytest.mark.parametrize("dim", [64, 128])
def test_random_directions_lose_what_the_theory_says_and_keep_their_length(bits: int, bound: float, dim: int):
    """Relative mean square error of unit vectors: the distortion of the codebook; the norm to the rounding of fp16."""
    x = torch.randn(4000, dim, generator=torch.Generator().manual_seed(0))
    x /= x.norm(dim=1, keepdim=True)
    code = code_of("lloyd", bits)
    codes, scale, _ = encode(x, code)
    got = decode(codes, scale, None, code)
    assert (got - x).square().sum(1).mean() == pytest.approx(bound, rel=0.12)  # Beta has lighter tails than normal
    assert got.norm(dim=1).tolist() == pytest.approx([1.0] * len(x), rel=6e-4)


E2M1_TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def test_e2m1_codes_are_those_of_the_standard():
    """Every value, both signs of zero, borders to the even code, and what saturates; scale 1 through a block of 6."""
    code = code_of("nvfp4", 4)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    codes, scale, zero = encode(torch.tensor(values), code)
    assert codes.tolist() == list(range(16)) and scale.tolist() == [0x38] and zero is None  # 0x38: e4m3 of 1
    assert decode(codes, scale, None, code).tolist() == values
    for border, want in E2M1_TIES.items():
        codes, _, _ = encode(torch.tensor([border, -border, 6.0]), code)
        assert codes.tolist() == [want, want + 8, 7]


@pytest.mark.parametrize(("largest", "byte"), [(6.0, 127), (4.0, 127), (7.99, 127), (8.0, 128), (0.5, 124), (0.0, 2)])
def test_mx_scales_are_powers_of_two_below_the_largest(largest: float, byte: int):
    """The exponent of the largest number less that of e2m1's largest (2), over a bias of 127; clipped above 6 of it."""
    code = code_of("mxfp4", 4)
    codes, scale, _ = encode(torch.tensor([[largest, 0.0, 0.0, 0.0]]), code)
    assert scale.tolist() == [[byte]]
    assert decode(codes, scale, None, code)[0, 0] == (min(largest, 6.0 * 2.0 ** (byte - 127)) if largest else 0.0)


def test_nvfp4_scales_saturate_and_small_blocks_vanish():
    """A scale is the e4m3 float nearest to a sixth of the largest number: at most 448, and 0 below half of 2^-9."""
    code = code_of("nvfp4", 4)
    x = torch.tensor([[6.0 * 448, 1.0], [1e5, 1.0], [6 * 2.0**-9, 0.0], [2.9 * 2.0**-9, 1e-3]])
    codes, scale, _ = encode(x, code)
    assert scale[:, 0].tolist() == [0x7E, 0x7E, 1, 0]
    got = decode(codes, scale, None, code)
    assert got[:, 0].tolist() == [2688.0, 2688.0, 6 * 2.0**-9, 0.0] and codes[3].tolist() == [0, 0]


@pytest.mark.parametrize(("name", "bits"), [("e4m3_scaled", 8), ("lloyd", 3), ("nvfp4", 4), ("mxfp4", 4)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(name: str, bits: int, bad: float):
    """A vector with a NaN reads as NaN, one with an infinity as no smaller than what the code reaches; codes are 0."""
    code, x = code_of(name, bits), torch.ones(8)
    x[3] = bad
    codes, scale, _ = encode(x, code)
    got = decode(codes, scale, None, code)
    if math.isnan(bad):
        assert not codes.any() and got.isnan().all()
    else:
        assert not got.isfinite().all() or got[3] == math.copysign(2688.0, bad)


def test_every_code_has_a_table_of_bytes():
    """Levels are bytes, so that backends may multiply them as such; policies name codes that exist."""
    for name in NAMES:
        for bits in (2, 3, 4, 8):
            try:
                code = code_of(name, bits)
            except ValueError as error:
                assert "do not exist" in str(error)
                continue
            assert len(code.table) == 2**bits and 0 <= min(code.table) <= max(code.table) <= 255
    assert set(CodeName.__args__) - {""} < set(NAMES)
