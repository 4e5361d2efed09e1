"""Logits of many positions, made a piece at a time: those of a long answer would fill the memory with its vocabulary.

16,384 tokens of a vocabulary of 128,256 are 8.4 GB of logits, and 134 MB of what a model of 4,096 channels makes them
from. So the pass over the text keeps the latter, and the model's head is run over a piece of it when a logit of the
piece is read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

PIECE = 256  # positions whose logits are held at once; texts up to here are read as ever


class LongLogits:
    """Logits of consecutive positions, fp32; `logits[i]` is [vocabulary].

    The model's head makes them on access from [n, E], the normed output of the last layer.
    """

    def __init__(self, model: PreTrainedModel, hidden: Tensor) -> None:
        self._model, self._hidden = model, hidden
        self._first, self._piece = 0, hidden.new_empty(0)

    def __len__(self) -> int:
        return len(self._hidden)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"position {index} of {len(self)}")
        if not self._first <= index < self._first + len(self._piece):
            self._first = index - index % PIECE
            self._piece = _head(self._model, self._hidden[self._first : self._first + PIECE])
        return self._piece[index - self._first]

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._hidden).all())

    @property
    def nbytes(self) -> int:
        return self._hidden.nbytes + 4 * PIECE * self._model.config.get_text_config().vocab_size

    def take(self, indices: Sequence[int]) -> "LongLogits":
        return LongLogits(self._model, self._hidden[list(indices)])


Logits = Tensor | LongLogits


def take(logits: Logits, indices: Sequence[int]) -> Logits:
    """The logits of some positions; of the first ones, without a copy."""
    if list(indices) == list(range(len(indices))):
        return logits
    return logits.take(indices) if isinstance(logits, LongLogits) else logits[list(indices)]


def read_long(model: PreTrainedModel, num_logits: int, forward: Callable[[], Tensor]) -> LongLogits:
    """Runs a pass for the logits of its last positions.

    `forward` runs the model over the text, for the logits of its last position alone.
    """
    hidden: list[Tensor] = []

    def note(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state[0, -num_logits:])

    hook = model.base_model.register_forward_hook(note)
    try:
        forward()
    finally:
        hook.remove()
    return LongLogits(model, hidden[0].clone())  # the rest of the text need not stay


@torch.no_grad()
def _head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Output of the model's operations after its last layer, fp32 [n, vocabulary], with scales and caps."""
    with _replaced(model.base_model, BaseModelOutputWithPast(last_hidden_state=hidden[None])):
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        out = model(input_ids=ids, use_cache=False, logits_to_keep=len(hidden), return_dict=True)
    return out.logits[0].float()


@contextmanager
def _replaced(module: torch.nn.Module, output: BaseModelOutputWithPast) -> Iterator[None]:
    """Lets a module give this output, whatever it is given."""
    before = vars(module).get("forward")  # a library that spreads a model over devices puts one here
    module.forward = lambda *arguments, **named: output
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
