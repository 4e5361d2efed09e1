"""Every causal decoder that transformers has, tiny and with random weights, and what kvbench says to it.

As a program it prints docs/reference/models.md (`make docs`).
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from places import ROOT
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvbench
from kvbench.api.generate import begin
from kvbench.engine import hf
from kvbench.engine.runner import Runner
from kvbench.engine.supported import layer_kinds
from kvbench.errors import UnsupportedModel

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS, WINDOW, PROMPT, ANSWER = 4, 8, 20, 4
WHOLE = dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers".split(), LAYERS)
WHOLE |= dict.fromkeys("num_attention_heads n_head n_heads num_heads decoder_attention_heads".split(), 4)
WHOLE |= dict.fromkeys("hidden_size n_embd d_model embedding_size word_embed_proj_dim".split(), 64)
WHOLE |= dict.fromkeys("intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim".split(), 96)
WHOLE |= dict.fromkeys("num_local_experts num_experts n_routed_experts moe_num_experts".split(), 4)
WHOLE |= dict.fromkeys("num_key_value_heads num_experts_per_tok moe_topk".split(), 2)
WHOLE |= dict.fromkeys("head_dim kv_channels v_head_dim q_lora_rank kv_lora_rank".split(), 16)
WHOLE |= dict.fromkeys("max_position_embeddings n_positions".split(), 512)
WHOLE |= dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 32)
WHOLE |= dict.fromkeys("n_shared_experts n_group topk_group first_k_dense_replace".split(), 1)
WHOLE |= dict.fromkeys("sliding_window attention_chunk_size".split(), WINDOW)  # shorter than the prompt
WHOLE |= {"vocab_size": 96, "pad_token_id": 0, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "rotary_dim": 8}
WHOLE |= {"mamba_n_heads": 8, "n_mamba_heads": 8, "mamba_d_head": 16, "mamba_headdim": 16, "mamba_n_groups": 1}
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers")
# Layers of families whose defaults have none that look back, or no others.
MIXED = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
EVERY_OTHER = ["sliding_attention", "full_attention"]
SHARING = {"num_hidden_layers": 6, "layer_types": EVERY_OTHER * 3, "num_kv_shared_layers": 2}
SHARING |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16}
GEMMA_4 = SHARING | {"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1}
SSM = {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_headdim": 16}
ZAMBA |= dict.fromkeys("num_attention_heads num_key_value_heads".split(), 4) | {"n_mamba_heads": 8, "kv_channels": 16}
ZAMBA |= dict.fromkeys("hidden_size intermediate_size".split(), 64) | {"attention_head_dim": 32}
# What is said when a configuration is made, and stays.
MADE = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": SSM,
    "gemma3n_text": SHARING | {"intermediate_size": 96, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": GEMMA_4 | {"attention_k_eq_v": True},
    "gemma4_unified": {"text_config": GEMMA_4},
    "gemma4_unified_text": GEMMA_4,
    "gpt_bigcode": {"num_key_value_heads": 1},
    "mimo_v2_flash": {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "zamba2": ZAMBA,
}
MOST_WEIGHTS = 30_000_000


def shrink(config, layers: int = LAYERS):
    """Sets what there is of the tiny sizes; of layers of several kinds, each stays."""
    given = MADE.get(config.model_type, {})
    for name, value in WHOLE.items():
        if name in given:
            continue
        if getattr(config, name, None) is not None or (name == "head_dim" and hasattr(config, name)):
            with contextlib.suppress(Exception):  # a field that follows from others
                setattr(config, name, value)
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "head_dim"):
        config.head_dim = WHOLE["qk_rope_head_dim"]  # there the rotary part's
    for name in BY_LAYER:
        if name not in given and isinstance(listed := getattr(config, name, None), list) and len(listed) > layers:
            kinds = list(dict.fromkeys(listed))
            setattr(config, name, listed[:layers] if {*listed[:layers]} == {*kinds} else (layers * kinds)[:layers])
    return config


def tiny_model(kind: str, **fields):
    """A random model of a type; a string that says why where the tiny sizes make none, or a large one."""
    try:
        config = transformers.AutoConfig.for_model(kind, **MADE.get(kind, {}))
        text = shrink(config.get_text_config())
        for name, value in (MIXED.get(kind, {}) | fields).items():
            setattr(text, name, value)
        torch.manual_seed(0)
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config)
        if (count := sum(weights.numel() for weights in outline.parameters())) > MOST_WEIGHTS:
            return f"{count} weights at the tiny sizes"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        if text.get_text_config().__dict__.get("attn_logit_softcapping"):
            model.set_attn_implementation("eager")  # others leave the cap out
        with torch.no_grad():
            for weights in model.parameters():  # biases and gates begin at 0 or 1, where they do nothing
                weights.add_(0.1 * torch.randn_like(weights))
            model(torch.arange(3, 8)[None], use_cache=False)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    return model


def logits_of(model, ids: torch.Tensor, num_prompt: int) -> torch.Tensor:
    """Logits of the last prompt token and of each later one, through a full cache in the dtype of the model."""
    with torch.no_grad(), kvbench.compress(model, "full", tier="native"):
        out = model(ids[:, :num_prompt], use_cache=True, logits_to_keep=1)
        found = [out.logits]
        for place in range(num_prompt, ids.shape[1]):
            out = model(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
    return torch.cat(found, 1).float()


@dataclass(frozen=True)
class Verdict:
    """What kvbench says to a family: its logits differ by this share of their spread, or it is refused."""

    layers: str
    difference: float | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """Its last column in the table."""
        return "runs" if self.difference is not None else self.reason


def try_family(kind: str) -> Verdict:
    """Reads a prompt and decodes behind it with the full cache, and without any."""
    model = tiny_model(kind)
    if isinstance(model, str):
        return Verdict("", reason=refused_unseen(kind) or f"not tried: {model}".rstrip())
    ids = torch.randint(3, 90, (1, PROMPT + ANSWER), generator=torch.Generator().manual_seed(1))
    layers = layers_of(model)
    try:
        found = logits_of(model, ids, PROMPT)
    except UnsupportedModel as error:
        return Verdict(layers, reason=in_words(error))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, PROMPT - 1 :].float()
    return Verdict(layers, difference=float((found - wanted).abs().max() / wanted.std()))


def in_words(error: UnsupportedModel) -> str:
    """A refusal without its remedy."""
    return f"refused: {str(error).partition('; use a model with')[0]}"


def refused_unseen(kind: str) -> str:
    """What kvbench says to a configuration of which no tiny model can be made; empty where that is nothing."""
    try:
        layer_kinds(transformers.AutoConfig.for_model(kind, **MADE.get(kind, {})))
    except UnsupportedModel as error:
        return in_words(error)
    except Exception:  # it makes no sense to kvbench either
        return ""
    return ""


def layers_of(model) -> str:
    """What the layers of a model are, and what their softmax has beside logits."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["full_attention"]
    words = [str(kind).removesuffix("_attention") for kind in dict.fromkeys(kinds)]
    if words == ["full"] and getattr(config, "sliding_window", None):
        words = ["sliding"]
    softmax = [name for name, has in (
        ("latent", getattr(config, "kv_lora_rank", None)),
        ("soft cap", getattr(config, "attn_logit_softcapping", None)),
        ("sinks", any(isinstance(getattr(module, "sinks", None), torch.Tensor) for module in model.modules())),
    ) if has]  # fmt: skip
    return ", ".join(words + softmax)


HEAD = f"""# Models

Generated by `make docs`; a test keeps it so. It lists every family of transformers {transformers.__version__} that has
a causal decoder, by its `model_type`. Each was tried with a random model of {LAYERS} layers, windows of {WINDOW} tokens
and a prompt of {PROMPT}: a family that `runs` gives the logits of transformers' own attention, behind the prompt and
behind each of {ANSWER} later tokens, through the method `full` in the model's own 32 bits. The second column has the
kinds of the tiny model's layers, and what else its attention has. A family that is refused says so with this reason,
and gives no answer.

The text part of a model that also sees (Qwen3-VL, Mistral 3, Gemma 3) counts under the name of its text model.

"""


def render() -> str:
    """The document."""
    found = {kind: try_family(kind) for kind in KINDS}
    runs = sum(verdict.difference is not None for verdict in found.values())
    text = f"{runs} of {len(found)} families run.\n\n| family | layers | kvbench |\n|---|---|---|\n"
    return HEAD + text + "".join(f"| {kind} | {one.layers} | {one.words} |\n" for kind, one in found.items())


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """The rows of the document: family, layers, what kvbench says."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| family"):
            family, layers, words = (cell.strip() for cell in line.strip("|").split("|"))
            yield family, layers, words


RUN = [family for family, _, words in rows((ROOT / "docs" / "reference" / "models.md").read_text()) if words == "runs"]


@contextmanager
def run(model, ids: torch.Tensor, method: str, **settings):
    """Gives a runner that has read prompts, and the other tokens one by one; its rows; and logits of each step."""
    with hf.attached(model):
        runner = Runner(*begin(model, None, method, settings))
        runner.reserve(rows=len(ids), prompt_tokens=PROMPT, new_tokens=ids.shape[1] - PROMPT)
        read = [runner.read(row[:PROMPT]) for row in ids.tolist()]
        rows, logits = [row for row, _ in read], [torch.stack([found[-1] for _, found in read])]
        logits += [runner.step(rows, ids[:, at].tolist()).clone() for at in range(PROMPT, ids.shape[1])]
        yield runner, rows, torch.stack(logits, 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.stdout.write(render())
