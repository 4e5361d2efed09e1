"""States of layers, instead of keys and values or in addition: of every row, in transformers' objects."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine import hf

Layers = dict[int, Any]  # the model's number of a layer -> the object that its module reads and writes
_PARTS = ("conv_states", "recurrent_states")  # of an object: number of a state -> [B, ...], None before the first token


class States:
    """States of layers (a gated delta net, Mamba, a short convolution) of the rows of a cache.

    A forward pass over one row writes to the row's own objects. Of several rows, the states are put together, and taken
    apart again once other rows come: rows that stay together are copied once.

    Attributes:
        row_bytes: Bytes of one row, whatever its length; 0 where the model has no such layers.
    """

    def __init__(self, model: PreTrainedModel, kinds: Sequence[int]) -> None:
        self._rows: dict[int, Layers] = {}
        self._batched: tuple[tuple[int, ...], Layers] = (), {}
        self._made: Layers = {}
        self.row_bytes = 0
        if kinds:
            layers = hf.native_cache(model, "dynamic").layers
            self._made = {number: layers[number] for number in kinds}
            self.row_bytes = self._measured(model)

    def _measured(self, model: PreTrainedModel) -> int:
        """The bytes of the states after one token, which are those after any text."""
        cache = hf.native_cache(model, "dynamic")
        hf.detach(model)
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            forward = type(model).forward  # where `kvbench.compress` has put another one on the object
            forward(model, token, logits_to_keep=1, use_cache=True, **{hf.cache_name(forward): cache})
        return sum(x.nbytes for number in self._made for x in _tensors(cache.layers[number]))

    def anew(self) -> Layers:
        """The layers before the first token of a text."""
        return copy.deepcopy(self._made)

    def clear(self) -> None:
        self._rows, self._batched = {}, ((), {})

    def of(self, rows: Sequence[int]) -> Layers:
        """The layers for a forward pass over rows; of a single row its own, which is new where nothing was read."""
        if not self._made:
            return {}
        numbers = tuple(rows)
        if numbers != self._batched[0]:
            self._part()
            for row in numbers:
                self._rows.setdefault(row, self.anew())
            if len(numbers) > 1:
                each = [self._rows[row] for row in numbers]
                self._batched = (
                    numbers,
                    {number: _batch([layers[number] for layers in each]) for number in self._made},
                )
        return self._rows[numbers[0]] if len(numbers) == 1 else self._batched[1]

    def copied(self, row: int) -> Layers:
        """The layers of a row for a pass that leaves them as they are."""
        self._part()
        return copy.deepcopy(self._rows.get(row, self._made))

    def fork(self, source: int, row: int) -> None:
        if self._made:
            self._rows[row] = self.copied(source)

    def close(self, row: int) -> None:
        self._part()
        self._rows.pop(row, None)

    def held_bytes(self, row: int) -> int:
        """Bytes of a row's states, counted tensor by tensor."""
        self._part()
        return sum(x.nbytes for layer in self._rows.get(row, {}).values() for x in _tensors(layer))

    def _part(self) -> None:
        """Gives states that were put together back to their rows."""
        numbers, batched = self._batched
        for index, row in enumerate(numbers):
            for number, layer in batched.items():
                for part in _PARTS:
                    states = getattr(layer, part, {})
                    row_states = {i: None if x is None else x[index : index + 1].clone() for i, x in states.items()}
                    setattr(self._rows[row][number], part, row_states)
        self._batched = (), {}


def _tensors(layer: Any) -> list[Tensor]:
    return [x for part in _PARTS for x in getattr(layer, part, {}).values() if x is not None]


def _batch(layers: Sequence[Any]) -> Any:
    """One layer for several sequences."""
    batched = copy.copy(layers[0])
    for part in _PARTS:
        first = getattr(layers[0], part, {})
        each = {
            i: None if x is None else torch.cat([getattr(layer, part)[i] for layer in layers]) for i, x in first.items()
        }
        setattr(batched, part, each)
    return batched
