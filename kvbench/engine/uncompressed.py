"""A prompt that was read and is not compressed yet, so that further passes can look back at all of it."""

from dataclasses import dataclass, field

from torch import Tensor

from kvbench.cache.store import CompressedStore
from kvbench.policy import AttentionCall, Replay


@dataclass
class _Layer:
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
    """The layers of one prompt, and what passes behind it gave.

    Args:
        store: Takes the layers in the end.

    Attributes:
        part: First token that the pass under way repeats, and the one after its last.
    """

    def __init__(self, store: CompressedStore) -> None:
        self._store, self._layers, self.part = store, list[_Layer](), (0, 0)
        spec = store.policy.score
        self._wants_queries = bool(spec.prefill_queries or spec.slot_queries)

    def hold(self, q: Tensor, k: Tensor, v: Tensor, scale: float, call: AttentionCall | None) -> None:
        """Takes the next layer: queries [Hq, N, D], keys and values [H, N, D], the model's call. Queries are kept
        only where something will look at them, and billed where that is the method."""
        wanted = self._wants_queries or self._store.watcher is not None
        self._layers.append(_Layer(q if wanted else None, k, v, scale, call))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the tokens of a pass, q [Hq, m, D], over the prompt and themselves, fp32 in the same shape;
        notes their queries and keys."""
        held = self._layers[layer]
        held.replays.append(Replay(first=self.part[0], end=self.part[1], q=q, k=k))
        return self._store.replay_attention(q, k, v, held.k, held.v, scale)

    def compress(self, row: int, num_tokens: int) -> int:
        """Hands the layers to the store, each with what the passes gave of it, and forgets them.

        Args:
            row: The prompt's row.
            num_tokens: Tokens that the passes read.

        Returns:
            Bytes that were held.
        """
        held_bytes = sum(layer.num_bytes(self._wants_queries) for layer in self._layers)
        self._store.ledger.note_probe(row, held_bytes, num_tokens)
        for index in range(len(self._layers)):
            own = self._layers.pop(0)
            self._store.prefill_layer(row, index, own.q, own.k, own.v, own.scale, own.call, tuple(own.replays))
        return held_bytes
