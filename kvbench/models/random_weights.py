"""Models with random weights in the shape of a known model: for speed and memory work without any download."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import check_whole, unknown_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def _shape(
    model_type: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict:
    """Returns the configuration fields of one preset, under transformers' names."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    } | more


def _rope(theta: float, llama3_factor: float | None = None) -> dict:
    """Returns rotary parameters: plain, or Llama 3.1's stretched to 128k tokens."""
    if llama3_factor is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": llama3_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# The shapes are those of each model's published config.json. `tiny` is for tests: its weights are scaled so that
# attention is as peaked as that of the large shapes (standard deviation x sqrt(hidden size) near 1.3).
PRESETS: dict[str, dict] = {
    "tiny": _shape(
        "llama", 128, 256, 2, 4, 2, vocab_size=320, max_position_embeddings=2048, initializer_range=0.12, head_dim=64
    ),
    "smollm2-135m": _shape(
        "llama",
        576,
        1536,
        30,
        9,
        3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters=_rope(100_000.0),
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": _shape(
        "qwen2",
        896,
        4864,
        24,
        14,
        2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_parameters=_rope(1e6),
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    ),
    "llama3.2-1b": _shape(
        "llama",
        2048,
        8192,
        16,
        32,
        8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=_rope(5e5, 32.0),
        tie_word_embeddings=True,
        head_dim=64,
    ),
    "llama2-7b": _shape(
        "llama", 4096, 11008, 32, 32, 32, vocab_size=32000, max_position_embeddings=4096, rope_parameters=_rope(1e4)
    ),
    "mistral-7b": _shape(
        "mistral",
        4096,
        14336,
        32,
        32,
        8,
        vocab_size=32768,
        max_position_embeddings=32768,
        rope_parameters=_rope(1e6),
        sliding_window=None,
        head_dim=128,
    ),
    "qwen2.5-7b": _shape(
        "qwen2",
        3584,
        18944,
        28,
        28,
        4,
        vocab_size=152064,
        max_position_embeddings=32768,
        rope_parameters=_rope(1e6),
        rms_norm_eps=1e-6,
    ),
    "llama3-8b": _shape(
        "llama", 4096, 14336, 32, 32, 8, vocab_size=128256, max_position_embeddings=8192, rope_parameters=_rope(5e5)
    ),
    "llama3.1-8b": _shape(
        "llama",
        4096,
        14336,
        32,
        32,
        8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=_rope(5e5, 8.0),
    ),
    "llama3.1-70b": _shape(
        "llama",
        8192,
        28672,
        80,
        64,
        8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=_rope(5e5, 8.0),
    ),
}
_BYTE_VOCABULARY_TOKENS = 257
_GIB = 1 << 30


def random_config(
    preset: str,
    *,
    num_layers: int | None = None,
    max_tokens: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> "PretrainedConfig":
    """Builds the transformers configuration of a preset.

    Args:
        preset: A key of PRESETS.
        num_layers: Layers, >= 1, in place of the preset's, so that a large shape fits into memory.
        max_tokens: Context length, >= 1, in place of the preset's.
        overrides: Any configuration fields under transformers' names, for example `{"num_key_value_heads": 1}`.

    Returns:
        The configuration, with the byte tokenizer's end-of-text token.

    Raises:
        ValueError: Unknown preset or field, or values that make no model.
    """
    from transformers import CONFIG_MAPPING

    if preset not in PRESETS:
        raise unknown_name("model.preset", preset, PRESETS)
    fields = dict(PRESETS[preset])
    for name, key, value in (
        ("model.num_layers", "num_hidden_layers", num_layers),
        ("model.max_tokens", "max_position_embeddings", max_tokens),
    ):
        if value is not None:
            fields[key] = check_whole(name, value, 1, f", or null for the preset's {fields[key]}")
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
        raise ValueError(f"model.overrides={overrides} makes no model: {' '.join(str(error).split())}") from error
    _check_shape(config)
    return config


def random_model(
    config: "PretrainedConfig", *, seed: int, dtype: torch.dtype, device: torch.device
) -> "PreTrainedModel":
    """Builds a model with seeded random weights, directly on the device and in the dtype it will run in.

    The same seed gives the same weights on the same kind of device; the global random state is left as it was.

    Args:
        config: From `random_config`.
        seed: Seed of the weights, >= 0.
        dtype: Floating-point dtype.
        device: Where the weights live.

    Returns:
        The model.

    Raises:
        ValueError: The weights do not fit into the free memory.
    """
    import transformers

    with torch.device("meta"):
        outline = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    _check_memory(outline, config, device)
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def byte_tokenizer(vocab_size: int) -> "PreTrainedTokenizerFast":
    """Builds a tokenizer of one token per UTF-8 byte, so that every task runs on a model without a vocabulary.

    Token 0 ends a text; the 256 bytes follow. Ids above, which a random model emits too, decode to nothing.

    Args:
        vocab_size: The model's vocabulary, >= 257.

    Returns:
        The tokenizer, without a chat template.

    Raises:
        ValueError: The vocabulary cannot hold 256 bytes and the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < _BYTE_VOCABULARY_TOKENS:
        raise ValueError(
            f"vocab_size={vocab_size} is below {_BYTE_VOCABULARY_TOKENS} (256 bytes and the end of text), the least "
            "that a random model needs to read prompts; raise model.overrides.vocab_size."
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
        raise ValueError(
            f"model.overrides.head_dim={fields['head_dim']} is odd, and rotary positions turn channels in pairs; "
            "choose an even one"
        )


def _check_shape(config: "PretrainedConfig") -> None:
    """Raises ValueError when heads and sizes do not fit together."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; every KV head serves a "
            "whole number of query heads."
        )
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={heads}; change one, or set "
            "head_dim."
        )


def _check_memory(outline: "PreTrainedModel", config: "PretrainedConfig", device: torch.device) -> None:
    """Raises ValueError when the weights of `outline` (on the meta device) exceed the memory that is free."""
    total_bytes = sum(weight.numel() * weight.element_size() for weight in outline.parameters())
    layer_bytes = sum(weight.numel() * weight.element_size() for weight in outline.model.layers[0].parameters())
    free_bytes = _free_bytes(device)
    if free_bytes is None or total_bytes <= free_bytes:
        return
    num_layers = config.num_hidden_layers
    fitting = num_layers - -(-(total_bytes - free_bytes) // layer_bytes)
    remedy = (
        f"model.num_layers={fitting} fits" if fitting >= 1 else "not even one layer fits: choose a smaller model.preset"
    )
    raise ValueError(
        f"The weights need {total_bytes / _GIB:.1f} GiB ({num_layers} layers), but {free_bytes / _GIB:.1f} GiB are "
        f"free on {device}; "
        f"{remedy}" + ("; model.dtype=bfloat16 halves the need." if outline.dtype == torch.float32 else ".")
    )


def _free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a device in bytes; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
