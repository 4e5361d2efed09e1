"""Keys that are stored less one vector per list: attention is the same in every format, and quantisers err less."""

import dataclasses

import pytest
import torch
from engine_helpers import answers, comparable, random_tokens, request
from refusals import refused
from selection import in_turn
from store_helpers import filled, make_store, plain_attention, random_layer, rotated, step_at
from test_rotation import POLICIES

from kvbench.cache.codebooks import KeyBiases
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine.supported import model_shape
from kvbench.errors import NotForModel
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.operands import Softmax
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KeyNorm
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.quest import Quest
from kvbench.methods.r_kv import RKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.uniform import Uniform
from kvbench.methods.zipcache import ZipCache

UNIFORM = (
    *("int8", "int4", "k4v2", "k2v4", "k1v8", "lloyd-k4v4", "fp8", "fp8_e5m2", "fp8_per_token_head"),
    *("int8_per_token_head", "int4_per_token_head", "turboquant_k8v4", "turboquant_4bit", "turboquant_3bit", "nvfp4"),
    *("nvfp4_4over6", "fp4_mx_block16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "f16-q8_0", "mxfp4"),
)
# Every way to code tokens, in pages, in rings before them, in several tiers and after them, some of whose tokens go.
FORMATS = {tier: Uniform(tier=tier) for tier in UNIFORM} | {
    "full": Full(tier="fp16"),
    "symmetric": Uniform(tier="int4", symmetric=True, splits=2),
    "by layer": Uniform(tier="int4", tiers_by_layer="0:fp16 -1:int8"),
    "kivi": Kivi(bits=2, group=8, residual_tokens=16),
    "kvquant_style": KVQuantStyle(bits=4, group=8, pre_rope=False),
    "zipcache": ZipCache(window=8),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=4),
    "snapkv": SnapKV(budget=20, window=4, tier="int4"),
    "quest": Quest(read_budget=24, page_tokens=8, dense_layers=0, tier="int8", group="mean"),
}
LENGTH, PROMPT, DIM = 51, 36, 64


def layers_of(seed: int, heads: int = 2, group: int = 2, dim: int = DIM, shift: float = 0.0, layers: int = 2) -> list:
    """Queries, keys and values of layers; keys of the prompt have the mean 0, so that with `shift` on them a row's
    vector is the shift and the keys less it are the same bits as without."""
    found = []
    for layer in range(layers):
        q, k, v = random_layer(seed + layer, heads, group, LENGTH, dim)
        k = (k * 64).round() / 64
        k[:, PROMPT // 2 : PROMPT] = -k[:, : PROMPT // 2]
        every = torch.arange(dim) % 5 - 2.0  # numbers that sums and 16 bits hold exactly
        found.append((q, k + shift * every, v))
    return found


def outputs(policy, layers, backend="torch", **options) -> list:
    """Attention of the steps behind a prompt, of all layers."""
    store, row = filled(policy, layers, PROMPT, 0.125, new_tokens=LENGTH, backend=backend, **options)
    return [torch.stack(step_at(store, row, layers, at, 0.125)) for at in range(PROMPT, LENGTH)]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "backend"), in_turn([*FORMATS], ("torch", "auto")))
def test_a_constant_of_all_keys_costs_no_format_anything(name, backend):
    """Keys that share a large vector are stored as keys without it are, to the bit: in pages of every format and in
    rings, of the prompt and of what follows it. Where attention decides what stays, its last digits may."""
    policy = FORMATS[name]
    plain = outputs(policy, layers_of(0), backend)
    shifted = outputs(policy, layers_of(0, shift=8.0), backend, key_offset="prompt")
    same = [torch.equal(*each) for each in zip(plain, shifted, strict=True)]
    assert all(same) or name in ("diffkv", "snapkv", "zipcache"), name
    assert sum(torch.allclose(*each, atol=1e-4) for each in zip(plain, shifted, strict=True)) >= len(same) - 1


def fake_int4(x):
    """Numbers as 4-bit codes of each vector give them back, in plain torch: scale and zero in 16 bits."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 15
    return ((x - low) / scale).round().clamp(0, 15) * scale.half().float() + low.half().float()


@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 3, 40), (2, 1, 64), (3, 2, 96)])
def test_attention_is_that_over_fake_quantised_keys(heads, group, dim):
    """The oracle: the mean of the prompt's keys goes off all keys, 4 bits take what is left, and it is put on again."""
    q, k, v = random_layer(1, heads, group, LENGTH, dim)
    k = k + 9 * torch.randn(heads, 1, dim)
    store, row = filled(Uniform(tier="int4"), [(q, k, v)], PROMPT, 0.125, key_offset="prompt")
    mean = k[:, :PROMPT].mean(1, keepdim=True)
    keys, values, plain = fake_int4(k - mean.half().float()) + mean, fake_int4(v), fake_int4(k)
    for at in range(PROMPT, PROMPT + 4):
        (out,), seen = step_at(store, row, [(q, k, v)], at, 0.125), slice(at + 1)
        oracle, exact, without = (
            plain_attention(q[:, at], x[:, seen], y[:, seen], 0.125) for x, y in ((keys, values), (k, v), (plain, v))
        )
        assert torch.allclose(out, oracle, atol=0.02), "a code at a rounding edge moves a logit by a hundredth or two"
        assert (out - exact).norm() < 0.5 * (without - exact).norm()


def table_for(loaded, seed: int = 0) -> list:
    """A random table of a model."""
    shape = model_shape(loaded.model)
    make = torch.Generator().manual_seed(seed)
    return torch.randn(shape.num_layers, shape.num_kv_heads * shape.head_dim, generator=make).tolist()


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "backend"), in_turn([*POLICIES], ("torch", "auto")))
def test_without_rounding_nothing_changes(tiny_model, name, backend):
    """The same answers from the same tokens, for prompts, segments and steps; decisions that read keys see them as they
    are; and as many bytes more as the vectors have."""
    loaded = tiny_model("llama", "gqa3", 64, narrow=True)
    policy = POLICIES[name]
    if policy.position_mode != "absolute":
        pytest.skip("refused")
    if name == "quest":
        policy = Quest(read_budget=1000, page_tokens=8, dense_layers=0, tier="native", group="mean")
    asked = [
        request("a", random_tokens(70), gold=random_tokens(9, seed=3), max_new_tokens=11),
        request("b", random_tokens(50, seed=1), random_tokens(12, seed=2), max_new_tokens=11),
    ]
    table = table_for(loaded)
    plain, prompt, fixed = (
        answers(loaded, policy, asked, batch_size=2, backend=backend, key_offset=kind)
        for kind in ("none", "prompt", table)
    )
    more = len(table) * len(table[0]) * 4  # of the model's own type
    for key, one in plain.items():
        for found, item in ((prompt, "table_bytes"), (fixed, "book_bytes")):
            assert (one.token_ids, one.kept) == (found[key].token_ids, found[key].kept)
            held, without = found[key].ledger, one.ledger
            assert held[item] - without[item] == held["resident_bytes"] - without["resident_bytes"] == more
            if one.fidelity is not None:
                assert found[key].fidelity["nll"] == pytest.approx(one.fidelity["nll"], abs=1e-4)


@pytest.mark.parametrize(
    "policy",
    [KeyNorm(budget=30, decode_every=4, tier="native"), RKV(budget=30, window=5, decode_every=4, tier="native")],
)
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_statistics_see_keys_as_they_are(policy, rotation):
    """Slots that are measured at a bulk eviction, and tokens as they are written."""
    layers = layers_of(3, heads=1, dim=16, shift=2.0)
    found = []
    for kind in ("none", "prompt"):
        store, row = filled(policy, layers, 40, 0.3, key_offset=kind, rotation=rotation)
        for at in (40, 41):
            step_at(store, row, layers, at, 0.3)
        rows = torch.tensor([row])
        scores = store.holding.scores
        view = store.view(rows).slots(0)
        found.append(scores.of_slots(rows, store.counters.tokens_seen[rows]) if scores.measures_slots else view.score)
    assert torch.allclose(*found, atol=1e-4) and found[0].abs().sum() > 0


@pytest.mark.parametrize("name", ["int4", "kivi", "q4_0"])
def test_a_row_is_the_same_bits_in_any_company(tiny_model, name):
    """Rows of unlike length, each with vectors of its own, joined and one after the other in rows that were used."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request(str(n), random_tokens(n), gold=random_tokens(7), max_new_tokens=6) for n in (50, 3, 30, 9, 77, 1)]
    if not loaded.rows_are_alone:
        pytest.skip("products are not streamed here")
    alone, joined = (answers(loaded, FORMATS[name], asked, batch_size=n, key_offset="prompt") for n in (1, 6))
    assert {key: comparable(one) for key, one in joined.items()} == {key: comparable(one) for key, one in alone.items()}


def test_a_copied_row_goes_on_with_its_vectors_and_a_new_one_has_none():
    """The copy outlives its source, and a row that is used again begins without."""
    layers = layers_of(5, shift=4.0)
    store, row = filled(FORMATS["int4"], layers, PROMPT, 0.125, key_offset="prompt", rows=2)
    other = store.fork_row(row)
    store.close_row(row)
    again = store.open_row()
    assert not store.holding.offsets.of(torch.tensor([again])).any()
    alone = outputs(FORMATS["int4"], layers, key_offset="prompt")
    found = [torch.stack(step_at(store, other, layers, at, 0.125)) for at in range(PROMPT, LENGTH)]
    assert all(map(torch.equal, alone, found))


@pytest.mark.parametrize("policy", [Full(tier="native"), SnapKV(budget=0.5, window=8, tier="native")])
def test_a_table_holds_for_prompts_in_chunks(tiny_model, policy):
    """What is held of earlier chunks is attended to, and measured, as it is."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request("a", random_tokens(70), gold=random_tokens(9, seed=3), max_new_tokens=5)]
    plain, shifted = (
        answers(loaded, policy, asked, prefill_chunk=33, key_offset=kind)["a", 0]
        for kind in ("none", table_for(loaded))
    )
    assert (plain.token_ids, plain.kept) == (shifted.token_ids, shifted.kept)
    assert shifted.fidelity["nll"] == pytest.approx(plain.fidelity["nll"], abs=1e-4)


def test_what_a_constant_would_change_is_refused(tiny_model):
    """With the setting's name: softmaxes that see a constant, tables of other keys, keys without positions, bounds of
    several heads, chunks of a prompt, tables of another model and paths that nobody read."""
    inv_freq, int4 = 10000.0 ** -(torch.arange(4) / 4), Uniform(tier="int4")
    for softmax in (Softmax(cap=30.0), Softmax(sinks=torch.zeros(1, 1))):
        with pytest.raises(NotForModel, match="store.key_offset=prompt"):
            make_store(int4, softmax=softmax, key_offset="prompt")
    for policy in (
        StreamingLLM(budget=40),
        KVQuantStyle(group=8),
        KVQuant(books=None, native=True),
        Quest(tier="int8"),
        Uniform(tier="fp8", scales=[[1.0, 1.0]]),
    ):
        with refused("settings-conflict", "store.key_offset", "store.key_offset=prompt"):
            make_store(policy, inv_freq=inv_freq, key_offset="prompt")
    with refused("settings-conflict", "store.key_offset", "store.key_offset=prompt", "prefill.chunk=null"):
        answers(tiny_model("llama", "gqa3", 64), int4, [], prefill_chunk=33, key_offset="prompt")
    for table in ([[0.0] * 8] * 3, [[0.0] * 9] * 2, [[0.0] * 8]):
        with pytest.raises(NotForModel, match="store.key_offset"):
            make_store(int4, num_layers=2, key_offset=table)
    with refused("setting-value", "store.key_offset", "store.key_offset=somewhere"):
        make_store(int4, key_offset="somewhere")
    with refused("setting-value", "store.key_offset", "store.key_offset=5"):
        make_store(int4, key_offset=5)


def biased(tiny_model):
    """A tiny model whose key projections have large biases."""
    loaded = tiny_model.__wrapped__("qwen2", "gqa3", 64)  # one of its own, whose weights change
    make = torch.Generator().manual_seed(1)
    for layer in loaded.model.model.layers:
        layer.self_attn.k_proj.bias.data = 12 * torch.randn(layer.self_attn.k_proj.bias.shape, generator=make)
    return loaded


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("tiers", [None, "0:fp16 -1:int8"])
def test_keys_less_their_bias_are_coded_as_without_one(backend, tiers):
    """In a store of keys without positions: to the bit, in every precision of its layers."""
    inv_freq, layers = 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), layers_of(7)
    bias = torch.randint(-9, 9, (2, 2, DIM)).float()
    policy, found = Uniform(tier="int4", pre_rope=True, tiers_by_layer=tiers), []
    for kind in ("none", "bias"):
        each = [
            (q, rotated(k + (bias[i, :, None] if kind == "bias" else 0), 0, inv_freq), v)
            for i, (q, k, v) in enumerate(layers)
        ]
        shape = dataclasses.replace(
            make_store(policy, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=DIM, inv_freq=inv_freq).shape,
            key_biases=[*bias.flatten(1)],
        )
        store = CompressedStore(
            policy,
            shape,
            rows=1,
            max_prompt_tokens=LENGTH,
            max_new_tokens=LENGTH,
            options=StoreOptions(key_offset=kind),
            backend=get_backend(backend),
        )
        row = store.open_row()
        for layer, tensors in enumerate(each):
            store.prefill_layer(row, layer, *(x[:, :PROMPT] for x in tensors), 0.125)
        for at in range(PROMPT, LENGTH):
            step_at(store, row, each, at, 0.125)
        lists = torch.zeros(LENGTH, dtype=torch.int64)
        found.append([store.pages.read(t, *store.pages.table.lookup(lists, t, lists)) for t in (0,)])
        held = store.holding.parts[0].layer(torch.tensor([row]), 1)[0]
        store.holding.parts[0].rope.attach(held, None)
        keys = store.pages.gather(1, held, None)[0][0][:, :LENGTH]
        assert (keys - each[1][1]).abs().max() < (0.02 if tiers else 0.7), "keys come back with their bias"
    assert torch.allclose(found[0][0][0], found[1][0][0], atol=0.02)


def test_a_bias_costs_int4_nothing_once_it_is_off(tiny_model):
    """On a model with large biases, beside a full cache; and its vectors are billed."""
    loaded = biased(tiny_model)
    asked = [request(str(n), random_tokens(n), gold=random_tokens(9), max_new_tokens=6) for n in (40, 3, 21)]
    asked.append(request("segments", random_tokens(30), random_tokens(11), max_new_tokens=6))
    plain = Uniform(tier="int4", pre_rope=True)
    runs = {
        name: answers(loaded, policy, asked, batch_size=size, key_offset=kind)
        for name, policy, kind, size in (
            ("none", plain, "none", 3),
            ("bias", plain, "bias", 3),
            ("alone", plain, "bias", 1),
            ("lossless", Uniform(tier="native", pre_rope=True), "bias", 3),
            ("full", Full(tier="native"), "none", 3),
        )
    }
    lost = {
        name: sum(one.fidelity["kl_mean"] for one in found.values() if one.fidelity) for name, found in runs.items()
    }
    assert lost["bias"] < 0.2 * lost["none"] and lost["lossless"] < 1e-4, lost
    for key, one in runs["bias"].items():
        assert one.ledger["book_bytes"] - runs["none"][key].ledger["book_bytes"] == 2 * 2 * 64 * 2
        assert runs["full"][key].token_ids == runs["lossless"][key].token_ids
    chunked = answers(loaded, Uniform(tier="native", pre_rope=True), asked, prefill_chunk=16, key_offset="bias")
    assert {key: one.token_ids for key, one in chunked.items()} == {
        key: one.token_ids for key, one in runs["full"].items()
    }
    if loaded.rows_are_alone:
        assert {key: comparable(one) for key, one in runs["bias"].items()} == {
            key: comparable(one) for key, one in runs["alone"].items()
        }


def test_a_bias_is_refused_where_there_is_none_to_take(tiny_model):
    """Of models without, of keys with their positions, and of formats that have a zero for each channel."""
    inv_freq = 10000.0 ** -(torch.arange(4) / 4)
    with pytest.raises(NotForModel, match="store.key_offset=bias"):
        make_store(Uniform(tier="int4", pre_rope=True), inv_freq=inv_freq, key_offset="bias")
    for policy in (Uniform(tier="int4"), KVQuantStyle(group=8), StreamingLLM(budget=40), SnapKV(budget=40)):
        with refused("settings-conflict", "store.key_offset", "store.key_offset=bias"):
            make_store(policy, inv_freq=inv_freq, key_offset="bias")
    assert model_shape(biased(tiny_model).model).key_biases is not None
    assert model_shape(tiny_model("llama", "gqa3", 64).model).key_biases is None


def test_a_latent_vector_has_no_bias_to_take_off():
    """Its keys are its values too, and a bias of the one is none of the other."""
    shape = make_store(Uniform(tier="int4"), head_dim=DIM).shape
    biased = dataclasses.replace(shape, key_biases=[torch.ones(DIM * shape.num_kv_heads)] * shape.num_layers)
    formats = make_store(Uniform(tier="int4"), head_dim=DIM).pages.formats
    assert KeyBiases(formats, biased, 0).channel_bytes > 0
    with refused("method-misfit", "store.key_offset"):
        KeyBiases(formats, dataclasses.replace(biased, keys_only=True), 0)
