"""Times the products of rows with a model's matrices: torch's, and those that read each matrix as it lies.

Runs with torch alone: `python -m kvbench.kernels.bench.products rows=[1,16] dtypes=[bf16]`.
"""

import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.bench import machine
from kvbench.kernels.bench.bench import Bench, Common, Skipped, main, setting
from kvbench.kernels.bench.rounds import Variant
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.cpu.products import RowProducts

# Of the largest number of a result: sums in another order, and one rounding to the element type.
DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 1e-2), "fp16": (torch.float16, 2e-3)}


@dataclass(kw_only=True)
class Settings(Common):
    """Products of rows with the matrices of a model's layer, torch's and kvbench's own."""

    what = "products"
    quick = {"rows": [1, 16], "dtypes": ["bf16"], "rounds": 5, "threads": [1]}

    matrices: list[str] = setting(
        ["896x896", "128x896", "128x896", "896x896", "4864x896", "4864x896", "896x4864"],
        "Outputs x columns of each matrix of a layer (Qwen2.5-0.5B).",
    )
    rows: list[int] = setting([1, 4, 8, 16, 32, 64, 256], "Rows that are multiplied at once.", 1)
    dtypes: list[str] = setting(["fp32", "bf16"], "Element types.", among=DTYPES)

    def check(self) -> None:
        super().check()
        for text in self.matrices:
            parts = str(text).split("x")
            if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
                raise ValueError(f"matrices={text} is not outputs x columns, for example 896x4864")

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(threads, self.dtypes, self.rows)
        return [{"dtype": dtype, "rows": rows, "threads": count} for count, dtype, rows in every]

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": ["torch"], "probe": bench.bandwidth.variant()}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        if bench.device != "cpu":
            raise Skipped(f"kvbench has products of its own for CPUs, and the device is {bench.device}")
        try:
            products = RowProducts()
        except BuildError as error:
            raise Skipped(str(error)) from error
        dtype, tolerance = DTYPES[cell["dtype"]]
        layer = [tuple(map(int, text.split("x"))) for text in self.matrices]
        numbers, make = sum(out * columns for out, columns in layer), torch.Generator().manual_seed(self.seed)
        copies = max(1, min(self.max_buffers, -(-self.working_set(bench.device) * 2**20 // (numbers * dtype.itemsize))))
        rows = [torch.randn(cell["rows"], columns, generator=make).to(dtype) for _, columns in layer]
        first = [torch.randn(out, columns, generator=make).to(dtype) for out, columns in layer]
        matrices = [first, *([weight.clone() for weight in first] for _ in range(copies - 1))]

        def of(multiply: Any) -> Any:
            return lambda index: [multiply(x, weight) for x, weight in zip(rows, matrices[index], strict=True)]

        def check() -> float:
            return max(_error(products, x, weight) for x, weight in zip(rows, first, strict=True))

        timed = [
            Variant(name="torch", call=of(torch.nn.functional.linear)),
            Variant(name="streamed", call=of(products), check=check, tolerance=tolerance),
        ]
        for each in timed:
            each.num_buffers, each.bytes_per_call = copies, numbers * dtype.itemsize
            each.extra |= {"tokens_per_call": cell["rows"], "flops_per_token": 2 * numbers}
        return [*timed, machine.product(bench.device, dtype)]

    def finish(self, figures: dict) -> None:
        machine.tell_limits(figures)


def _error(products: RowProducts, x: Tensor, weight: Tensor) -> float:
    """The largest difference from the product in fp64, as a share of its largest number."""
    wanted = x.double() @ weight.double().T
    return float((products(x, weight).double() - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
