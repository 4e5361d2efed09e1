"""What the prompts of a model depend on, without its weights: tokenizer, context length, chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvbench.config.settings import as_dict
from kvbench.models import embedded, files, random_weights
from kvbench.models.checkpoint import SAFELY
from kvbench.models.load import LoadedModel, context_length, load_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class _NoWeights:
    """Stands for the model: it has a configuration and nothing to compute with."""

    def __init__(self, config: "PretrainedConfig") -> None:
        self.config = self.generation_config = config


def load_outline(cfg: Mapping[str, Any]) -> LoadedModel:
    """As `load_model`, without weights, for what only makes prompts; no answer can be had from it.

    A GGUF file has its tokenizer beside the weights, so its model is loaded whole.

    Args:
        cfg: A `model` config group.

    Returns:
        Tokenizer, name, context length and chat template are those of the model; the fingerprint is empty.

    Raises:
        ValueError: As `load_model`.
        MissingWeightsError: As `load_model`.
    """
    settings = as_dict(cfg)
    kind, path = settings.get("kind"), str(settings.get("path") or "")
    if kind == "random":
        config = random_weights.random_config(
            str(settings.get("preset")),
            num_layers=settings.get("num_layers"),
            max_tokens=settings.get("max_tokens"),
            overrides=settings.get("overrides") or {},
        )
        return _outline(settings, config, random_weights.byte_tokenizer(config.vocab_size))
    if kind == "embedded":
        folder = embedded.ensure_embedded()
    elif kind == "hf" and path and not path.lower().endswith(".gguf"):
        folder = files.find_model_folder(path, settings.get("revision"))
    else:
        return load_model(cfg)
    return _outline(settings, *_read(folder))


def _read(folder: Path) -> "tuple[PretrainedConfig, PreTrainedTokenizerBase]":
    import transformers

    files.check_config(folder)
    with embedded.quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(folder, **SAFELY)
        return config, transformers.AutoTokenizer.from_pretrained(folder, **SAFELY)


def _outline(settings: dict, config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> LoadedModel:
    return LoadedModel(
        model=cast("PreTrainedModel", _NoWeights(config)),
        tokenizer=tokenizer,
        name=str(settings.get("name") or settings.get("path") or settings.get("preset") or settings["kind"]),
        fingerprint="",
        max_tokens=context_length(config, settings.get("max_tokens")),
        dtype=torch.float32,
        device=torch.device("cpu"),
        chat_template=bool(tokenizer.chat_template),
    )
