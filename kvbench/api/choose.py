"""What a Python call asks for: a policy, and a transformers model that somebody else loaded as the engine takes it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kvbench.config.compose import compose, words_of
from kvbench.models.load import LoadedModel
from kvbench.runs import calibration
from kvbench.runs.parts import make_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvbench.policy import Policy

IN_MEMORY = "in memory"  # the weights of such a model are not hashed: nothing that is kept depends on them


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


def choose_policy(method: "str | Policy", settings: Mapping[str, object]) -> "Policy":
    """The policy that a call asks for.

    Args:
        settings: Its settings by name; what is left out has the default of the YAML.

    Raises:
        ValueError: There is no such method or setting, a value is out of range, or a policy came with settings.
    """
    if not isinstance(method, str):
        if settings:
            raise ValueError(
                f"{', '.join(settings)} cannot be set beside a policy that was made already; give it to "
                f"{type(method).__name__}(...)"
            )
        return method
    if settings.get(calibration.KEY) is not None:
        raise ValueError(
            f"{calibration.KEY}={settings[calibration.KEY]} is for one model, which cannot be checked for a model in "
            "memory; give the settings of that file instead, or use kvbench.run"
        )
    return make_policy(compose([f"method={method}", *words_of(settings, "method.")]).method)
