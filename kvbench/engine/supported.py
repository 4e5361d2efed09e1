"""Which models are taken, and what the store has to know of one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.layout import ModelShape, Place
from kvbench.engine import placement
from kvbench.engine.calls import OutputProjections, attention_modules
from kvbench.errors import UnsupportedModel
from kvbench.kernels.operands import Softmax
from kvbench.models.matrices import PackedLinear

REMEDY = "use a model with full attention in every layer (Llama, Mistral without window, Qwen2, Qwen3, ...)"
# Rotary layouts in which channel i is paired with channel i + D_rot / 2, at frequencies that do not depend on the
# length.
PLAIN_ROPE_MODELS = {"llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "phi3"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def binds(window: int, config: Any) -> bool:
    """True when a sliding window is shorter than the context, so that a layer forgets on its own."""
    return window < (getattr(config.get_text_config(), "max_position_embeddings", None) or float("inf"))


def check_supported(model: PreTrainedModel) -> None:
    """Refuses models whose attention the store does not reproduce (`UnsupportedModel`), with the reason and what works
    instead."""
    config = model.config.get_text_config()
    name = config.model_type
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window is not None and not binds(window, config):
        window, kinds = None, kinds - {"sliding_attention"} | {"full_attention"}
    if kinds != {"full_attention"}:
        raise UnsupportedModel(
            f"{name}: layers of type {sorted(kinds - {'full_attention'})} are not supported; {REMEDY}"
        )
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(
            f"{name}: sliding_window={window} means that layers forget on their own; {REMEDY}, or set sliding_window: "
            "null"
        )
    for key in ("kv_lora_rank", "attention_chunk_size"):
        if getattr(config, key, None):
            raise UnsupportedModel(
                f"{name}: {key}={getattr(config, key)} changes attention in a way the store does not reproduce; "
                f"{REMEDY}"
            )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; {REMEDY}")
    placement.check(model, name)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name}: this transformers class does not go through AttentionInterface; {REMEDY}")


def model_shape(model: PreTrainedModel, places: Sequence[tuple[torch.device, int]] = ()) -> ModelShape:
    """Heads, dims, dtype and rotary frequencies of a supported model; `places` are devices and how many layers each has
    of the cache, where that was said, else as the weights lie."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    parts = tuple(Place(*each) for each in places) or placement.places_of(model)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_q_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=parts[0].device if parts else model.device,
        inv_freq=_plain_inv_freq(model),
        output_projections=_output_projections(model),
        places=parts if len(parts) > 1 else (),
        ranks=placement.ranks_of(model),
        softmax=softmax_of(model),
    )


def softmax_of(model: PreTrainedModel) -> Softmax:
    """Caps and sinks of all layers: what a layer without sinks has of them is minus infinity."""
    config, sinks = model.config.get_text_config(), None
    for module in attention_modules(model):
        if isinstance(own := getattr(module, "sinks", None), Tensor):
            own = getattr(own, "to_local", lambda own=own: own)().detach().float()  # of a DTensor this process's part
            if sinks is None:
                sinks = own.new_full((config.num_hidden_layers, len(own)), float("-inf"))
            sinks[int(getattr(module, "layer_idx"))] = own  # noqa: B009 - mypy takes it for a tensor
    return Softmax(getattr(config, "attn_logit_softcapping", None) or 0.0, sinks)


def _output_projections(model: PreTrainedModel) -> OutputProjections | None:
    """The weights behind attention, layer by layer; None where not every layer has one."""
    outs = [module.o_proj for module in attention_modules(model)]
    whole = len(outs) == model.config.get_text_config().num_hidden_layers
    known = all(isinstance(out, PackedLinear) or isinstance(getattr(out, "weight", None), Tensor) for out in outs)
    return OutputProjections(outs) if whole and known else None


def looks_at_length(model: PreTrainedModel) -> bool:
    """True where some rotary embedding asks in every forward pass how long the text is."""
    return any(getattr(module, "rope_type", None) in LENGTH_DEPENDENT_ROPE for module in model.modules())


def _plain_inv_freq(model: PreTrainedModel) -> Tensor | None:
    """fp32 [D_rot / 2] when keys can be rotated by angles position x inv_freq, else None."""
    config = model.config.get_text_config()
    if config.model_type not in PLAIN_ROPE_MODELS or 0 in (getattr(config, "no_rope_layers", None) or ()):
        return None  # SmolLM3 leaves every fourth layer without rotary positions
    for module in model.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if type(module).__name__.endswith("RotaryEmbedding") and isinstance(inv_freq, Tensor):
            if getattr(module, "rope_type", "default") in LENGTH_DEPENDENT_ROPE:
                return None
            return inv_freq.detach().float()
    return None
