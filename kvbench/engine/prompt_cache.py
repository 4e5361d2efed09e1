"""Keeps what the model computed of a prompt, so that other settings of a method need not read the prompt again.

Compression acts after a prompt has been read: the forward pass over it is the same for every setting of every method.
Its keys, values, scores and logits are kept here once and replayed into the store of the next setting, which
plans and writes them by the same code as after a forward pass.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvbench.cache.store import CompressedStore
from kvbench.engine.hf import Session
from kvbench.kernels.memory import is_out_of_memory
from kvbench.policy import ScoreSpec

Layer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # keys, values, scores, last queries


@dataclass
class Recording:
    """Copies of what the store is given of one prompt, up to a number of bytes.

    Args:
        limit_bytes: What may be held; a prompt that needs more is not held at all.
    """

    limit_bytes: int
    layers: list[Layer] = field(default_factory=list)
    num_bytes: int = 0
    overflow: bool = False

    def add(self, k: Tensor, v: Tensor, score: Tensor | None, last: Tensor | None = None) -> None:
        """Copies one layer: keys and values [H, N, D], scores and last queries, as the store was given them."""
        self.num_bytes += sum(x.nbytes for x in (k, v, score, last) if x is not None)
        self.overflow = self.overflow or self.num_bytes > self.limit_bytes
        try:
            if not self.overflow:
                score, last = (None if x is None else x.clone() for x in (score, last))
                self.layers.append((k.clone(), v.clone(), score, last))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.overflow = True  # the prompt itself may still fit
        if self.overflow:
            self.layers.clear()


@dataclass(frozen=True)
class _Entry:
    layers: list[Layer]
    logits: Tensor
    measured: Hashable  # how scores were computed; None without scores
    num_bytes: int


class PromptCache:
    """Prompts that were read, within a limit of bytes; what does not fit is read again.

    Answers, bytes and fidelity are those of a fresh run to the last bit; only `prefill_s` is not: it is the time of the
    replay.

    Args:
        limit_bytes: Most bytes of keys, values, scores and logits held; 0 holds nothing.

    Attributes:
        used_bytes: What is held now.
        num_read: Forward passes over prompts.
        num_reused: Forward passes that were saved.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.num_read = self.num_reused = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._recent: list[Hashable] = []

    def read(self, session: Session, prompt: Hashable, forward: Callable[[], Tensor]) -> Tensor:
        """Replays a prompt into the session's row, or runs the model over it and remembers.

        Args:
            session: Of mode `prefill`, or `dense`, which stores nothing.
            prompt: Everything that decides the forward pass: the model and the tokens.
            forward: Runs the model through the session.

        Returns:
            The logits that `forward` gives, or gave.
        """
        store = session.store
        key = (session.mode, session.num_prompt_tokens, store.pages.backend.name, prompt)
        measured = None if session.mode == "dense" else how_measured(store)
        entry = self._entries.get(key)
        if entry is not None and measured in (None, entry.measured):
            for layer, (k, v, *measures) in enumerate(entry.layers):
                store.place_layer(session.row, layer, k, v, *(measures if measured else (None, None)))
            self.num_reused += 1
            return entry.logits
        self.num_read += 1
        if not self.limit_bytes:
            return forward()
        self._drop(key)
        recording = Recording(self.limit_bytes - self.used_bytes)
        store.watcher = recording.add
        try:
            logits = forward()
        finally:
            store.watcher = None
        size = recording.num_bytes + logits.nbytes
        if not recording.overflow and self.used_bytes + size <= self.limit_bytes:
            self._entries[key] = _Entry(recording.layers, logits, measured, size)
            self._recent.append(key)
            self.used_bytes += size
        return logits

    def settle(self) -> None:
        """Ends a group of prompts: drops those read since the last call unless as many more would still fit.

        A sweep that runs every setting over one group of prompts before it goes on thus needs room for one group, and
        keeps the first groups for the next sweep when there is more.
        """
        size = sum(self._entries[key].num_bytes for key in self._recent if key in self._entries)
        if self.used_bytes + size > self.limit_bytes:
            for key in self._recent:
                self._drop(key)
        self._recent.clear()

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        self.used_bytes -= entry.num_bytes if entry is not None else 0


def how_measured(store: CompressedStore) -> tuple[ScoreSpec, str] | None:
    """What decides the scores of a prompt and the queries kept of it, beside the prompt: the policy's statistic, by
    class and settings, and granularity; None when nothing but keys and values decides."""
    spec = store.policy.score
    if spec.only_keys_and_values:
        return None
    return replace(spec, decode_update=False, decode_replace=False, track=()), store.policy.granularity
