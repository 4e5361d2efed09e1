"""Second passes over a prompt, for methods with a probe.

The passes, and the uncompressed prompt that they attend to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.store import CompressedStore
from kvbench.errors import PromptLength
from kvbench.policy import AttentionCall, Probe, Replay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_TOKENS = 32  # of a part; shorter ones would take dozens of passes over a prompt that fills the context


@dataclass(frozen=True)
class Pass:
    """Tokens that are read after a whole prompt, the last of which are its tokens from `first` up to `end` again."""

    first: int
    end: int
    tokens: tuple[int, ...]


def plan_passes(
    probe: Probe, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], closing: Sequence[int], max_tokens: int
) -> list[Pass]:
    """Passes to read after a prompt so that every token of it is repeated once.

    Parts for which the model's context leaves no room are left out. `closing` are the tokens that close a user's turn
    and open the answer, none outside of chats.
    """
    ask, go_on = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (probe.ask, probe.go_on))
    around = max(len(ask), len(go_on) + probe.overlap_tokens) + len(closing)
    room, length = max_tokens - len(prompt) - around, len(prompt)
    if room < min(FEWEST_TOKENS, length):
        raise PromptLength(
            f"the method reads a prompt a second time behind itself, and one of {length} tokens leaves {max(room, 0)} "
            f"for that in the model's context of {max_tokens}, fewer than {min(FEWEST_TOKENS, length)}; shorten the "
            "task's prompts, or choose a model with a longer context"
        )
    passes = []
    for first in range(0, length, size := min(probe.part_tokens, room)):
        before = tuple(prompt[max(0, first - probe.overlap_tokens) : first])
        request = (*go_on, *before) if first else ask
        part = tuple(prompt[first : first + size])
        passes.append(Pass(first, first + len(part), (*request, *closing, *part)))
    return passes


@dataclass
class _HeldLayer:
    store: CompressedStore
    number: int
    q: Tensor | None
    k: Tensor
    v: Tensor
    scale: float
    call: AttentionCall | None
    replays: list[Replay] = field(default_factory=list)

    def num_bytes(self, with_queries: bool) -> int:
        passes = [x for replay in self.replays for x in (replay.q, replay.k)]
        hidden = None if self.call is None else self.call.hidden_states
        held = (self.q if with_queries else None, self.k, self.v, hidden, *passes)
        return sum(x.nbytes for x in held if x is not None)


class Uncompressed:
    """A prompt that was read and is not compressed yet: its layers, and the results of passes after it.

    `part` is the first token that the current pass repeats, and the one after its last.
    """

    def __init__(self, store: CompressedStore) -> None:
        self._store, self._layers, self.part = store, dict[int, _HeldLayer](), (0, 0)
        spec = store.policy.score
        self._wants_queries = bool(spec.prefill_queries or spec.slot_queries)

    def hold(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, call: AttentionCall | None) -> None:
        """Stores a layer of the model: queries [Hq, N, D], keys and values [H, N, D], the model's call.

        Queries are kept only where something will read them, and billed where that is the method.
        """
        wanted = self._wants_queries or self._store.watcher is not None
        store, number = self._store.kind_of(layer)
        self._layers[layer] = _HeldLayer(store, number, q if wanted else None, k, v, scale, call)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the tokens of a pass, q [Hq, m, D], over the prompt and themselves, in the same shape.

        Records their queries and keys.
        """
        held = self._layers[layer]
        held.replays.append(Replay(first=self.part[0], end=self.part[1], q=q, k=k))
        return held.store.replay_attention(held.number, q, k, v, held.k, held.v, scale)

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the last tokens of a pass, q [Hq, n, D], in a layer that shares the keys of a held one.

        k and v [H, m, D] are of the whole pass. Records nothing.
        """
        held, num_new = self._layers[layer], q.shape[1]
        past_k, past_v = (torch.cat([old, new[:, :-num_new]], 1) for old, new in ((held.k, k), (held.v, v)))
        return held.store.replay_attention(held.number, q, k[:, -num_new:], v[:, -num_new:], past_k, past_v, scale)

    def compress(self, row: int, num_tokens: int) -> int:
        """Hands the layers to the store, each with its results of the passes, and drops them.

        `num_tokens` are those that the passes read. Returns the bytes that were held.
        """
        held_bytes = sum(layer.num_bytes(self._wants_queries) for layer in self._layers.values())
        self._store.ledger.note_probe(row, held_bytes, num_tokens)
        for layer in list(self._layers):
            held = self._layers.pop(layer)
            tensors = held.q, held.k, held.v, held.scale, held.call
            held.store.prefill_layer(row, held.number, *tensors, tuple(held.replays))
        return held_bytes
