"""CPU backend: products of rows with a matrix, which is read as it lies, once for all rows of a decode step."""

import torch
from torch import Tensor

from kvbench.kernels.cpu.abi import ELEMENT_KINDS, check, chosen_isa, load

DTYPES = tuple(ELEMENT_KINDS)
# Work that is worth a thread, where threads sleep between calls: bytes of a matrix, and half of its products.
WORK_PER_THREAD = 1_000_000


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
        self._call = load().kvb_products

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
        size_out, size_in = weight.shape
        *rows, width = x.shape
        assert width == size_in and x.dtype == weight.dtype, "x has a matrix's columns and its dtype"
        assert weight.is_contiguous() and weight.is_cpu and x.is_cpu, "a plain matrix on the CPU"
        assert bias is None or (bias.dtype == x.dtype and bias.shape == (size_out,) and bias.is_cpu), "a bias likewise"
        assert bias is None or bias.is_contiguous(), "a bias likewise"
        x = x.contiguous()
        y = x.new_empty(*rows, size_out)
        num_rows = y.numel() // size_out
        work = weight.nbytes + num_rows * weight.numel() // 2
        status = self._call(
            ELEMENT_KINDS[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            num_rows,
            size_in,
            size_out,
            min(torch.get_num_threads(), 1 + work // WORK_PER_THREAD),
        )
        if status:
            check(status)
        return y
