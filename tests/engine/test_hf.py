"""The adapter to transformers: which models are taken, which are refused and why, and what is left behind."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers
from engine_helpers import answers, engine, own_greedy, random_tokens, request

from kvbench.engine import hf, sessions
from kvbench.engine.supported import model_shape
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def small_model(kind, **fields):
    """A random model of a transformers class, tiny."""
    config = transformers.CONFIG_MAPPING[kind](**(SMALL | fields))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mistral", {"sliding_window": 128}, r"mistral: sliding_window=128 in every layer leaves none for a method"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "compressed_sparse_attention"]},
            r"qwen3: layers of type \['compressed_sparse_attention'\] are not supported; use a model with full",
        ),
    ],
)
def test_models_whose_attention_differs_are_refused(kind, fields, message):
    """Layers of unknown types are named, with what works instead; the model stays usable."""
    model = small_model(kind, **fields)
    before = model.config._attn_implementation
    with pytest.raises(hf.UnsupportedModel, match=message):
        hf.attach(model)
    assert model.config._attn_implementation == before
    assert isinstance(hf.UnsupportedModel("x"), ValueError)


@pytest.mark.parametrize("kwarg", ["sliding_window", "softcap", "s_aux", "position_bias", "whatever_comes_next"])
def test_what_a_layer_asks_for_at_run_time_is_refused_too(kwarg):
    """A layer that hands the attention function a window, or a soft cap or sinks that its model was not known by, is
    refused by name."""
    key = torch.zeros(1, 1, 1, 8)
    shape = model_shape(small_model("llama"))
    store = SimpleNamespace(kind_of=lambda layer: (SimpleNamespace(shape=shape), layer), shape=shape)
    key._kvbench_layer = hf._Layer(sessions.Decode(store), 0, 0)
    module = SimpleNamespace(config=small_model("llama").config)
    with pytest.raises(hf.UnsupportedModel, match=f"layer 0 uses {kwarg}"):
        hf.attention(module, key, key, key, None, **{kwarg: 1})


def test_an_offloaded_model_is_refused():
    """Weights that lie where nothing computes, as device_map=auto may leave them, are named with the way out."""
    model = small_model("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(hf.UnsupportedModel, match=r"lie on cpu and meta, some of them outside .*device=cuda:0"):
        hf.attach(model)


def test_a_model_that_was_cut_otherwise_is_refused():
    """Heads that are fewer than the configuration says, however they were cut, are named before anything is read."""
    shape = model_shape(small_model("llama"))
    key = torch.zeros(1, 1, 1, 16)
    store = SimpleNamespace(kind_of=lambda layer: (SimpleNamespace(shape=shape), layer), shape=shape)
    key._kvbench_layer = hf._Layer(sessions.Decode(store), 0, 0)
    with pytest.raises(hf.UnsupportedModel, match=r"layer 0 has 2 query heads on 1 KV heads, but .* says 4 on 2 for"):
        hf.attention(None, torch.zeros(1, 2, 1, 16), key, key, None)


def test_attached_model_without_our_cache_says_so(tiny_model):
    """Calling an attached model directly names the way out instead of computing something else."""
    loaded = tiny_model("llama", "gqa3", 64)
    with engine(loaded, Full()), pytest.raises(RuntimeError, match="kvbench attention runs only with a kvbench cache"):
        loaded.model(torch.tensor([[1, 2, 3]]))


def test_model_answers_as_before_once_it_is_given_back(tiny_model):
    """After a run and with its own attention again, a model gives the tokens that it gave before."""
    loaded = tiny_model("llama", "gqa3", 64)
    prompt = random_tokens(30)
    before = own_greedy(loaded, [prompt], 12)
    answers(loaded, StreamingLLM(budget=16), [request("a", prompt)])
    assert own_greedy(loaded, [prompt], 12) == before


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"sliding_window": None}),
        ("olmo2", {}),
        ("granite", {}),
        ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5}),
        ("smollm3", {"pad_token_id": 0}),
    ],
)
def test_families_of_the_remedy_run_and_equal_their_own_cache(tiny_model, kind, fields):
    """Each family gives its own greedy tokens through the store, and through keys rotated off and on again."""
    model = small_model(kind, bos_token_id=None, initializer_range=0.15, **fields)
    model.generation_config.eos_token_id = 0
    loaded = dataclasses.replace(tiny_model("llama", "gqa3", 64), model=model, max_tokens=256)
    prompt = random_tokens(40)
    want = own_greedy(loaded, [prompt], 24)[0]
    for policy in (Full(tier="native"), StreamingLLM(budget=500, tier="native")):
        assert answers(loaded, policy, [request("a", prompt)])["a", 0].token_ids == want


def test_model_shape_reads_heads_dims_and_frequencies(tiny_model):
    """Heads, head dim, dtype and rotary frequencies are the model's."""
    shape = model_shape(tiny_model("qwen2", "gqa7", 128, "bfloat16").model)
    assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (2, 14, 2, 128)
    assert shape.dtype == torch.bfloat16
    assert shape.inv_freq.dtype == torch.float32 and shape.inv_freq.shape == (64,)
    assert shape.fp16_bytes(10) == 10 * 2 * 2 * 128 * 4


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("cohere", {"pad_token_id": 0}),  # pairs neighbouring channels
        ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 4}),  # no rotary positions in its fourth layer
    ],
)
def test_keys_are_not_rerotated_where_the_formula_differs(kind, fields):
    """Rotary positions of another layout, that change with the length or that a layer lacks give no frequencies."""
    assert model_shape(small_model(kind, **fields)).inv_freq is None
