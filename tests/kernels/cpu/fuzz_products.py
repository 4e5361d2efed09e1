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
        self.other = self.randn(self.dice.randint(1, 40), into).to(dtype)

    def run(self) -> Tensor:
        x, matrix = self.args["x"], (self.args["weight"], self.args["bias"])
        _, found = RowProducts().of(x, [(self.other, None), matrix])
        return found

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


class Layers(Call):
    """A norm, and a feed-forward layer of what it gives, likewise."""

    def build(self) -> None:
        self.room, self.pages = torch.full((2 * GUARD,), 0xA5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
        rows, size_out, size_in, mid = (
            self.dice.randint(low, high) for low, high in ((0, 20), (1, 40), (1, 90), (1, 90))
        )
        dtype = self.dice.choice(DTYPES)

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.make).to(dtype)  # larger ones are more than fp16 holds

        self.args = {"x": some(rows, size_in), "weight": some(size_in), "gate": some(mid, size_in)}
        self.args |= {"up": some(mid, size_in), "down": some(size_out, mid)}
        self.args["bias"] = some(mid) if self.dice.random() < 0.5 else None

    def run(self) -> Tensor:
        products, given = RowProducts(), self.args
        x = products.norm(given["x"], given["weight"], 1e-6)
        return products.gated(x, (given["gate"], given["bias"]), (given["up"], None), (given["down"], None))

    def judge(self) -> str:
        given, found = {name: value for name, value in self.args.items() if value is not None}, self.run()
        x, weight, gate, up, down = (given[name].double() for name in ("x", "weight", "gate", "up", "down"))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        bias = given["bias"].double() if "bias" in given else 0.0
        between = torch.nn.functional.silu(x @ gate.T + bias) * (x @ up.T)
        exact = between @ down.T
        if found.shape != exact.shape or found.dtype != self.args["x"].dtype:
            return f"shape {list(found.shape)}, {found.dtype}"
        # Roundings of four steps, none of which makes more of them than their numbers' sums.
        size = (x.abs() @ gate.abs().T + abs(bias)) * (x.abs() @ up.abs().T)
        allowed = 8 * (ROUNDING[found.dtype][0] + 1e-5) * (1 + size @ down.abs().T)
        return "" if bool(((found.double() - exact).abs() <= allowed).all()) else "a layer is not the exact one"

    def wrongs(self) -> list[Wrong]:
        found = [wrong for name in ("gate", "up", "down") for wrong in self.bent(self.args, name, (1,))]
        return found + self.bent(self.args, "weight", (0,))
