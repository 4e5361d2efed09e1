"""Matrices packed by oneDNN: the same products within what another order of sums may change, and no byte twice."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from kvbench.models import packed
from kvbench.models.load import load_model

TINY = {"kind": "random", "preset": "tiny", "dtype": "float32", "device": "cpu"}
SHAPES = [(1, 1), (3, 5), (17, 33), (576, 192), (320, 128), (96, 1000)]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 1.01 * 2.0**-8}  # of a number to the nearest, relative
needs_packing = pytest.mark.skipif(
    bool(packed.why_not(torch.float32, torch.device("cpu"))), reason="matrices cannot be packed here"
)
DTYPES = [
    dtype for dtype in (torch.float32, torch.bfloat16) if not packed.why_not(dtype, torch.device("cpu"))
]  # bf16 takes AVX-512
pytestmark = needs_packing


def a_linear(out: int, into: int, dtype: torch.dtype, bias: bool = True) -> torch.nn.Linear:
    """A layer with weights of the size that models have, the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(out * 10_000 + into)
        return torch.nn.Linear(into, out, bias=bias, dtype=dtype).requires_grad_(False)


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a normal distribution, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "into"), SHAPES, ids=str)
def test_products_are_exact_but_for_the_order_of_sums(out, into, dtype):
    """Every result is as near to the exact one as fp32 sums of any order are, and one rounding to the dtype.

    A sum of n products in fp32, in whatever order, is off by at most n half ulps of the sum of their magnitudes.
    """
    linear = a_linear(out, into, dtype)
    layer = packed.PackedLinear(linear)
    for rows in ((1,), (2,), (5,), (33,), (2, 1), (1, 7), (2, 3, 4)):
        x = some(*rows, into, dtype=dtype)
        found = layer(x)
        assert found.shape == (*rows, out) and found.dtype == dtype
        weight, bias = linear.weight.double(), linear.bias.double()
        exact = x.double() @ weight.T + bias
        magnitude = x.double().abs() @ weight.abs().T + bias.abs()
        allowed = (into + 2) * 2.0**-24 * magnitude + ROUNDING[dtype] * exact.abs()
        assert bool(((found.double() - exact).abs() <= allowed).all())
        plain = torch.nn.functional.linear(x, linear.weight, linear.bias)
        assert bool(((plain.double() - exact).abs() <= allowed).all()), "the bound is not that of a plain layer"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_without_bias_and_without_rows(dtype):
    """No bias is no zero that is added, and no row is an empty answer."""
    linear = a_linear(24, 40, dtype, bias=False)
    layer = packed.PackedLinear(linear)
    assert layer.bias is None and layer(some(3, 40, dtype=dtype)[:0]).shape == (0, 24)
    x = some(3, 40, dtype=dtype)
    assert torch.allclose(layer(x), linear(x), atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "into"), SHAPES, ids=str)
def test_the_plain_matrix_can_be_had_again(out, into, dtype):
    """Whoever looks at a weight sees the same bits as before."""
    linear = a_linear(out, into, dtype)
    layer = packed.PackedLinear(linear)
    assert layer.weight.is_contiguous() and torch.equal(layer.weight, linear.weight)
    kept = layer.state_dict()
    assert list(kept) == ["bias", "weight"] and torch.equal(kept["weight"], linear.weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_depend_neither_on_threads_nor_on_the_time(rows, dtype):
    """Bit for bit: one thread, two and three, and the same call again; as plain layers have it."""
    layer = packed.PackedLinear(a_linear(576, 1536, dtype))
    x, before = some(rows, 1, 1536, dtype=dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), alone)
    finally:
        torch.set_num_threads(before)


def plain_and_packed(**settings) -> tuple:
    """The same tiny model twice."""
    return load_model(TINY | settings), load_model(TINY | settings | {"linear": "packed"})


@pytest.mark.parametrize("dtype", [str(dtype).removeprefix("torch.") for dtype in DTYPES])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_packed_model_is_the_same_model(dtype, tied):
    """Same weights under the same names, the same logits but for sums in another order, and a head that is tied to the
    embedding stays what it was."""
    plain, other = plain_and_packed(dtype=dtype, overrides={"tie_word_embeddings": tied})
    assert (plain.linear, other.linear, other.remark) == ("plain", "packed", "")
    assert plain.fingerprint == other.fingerprint and plain.decides != other.decides
    kinds = {name: type(module) for name, module in other.model.named_modules()}
    assert kinds["model.layers.1.mlp.down_proj"] is packed.PackedLinear
    assert kinds["lm_head"] is (torch.nn.Linear if tied else packed.PackedLinear)
    if tied:
        assert other.model.lm_head.weight is other.model.model.embed_tokens.weight
    before, after = plain.model.state_dict(), other.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.arange(1, 41).view(2, 20)
    expected, found = (model(input_ids=tokens).logits.float() for model in (plain.model, other.model))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_no_matrix_is_held_twice():
    """Every plain matrix is gone when the model is packed, and what is held instead is as large but for padding."""
    model = load_model(TINY | {"overrides": {"tie_word_embeddings": True}}).model
    plain = [weakref.ref(module) for module in model.modules() if type(module) is torch.nn.Linear]
    held = sum(weight.nbytes for weight in model.parameters())
    tied = model.lm_head
    assert packed.pack(model) == len(plain) - 1
    gc.collect()
    assert [module() for module in plain if module() is not None] == [tied]
    matrices = sum(module.nbytes for module in model.modules() if isinstance(module, packed.PackedLinear))
    now = sum(weight.nbytes for weight in model.parameters()) + matrices
    assert held <= now <= 1.05 * held


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is told by Linux alone")
def test_the_file_of_the_weights_is_let_go(tmp_path):
    """Plain weights may lie in the mapped file; packed ones do not, and neither do those beside them."""
    plain = load_model(TINY | {"overrides": {"tie_word_embeddings": True}})
    plain.model.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    loaded = load_model({"kind": "hf", "path": str(tmp_path), "dtype": "float32", "device": "cpu", "linear": "packed"})
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    found, expected = loaded.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_layer_with_two_users_stays_plain():
    """A layer that lies at two places of a model is not packed twice, and neither is one whose matrix is shared."""
    shared = a_linear(8, 8, torch.float32)
    twin = a_linear(8, 8, torch.float32)
    twin.weight = shared.weight
    alone = a_linear(8, 8, torch.float32)
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(shared), "b": torch.nn.Sequential(shared, twin), "c": alone})
    assert packed.pack(model) == 1
    assert model["a"][0] is shared and model["b"][1] is twin and isinstance(model["c"], packed.PackedLinear)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "matrices are packed in float32 and bfloat16, not in float16"),
        ({"machine": "aarch64"}, "this processor is aarch64, and packing was measured on x86 alone"),
        ({"onednn": False}, r"this torch was built without oneDNN \(mkldnn\)"),
        ({"dtype": "bfloat16", "avx512": False}, "oneDNN multiplies bfloat16 only where the processor has AVX-512"),
    ],
    ids=["dtype", "machine", "onednn", "avx512"],
)
def test_what_cannot_be_packed_stays_plain_and_says_so(change, reason, monkeypatch):
    """The model is loaded all the same, as the plain one that it is, with one sentence on why."""
    monkeypatch.setattr(packed.platform, "machine", lambda: change.get("machine", "x86_64"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: change.get("onednn", True))
    if "avx512" in change:
        monkeypatch.setattr(packed, "_multiplies_bf16", lambda: change["avx512"])
    loaded = load_model(TINY | {"linear": "packed", "dtype": change.get("dtype", "float32")})
    assert loaded.linear == "plain" and re.search(reason, loaded.remark)
    assert loaded.remark.startswith("model.linear=packed was not done, because ")
    assert not any(isinstance(module, packed.PackedLinear) for module in loaded.model.modules())


def test_another_word_is_refused():
    """With the words that there are."""
    with pytest.raises(ValueError, match=r"model.linear=pakced does not exist. Did you mean packed\?"):
        load_model(TINY | {"linear": "pakced"})
