"""RowProducts of a few rows against exact ones in fp64, for every build that this CPU runs."""

import copy
import pickle

import pytest
import selection
import torch
from test_cpu import pytestmark  # noqa: F401
from test_cpu_pages import isa  # noqa: F401

from kvbench.kernels.cpu import products as cpu_products
from kvbench.kernels.cpu.products import DTYPES, RowProducts

# Outputs around the 4, 8 and 64 that are made at a time, inputs around the 4 to 32 numbers of a step and its 64 steps.
SHAPES = [(1, 1), (7, 15), (8, 16), (9, 33), (17, 64), (24, 100), (67, 576), (5, 2100)]
# Of matrices that are multiplied in one call: some are parts of what a thread takes at a time, some are several of it.
OUTPUTS = (1, 130, 8, 67, 64, 5)
# Of a number to the nearest, relative.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 1.01 * 2.0**-8, torch.float16: 1.01 * 2.0**-11}


@pytest.fixture
def products(isa) -> RowProducts:  # noqa: F811
    """The products of one build of the library."""
    found = RowProducts()
    assert found.isa == isa
    return found


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a normal distribution, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "into"), SHAPES, ids=str)
def test_products_are_exact_but_for_the_order_of_sums(out, into, dtype, products):
    """Every result is as near to the exact one as fp32 sums of any order are, and one rounding to the dtype.

    A sum of n products in fp32, in whatever order, is off by at most n half ulps of the sum of their magnitudes; and
    2^-25 is half the smallest step of fp16.
    """
    weight, bias = numbers(out, into, dtype=dtype), numbers(out, dtype=dtype)
    for rows in ((1,), (2,), (3,), (4,), (5,), (7,), (16,), (41,), (97,), (), (2, 1), (1, 3), (0,)):
        x = numbers(*rows, into, dtype=dtype)
        for add in (bias, None):
            found = products(x, weight, add)
            assert found.shape == (*rows, out) and found.dtype == dtype
            given = torch.zeros(out) if add is None else add
            exact = x.double() @ weight.double().T + given.double()
            magnitude = x.double().abs() @ weight.double().abs().T + given.double().abs()
            allowed = (into + 2) * 2.0**-24 * magnitude + ROUNDING[dtype] * exact.abs() + 2.0**-25
            assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.fixture
def small_work(monkeypatch):
    """Every call is worth threads, small ones too."""
    monkeypatch.setattr(cpu_products, "WORK_PER_THREAD", 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_in_any_company(dtype, products, small_work):
    """Alone, among others at any place, with one thread and with three, and out of a tensor that is not contiguous; of
    so many that they are worked on in panels and in parts, too."""
    weight, x = numbers(70, 2100, dtype=dtype), numbers(400, 2100, dtype=dtype)
    alone = torch.cat([products(row[None], weight) for row in x[:40]])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in range(1, 41) if selection.FULL else (1, 2, 5, 7, 16, 36, 37):
                for begin in {0, 40 - rows}:
                    assert torch.equal(products(x[begin : begin + rows], weight), alone[begin : begin + rows])
            for rows in (95, 96, 101, 400):
                many = products(x[:rows], weight)
                assert torch.equal(many[:40], alone)
                assert torch.equal(many[-30:], products(x[rows - 30 : rows], weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products(x[:40:2], weight), alone[::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("into", [15, 64, 2100])
def test_several_matrices_in_one_call_are_the_same_bits_as_alone(into, dtype, products, small_work):
    """Whatever outputs each has, with biases and without, with one thread and with three; and so are no matrices."""
    matrices = [(numbers(out, into, dtype=dtype), numbers(out, dtype=dtype) if out % 2 else None) for out in OUTPUTS]
    before = torch.get_num_threads()
    try:
        for rows in ((1,), (2, 3), (41,), (300,), (0,)):
            x = numbers(*rows, into, dtype=dtype)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found = products.of(x, matrices)
                assert len(found) == len(matrices)
                for y, (weight, bias) in zip(found, matrices, strict=True):
                    assert torch.equal(y, products(x, weight, bias))
            assert products.of(x, []) == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_shows_where_it_is_used(dtype, bad, products):
    """A broken number of a row shows in that row alone, one of the matrix in its output alone, at the end of a row of
    the matrix too, behind which zeros are put."""
    weight, x = numbers(9, 37, dtype=dtype), numbers(5, 37, dtype=dtype)
    x[3, 36] = bad
    broken = ~products(x, weight).isfinite()
    assert broken[3].all() and int(broken.sum()) == 9
    many = numbers(110, 37, dtype=dtype)
    many[107, 36] = bad
    broken = ~products(many, weight).isfinite()
    assert broken[107].all() and int(broken.sum()) == 9
    weight[8, 36] = bad
    for rows in (5, 110):
        broken = ~products(numbers(rows, 37, dtype=dtype), weight).isfinite()
        assert broken[:, 8].all() and int(broken.sum()) == rows
    weight = numbers(32, 37, dtype=dtype)  # whole tiles of outputs, whose rows end within a step
    weight[8, 0] = bad
    for rows in (5, 110):
        broken = ~products(numbers(rows, 37, dtype=dtype), weight).isfinite()
        assert broken[:, 8].all() and int(broken.sum()) == rows


def test_numbers_that_no_kernel_reads_are_refused(products):
    """Another dtype, another width and a turned matrix would be read as what they are not."""
    weight, x = numbers(4, 6, dtype=torch.float32), numbers(2, 6, dtype=torch.float32)
    for wrong in (x.double(), x[:, :5], x.to("meta")):
        with pytest.raises(AssertionError, match=r"a matrix's columns|a plain matrix"):
            products(wrong, weight)
    with pytest.raises(AssertionError, match="a plain matrix"):
        products(x, weight.T.contiguous().T)
    with pytest.raises(AssertionError):
        products(x, weight, torch.zeros(5))
    with pytest.raises(AssertionError, match="a matrix's columns"):
        products.of(x, [(weight, None), (weight[:, :5].contiguous(), None)])


def test_copies_load_the_library_anew(products):
    """A model that is copied, or sent to another process, multiplies there as here."""
    weight, x = numbers(4, 6, dtype=torch.float32), numbers(2, 6, dtype=torch.float32)
    for other in (copy.deepcopy(products), pickle.loads(pickle.dumps(products))):
        assert other.isa == products.isa and torch.equal(other(x, weight), products(x, weight))
