"""Models and methods that a bench names in one string, such as `snapkv budget=0.25`, and text to feed them."""

from omegaconf import DictConfig

from kvbench.models.load import LoadedModel
from kvbench.policy import Policy


def compose_choice(group: str, text: str, *more: str) -> DictConfig:
    """The settings of `group` that a string asks for.

    Args:
        group: `method` or `model`.
        text: A choice, then settings of it without the group's name: `kivi bits=2`.
        more: Further settings, likewise.

    Raises:
        ValueError: No such choice or setting.
    """
    from kvbench.config.compose import compose

    name, *settings = [*str(text).split(), *more] or [""]
    return compose([f"{group}={name}", *(f"{group}.{setting}" for setting in settings)])[group]


def make_method(text: str) -> Policy:
    """The policy that a string asks for."""
    from kvbench.runs.parts import make_policy

    return make_policy(compose_choice("method", text))


def make_model(text: str, device: str) -> LoadedModel:
    """The model that a string asks for, on a device."""
    from kvbench.models.load import load_model

    return load_model(compose_choice("model", text, f"device={device}"))


def sample_tokens(model: LoadedModel, rows: int, length: int) -> list[list[int]]:
    """Prose for every row, a passage of its own each: real text, because on noise attention has no peaks.

    Args:
        model: Its tokenizer.
        rows: Passages.
        length: Tokens per passage.

    Raises:
        ValueError: The passages would be longer than the model's context.
    """
    from kvbench.tasks.haystack import paragraphs

    if length > model.max_tokens:
        raise ValueError(
            f"context and new tokens make {length}, but {model.name} holds {model.max_tokens}; lower context, "
            "rounds or steps"
        )
    texts = paragraphs()
    found, at = [], 0
    for _ in range(rows):
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += model.tokenizer(texts[at % len(texts)] + "\n\n", add_special_tokens=False)["input_ids"]
            at += 1
        found.append(tokens[:length])
    return found
