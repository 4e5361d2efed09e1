"""The shape of a model is what a run reads of it: from a config.json, whole or of differences alone, and from the
header of a GGUF file; and the presets are what a run reads of these models."""

import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from decoders import KINDS, MADE, PROMPT, RUN, run, tiny_model
from gguf_bytes import write_gguf
from refusals import refused
from selection import few

from kvbench.engine.hf import native_cache_bytes
from kvbench.engine.states import States
from kvbench.engine.supported import check_supported, heads_of, layer_kinds, model_shape
from kvbench.errors import UnsupportedModel
from kvbench.kernels.operands import Window
from kvbench.models.checkpoint import config_of, outline_of
from kvbench.models.random_weights import presets as random_presets
from kvbench.sizing.shapes import NamedShape, find_shape, preset_of, presets

LENGTH = 200_000  # beyond every window
FORMS = {"whole": False, "difference": True}
# Families whose files were read as if every layer saw everything, or were refused as if no reader knew them.
MISREAD = ("gemma2", "gemma3", "gemma3_text", "cohere2", "gemma4_text", "granite_swa", "llama4_text", "laguna")
OTHERS = ("bert", "bloom", "deepseek_v3", "llama", "mistral", "xlstm", "zamba")
PUBLISHED = yaml.safe_load((Path(__file__).with_name("published.yaml")).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gemma3-270m", "gemma3-270m"),
        ("gemma-3-270m", "gemma3-270m"),
        ("google/gemma-3-270m-it", "gemma3-270m"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("Qwen2.5-Coder-0.5B", "qwen2.5-coder-0.5b"),
    ],
)
def test_a_model_has_one_shape_however_its_name_is_written(name, preset):
    """A run's name, the hub's and that of the list; another ending is another model."""
    shape = presets()[preset]
    assert find_shape(name) is shape and shape.is_called(name) and not presets()["llama3-70b"].is_called(name)
    assert preset_of(f"{name}-other") is None


def written(config, folder: Path, form: str) -> Path:
    """The folder of the config.json that transformers writes of a configuration."""
    (folder / "config.json").write_text(config.to_json_string(use_diff=FORMS[form]), encoding="utf-8")
    return folder


def default_config(kind: str):
    """The configuration that a family has by default, or that of tests/decoders.py where that makes no model."""
    return transformers.AutoConfig.for_model(kind, **MADE.get(kind, {}))


def layers_of(config) -> list:
    """The kinds of a model's layers, and the heads of each."""
    kinds, total = layer_kinds(config), config.get_text_config().num_hidden_layers
    return [
        kinds,
        *(heads_of(config.get_text_config(), number) for number in range(total) if number not in kinds.states),
    ]


@pytest.mark.parametrize("part", range(4))
def test_a_file_of_any_family_keeps_its_layers(part, tmp_path):
    """Of every family, both files that transformers writes hold the kinds of its layers and the heads of each."""
    for kind in KINDS[part::4]:
        try:
            config = default_config(kind)
            wanted = layers_of(config)
        except Exception:  # no configuration by default, or none of a decoder that runs
            continue
        for form in FORMS:
            assert layers_of(config_of(written(config, tmp_path, form))) == wanted, (kind, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", few(KINDS, *MISREAD, *OTHERS))
def test_a_config_json_is_read_as_a_run_reads_it(kind, form, tmp_path):
    """Bytes at a length beyond every window, layers and weights are those of the outline that a run is checked with; a
    model that it refuses is refused, and what makes no model is named."""
    try:
        config = default_config(kind)
        model = outline_of(config, torch.bfloat16)
        check_supported(model)
        shape, states = model_shape(model), States(model, layer_kinds(config).states).row_bytes
    except Exception as error:
        kind_of_error = UnsupportedModel if isinstance(error, UnsupportedModel) else ValueError
        if kind in transformers.CONFIG_MAPPING and "config" in locals():
            with pytest.raises(kind_of_error, match="config.json|model in"):
                find_shape(written(config, tmp_path, form))
        return
    config.dtype = torch.bfloat16
    try:
        found = find_shape(written(config, tmp_path, form))
    except UnsupportedModel as error:  # by the pass over the outline
        assert kind not in MISREAD and "does not run this model" in str(error)
        return
    assert found.store_shape.fp16_bytes(LENGTH) == shape.fp16_bytes(LENGTH) + states
    assert found.store_shape.kinds == shape.kinds and found.store_shape.shared == shape.shared
    assert found.parameters == sum(weights.numel() for weights in model.parameters())
    assert found.context == config.get_text_config().max_position_embeddings


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        # full layers, (layers, window), KV heads x channels; bytes of 32,768 tokens
        ({"model_type": "gemma2"}, (13, (13, 4096), 4 * 256)),
        ({"model_type": "cohere2"}, (10, (30, 4096), 64 * 128)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20}, (20, (12, 4096), 32 * 128)),
        (
            {
                "model_type": "gemma3",
                "text_config": {"num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024},
            },
            (8, (40, 1024), 8 * 256),
        ),
    ],
)
def test_windows_that_a_family_has_by_default_are_counted(fields, wanted, tmp_path):
    """Files that leave to transformers which layers have windows, by hand counts; Gemma 3 12B once took 12.1 GB."""
    full, (count, window), width = wanted
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = find_shape(tmp_path / "config.json")
    assert shape.layers == full and not shape.is_plain
    assert [(each.num_layers, each.window) for each in shape.store_shape.other_kinds] == [(count, Window(window))]
    assert shape.store_shape.fp16_bytes(32768) == 4 * width * (full * 32768 + count * window)


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_states_of_a_config_json_are_counted(kind, tmp_path):
    """Layers with a state hold no keys, and their states count."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 8}))
    shape = find_shape(tmp_path)
    assert shape.layers + shape.state_layers == 8 and 0 < shape.layers < 8
    each = {"qwen3_next": 8192 * 4 * 2 + 32 * 128 * 128 * 4, "jamba": 8192 * 4 * 2 + 8192 * 16 * 4}[kind]
    assert shape.store_shape.state_bytes == shape.state_layers * each


@pytest.mark.parametrize("kind", few(RUN, "gemma3_text", "gemma4_text", "jamba", "zamba2"))
def test_a_file_says_what_a_run_holds(kind, tmp_path):
    """The FP16 cache of a running model's ledger is that of its config.json, to the byte."""
    model = tiny_model(kind)
    ids = torch.randint(3, 90, (1, PROMPT + 20), generator=torch.Generator().manual_seed(1))
    with run(model, ids, "full", tier="native") as (runner, rows, _):
        held = runner.report(rows[0])[0]
    model.config.dtype = model.dtype  # as it is saved
    for form in FORMS:
        try:
            outline_of(config_of(written(model.config, tmp_path, form)))
        except Exception as error:
            pytest.skip(f"the tiny sizes make no file that transformers reads: {str(error)[:80]}")
        shape = find_shape(written(model.config, tmp_path, form)).store_shape
        assert shape.fp16_bytes(ids.shape[1]) == held["fp16_bytes"], form
        assert shape.state_bytes == held.get("state_bytes", 0)


def alike(shape: NamedShape) -> tuple:
    """What of a shape is counted."""
    store = shape.store_shape
    heads = store.num_layers, store.num_q_heads, store.num_kv_heads, store.head_dim, store.dtype, store.keys_only
    others = [(each.num_layers, each.window, each.num_kv_heads, each.head_dim) for each in store.other_kinds]
    states = shape.state_layers, store.state_bytes
    return heads, others, states, store.inv_freq is None, shape.context, shape.parameters, store.fp16_bytes(LENGTH)


@pytest.mark.parametrize("name", few(presets(), "gemma3-12b", "gpt-oss-20b", "lfm2-1.2b", "phi4-mini", "smollm2-135m"))
def test_a_preset_is_what_a_run_reads(name, tmp_path):
    """Of every preset: layers, heads, windows, states, context, weights, and whether keys can be rotated anew."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert alike(find_shape(tmp_path)) == alike(presets()[name])


def test_every_preset_is_compared():
    """No preset is left out, and a shape for tests is not counted."""
    assert set(PUBLISHED) == set(presets())
    assert "tiny" in random_presets() and "tiny" not in presets()


@pytest.mark.parametrize("name", sorted(set(presets()) & set(random_presets())))
def test_random_weights_are_those_of_the_preset(name):
    """The fields that random weights are made from say the same sizes."""
    fields, published = random_presets()[name], PUBLISHED[name]
    config, wanted = (transformers.AutoConfig.for_model(**each) for each in (fields, published))
    assert layers_of(config) == layers_of(wanted)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
LLAMA |= {"intermediate_size": 64, "vocab_size": 64}


def test_a_folder_is_a_shape_and_what_is_neither_is_named(tmp_path):
    """config.json gives sizes and dtype, alone or in its folder; an unknown name says what to do."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 2, "torch_dtype": "float16"}))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = find_shape(path)
        found = shape.store_shape
        assert (found.num_layers, found.num_q_heads, found.num_kv_heads, found.head_dim) == (2, 4, 2, 16)
        assert found.dtype == torch.float16 and shape.is_plain and shape.name == tmp_path.name
        assert shape.path == str(tmp_path) and shape.context == 2048
    with refused("name-unknown", "model", "model=llama3-8", "mean llama3-8b", "config.json"):
        find_shape("llama3-8")


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        ("{", ValueError, "is no JSON"),
        ("[1]", ValueError, "holds list and not settings"),
        ({"model_type": "no_such"}, ValueError, "`no_such`"),
        ({"num_hidden_layers": 2}, ValueError, "model_type"),
        ({"model_type": "musicgen"}, ValueError, "cannot load the model"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, ValueError, "trust_remote_code"),
        (LLAMA | {"num_hidden_layers": 10**9}, ValueError, "num_hidden_layers=1000000000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, ValueError, "num_hidden_layers=10+"),
        (LLAMA | {"num_hidden_layers": "2"}, ValueError, "num_hidden_layers='2'"),
        (LLAMA | {"hidden_size": -64}, ValueError, "hidden_size=-64"),
        (LLAMA | {"dtype": "float64"}, ValueError, "dtype=float64"),
        ({"model_type": "bert", "num_hidden_layers": 1}, UnsupportedModel, "does not run this model.*later tokens"),
        ({"model_type": "mamba2", "num_hidden_layers": 1}, UnsupportedModel, "does not run this model"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 8}, UnsupportedModel, "sliding_window=8 in every layer"),
    ],
)
def test_what_makes_no_model_is_named(content, error, match, tmp_path):
    """What a run refuses is refused, with a reason."""
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(error, match=match):
        find_shape(tmp_path)


def test_a_gguf_file_is_read_as_a_run_reads_it(tmp_path):
    """Windows of a GGUF file's layers are those of the model that a run makes of it."""
    windows = {"attention.sliding_window": 16, "attention.key_length": 16, "attention.value_length": 16}
    write_gguf(tmp_path / "small.gguf", kind="gemma3", blocks=6, fields=windows)
    shape = find_shape(tmp_path / "small.gguf")
    assert shape.layers == 1 and [(each.num_layers, each.window) for each in shape.store_shape.other_kinds] == [
        (5, Window(16))
    ]
    assert shape.name == "small" and shape.path == str(tmp_path / "small.gguf")


def test_parameters_of_tied_weights_count_once(tmp_path):
    """The number of weights is that of what lies in memory."""
    sizes = {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | sizes))
    config = transformers.AutoConfig.for_model(**LLAMA, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert find_shape(tmp_path).parameters == sum(weights.numel() for weights in model.parameters())


def test_states_are_those_that_transformers_keeps():
    """The bytes of a state are those that a layer of these sizes leaves in transformers' own cache."""
    sizes = {"vocab_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    for name, kind, fields in (
        ("lfm2-1.2b", "lfm2", {"hidden_size": 2048, "layer_types": ["conv", "full_attention"]}),
        ("qwen3-next-80b", "qwen3_next", {"hidden_size": 32, "layer_types": ["linear_attention", "full_attention"]}),
    ):
        config = transformers.AutoConfig.for_model(kind, **sizes | fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(torch.arange(1, 8)[None], past_key_values=cache, use_cache=True)
        cache.layers = cache.layers[:1]
        shape = presets()[name]
        assert shape.store_shape.state_bytes == shape.state_layers * native_cache_bytes(cache)
