"""Products of a few rows against exact ones in fp64, for every build that this CPU runs."""

import copy
import pickle

import pytest
import torch
from test_cpu import pytestmark  # noqa: F401
from test_cpu_pages import isa  # noqa: F401

from kvbench.kernels.cpu.products import DTYPES, FewRows

# Outputs around the 8 that are made at a time, inputs around the 8, 16 and 32 numbers of a step.
SHAPES = [(1, 1), (7, 15), (8, 16), (9, 33), (17, 64), (24, 100), (192, 576)]
# Of a number to the nearest, relative.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 1.01 * 2.0**-8, torch.float16: 1.01 * 2.0**-11}


@pytest.fixture
def few_rows(isa) -> FewRows:  # noqa: F811
    """The products of one build of the library."""
    found = FewRows()
    assert found.isa == isa
    return found


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a normal distribution, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "into"), SHAPES, ids=str)
def test_products_are_exact_but_for_the_order_of_sums(out, into, dtype, few_rows):
    """Every result is as near to the exact one as fp32 sums of any order are, and one rounding to the dtype.

    A sum of n products in fp32, in whatever order, is off by at most n half ulps of the sum of their magnitudes; and
    2^-25 is half the smallest step of fp16.
    """
    weight, bias = numbers(out, into, dtype=dtype), numbers(out, dtype=dtype)
    for rows in ((1,), (2,), (3,), (4,), (5,), (7,), (16,), (), (2, 1), (1, 3), (0,)):
        x = numbers(*rows, into, dtype=dtype)
        for add in (bias, None):
            found = few_rows(x, weight, add)
            assert found.shape == (*rows, out) and found.dtype == dtype
            given = torch.zeros(out) if add is None else add
            exact = x.double() @ weight.double().T + given.double()
            magnitude = x.double().abs() @ weight.double().abs().T + given.double().abs()
            allowed = (into + 2) * 2.0**-24 * magnitude + ROUNDING[dtype] * exact.abs() + 2.0**-25
            assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_company(dtype, few_rows):
    """Alone, among others at any place, with one thread and with three, and out of a tensor that is not contiguous."""
    weight, x = numbers(1100, 576, dtype=dtype), numbers(13, 576, dtype=dtype)
    alone = torch.cat([few_rows(row[None], weight) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13):
                for begin in (0, 13 - rows):
                    assert torch.equal(few_rows(x[begin : begin + rows], weight), alone[begin : begin + rows])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(few_rows(x[::2], weight), alone[::2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_shows_where_it_is_used(dtype, bad, few_rows):
    """A broken number of a row shows in that row alone, one of the matrix in its output alone, at the end of a row of
    the matrix too, behind which zeros are put."""
    weight, x = numbers(9, 37, dtype=dtype), numbers(5, 37, dtype=dtype)
    x[3, 36] = bad
    broken = ~few_rows(x, weight).isfinite()
    assert broken[3].all() and int(broken.sum()) == 9
    x = numbers(5, 37, dtype=dtype)
    weight[8, 36] = bad
    broken = ~few_rows(x, weight).isfinite()
    assert broken[:, 8].all() and int(broken.sum()) == 5


def test_numbers_that_no_kernel_reads_are_refused(few_rows):
    """Another dtype, another width and a turned matrix would be read as what they are not."""
    weight, x = numbers(4, 6, dtype=torch.float32), numbers(2, 6, dtype=torch.float32)
    for wrong in (x.double(), x[:, :5], x.to("meta")):
        with pytest.raises(AssertionError, match=r"a matrix's columns|a plain matrix"):
            few_rows(wrong, weight)
    with pytest.raises(AssertionError, match="a plain matrix"):
        few_rows(x, weight.T.contiguous().T)
    with pytest.raises(AssertionError):
        few_rows(x, weight, torch.zeros(5))


def test_copies_load_the_library_anew(few_rows):
    """A model that is copied, or sent to another process, multiplies there as here."""
    weight, x = numbers(4, 6, dtype=torch.float32), numbers(2, 6, dtype=torch.float32)
    for other in (copy.deepcopy(few_rows), pickle.loads(pickle.dumps(few_rows))):
        assert other.isa == few_rows.isa and torch.equal(other(x, weight), few_rows(x, weight))
