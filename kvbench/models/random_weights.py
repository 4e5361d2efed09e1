"""Models with random weights in the shape of a known model: for speed and memory work without any download."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import SettingsConflict, SettingValue, check_name, check_whole, unknown_name
from kvbench.kernels.bench.machine import available_bytes
from kvbench.models.cache import NoRoom
from kvbench.models.checkpoint import native_attention, outline_of
from kvbench.models.names import listed_presets

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


_BYTE_VOCABULARY_TOKENS = 257
_GIB = 1 << 30


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The configuration fields of each preset of config/shapes.yaml, under transformers' names."""
    return {
        name: {
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["q_heads"],
            "num_key_value_heads": shape["kv_heads"],
            "max_position_embeddings": shape["context"],
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
        }
        | shape["weights"]
        for name, shape in listed_presets().items()
    }


def random_config(
    preset: str,
    *,
    num_layers: int | None = None,
    max_tokens: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> "PretrainedConfig":
    """Builds the transformers configuration of a preset, with the byte tokenizer's end-of-text token.

    Args:
        num_layers: Layers, >= 1, in place of the preset's, so that a large shape fits into memory.
        max_tokens: Context length, >= 1, in place of the preset's.
        overrides: Any configuration fields under transformers' names, for example `{"num_key_value_heads": 1}`.
    """
    from transformers import CONFIG_MAPPING

    fields = dict(presets()[check_name("model.preset", preset, presets())])
    for name, key, value in (
        ("model.num_layers", "num_hidden_layers", num_layers),
        ("model.max_tokens", "max_position_embeddings", max_tokens),
    ):
        if value is not None:
            fields[key] = check_whole(name, value, 1, f", or null for the preset's {fields[key]}")
    if not isinstance(overrides, Mapping | None):
        raise SettingValue(
            f"model.overrides={overrides} must hold fields of the configuration, as {{hidden_size: 64}}",
            setting="model.overrides",
        )
    overrides = dict(overrides or {})
    model_type = str(overrides.get("model_type", fields["model_type"]))
    if model_type not in CONFIG_MAPPING:
        raise unknown_name("model.overrides.model_type", model_type, CONFIG_MAPPING.keys())
    # The byte tokenizer decides what ends a text.
    tokens: dict[str, Any] = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    known = (set(CONFIG_MAPPING[model_type]().to_dict()) | {"head_dim"}) - set(tokens)
    for field in overrides:
        if field not in known:
            raise unknown_name("model.overrides", field, known)
    fields |= overrides | tokens
    del fields["model_type"]
    _check_sizes(fields)
    try:
        config = CONFIG_MAPPING[model_type](**fields)
    except Exception as error:  # each version of transformers has errors of its own for values that make no model
        raise SettingValue(
            f"model.overrides={overrides} makes no model: {' '.join(str(error).split())}", setting="model.overrides"
        ) from error
    _check_shape(config)
    return config


def random_model(
    config: "PretrainedConfig", *, seed: int, dtype: torch.dtype, device: torch.device
) -> "PreTrainedModel":
    """Builds a model with seeded random weights, directly on the device and in its dtype.

    The same seed gives the same weights on the same kind of device; the global random state is restored. Refuses
    weights that do not fit into the free memory.
    """
    import transformers

    _check_memory(outline_of(config, dtype), config, device)
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
        torch.manual_seed(seed)
        build = transformers.AutoModelForCausalLM.from_config
        return build(config, dtype=dtype, attn_implementation=native_attention(config))


def byte_tokenizer(vocab_size: int) -> "PreTrainedTokenizerFast":
    """Builds a tokenizer of one token per UTF-8 byte, without a chat template.

    So every task runs on a model without a vocabulary. Token 0 ends a text; the 256 bytes follow. Ids above, which a
    random model emits too, decode to nothing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < _BYTE_VOCABULARY_TOKENS:
        raise SettingValue(
            f"vocab_size={vocab_size} is below {_BYTE_VOCABULARY_TOKENS} (256 bytes and the end of text), the least "
            "that a random model needs to read prompts; raise model.overrides.vocab_size.",
            setting="model.overrides.vocab_size",
        )
    end = "<|endoftext|>"
    # The alphabet stands for the 256 bytes by one printable character each; sorted, because its own order is not fixed.
    symbols = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


def _check_sizes(fields: Mapping[str, Any]) -> None:
    """Raises ValueError when a size is no whole number above 0, or a head has an odd number of channels."""
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        check_whole(f"model.overrides.{name}", fields[name], 1)
    if fields.get("head_dim") is not None and check_whole("model.overrides.head_dim", fields["head_dim"], 2) % 2:
        raise SettingValue(
            f"model.overrides.head_dim={fields['head_dim']} is odd, and rotary positions turn channels in pairs; "
            "choose an even one",
            setting="model.overrides.head_dim",
        )


def _check_shape(config: "PretrainedConfig") -> None:
    """Raises ValueError when heads and sizes do not fit together."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise SettingsConflict(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; every KV head serves a "
            "whole number of query heads.",
            setting="model.overrides.num_attention_heads",
        )
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise SettingsConflict(
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={heads}; change one, or set "
            "head_dim.",
            setting="model.overrides.hidden_size",
        )


def _check_memory(outline: "PreTrainedModel", config: "PretrainedConfig", device: torch.device) -> None:
    """Raises ValueError when the weights of `outline` (on the meta device) exceed the memory that is free."""
    total_bytes = sum(weight.numel() * weight.element_size() for weight in outline.parameters())
    layer_bytes = sum(weight.numel() * weight.element_size() for weight in outline.model.layers[0].parameters())
    free_bytes = available_bytes(str(device))
    if free_bytes is None or total_bytes <= free_bytes:
        return
    num_layers = config.num_hidden_layers
    fitting = num_layers - -(-(total_bytes - free_bytes) // layer_bytes)
    remedy = (
        f"model.num_layers={fitting} fits" if fitting >= 1 else "not even one layer fits: choose a smaller model.preset"
    )
    raise NoRoom(
        f"The weights need {total_bytes / _GIB:.1f} GiB ({num_layers} layers), but {free_bytes / _GIB:.1f} GiB are "
        f"free on {device}; "
        f"{remedy}" + ("; model.dtype=bfloat16 halves the need." if outline.dtype == torch.float32 else ".")
    )
