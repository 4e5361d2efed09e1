"""CPU backend: products of rows with a matrix, which is read as it lies, once for all rows of a decode step; and what
stands between them in a decoder's layer."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels.cpu.abi import ELEMENT_KINDS, check, chosen_isa, load

DTYPES = tuple(ELEMENT_KINDS)
Matrix = tuple[Tensor, Tensor | None]  # and its bias
# Work that is worth a thread, where threads sleep between calls: bytes of a matrix, and half of its products.
WORK_PER_THREAD = 1_000_000
# Elements of a norm likewise.
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
            bias: [out] likewise, or None.

        Returns:
            [..., out] in the same dtype.

        Raises:
            MemoryError: No room for some rows of x in another order.
        """
        _look(x, weight, bias)
        size_out, size_in = weight.shape
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], size_out)
        num_rows = y.numel() // size_out
        status = self._call(
            ELEMENT_KINDS[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            num_rows,
            size_in,
            size_out,
            _threads(weight, num_rows),
        )
        if status:
            check(status)
        return y

    def gated(self, x: Tensor, gate: Matrix, up: Matrix, down: Matrix) -> Tensor:
        """A feed-forward layer, down(silu(gate(x)) * up(x)); between the products there is one rounding, not two.

        Args:
            x: [..., in], any number of rows.
            gate: weight [mid, in] and bias, each as above.
            up: Likewise.
            down: weight [out, mid] and bias likewise.

        Returns:
            [..., out] in the same dtype.

        Raises:
            MemoryError: No room for what lies between the products.
        """
        _look(x, *gate)
        _look(x, *up)
        (mid, size_in), size_out = gate[0].shape, down[0].shape[0]
        assert up[0].shape == gate[0].shape and down[0].shape[1] == mid, "matrices of one layer"
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], size_out)
        _look(y.new_empty(mid), *down)
        num_rows = y.numel() // size_out
        status = self._gated(
            ELEMENT_KINDS[x.dtype],
            x.data_ptr(),
            (ctypes.c_void_p * 3)(*(weight.data_ptr() for weight, _ in (gate, up, down))),
            (ctypes.c_void_p * 3)(*(None if bias is None else bias.data_ptr() for _, bias in (gate, up, down))),
            y.data_ptr(),
            num_rows,
            size_in,
            mid,
            size_out,
            _threads(gate[0], num_rows),
        )
        if status:
            check(status)
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root-mean-square norm weight * x / sqrt(mean(x^2) + eps) of rows, with one rounding, not two.

        Args:
            x: [..., width], any number of rows.
            weight: [width], contiguous, of the same dtype; on the CPU as x.
            eps: What keeps a row of zeros one.

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


def _threads(weight: Tensor, num_rows: int) -> int:
    work = weight.nbytes + num_rows * weight.numel() // 2
    return min(torch.get_num_threads(), 1 + work // WORK_PER_THREAD)
