"""What a scorer of another package takes: settings as Python has them, and the rotary embedding beside a module."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def value_of(text: str) -> bool | int | float | str:
    """What a setting says, as Python has it."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@contextmanager
def attached_rotary(module: torch.nn.Module, rotary: torch.nn.Module | None) -> Iterator[None]:
    """Lets an attention module have the model's rotary embedding for a while, where kvpress looks for it."""
    missing = rotary is not None and not hasattr(module, "rotary_emb")
    if missing:
        module.rotary_emb = rotary  # type: ignore[assignment]
    try:
        yield
    finally:
        if missing:
            del module.rotary_emb
