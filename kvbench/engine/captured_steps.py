"""Greedy decode steps that wait for nothing: a step's tokens are the next one's input on the device, and leave late.

A step, from the plan to the chosen tokens, is captured once per batch size and replayed (`CapturedSteps`): rows, tokens
and counts lie in tensors that stay where they are, so that a replay serves any rows. The host's part of a step is done
again at every replay (`CompressedStore.note_replay`). Steps that a graph cannot hold run as they are: where rows share
pages, where a bulk eviction is due, and where too few pages are free for the worst case.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.async_counts import Receiver, ReplayLog, Rows
from kvbench.engine import hf
from kvbench.engine.runner import Runner

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # runs a step once, and returns what runs it again


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Captures a step in a CUDA graph, runs it once, and returns its replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph.replay


@dataclass
class State:
    """The state between two steps, in tensors that stay where they are: the rows, whose numbers are a list; int64 [S]
    tokens to be read next, where each step puts its own; and fp32 [S, vocabulary] logits of the last step, which the
    next replay writes over. `told` takes what a step chose and which logits were finite, in the order of the steps."""

    rows: Rows
    tokens: Tensor
    told: Callable[[list[int], list[bool]], None]
    logits: Tensor | None = None


@dataclass(frozen=True)
class _Captured:
    """A captured step of one batch size: what it reads and writes, what runs it again, the numbers that it tells the
    host, and the pages that it takes at most."""

    state: State
    replay: Callable[[], None]
    log: ReplayLog
    most_pages: int


class CapturedSteps:
    """The captured steps of a runner, one per batch size; without `capture`, nothing is. The runner's cache must have
    been reserved, and a new one needs new graphs. Counted are steps that were replayed, and those that ran as they are
    or were captured (`eager`)."""

    def __init__(self, runner: Runner, capture: Capture | None) -> None:
        self._runner, self._store, self._capture = runner, runner.store, capture
        if not runner.shape.is_whole:
            raise ValueError(
                f"a captured step is of a cache in one place, and this one lies in {len(runner.shape.parts())} places "
                f"of {runner.shape.ranks.size} processes; give model.device one device and set "
                "model.tensor_parallel=null, or decode with Runner.step"
            )
        self._warm: set[int] = set()  # batch sizes whose kernels are compiled, and whose small tables are made
        self._captured: dict[int, _Captured] = {}
        self.replays = self.eager = 0

    def step(self, state: State) -> None:
        """One step on the device: plan, room, forward, choice, counts."""
        store, rows, size = self._store, state.rows, len(state.rows)
        store.begin_step(rows)
        positions = store.counters.tokens_seen[rows.tensor][:, None]
        past = max(store.counters.seen[row] for row in rows.numbers)
        session = hf.Decode(store)
        logits = hf.forward(self._runner.loaded.model, session, state.tokens[:, None], positions, past, 1)[:, 0]
        chosen = logits.argmax(-1)
        state.tokens.copy_(chosen)
        state.logits = logits

        def bind() -> Receiver:
            told = state.told
            return lambda values: told(values[:size], [bool(value) for value in values[size:]])

        store.pages.counts.post(torch.cat([chosen, torch.isfinite(logits).all(1).long()]), bind)
        store.end_step()

    def advance(self, state: State) -> State:
        """Makes one step, replayed where it can be; returns where the next one reads."""
        size, pool, numbers = len(state.rows), self._store.pages.pool, state.rows.numbers
        held, is_plain = self._captured.get(size), self._store.next_step_is_plain(numbers)
        if self._capture is not None and is_plain and held is not None and pool.takes(held.most_pages):
            self._enter(held.state, state)
            held.replay()
            self._store.note_replay(held.state.rows.numbers, held.log)
            self.replays += 1
            return held.state
        self.eager += 1
        captures = held is None and size in self._warm and self._store.has_pages_for(size)
        if self._capture is not None and is_plain and captures:
            self._captured[size] = self._run_captured(state, self._capture)
        else:
            self.step(state)
            if is_plain:
                self._warm.add(size)
        return state

    def _run_captured(self, state: State, capture: Capture) -> _Captured:
        """Captures the next step, and makes it."""
        pages, before = self._store.pages, self._store.pages.pool.taken
        pages.forget_lists()  # a replay finds them anew
        pages.counts.log = log = ReplayLog()
        try:
            replay = capture(lambda: self.step(state))
        finally:
            pages.counts.log = None
            pages.forget_lists()
        pages.counts.send_again(log)  # the host's part took place while it was captured
        return _Captured(state, replay, log, pages.pool.taken - before)

    def _enter(self, held: State, state: State) -> None:
        """Puts rows and tokens where a captured step reads them."""
        if held is state:
            return
        numbers = held.rows.numbers
        assert isinstance(numbers, list), "they are changed in place"
        held.told, numbers[:] = state.told, state.rows.numbers
        held.rows.tensor.copy_(state.rows.tensor)
        held.tokens.copy_(state.tokens)
        self._store.pages.forget_lists()
