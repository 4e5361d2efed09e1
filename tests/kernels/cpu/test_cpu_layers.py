"""What stands between the products of a decoder's layer against exact results in fp64, for every build that this CPU
runs: norms, and feed-forward layers with a gate."""

import pytest
import torch
from test_cpu import pytestmark  # noqa: F401
from test_cpu_pages import isa  # noqa: F401
from test_cpu_products import ROUNDING, numbers, products, small_work  # noqa: F401
from torch import Tensor

from kvbench.kernels.cpu.products import DTYPES

# Input, middle and output of a feed-forward layer, around the 4 to 16 numbers that are made at a time.
SHAPES = [(1, 1, 1), (7, 15, 9), (16, 33, 4), (40, 100, 67)]
LEAST = 2.0**-25  # half the smallest step of fp16
EXPONENTIAL = 2e-6  # of the gate's function, relative


def product(x: Tensor, off: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact product of x, which is off by so much at most, and how far off fp32 sums and one rounding may be."""
    given = torch.zeros(len(weight)).double() if bias is None else bias.double()
    exact, weight = x @ weight.double().T + given, weight.double().abs()
    magnitude = x.abs() @ weight.T + given.abs()
    return exact, off @ weight.T + (weight.shape[1] + 2) * 2.0**-24 * magnitude


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_with_a_gate_is_exact_but_for_its_roundings(shape, dtype, products):  # noqa: F811
    """Each of its three products and what is between them is rounded once; silu grows by at most 1.1 times what its
    argument does."""
    size_in, mid, size_out = shape
    gate, up = (numbers(mid, size_in + i, dtype=dtype)[:, :size_in].contiguous() for i in range(2))
    down, bias = numbers(size_out, mid, dtype=dtype), numbers(mid, dtype=dtype)
    round_off = ROUNDING[dtype]
    for rows in ((1,), (2,), (5,), (41,), (300,), (), (2, 3), (0,)):
        x = numbers(*rows, size_in, dtype=dtype)
        for add in (bias, None):
            found = products.gated(x, (gate, add), (up, None), (down, None))
            assert found.shape == (*rows, size_out) and found.dtype == dtype
            nothing = torch.zeros_like(x).double()
            (g, off_g), (u, off_u) = product(x.double(), nothing, gate, add), product(x.double(), nothing, up, None)
            off_g, off_u = off_g + round_off * g.abs() + LEAST, off_u + round_off * u.abs() + LEAST
            silu = torch.nn.functional.silu(g)
            between = silu * u
            off = 1.1 * off_g * (u.abs() + off_u) + (silu.abs() + EXPONENTIAL) * off_u
            off = off + (round_off + EXPONENTIAL) * (between.abs() + off) + LEAST
            exact, allowed = product(between, off, down, None)
            allowed = allowed + round_off * (exact.abs() + allowed) + LEAST
            assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 37, 576])
def test_a_norm_is_exact_but_for_one_rounding(width, dtype, products):  # noqa: F811
    """The sum of n squares in fp32 is off by at most n half ulps of itself; a row of zeros stays one."""
    weight = numbers(width, dtype=dtype)
    for rows in ((1,), (7,), (), (2, 3), (0,)):
        x = numbers(*rows, width, dtype=dtype)
        found = products.norm(x, weight, 1e-5)
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        allowed = (ROUNDING[dtype] + (width + 8) * 2.0**-24) * exact.abs() + LEAST
        assert found.shape == x.shape and bool(((found.double() - exact).abs() <= allowed).all())
    assert not products.norm(torch.zeros(2, width, dtype=dtype), weight, 1e-5).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_company(dtype, products, small_work):  # noqa: F811
    """Alone and among so many that they are worked on in parts, with one thread and with three, and laid apart."""
    gate, up, down = (numbers(*shape, dtype=dtype) for shape in ((1030, 70), (1030, 70), (9, 1030)))
    weight, x = numbers(300, dtype=dtype), numbers(500, 300, dtype=dtype)

    def layer(x: Tensor) -> Tensor:
        return products.gated(x, (gate, None), (up, None), (down, None))

    narrow = x[:, :70]
    alone = torch.cat([layer(row[None]) for row in narrow[:40]])
    normed = torch.cat([products.norm(row[None], weight, 1e-6) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (2, 5, 7, 37, 500):
                assert torch.equal(layer(narrow[:rows])[:40], alone[:rows])
            assert torch.equal(products.norm(x, weight, 1e-6), normed)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(layer(narrow[:40:2]), alone[::2])
    assert torch.equal(products.norm(x[::2], weight, 1e-6), normed[::2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_shows_in_its_row_alone(dtype, bad, products):  # noqa: F811
    """Whichever of the two products it comes through, and in a norm."""
    gate, up, down = (numbers(*shape, dtype=dtype).abs() for shape in ((20, 37), (20, 37), (9, 20)))
    weight, x = numbers(37, dtype=dtype), numbers(5, 37, dtype=dtype)
    x[3, 36] = bad
    for found in (products.gated(x, (gate, None), (up, None), (down, None)), products.norm(x, weight, 1e-6)):
        broken = ~found.isfinite()
        assert broken[3].any() and not broken[[0, 1, 2, 4]].any()


def test_numbers_that_no_kernel_reads_are_refused(products):  # noqa: F811
    """Other dtypes, sizes and layouts would be read as what they are not."""
    gate, up, down = (torch.zeros(*shape) for shape in ((8, 6), (8, 6), (4, 8)))
    x, weight = torch.zeros(2, 6), torch.zeros(6)
    wrong = [(x.double(), gate, up, down), (x, gate[:7], up, down), (x, gate, up, down[:, :7].contiguous())]
    wrong += [(x, gate, up.T.contiguous().T, down), (x, gate, up, down.double()), (x[:, :5], gate, up, down)]
    for given, *matrices in wrong:
        with pytest.raises(AssertionError, match="a matrix's columns|a plain matrix|matrices of one layer"):
            products.gated(given, *((matrix, None) for matrix in matrices))
    with pytest.raises(AssertionError, match="a bias likewise"):
        products.gated(x, (gate, None), (up, torch.zeros(7)), (down, None))
    for given, by in ((x.double(), weight), (x[:, :5], weight), (x, torch.zeros(12)[::2]), (x.to("meta"), weight)):
        with pytest.raises(AssertionError, match="a weight's columns|a plain weight"):
            products.norm(given, by, 1e-6)
