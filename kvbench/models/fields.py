"""Settings that kvbench reads from the JSON files of a model's folder, with their types.

transformers checks those that its class of a model declares, and passes any value of the others on.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import FileContent

_Rule = tuple[str, Callable[[Any], bool]]


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _each(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(rule, value))


_TEXT: _Rule = ("a text", lambda value: isinstance(value, str))
_SWITCH: _Rule = ("true or false", lambda value: isinstance(value, bool))
_WHOLE: _Rule = ("a whole number", _is_whole)
_NUMBER: _Rule = ("a number", lambda value: type(value) in (int, float))
_WHOLES: _Rule = ("a list of whole numbers", _each(_is_whole))
_TEXTS: _Rule = ("a list of texts", _each(lambda value: isinstance(value, str)))
_NAMES: _Rule = ("a list of texts and null", _each(lambda value: value is None or isinstance(value, str)))
_IDS: _Rule = (
    "a token id or a list of them",
    lambda value: type(value) is int or _each(lambda item: type(item) is int)(value),
)

CONFIG: dict[str, _Rule] = {
    **dict.fromkeys(("model_type", "dtype"), _TEXT),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "is_encoder_decoder", "is_heterogeneous"), _SWITCH),
    **dict.fromkeys(
        (
            *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
            *("max_position_embeddings", "sliding_window", "attention_chunk_size"),
            *("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"),
        ),
        _WHOLE,
    ),
    "attn_logit_softcapping": _NUMBER,
    "layer_types": _TEXTS,
    "kv_sharing_modes": _NAMES,
    "no_rope_layers": _WHOLES,
    "num_attention_heads_per_layer": _WHOLES,
    "eos_token_id": _IDS,  # of a folder without generation_config.json
}
"""Of config.json; each may be null. num_hidden_layers is counted against the weights (`files.check_config`)."""

GENERATION: dict[str, _Rule] = {"eos_token_id": _IDS}
"""Of generation_config.json."""

TOKENIZER: dict[str, _Rule] = {
    "model_max_length": _NUMBER,
    "chat_template": ("a text or texts by names", lambda value: isinstance(value, str | list | dict)),
}
"""Of tokenizer_config.json, which the tokenizer reads only when a text or a chat comes."""

FILES = {"config.json": CONFIG, "generation_config.json": GENERATION, "tokenizer_config.json": TOKENIZER}

MOST_GROWTH = 1000  # times that a text may grow; those of real tokenizers grow threefold at most
_BY_LAYER = ("layer_types", "kv_sharing_modes", "num_attention_heads_per_layer")
_PARTS = (
    "text_config",
    "decoder",
    "generator",
    "thinker_config",
)  # where a configuration of several models has a text's


def read_object(file: Path) -> dict[str, Any]:
    """Read the object that a JSON file holds.

    Raises:
        ValueError: It is no JSON, or holds something else.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileContent(f"{file} is no JSON ({error}); fetch the folder again") from error
    if not isinstance(settings, dict):
        raise FileContent(f"{file} holds {type(settings).__name__} and not settings; fetch the folder again")
    return settings


def check_fields(file: Path, settings: Mapping[str, Any], rules: Mapping[str, _Rule], part: str = "") -> None:
    """Check the types of fields read from a file, and that a list by layers has an item for each.

    Args:
        file: Named in the error.
        settings: Its content, or a part of it.
        rules: An item of `FILES`.
        part: The keys that lead to that part, each with a dot.

    Raises:
        ValueError: A setting has another type.
    """
    for key, (what, holds) in rules.items():
        if (value := settings.get(key)) is not None and not holds(value):
            raise FileContent(f"{file} says {part}{key}={value!r:.100}, which is not {what}; fetch the folder again")
    num_layers = settings.get("num_hidden_layers")
    for key in _BY_LAYER:
        if key in rules and type(num_layers) is int and 0 < len(settings.get(key) or ()) < num_layers:
            raise FileContent(
                f"{file} says {part}{key} of {len(settings[key])} items, and {part}num_hidden_layers={num_layers}; "
                "fetch the folder again"
            )
    for key in _PARTS:
        if isinstance(inner := settings.get(key), dict):
            check_fields(file, inner, rules, f"{part}{key}.")


def check_growth(where: Path, tokenizer: object) -> None:
    """Check how long a tokenizer's normalizer and decoder may make a text by chained replacements.

    The tokenizers library ends the process where memory does not suffice.

    Args:
        where: The folder, named in the error.
        tokenizer: One of transformers; without replacements of its own it passes.

    Raises:
        ValueError: A text may grow more than `MOST_GROWTH` times.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "decoder"):
        if (step := getattr(backend, name, None)) is not None:
            growth = math.prod(_growths(json.loads(step.__getstate__())))
            if growth > MOST_GROWTH:
                raise FileContent(
                    f"{where}: the {name} of its tokenizer may make a text {growth:.3g} times as long, {MOST_GROWTH} "
                    "times at most are taken; fetch the folder again"
                )


def _growths(step: object) -> Iterator[float]:
    """Factors by which each replacement within a step may lengthen a text; a match may be one character, or none."""
    if isinstance(step, list):
        for inner in step:
            yield from _growths(inner)
    elif isinstance(step, dict) and step.get("type") == "Replace":
        pattern = step["pattern"].get("String", "")
        yield max(1.0, len(step["content"]) / len(pattern) if pattern else len(step["content"]) + 1)
    elif isinstance(step, dict):
        yield from _growths(list(step.values()))
