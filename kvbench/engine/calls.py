"""Calls of a model's attention modules, noted while a prompt is read, for statistics that look at it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.errors import Unsupported
from kvbench.policy import AttentionCall


def attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that project into attention and out of it, by layer."""
    modules = [module for module in model.modules() if hasattr(module, "o_proj") and hasattr(module, "layer_idx")]
    return sorted(modules, key=lambda module: int(getattr(module, "layer_idx")))  # noqa: B009 - mypy takes it for a tensor


class OutputProjections(Sequence[Tensor]):
    """Output projection weights [E, Hq * D] by layer, each looked up on access.

    Packed layers are unpacked to a plain copy, which lives as long as it is used; of weights split over processes it is
    the local part.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, layer: int) -> Tensor: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, layer: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(layer, slice):
            return OutputProjections(self._modules[layer])
        weight = self._modules[layer].weight
        assert isinstance(weight, Tensor), "a linear layer has one"
        to_local = getattr(weight, "to_local", None)  # of torch's DTensor: the part that this process holds
        return (weight if to_local is None else to_local()).detach()


@contextmanager
def calls_noted(model: PreTrainedModel, note: Callable[[AttentionCall | None], None]) -> Iterator[None]:
    """Hands on what each layer's attention is called with, just before it runs, and None at the end."""
    modules = attention_modules(model)
    if not modules:
        raise Unsupported("the statistic looks at hidden states, and no attention module with o_proj was found")
    rotary = next((one for one in model.modules() if type(one).__name__.endswith("RotaryEmbedding")), None)

    def before(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = named["hidden_states"] if "hidden_states" in named else arguments[0]
        note(AttentionCall(module, hidden[0], named.get("position_embeddings"), rotary))

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        note(None)
        for hook in hooks:
            hook.remove()


def first_tokens(call: AttentionCall, count: int) -> AttentionCall:
    """Copy of a call, cut to its first tokens."""

    def cut(angles: Tensor) -> Tensor:
        return angles[:, :count]

    angles = call.position_embeddings
    both = None if angles is None else (cut(angles[0]), cut(angles[1]))
    return AttentionCall(call.module, call.hidden_states[:count], both, call.rotary)
