"""Random products of rows with a matrix, for kernel_fuzz.py."""

import torch
from fuzz_calls import GUARD, Call, Wrong
from torch import Tensor

from kvbench.kernels.cpu.products import DTYPES, RowProducts

# Half a step of a dtype, relative, and the smallest number that it does not round to 0.
ROUNDING = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}


class Products(Call):
    """`RowProducts`; it has no pages, and whoever reads or writes beside a tensor is the sanitizers' find."""

    def build(self) -> None:
        self.room, self.pages = torch.full((2 * GUARD,), 0xA5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
        rows, out, into = self.dice.randint(0, 20), self.dice.randint(1, 40), self.dice.randint(1, 150)
        dtype = self.dice.choice(DTYPES)
        self.args = {"x": self.randn(rows, into).to(dtype), "weight": self.randn(out, into).to(dtype)}
        self.args["bias"] = self.randn(out).to(dtype) if self.dice.random() < 0.5 else None

    def run(self) -> Tensor:
        return RowProducts()(**self.args)

    def judge(self) -> str:
        x, weight = self.args["x"].double(), self.args["weight"].double()
        bias = torch.zeros(len(weight)) if self.args["bias"] is None else self.args["bias"].double()
        exact, found = x @ weight.T + bias, self.run()
        if found.shape != exact.shape or found.dtype != self.args["x"].dtype:
            return f"shape {list(found.shape)}, {found.dtype}"
        relative, absolute = ROUNDING[found.dtype]
        magnitude = x.abs() @ weight.abs().T + bias.abs()
        allowed = (x.shape[1] + 2) * 2.0**-24 * magnitude + 1.01 * relative * exact.abs() + absolute
        return "" if bool(((found.double() - exact).abs() <= allowed).all()) else "a product is not the exact one"

    def wrongs(self) -> list[Wrong]:
        found = self.bent(self.args, "x", (1,)) + self.bent(self.args, "weight", (1,))
        if self.args["bias"] is not None:
            found += self.bent(self.args, "bias", (0,))
        # One row that is laid out otherwise is still a row.
        return [wrong for wrong in found if wrong.name != "x flat" or len(self.args["x"]) != 1]
