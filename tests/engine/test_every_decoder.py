"""Every causal decoder that transformers has, tiny and with random weights: kvbench gives its logits, or refuses it."""

import contextlib

import pytest
import torch
import transformers
from selection import few
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvbench
from kvbench.errors import UnsupportedModel
from kvbench.models import matrices
from kvbench.models.load import load_model
from kvbench.models.random_weights import byte_tokenizer

WHOLE = dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers".split(), 2)
WHOLE |= dict.fromkeys("num_attention_heads n_head n_heads num_heads decoder_attention_heads".split(), 4)
WHOLE |= dict.fromkeys("hidden_size n_embd d_model embedding_size word_embed_proj_dim".split(), 64)
WHOLE |= dict.fromkeys("intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim".split(), 96)
WHOLE |= dict.fromkeys("num_local_experts num_experts n_routed_experts moe_num_experts".split(), 4)
WHOLE |= dict.fromkeys("num_key_value_heads num_experts_per_tok moe_topk".split(), 2)
WHOLE |= dict.fromkeys("head_dim kv_channels v_head_dim q_lora_rank kv_lora_rank".split(), 16)
WHOLE |= dict.fromkeys("max_position_embeddings n_positions".split(), 512)
WHOLE |= dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 32)
WHOLE |= dict.fromkeys("n_shared_experts n_group topk_group first_k_dense_replace".split(), 1)
WHOLE |= {"vocab_size": 96, "pad_token_id": 0, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MOST_WEIGHTS = 30_000_000
# Models whose attention is another one in a way that no setting tells, and one that is taken.
TELLING = ("bert", "bloom", "diffllama", "doge", "hrm_text", "jetmoe", "llama", "phi3")


def shrink(config):
    """Sets what there is of the tiny sizes."""
    for name, value in WHOLE.items():
        if getattr(config, name, None) is not None:
            with contextlib.suppress(Exception):  # a field that follows from others
                setattr(config, name, value)
    return config


def tiny_model(kind, **fields):
    """A random model of a type; None where the tiny sizes make none, or a large one."""
    try:
        config = transformers.AutoConfig.for_model(kind)
        text = shrink(config.get_text_config())
        for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
            if isinstance(listed := getattr(text, name, None), list):
                setattr(text, name, listed[:2])
        for name, value in fields.items():
            setattr(text, name, value)
        torch.manual_seed(0)
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config)
        if sum(weights.numel() for weights in outline.parameters()) > MOST_WEIGHTS:
            return None
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for weights in model.parameters():  # biases and gates begin at 0 or 1, where they do nothing
                weights.add_(0.1 * torch.randn_like(weights))
            model(torch.arange(3, 8)[None], use_cache=False)
    except Exception:
        return None
    return model


def logits_of(model, ids, num_prompt):
    """Logits of the last prompt token and of each later one, through a full cache of kvbench's."""
    with torch.no_grad(), kvbench.compress(model, "full"):
        out = model(ids[:, :num_prompt], use_cache=True, logits_to_keep=1)
        found = [out.logits]
        for place in range(num_prompt, ids.shape[1]):
            out = model(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
    return torch.cat(found, 1).float()


@pytest.mark.parametrize("kind", few(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *TELLING))
def test_a_decoder_agrees_or_is_refused(kind):
    """No type gives other logits than transformers does, and none ends in an error of another kind."""
    model = tiny_model(kind)
    if model is None:
        pytest.skip("the tiny sizes make no model of this type")
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    try:
        found = logits_of(model, ids, 20)
    except UnsupportedModel:
        assert kind not in ("llama", "phi3")
        return
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 19:].float()
    # The full cache holds 16 bits; its rounding is some 1e-3 of the logits' spread, a mask that is left out 3e-2.
    assert float((found - wanted).abs().max() / wanted.std()) < 5e-3


@pytest.mark.parametrize("kind", few(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "llama", "gemma"))
def test_rows_are_alone_where_that_is_said(kind):
    """A model of which it is said that no row depends on the others gives each of five rows what it gives that alone,
    though no register divides the width of its activations."""
    model = tiny_model(kind, intermediate_size=90)
    if model is None or matrices.why_not("streamed", torch.float32, torch.device("cpu")):
        pytest.skip("the tiny sizes make no model of this type, or there is no compiler")
    matrices.stream(model)
    is_said = matrices.rows_are_alone(model)
    assert is_said or kind not in ("llama", "gemma", "qwen2", "qwen3", "mistral")
    if not is_said:
        return
    ids = torch.arange(3, 8)[:, None]
    with torch.no_grad():
        together = model(ids, use_cache=False).logits
        alone = torch.cat([model(row[None], use_cache=False).logits for row in ids])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", r"layer 0 uses later tokens \(is_causal=False\)"),
        ("diffllama", "layer 0 uses another number of calls of attention than one per layer"),
        ("doge", "layer 0 uses a mask of its own"),
        ("hrm_text", "attention 2 of a model with 2 layers: it reads its layers more than once"),
        ("jetmoe", "the model changes its keys between the cache and attention"),
        ("bloom", "bloom: its configuration has no context length"),
    ],
)
def test_the_reason_is_named(kind, message):
    """A refusal says what the model does, and what to use instead."""
    with pytest.raises(UnsupportedModel, match=f"{message}.*use a model with full attention"):
        logits_of(tiny_model(kind), torch.arange(3, 19)[None], 14)


@pytest.mark.parametrize(("window", "taken"), [(512, True), (511, False)])
def test_a_window_that_never_binds_is_none(window, taken):
    """Phi-4-mini and Phi-3.5 name a window as long as their context, which changes nothing."""
    model = tiny_model("phi3", sliding_window=window)
    ids = torch.arange(3, 19)[None]
    if taken:
        assert logits_of(model, ids, 14).shape == (1, 3, 96)
        return
    with pytest.raises(UnsupportedModel, match="phi3: sliding_window=511 means that layers forget on their own"):
        logits_of(model, ids, 14)


@pytest.mark.parametrize(
    ("kind", "rope"), [("qwen3_vl", [4, 2, 2]), ("mistral3", None), ("glm4v", [4, 2, 2]), ("llava", None)]
)
def test_the_text_part_of_a_model_that_sees_is_taken(kind, rope, tmp_path):
    """A checkpoint whose decoder can also be shown pictures loads like any other, and answers text as its own class."""
    config = transformers.AutoConfig.for_model(kind)
    text = shrink(config.get_text_config())
    shrink(config.vision_config).depth = 1
    if rope:
        text.rope_parameters = {**text.rope_parameters, "mrope_section": rope, "partial_rotary_factor": 1.0}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    byte_tokenizer(257).save_pretrained(tmp_path)
    loaded = load_model({"kind": "hf", "path": str(tmp_path)})
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 19:].float()
    assert float((logits_of(loaded.model, ids, 20) - wanted).abs().max() / wanted.std()) < 5e-3
