"""Keeps what the model computed of a prompt, so that other settings of a method need not read the prompt again.

Compression acts after a prompt has been read: the forward pass over it is the same for every setting of every method.
Its keys, values, scores and logits are kept here once and replayed into the store of the next setting, which
plans and writes them by the same code as after a forward pass. With its queries kept too, a method that measures a
prompt in another way gets its own scores from them, again by the same code, and the model runs over the prompt once
for all methods.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvbench.cache.prompts import ScoredLayer
from kvbench.cache.store import CompressedStore
from kvbench.engine.long_logits import Logits
from kvbench.engine.sessions import Dense, Prefill
from kvbench.kernels.memory import is_out_of_memory
from kvbench.policy import ScoreSpec

Queries = tuple[Tensor, float]  # queries, factor on the logits


@dataclass
class Recording:
    """Copies of the store's inputs of one prompt; one that needs more than `limit_bytes` is not held at all.

    Each of `others` measures it too, by its rules.
    """

    limit_bytes: int
    keeps_queries: bool = False
    others: dict[Hashable, CompressedStore] = field(default_factory=dict)
    layers: list[ScoredLayer] = field(default_factory=list)
    measured: dict[Hashable, list[ScoredLayer]] = field(default_factory=dict)
    """What others measured of the layers, whose keys and values these are."""
    queries: list[Queries] = field(default_factory=list)
    num_bytes: int = 0
    overflow: bool = False

    def add(self, scored: ScoredLayer, q: Tensor | None, scale: float) -> None:
        """Copies one layer, and its queries [Hq, N, D], as the store was given them."""
        kept = q if self.keeps_queries else None
        self.num_bytes += sum(x.nbytes for x in (*vars(scored).values(), kept) if x is not None)
        self.overflow = self.overflow or self.num_bytes > self.limit_bytes
        try:
            if not self.overflow:
                layer = _copied(scored)
                for how in list(self.others) if q is not None else ():
                    self._measure(how, layer, q, scale)
                self.layers.append(layer)
                if kept is not None:
                    self.queries.append((kept.clone(), scale))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.overflow = True  # the prompt itself may still fit
        if self.overflow:
            self.layers.clear()
            self.measured.clear()
            self.queries.clear()

    def _measure(self, how: Hashable, scored: ScoredLayer, q: Tensor | None, scale: float) -> None:
        try:
            store, layer = self.others[how].layers[len(self.layers)]
            measured = store.measure(layer, q, scored.k, scored.v, scale)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            del self.others[how]  # its own run meets and reports the fault
            self.measured.pop(how, None)
            return
        measured = _copied(measured, scored.k, scored.v)
        self.num_bytes += sum(x.nbytes for x in (measured.score, measured.last, measured.channels) if x is not None)
        self.measured.setdefault(how, []).append(measured)


def _copied(scored: ScoredLayer, k: Tensor | None = None, v: Tensor | None = None) -> ScoredLayer:
    """A copy, of keys and values unless there is one."""
    k, v = scored.k.clone() if k is None else k, scored.v.clone() if v is None else v
    score, last, channels = (None if x is None else x.clone() for x in (scored.score, scored.last, scored.channels))
    return ScoredLayer(k, v, score, last, channels)


@dataclass(frozen=True)
class _Entry:
    layers: list[ScoredLayer]
    queries: list[Queries]  # empty where they are not kept
    logits: Logits
    measured: dict[Hashable, list[ScoredLayer]]  # by how scores were computed
    num_bytes: int
    probed: tuple[int, int]  # bytes that a probe's passes held and tokens that they read
    states: dict[int, Any]  # after the prompt, of layers that hold one


class PromptCache:
    """Prompts that were read, within a limit of bytes (0 holds nothing); what does not fit is read again.

    Answers, bytes and fidelity are those of a fresh run to the last bit; only `prefill_s` is not: it is the time of the
    replay. With `keeps_queries`, a method with another statistic need not read a prompt again either; a model with
    three query heads per KV head takes 2.5 times the bytes then.

    Attributes:
        others: Stores that read the prompt next: their measurements of it are kept, and need no queries.
        num_read, num_reused: Forward passes over prompts, and those that were saved.
    """

    def __init__(self, limit_bytes: int = 0, *, keeps_queries: bool = False) -> None:
        self.limit_bytes, self.keeps_queries = limit_bytes, keeps_queries
        self.others: Sequence[CompressedStore] = ()
        self.used_bytes = self.num_read = self.num_reused = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._recent: list[Hashable] = []

    def read(
        self, session: Dense, prompt: Hashable, forward: Callable[[], Logits], probed_with: Hashable = None
    ) -> Logits:
        """Replays a prompt into the row of a session, or runs the model over it and records it; returns the logits.

        The session is a `Prefill`, or a `Dense`, which stores nothing. `prompt` is everything that decides the forward
        pass, the model and the tokens; `probed_with` the other inputs of the scores where the method has a probe.
        """
        store = session.store
        key = (type(session), session.num_prompt_tokens, store.backend.name, prompt)
        measured: Hashable = how_measured(store) if isinstance(session, Prefill) else None
        if session.uncompressed is not None:
            measured = measured, probed_with
        entry = self._entries.get(key)
        if entry is not None and (measured is None or measured in entry.measured):
            if session.uncompressed is not None:
                store.ledger.note_probe(session.row, *entry.probed)
            layers = entry.measured.get(measured, entry.layers)
            for (layer_store, number), held in zip(
                store.layers, layers, strict=False
            ):  # none, where nothing was stored
                layer_store.write_layer(session.row, number, held if measured else ScoredLayer(held.k, held.v))
        elif entry is not None and entry.queries and not session.wants_calls and session.uncompressed is None:
            for (layer_store, number), held, (q, scale) in zip(store.layers, entry.layers, entry.queries, strict=True):
                layer_store.prefill_layer(session.row, number, q, held.k, held.v, scale)
        else:
            return self._run(session, key, measured, forward)
        session.states.update(copy.deepcopy(entry.states))
        self.num_reused += 1
        return entry.logits

    def _run(self, session: Dense, key: Hashable, measured: Hashable, forward: Callable[[], Logits]) -> Logits:
        store = session.store
        self.num_read += 1
        if not self.limit_bytes:
            return forward()
        self._drop(key)
        others: dict[Hashable, CompressedStore] = {}
        for other in self.others:
            if other.backend.name == store.backend.name and (how := from_queries(other)) not in (None, measured):
                others[how] = other
        recording = Recording(self.limit_bytes - self.used_bytes, self.keeps_queries, others)
        stores = store, *store.other_kinds
        try:
            for each in stores:
                each.watcher = recording.add
            logits = forward()
        finally:
            for each in stores:
                each.watcher = None
        size = recording.num_bytes + logits.nbytes + store.shape.state_bytes
        if not recording.overflow and self.used_bytes + size <= self.limit_bytes:
            probed, states = (session.held_bytes, session.replay_tokens), copy.deepcopy(session.states)
            by_measure = recording.measured | {measured: recording.layers}
            self._entries[key] = _Entry(recording.layers, recording.queries, logits, by_measure, size, probed, states)
            self._recent.append(key)
            self.used_bytes += size
        return logits

    def forget(self) -> None:
        """Drops every prompt."""
        self._entries.clear()
        self._recent.clear()
        self.used_bytes = 0

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
    """Everything that decides the scores of a prompt and the queries kept of it, except the prompt.

    The policy's statistic, by class and settings, and granularity; None when keys and values alone decide.
    """
    spec = store.policy.score
    if spec.only_keys_and_values:
        return None
    return replace(spec, decode_update=False, decode_replace=False, track=()), store.policy.granularity


def from_queries(store: CompressedStore) -> tuple[ScoreSpec, str] | None:
    """Key of measurements that depend on queries, keys and values alone; else None."""
    spec = store.policy.score
    more = spec.probe is not None or not spec.statistic.needs.isdisjoint({"hidden_states", "attention_call"})
    return None if more else how_measured(store)
