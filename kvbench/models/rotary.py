"""Rotary tables that depend on the length of a text, as far as a model has them, and the context that a table is for.

`longrope` and `dynamic` choose their frequencies by the longest row of a pass, so that a row's numbers depend on the
rows that pass with it. Which texts share a table is measured on the embeddings themselves, by a short row that passes
with a longer one: no list of types is read, and no whole forward pass is made.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.errors import SettingValue, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FAR = 1 << 22  # tokens; no text is as long
_Embedding = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class RotaryTable:
    """A rotary table that is another one for long texts.

    Args:
        border: Tokens of the longest text that has the short table.
        grows: Beyond the border, every length has a table of its own; False = one serves all of them.
    """

    border: int
    grows: bool


@dataclass(frozen=True)
class Lengths:
    """The tables of a model that depend on the length; empty where none does."""

    tables: tuple[RotaryTable, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tables)

    def kind(self, length: int) -> tuple[int, ...]:
        """Key that two texts have to share for one pass to serve both; `length` in tokens, the next one included."""
        return tuple(0 if length <= one.border else length if one.grows else 1 for one in self.tables)

    def limit(self, length: int) -> int:
        """Tokens that a text of a length may grow to before a table changes; `FAR` after the last border."""
        return min((one.border for one in self.tables if one.border >= length), default=FAR)

    def crossed(self, first: int, last: int) -> RotaryTable | None:
        """The table that changes while a text of `first` tokens, which were read together, grows to `last`."""
        changed = (one for one in self.tables if last > one.border and (one.grows or first <= one.border))
        return next(changed, None)


def lengths_of(model: "PreTrainedModel") -> Lengths:
    """Measures the tables of a model's rotary embeddings; takes some milliseconds.

    Of an outline, on new embeddings of its configuration.
    """
    tables = []
    with torch.no_grad():
        for embedding in _embeddings(model):
            usual, far = _table(embedding, 2), FAR
            try:
                last = _table(embedding, far)
            except IndexError:  # GPT-J looks its angles up, and has as many as its context is long
                last = _table(embedding, far := context_of(model.config) or 2)
            if _same(usual, last):
                continue
            low, high = 2, far
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _same(usual, _table(embedding, middle)) else (low, middle)
            tables.append(RotaryTable(low, not _same(_table(embedding, low + 1), last)))
            forget(embedding)
    return Lengths(tuple(dict.fromkeys(tables)))


def forget_lengths(model: torch.nn.Module) -> None:
    """Resets the lengths that every rotary embedding has seen.

    transformers' `dynamic` keeps the table of the longest text until a short one comes.
    """
    for embedding in _embeddings(model):
        forget(embedding)


def forget(embedding: _Embedding) -> None:
    """Run an embedding on a text of one token, which resets its table."""
    embedding(torch.zeros(1, 1, dtype=torch.int64))


def _table(embedding: _Embedding, length: int) -> list[Tensor]:
    """The angles of a short row's second token that passes with a row of so many tokens."""
    forget(embedding)
    return [part[0].clone() for part in embedding(torch.tensor([[1], [length - 1]]))]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def _embeddings(model: torch.nn.Module) -> Iterator[_Embedding]:
    """Rotary embeddings of a model as functions of int64 positions [rows, tokens].

    There is one for each type of layer that has its own.
    """
    decoder: Any = getattr(model, "get_decoder", lambda: model)()  # without what looks at pictures
    modules: list[Any] = list(decoder.modules())
    for module in modules:
        names = _parameters(type(module).forward)
        if names[1:3] != ("x", "position_ids") or next(module.parameters(), None) is not None:
            continue
        first = next(module.buffers(), None)
        if first is not None and first.is_meta:
            try:
                module = type(module)(module.config)
            except Exception:  # of the model's code; with weights it is measured
                continue
        types: Any = getattr(module, "rope_type", None)
        for kind in types if isinstance(types, dict) and "layer_type" in names else (None,):
            yield partial(_call, module, {} if kind is None else {"layer_type": kind})


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _call(module: torch.nn.Module, named: dict[str, str], positions: Tensor) -> tuple[Tensor, ...]:
    device = next((one.device for one in module.buffers()), torch.device("cpu"))
    # In fp32, where a change of a table shows that rounding would hide.
    angles = module(torch.zeros(len(positions), 1, 1, device=device), positions.to(device), **named)
    return angles if isinstance(angles, tuple) else (angles,)


def context_of(config: "PretrainedConfig") -> int | None:
    """Tokens that a model's text may have; None where its configuration does not say.

    That is `max_position_embeddings`, or more where rope scaling extends the context that it is relative to: `yarn` to
    `factor` times its `original_max_position_embeddings`, `dynamic` to `factor` times `max_position_embeddings`.

    Source: vLLM, vllm/config/model.py, `_get_and_verify_max_len`.
    Differs: never less than `max_position_embeddings`; `linear` is not multiplied, since some configurations that have
        it name the extended context (DeepSeek-Coder).
    """
    text = config.get_text_config()
    base: int | None = getattr(text, "max_position_embeddings", None)
    if base is None:
        return None
    scaling = getattr(text, "rope_parameters", None) or {}
    by_layer = [each for each in scaling.values() if isinstance(each, dict)]
    return max([base, *(_extended(each, base) for each in by_layer or [scaling])])


def _extended(scaling: dict[str, Any], base: int) -> int:
    """Tokens to which rope scaling extends a context of `base`."""
    of = {"yarn": scaling.get("original_max_position_embeddings"), "dynamic": base}.get(str(scaling.get("rope_type")))
    return int(of * (scaling.get("factor") or 1.0)) if of else base


def context_length(config: "PretrainedConfig", wanted: int | None) -> int:
    """The context length: the model's own, or a shorter one that the user set (`model.max_tokens`)."""
    length = context_of(config)
    if length is None:
        raise UnsupportedModel(
            f"{config.model_type}: its configuration has no context length (max_position_embeddings); use a model with "
            "full attention in every layer"
        )
    if wanted is None:
        return length
    if not isinstance(wanted, int) or not 1 <= wanted <= length:
        raise SettingValue(
            f"model.max_tokens={wanted} must be in [1, {length}], the context length of this model, or null for all of "
            "it.",
            setting="model.max_tokens",
        )
    return wanted
