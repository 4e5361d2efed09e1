"""Linear layers that read a plain matrix once for all rows: the same model but for the order of sums."""

import copy

import pytest
import torch
from engine_helpers import random_tokens
from store_helpers import held_positions

from kvbench.cache.layout import StoreOptions
from kvbench.engine.runner import Runner
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.cpu.products import MAX_ROWS, FewRows
from kvbench.methods.critical import Critical
from kvbench.methods.full import Full
from kvbench.models import matrices, packed, streamed
from kvbench.models.load import load_model

TINY = {"kind": "random", "preset": "tiny", "dtype": "float32", "device": "cpu"}
WAYS = ["streamed"] + ([] if packed.why_not(torch.float32, torch.device("cpu")) else ["packed"])
pytestmark = pytest.mark.skipif(
    bool(streamed.why_not(torch.float32, torch.device("cpu"))), reason="the kernels cannot be built here"
)


def plain_and_streamed(**settings) -> tuple:
    """The same tiny model twice."""
    return load_model(TINY | settings), load_model(TINY | settings | {"linear": "streamed"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_streamed_model_is_the_same_model(dtype, tied):
    """The same weights at the same places, a head that is tied to the embedding too; the same logits but for sums in
    another order, and of a prompt in fp32 the very same."""
    plain, other = plain_and_streamed(dtype=dtype, overrides={"tie_word_embeddings": tied})
    assert (plain.linear, other.linear, other.remark) == ("plain", "streamed", "")
    assert plain.fingerprint == other.fingerprint and plain.decides != other.decides
    kinds = {name: type(module) for name, module in other.model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(kinds) > 14 and set(kinds.values()) == {streamed.StreamedLinear}
    assert (other.model.lm_head.weight is other.model.model.embed_tokens.weight) == tied
    before, after = plain.model.state_dict(), other.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    few, many = torch.arange(1, 1 + MAX_ROWS)[None], torch.arange(1, 41).view(2, 20)
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]  # some roundings of the dtype
    for tokens in (few, many):
        expected, found = (model(input_ids=tokens).logits.float() for model in (plain.model, other.model))
        assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())
    assert dtype != "float32" or torch.equal(found, expected)


def test_few_rows_are_the_kernel_s_and_many_are_torch_s(monkeypatch):
    """Up to `MAX_ROWS` rows, however they are laid out; a tensor of another kind or one with a gradient is torch's."""
    calls = []
    monkeypatch.setattr(FewRows, "__call__", lambda self, x, weight, bias: calls.append(x.shape) or x @ weight.T)
    layer = torch.nn.Linear(6, 4, bias=False).requires_grad_(False)
    assert streamed.stream(torch.nn.Sequential(layer)) == 1
    given = torch.randn(MAX_ROWS + 1, 6)
    for x in (given[:1], given[:MAX_ROWS], given[0], given[: MAX_ROWS // 2 * 2].view(2, -1, 6)):
        calls.clear()
        assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-6) and calls == [x.shape]
    calls.clear()
    layer(given), layer(given[:1].clone().requires_grad_()), layer(torch.nn.Parameter(given[:1], requires_grad=False))
    assert layer.to("meta")(given[:1].to("meta")).shape == (1, 4) and not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("there", [False, True])
def test_many_rows_are_rounded_once_where_the_processor_has_no_such_products(dtype, there, monkeypatch):
    """They are the exact products, rounded; and torch's own, to the bit, where it has them or in fp32."""
    for ask in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, ask, lambda: there)
    layer = torch.nn.Linear(48, 20, dtype=dtype).requires_grad_(False)
    x = torch.randn(3, MAX_ROWS, 48).to(dtype)
    plain = layer(x)
    streamed.stream(torch.nn.Sequential(layer))
    assert layer.widens == (not there and dtype != torch.float32)
    if not layer.widens:
        assert torch.equal(layer(x), plain)
        return
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    # Half a step of the dtype, and what 49 additions in fp32 may add before.
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert layer(x).dtype == dtype
    assert bool(((layer(x).double() - exact).abs() <= 1.001 * step * exact.abs() + 1e-5).all())


def test_a_decode_step_is_the_same_bits_in_any_batch():
    """What the plain model does not promise: three rows that decode together, and each alone."""
    loaded = load_model(TINY | {"linear": "streamed"})
    prompts = [random_tokens(20 + 7 * i) for i in range(3)]

    def decode(chosen):
        runner = Runner(loaded, Full(), options=StoreOptions())
        runner.reserve(rows=3, prompt_tokens=40, new_tokens=4)
        rows = [runner.read(list(prompts[i]))[0] for i in chosen]
        return torch.stack([runner.step(rows, [5 + step + i for i in chosen]) for step in range(3)], 1)

    together = decode([0, 1, 2])
    for i in range(3):
        assert torch.equal(decode([i])[0], together[i])


def test_a_copied_model_multiplies_alike():
    """A deep copy has layers of the same kind and gives the same bits."""
    model = load_model(TINY | {"linear": "streamed"}).model
    other, tokens = copy.deepcopy(model), torch.arange(1, 5)[None]
    assert type(other.lm_head) is streamed.StreamedLinear
    assert torch.equal(model(input_ids=tokens).logits, other(input_ids=tokens).logits)


def test_layers_that_are_not_plain_stay_what_they_are():
    """A matrix that lies turned, and a kind of layer or of weight that is not torch's own, are left alone."""

    class Other(torch.nn.Linear):
        pass

    turned = torch.nn.Linear(6, 4)
    turned.weight = torch.nn.Parameter(torch.randn(6, 4).T)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), Other(6, 6), turned)
    assert streamed.stream(model) == 1
    assert [type(layer) for layer in model] == [streamed.StreamedLinear, Other, torch.nn.Linear]


def test_where_it_cannot_be_had_the_model_is_plain_and_says_so(monkeypatch):
    """Without a compiler, with the compiler's reason; and on a GPU, with its name."""

    def no_library():
        raise BuildError("no C++ compiler found; install g++")

    monkeypatch.setattr(streamed, "load", no_library)
    loaded = load_model(TINY | {"linear": "streamed"})
    assert loaded.linear == "plain" and type(loaded.model.lm_head) is torch.nn.Linear
    assert loaded.remark == "model.linear=streamed was not done, because no C++ compiler found; install g++"
    assert "no kernel for float64" in streamed.why_not(torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("linear", ["packed", "streamed"])
@pytest.mark.parametrize(
    ("quantisation", "processes", "other"),
    [("int8", 1, "model.quantisation=int8"), (None, 2, "model.tensor_parallel=2")],
)
def test_matrices_that_are_not_plain_are_refused(linear, quantisation, processes, other):
    """Before a model is loaded, by both settings and the remedy; a plain one goes with everything."""
    assert matrices.read_linear("plain", quantisation, processes) == "plain"
    assert matrices.read_linear(linear, None, 1) == linear
    key = other.partition("=")[0]
    with pytest.raises(ValueError, match=f"^model.linear={linear} .* {other} leaves other .* or {key}=null$"):
        matrices.read_linear(linear, quantisation, processes)


def test_the_identity_has_the_instructions(monkeypatch):
    """Another instruction set sums in another order, whatever backend the cache has; other ways have no such choice."""
    monkeypatch.setattr(matrices, "chosen_isa", lambda: "avx1024")
    assert [matrices.identity(linear) for linear in matrices.LINEAR] == ["plain", "packed", "streamed avx1024"]
    assert [matrices.kernels(linear) for linear in matrices.LINEAR] == [(), (), ("cpu",)]


def read_and_step(loaded, tokens):
    """CriticalKV's held positions after a prompt, and the logits of a step."""
    runner = Runner(loaded, Critical(budget=0.5, window=8), options=StoreOptions(track=("pos",)))
    runner.reserve(rows=1, prompt_tokens=tokens, new_tokens=4)
    row, logits = runner.read(random_tokens(tokens))
    held = held_positions(runner.store, row)
    return held, logits[-1], runner.step([row], [7]), len(runner.store.holding.parts)


@pytest.mark.parametrize("way", WAYS)
def test_methods_find_weights_and_layers_lie_in_two_places(way):
    """CriticalKV takes the projection behind attention for what it is in the plain model; a model whose layers share
    two places of main memory gives the logits of one in one place."""
    plain, *others = (load_model(TINY | more) for more in ({}, {"linear": way}, {"linear": way, "device": ["cpu"] * 2}))
    assert all(loaded.linear == way for loaded in others)
    held, *_ = read_and_step(plain, 60)
    one, two = (read_and_step(loaded, 60) for loaded in others)
    assert one[0] == held == two[0] and 0 < len(held[0]) < 60
    assert torch.equal(one[1], two[1]) and torch.equal(one[2], two[2]) and (one[3], two[3]) == (1, 2)
    assert "runs on cuda" in getattr(matrices, way).why_not(torch.float32, torch.device("cuda:0"))
