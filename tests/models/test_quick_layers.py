"""Norms and feed-forward layers that the streamed products' kernels run as one call, where they do what they are called
for."""

import copy
import functools

import pytest
import torch
from test_matrices import CPU, TINY, needs_kernels, some
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from kvbench.kernels.cpu.products import RowProducts
from kvbench.models import matrices
from kvbench.models.load import load_model

pytestmark = needs_kernels


class SomeRMSNorm(torch.nn.Module):
    """As most models have it."""

    def __init__(self, width: int, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(some(width, dtype=dtype), requires_grad=False)
        self.variance_epsilon = eps

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of mean square 1, fp32."""
        return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm."""
        return self.weight * self.scaled(x).to(x.dtype)


class Feed(torch.nn.Module):
    """A feed-forward layer with a gate; `kind` of its function."""

    def __init__(self, kind: str = "silu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(32, 48, bias=b, dtype=dtype) for b in (True, False))
        self.down_proj, self.act_fn = torch.nn.Linear(48, 32, bias=False, dtype=dtype), ACT2FN[kind]
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OnePlus(SomeRMSNorm):
    """Gemma's, whose weights count from 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm."""
        return ((1 + self.weight.float()) * self.scaled(x)).to(x.dtype)


class OtherRMSNorm(SomeRMSNorm):
    """One that leaves out the epsilon that it names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


class Limited(Feed):
    """A layer that lets through no more than so much, as some mixtures of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer."""
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x).clamp(-7.0, 7.0))


class Ordered(Feed):
    """A layer that takes more than its input."""

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """The layer."""
        return super().forward(x) * order


def is_quick(module: torch.nn.Module) -> bool:
    """True if a kernel runs it."""
    assert matrices.stream(torch.nn.Sequential(module)) in (0, 3)
    return "forward" in vars(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_usual_layers_are_quick_and_give_the_same(dtype):
    """But for roundings of the dtype, of which there are fewer."""
    for module, width in ((SomeRMSNorm(33, dtype=dtype), 33), (Feed(dtype=dtype), 32)):
        assert is_quick(module)
        for x in (some(3, width, dtype=dtype), some(2, 5, width, dtype=dtype), some(4, width, dtype=dtype)[::2]):
            expected = type(module).forward(module, x)
            off = (module(x).float() - expected.float()).abs().max() / expected.float().abs().max()
            assert float(off) <= {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize(
    "make",
    [
        lambda: OnePlus(33),
        lambda: OtherRMSNorm(33),
        lambda: Feed("gelu_pytorch_tanh"),
        lambda: Feed("gelu"),
        Limited,
        Ordered,
    ],
    ids=["one_plus", "no_epsilon", "gelu_tanh", "gelu", "limited", "more"],
)
def test_what_does_something_else_under_the_same_name_is_left_alone(make):
    """What a name promises is tried."""
    assert not is_quick(make())


def test_what_somebody_else_has_changed_is_left_alone():
    """A library that spreads a model over devices puts its own forward pass into the modules."""
    norm = SomeRMSNorm(8)
    own = norm.forward = functools.partial(SomeRMSNorm.forward, norm)
    matrices.stream(torch.nn.Sequential(norm))
    assert norm.forward is own


def test_torch_runs_what_the_kernels_do_not():
    """A gradient, weights of another dtype, another device, and operations that somebody watches."""
    norm, feed = SomeRMSNorm(32), Feed()
    assert is_quick(norm) and is_quick(feed)
    x = some(5, 32, dtype=torch.float32)
    assert norm(x.bfloat16()).dtype == torch.float32  # as torch has it for weights in fp32
    for module in (norm, feed):
        assert module(x.clone().requires_grad_()).requires_grad
        assert module.to("meta")(x.to("meta")).shape == x.shape
    feed = Feed()
    assert is_quick(feed)
    with FlopCounterMode(display=False) as watch:
        feed(x)
    assert watch.get_total_flops() == 3 * 2 * 5 * 32 * 48


class Heads(torch.nn.Module):
    """Three layers that take the same rows, or two others, one after the other; as attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(32, out, bias=out == 8) for out in (64, 8, 24))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """What each layer makes of x, or what the last two make of other rows."""
        y = x if other is None else other
        return self.q_proj(x), self.k_proj(y), self.v_proj(y)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Matrices of every call of the kernel."""
    found: list[int] = []
    usual = RowProducts.of

    def of(self, x, matrices):
        found.append(len(matrices))
        return usual(self, x, matrices)

    monkeypatch.setattr(RowProducts, "of", of)
    return found


def test_layers_that_take_the_same_rows_are_multiplied_in_one_call(calls):
    """With the same bits as alone, and nothing is held between one pass and the next."""
    heads = Heads()
    assert matrices.stream(torch.nn.Sequential(heads)) == 3
    for rows in (1, 5, 1):
        x = some(rows, 32, dtype=torch.float32)
        for found, layer in zip(heads(x), heads.children(), strict=True):
            assert torch.equal(found, RowProducts()(x, layer.weight, layer.bias))
        assert calls == [3, 1, 1, 1]
        calls.clear()
        assert heads.q_proj.joint._x is None and not heads.q_proj.joint._left


def test_layers_that_take_other_rows_are_multiplied_alone(calls):
    """As those of attention to another text; what was multiplied in vain is not used, and not done again."""
    heads = Heads()
    matrices.stream(torch.nn.Sequential(heads))
    x, other = some(5, 32, dtype=torch.float32), some(7, 32, dtype=torch.float32)
    taken = zip((x, other, other), heads.children(), strict=True)
    expected = [RowProducts()(y, layer.weight, layer.bias) for y, layer in taken]
    for one_each in ([3, 1, 1], [1, 1, 1], [1, 1, 1]):
        calls.clear()
        assert all(map(torch.equal, heads(x, other), expected))
        assert calls == one_each
    calls.clear()
    assert torch.equal(heads(x)[1], RowProducts()(x, heads.k_proj.weight, heads.k_proj.bias))


def test_layers_of_other_widths_are_not_joined():
    """A module that only names its layers so."""
    heads = Heads()
    heads.v_proj = torch.nn.Linear(16, 8, bias=False).requires_grad_(False)
    matrices.stream(torch.nn.Sequential(heads))
    assert all(layer.joint is None for layer in heads.children())


def test_a_copy_has_weights_of_its_own():
    """What is changed in a deep copy shows in its answers, and in them alone."""
    layers = torch.nn.Sequential(SomeRMSNorm(32), Feed())
    matrices.stream(layers)
    x, other = some(5, 32, dtype=torch.float32), copy.deepcopy(layers)
    before = layers(x)
    assert torch.equal(other(x), before)
    other[0].weight.zero_()
    assert not other(x).any() and torch.equal(layers(x), before)
    heads = Heads()
    matrices.stream(torch.nn.Sequential(heads))
    twin, before = copy.deepcopy(heads), heads(x)
    twin.k_proj.weight.zero_()
    assert not twin.k_proj.bias.sub(twin(x)[1]).any() and torch.equal(heads(x)[1], before[1])


def test_every_layer_of_a_model_is_quick():
    """Its norms and its feed-forward layers; a model with plain matrices has none."""
    for linear, quick in (("streamed", 2 * 2 + 1 + 2), ("plain", 0)):
        model = load_model(TINY | {"linear": linear}).model
        assert sum("forward" in vars(module) for module in model.modules()) == quick
    assert model.device == CPU
