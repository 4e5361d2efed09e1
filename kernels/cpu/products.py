"""CPU backend: matrix products of a decode step, and the element-wise work between them in a decoder's layer.

Matrices are read in their stored layout, once for all rows of a step.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.cpu.abi import ELEMENT_KINDS, check, chosen_isa, load

DTYPES = tuple(ELEMENT_KINDS)
Matrix = tuple[Tensor, Tensor | None]  # and its bias
# Work that takes as long as to wake a thread, which sleeps between calls: bytes that are read, and a quarter of them
# for each row that they are multiplied by.
WORK_PER_THREAD = 2_500_000
# The same for a norm: elements.
NORM_PER_THREAD = 65_536


class RowProducts:
    """Rows times the transpose of a matrix, plus a bias, with sums in fp32 and one rounding at the end.

    Every number is summed in an order that depends on its columns alone: a row's answer is the same bits whatever other
    rows there are, and for any number of threads (torch.get_num_threads() at most are used).

    Attributes:
        isa: The instruction set, which was chosen when this was made; another one is another order of sums.

    Raises:
        BuildError: See `cpu.abi.load`.
        ValueError: See `cpu.abi.load`.
    """

    def __init__(self) -> None:
        self.isa = chosen_isa()
        library = load()
        self._call, self._gated, self._norm = library.kvb_products, library.kvb_gated, library.kvb_norm

    def __reduce__(self) -> tuple[type["RowProducts"], tuple[()]]:
        return RowProducts, ()  # a copy, or another process, loads the library anew

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            x: [..., in], any number of rows.
            weight: [out, in], contiguous, of the same dtype, which is one of `DTYPES`; on the CPU as all of them.
            bias: [out], of the same dtype, or None.

        Returns:
            [..., out] in the same dtype.

        Raises:
            MemoryError: No room for some rows of x in another order.
        """
        return self.of(x, [(weight, bias)])[0]

    def of(self, x: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
        """The products with several matrices, in one call.

        Args:
            x: [..., in], any number of rows.
            matrices: Weight [out, in] and bias of each, as above.

        Returns:
            [..., out] of each, the same bits as of a call of its own.

        Raises:
            MemoryError: See `__call__`.
        """
        for matrix in matrices:
            _look(x, *matrix)
        x = x.contiguous()
        outputs = [x.new_empty(*x.shape[:-1], len(weight)) for weight, _ in matrices]
        num_rows, size_in = _shape(x)
        threads = _threads(matrices, num_rows)
        kind = ELEMENT_KINDS[x.dtype]
        status = self._call(kind, x.data_ptr(), num_rows, size_in, _table(matrices, outputs), len(matrices), threads)
        if status:
            check(status)
        return outputs

    def gated(self, x: Tensor, gate: Matrix, up: Matrix, down: Matrix) -> Tensor:
        """A feed-forward layer, down(silu(gate(x)) * up(x)); between the products there is one rounding, not two.

        Args:
            x: [..., in], any number of rows.
            gate: weight [mid, in] and bias, each as above.
            up: As `gate`.
            down: weight [out, mid] and bias, as `gate`.

        Returns:
            [..., out] in the same dtype.

        Raises:
            MemoryError: No room for what lies between the products.
        """
        _look(x, *gate)
        _look(x, *up)
        mid = gate[0].shape[0]
        assert up[0].shape == gate[0].shape and down[0].shape[1] == mid, "matrices of one layer"
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], len(down[0]))
        _look(y.new_empty(mid), *down)
        num_rows, size_in = _shape(x)
        matrices = gate, up, down
        threads = _threads(matrices, num_rows)
        status = self._gated(
            ELEMENT_KINDS[x.dtype], x.data_ptr(), num_rows, size_in, _table(matrices, (y, y, y)), threads
        )
        if status:
            check(status)
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root-mean-square norm weight * x / sqrt(mean(x^2) + eps) of rows, with one rounding, not two.

        Args:
            x: [..., width], any number of rows.
            weight: [width], contiguous, of the same dtype; on the CPU as x.
            eps: Added to the mean square, so that a row of zeros stays zeros.

        Returns:
            [..., width] in the same dtype.
        """
        assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, "x has a weight's columns and its dtype"
        assert weight.is_contiguous() and weight.is_cpu and x.is_cpu, "a plain weight on the CPU"
        x = x.contiguous()
        y = torch.empty_like(x)
        size, width = x.numel(), len(weight)
        threads = min(torch.get_num_threads(), 1 + size // NORM_PER_THREAD)
        pointers = x.data_ptr(), weight.data_ptr(), y.data_ptr()
        self._norm(ELEMENT_KINDS[x.dtype], *pointers, size // width, width, eps, threads)
        return y


def _look(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert weight.is_contiguous() and weight.ndim == 2 and weight.is_cpu and x.is_cpu, "a plain matrix on the CPU"
    assert x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype, "x has a matrix's columns and its dtype"
    assert bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_cpu), "a bias likewise"
    assert bias is None or bias.is_contiguous(), "a bias likewise"


def _shape(x: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    return x.shape[:-1].numel(), x.shape[-1]


def _table(matrices: Sequence[Matrix], outputs: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_int64]":
    """`Matrix` of csrc/products.cpp for each of them."""
    rows = [
        (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), len(weight))
        for (weight, bias), y in zip(matrices, outputs, strict=True)
    ]
    return (ctypes.c_int64 * (4 * len(rows)))(*(field for row in rows for field in row))


def _threads(matrices: Sequence[Matrix], num_rows: int) -> int:
    work = sum(weight.nbytes for weight, _ in matrices) * (4 + num_rows) // 4
    return min(torch.get_num_threads(), 1 + work // WORK_PER_THREAD)
