"""Linear layers packed by oneDNN or streamed by the CPU's kernel: the same model but for the order of sums."""

import copy
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from engine_helpers import random_tokens
from refusals import refused
from store_helpers import held_positions
from torch.utils.flop_counter import FlopCounterMode

from kvbench.cache.options import StoreOptions
from kvbench.engine.runner import Runner
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.cpu.products import RowProducts
from kvbench.methods.critical import Critical
from kvbench.methods.full import Full
from kvbench.models import matrices
from kvbench.models.load import load_model
from kvbench.models.matrices import PackedLinear, StreamedLinear

TINY = {"kind": "random", "preset": "tiny", "dtype": "float32", "device": "cpu"}
SHAPES = [(1, 1), (3, 5), (17, 33), (576, 192), (320, 128), (96, 1000)]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 1.01 * 2.0**-8}  # of a number to the nearest, relative
CPU = torch.device("cpu")
WAYS = [way for way in (matrices.PACKED, matrices.STREAMED) if not matrices.why_not(way, torch.float32, CPU)]
DTYPES = [x for x in (torch.float32, torch.bfloat16) if not matrices.why_not("packed", x, CPU)]  # bf16 takes AVX-512
# A way and a dtype that are there.
HERE = [("packed", dtype) for dtype in DTYPES]
HERE += [("streamed", x) for x in (torch.float32, torch.bfloat16, torch.float16) if "streamed" in WAYS]
needs_packing = pytest.mark.skipif("packed" not in WAYS, reason="matrices cannot be packed here")
needs_kernels = pytest.mark.skipif("streamed" not in WAYS, reason="the kernels cannot be built here")


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
    layer = PackedLinear(linear)
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
    layer = PackedLinear(linear)
    assert layer.bias is None and layer(some(3, 40, dtype=dtype)[:0]).shape == (0, 24)
    x = some(3, 40, dtype=dtype)
    assert torch.allclose(layer(x), linear(x), atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "into"), SHAPES, ids=str)
def test_the_plain_matrix_can_be_had_again(out, into, dtype):
    """Whoever looks at a weight sees the same bits as before."""
    linear = a_linear(out, into, dtype)
    layer = PackedLinear(linear)
    assert layer.weight.is_contiguous() and torch.equal(layer.weight, linear.weight)
    kept = layer.state_dict()
    assert list(kept) == ["bias", "weight"] and torch.equal(kept["weight"], linear.weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_depend_neither_on_threads_nor_on_the_time(rows, dtype):
    """Bit for bit: one thread, two and three, and the same call again; as plain layers have it."""
    layer = PackedLinear(a_linear(576, 1536, dtype))
    x, before = some(rows, 1, 1536, dtype=dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), alone)
    finally:
        torch.set_num_threads(before)


@needs_packing
def test_no_matrix_is_held_twice():
    """Every plain matrix is gone when the model is packed, and what is held instead is as large but for padding."""
    model = load_model(TINY | {"linear": "plain", "overrides": {"tie_word_embeddings": True}}).model
    plain = [weakref.ref(module) for module in model.modules() if type(module) is torch.nn.Linear]
    held = sum(weight.nbytes for weight in model.parameters())
    tied = model.lm_head
    assert matrices.pack(model) == len(plain) - 1
    gc.collect()
    assert [module() for module in plain if module() is not None] == [tied]
    now = sum(weight.nbytes for weight in model.parameters())
    now += sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    assert held <= now <= 1.05 * held


@needs_packing
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


@needs_packing
def test_a_layer_with_two_users_stays_plain():
    """A layer that lies at two places of a model is not packed twice, and neither is one whose matrix is shared."""
    shared = a_linear(8, 8, torch.float32)
    twin = a_linear(8, 8, torch.float32)
    twin.weight = shared.weight
    alone = a_linear(8, 8, torch.float32)
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(shared), "b": torch.nn.Sequential(shared, twin), "c": alone})
    assert matrices.pack(model) == 1
    assert model["a"][0] is shared and model["b"][1] is twin and isinstance(model["c"], PackedLinear)


@needs_packing
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
    monkeypatch.setattr(matrices.platform, "machine", lambda: change.get("machine", "x86_64"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: change.get("onednn", True))
    if "avx512" in change:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: change["avx512"])
    loaded = load_model(TINY | {"linear": "packed", "dtype": change.get("dtype", "float32")})
    assert loaded.linear == "plain" and re.search(reason, loaded.remark)
    assert loaded.remark.startswith("model.linear=packed was not done, because ")
    assert not any(isinstance(module, PackedLinear) for module in loaded.model.modules())


@pytest.mark.parametrize(("way", "dtype"), HERE, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_it_is_the_same_model(way, dtype, tied):
    """The same weights under the same names, the same logits but for sums in another order; a head that is tied to the
    embedding is streamed too, and never packed."""
    asked = TINY | {"dtype": str(dtype).removeprefix("torch."), "overrides": {"tie_word_embeddings": tied}}
    plain, other = load_model(asked | {"linear": "plain"}), load_model(asked | {"linear": way})
    assert (plain.linear, other.linear, other.remark) == ("plain", way, "")
    assert plain.fingerprint == other.fingerprint and plain.decides != other.decides
    kind = {"packed": PackedLinear, "streamed": StreamedLinear}[way]
    kinds = {
        name: type(module)
        for name, module in other.model.named_modules()
        if isinstance(module, torch.nn.Linear | PackedLinear)
    }
    head = kinds.pop("lm_head")
    assert head is (torch.nn.Linear if tied and way == "packed" else kind)
    assert len(kinds) > 13 and set(kinds.values()) == {kind}
    assert (other.model.lm_head.weight is other.model.model.embed_tokens.weight) == tied
    before, after = plain.model.state_dict(), other.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    few, many = torch.arange(1, 9)[None], torch.arange(1, 41).view(2, 20)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]  # some roundings of the dtype
    for tokens in (few, many):
        expected, found = (model(input_ids=tokens).logits.float() for model in (plain.model, other.model))
        assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@needs_kernels
def test_rows_are_the_kernel_s_but_for_those_of_other_kinds(monkeypatch):
    """However they are laid out; a tensor of another kind or one with a gradient is torch's, and so is one whose
    operations somebody watches, such as what stands for a CUDA graph in main memory."""
    calls = []
    monkeypatch.setattr(RowProducts, "__call__", lambda self, x, weight, bias: calls.append(x.shape) or x @ weight.T)
    layer = torch.nn.Linear(6, 4, bias=False).requires_grad_(False)
    assert matrices.stream(torch.nn.Sequential(layer)) == 1
    given = torch.randn(48, 6)
    for x in (given[:1], given, given[0], given.view(2, -1, 6)):
        calls.clear()
        assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-6) and calls == [x.shape]
    calls.clear()
    layer(given[:1].clone().requires_grad_()), layer(torch.nn.Parameter(given[:1], requires_grad=False))
    with FlopCounterMode(display=False) as watch:
        layer(given)
    assert watch.get_total_flops() == 2 * 48 * 6 * 4
    assert layer.to("meta")(given[:1].to("meta")).shape == (1, 4) and not calls


@needs_kernels
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


@needs_kernels
def test_a_copied_model_multiplies_alike():
    """A deep copy has layers of the same kind and gives the same bits."""
    model = load_model(TINY | {"linear": "streamed"}).model
    other, tokens = copy.deepcopy(model), torch.arange(1, 5)[None]
    assert type(other.lm_head) is StreamedLinear
    assert torch.equal(model(input_ids=tokens).logits, other(input_ids=tokens).logits)


@needs_kernels
def test_layers_that_are_not_plain_stay_what_they_are():
    """A matrix that lies turned, and a kind of layer or of weight that is not torch's own, are left alone."""

    class Other(torch.nn.Linear):
        pass

    transposed = torch.nn.Linear(6, 4)
    transposed.weight = torch.nn.Parameter(torch.randn(6, 4).T)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), Other(6, 6), transposed)
    assert matrices.stream(model) == 1
    assert [type(layer) for layer in model] == [StreamedLinear, Other, torch.nn.Linear]


@needs_kernels
def test_where_it_cannot_be_had_the_model_is_plain_and_says_so(monkeypatch):
    """Without a compiler, with the compiler's reason; and on a GPU, with its name."""

    def no_library():
        raise BuildError("no C++ compiler found; install g++")

    monkeypatch.setattr(matrices, "load", no_library)
    loaded = load_model(TINY | {"linear": "streamed"})
    assert loaded.linear == "plain" and type(loaded.model.lm_head) is torch.nn.Linear
    assert loaded.remark == "model.linear=streamed was not done, because no C++ compiler found; install g++"
    assert "no kernel for float64" in matrices.why_not("streamed", torch.float64, CPU)


@pytest.mark.parametrize("linear", ["packed", "streamed"])
@pytest.mark.parametrize(
    ("quantisation", "processes", "other"),
    [("int8", 1, "model.quantisation=int8"), (None, 2, "model.tensor_parallel=2")],
)
def test_matrices_that_are_not_plain_are_refused(linear, quantisation, processes, other):
    """Before a model is loaded, by both settings and the remedy; a plain one goes with all. So is another word."""
    assert {matrices.read_linear(each, quantisation, processes) for each in ("plain", "auto")} == {"plain"}
    assert matrices.read_linear(linear, None, 1) == linear
    key = other.partition("=")[0]
    with refused("settings-conflict", "model.linear", f"model.linear={linear}", other, f"{key}=null"):
        matrices.read_linear(linear, quantisation, processes)
    with refused("name-unknown", "model.linear", "model.linear=pakced"):
        load_model(TINY | {"linear": "pakced"})


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_auto_streams_where_that_is_faster(isa, monkeypatch):
    """Not by portable C++, nor without a compiler, nor on a GPU, and then without a word: nobody asked for it."""
    monkeypatch.setattr(matrices, "chosen_isa", lambda: isa)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert matrices.lay(layers, "auto", torch.float64, CPU) == ("plain", "")
    assert matrices.lay(layers, "auto", torch.float32, torch.device("cuda")) == ("plain", "")
    wanted = "streamed" if isa == "avx2" and "streamed" in WAYS else "plain"
    assert matrices.lay(layers, "auto", torch.float32, CPU) == (wanted, "")


@needs_kernels
def test_rows_are_alone_only_if_all_their_matrices_are_streamed():
    """A matrix that another operation multiplies by, such as experts' or a convolution's, may depend on the batch."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    assert not matrices.rows_are_alone(model)
    matrices.stream(model)
    assert matrices.rows_are_alone(model)
    model.experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    assert not matrices.rows_are_alone(model)


@needs_kernels
@pytest.mark.parametrize("function", [torch.nn.SiLU(), torch.nn.GELU("tanh"), torch.nn.Sigmoid()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_activation_is_the_same_bits_wherever_a_number_lies(function, dtype):
    """Alone, in a row of any length, with one thread and with three: torch's own differs in some of these."""
    x, even, before = some(257, 333, dtype=dtype), matrices.Even(function), torch.get_num_threads()
    assert torch.equal(even(x.view(-1)[: 64 * 500]), function(x.view(-1)[: 64 * 500]))
    try:
        torch.set_num_threads(1)
        all_at_once = even(x)
        assert torch.equal(torch.cat([even(row) for row in x]), all_at_once.view(-1))
        assert torch.equal(even(x[:, :4]), all_at_once[:, :4])
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(even(x), all_at_once)
    finally:
        torch.set_num_threads(before)


def test_the_identity_has_the_instructions(monkeypatch):
    """Another instruction set sums in another order, whatever backend the cache has; other ways have no such choice."""
    monkeypatch.setattr(matrices, "chosen_isa", lambda: "avx1024")
    assert [matrices.identity(linear) for linear in matrices.LINEAR] == ["plain", "packed", "streamed avx1024", "fused"]
    assert [matrices.kernels(linear) for linear in matrices.LINEAR] == [(), (), ("cpu",), ("triton",)]


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
    plain, *others = (
        load_model(TINY | more)
        for more in ({"linear": "plain"}, {"linear": way}, {"linear": way, "device": ["cpu"] * 2})
    )
    assert all(loaded.linear == way for loaded in others)
    held, *_ = read_and_step(plain, 60)
    one, two = (read_and_step(loaded, 60) for loaded in others)
    assert one[0] == held == two[0] and 0 < len(held[0]) < 60
    assert torch.equal(one[1], two[1]) and torch.equal(one[2], two[2]) and (one[3], two[3]) == (1, 2)
    assert "runs on cuda" in matrices.why_not(way, torch.float32, torch.device("cuda:0"))
