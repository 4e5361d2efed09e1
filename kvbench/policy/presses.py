"""Adapters for scorers of another package: settings as Python values, and an attention module's rotary embedding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def value_of(text: str) -> bool | int | float | str:
    """Python value of a setting's text."""
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
