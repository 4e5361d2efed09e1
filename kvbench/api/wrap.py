"""A transformers model that somebody else loaded, as the engine takes it."""

from typing import TYPE_CHECKING, cast

from kvbench.models.load import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IN_MEMORY = "in memory"  # its weights are not hashed: nothing that is kept depends on them


def wrap(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> LoadedModel:
    """Describe a model in memory.

    Args:
        model: A causal language model of transformers; its layers may lie on several devices.
        tokenizer: Its tokenizer; None where tokens go in and come out.
    """
    return LoadedModel(
        model=model,
        tokenizer=cast("PreTrainedTokenizerBase", tokenizer),
        name=model.config.get_text_config().model_type,
        fingerprint=IN_MEMORY,
        max_tokens=model.config.get_text_config().max_position_embeddings,
        dtype=model.dtype,
        device=model.device,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )
