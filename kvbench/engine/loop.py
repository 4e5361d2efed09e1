"""Greedy decoding that waits for nothing: a step's tokens are the next one's input on the device, and leave late.

A step, from the plan to the chosen tokens, is captured once per batch size and replayed (`StepGraphs`): rows, tokens
and counts lie in tensors that stay where they are, so that a replay serves any rows. What the host notes in a step it
notes again at every replay (`cache.late.Tape`). Steps that a graph cannot hold run as they are: where rows share
pages, where a bulk eviction is due, and where too few pages are free for the worst case.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.late import Receiver, Tape, to_device
from kvbench.cache.store import StepRows
from kvbench.engine import hf
from kvbench.engine.runner import NotFinite, Runner

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
    """Where a loop is, in tensors that stay where they are.

    Args:
        rows: The rows.
        tokens: int64 [S] tokens to be read next; each step puts its own there.
        told: Takes what a step chose and which logits were finite, in the order of the steps.
        logits: fp32 [S, vocabulary] of the last step; where that was captured, the next replay writes over them.
    """

    rows: StepRows
    tokens: Tensor
    told: Callable[[list[int], list[bool]], None]
    logits: Tensor | None = None


@dataclass(frozen=True)
class _Captured:
    """A captured step of one batch size.

    Args:
        state: Where it reads and writes.
        replay: Runs it again.
        tape: What the host does in it.
        most_pages: Pages that it takes at most.
    """

    state: State
    replay: Callable[[], None]
    tape: Tape
    most_pages: int


class StepGraphs:
    """The captured steps of a runner, one per batch size.

    Args:
        runner: Its cache must have been reserved, and a new one needs new graphs.
        capture: What captures a step; None = a CUDA graph where there is CUDA, else nothing is captured.

    Attributes:
        replays: Steps that were replayed.
        eager: Steps that ran as they are, and those that were captured.

    Raises:
        ValueError: The cache lies in several places or processes.
    """

    def __init__(self, runner: Runner, capture: Capture | None = None) -> None:
        self._runner, self._store = runner, runner.store
        if not runner.shape.is_whole:
            raise ValueError(
                f"a captured step is of a cache in one place, and this one lies in {len(runner.shape.parts())} places "
                f"of {runner.shape.ranks.size} processes; give model.device one device and set "
                "model.tensor_parallel=null, or decode with Runner.step"
            )
        if capture is None and runner.device.type == "cuda":
            capture = cuda_graph
        self._capture = capture
        self._warm: set[int] = set()  # batch sizes whose kernels are compiled, and whose small tables are made
        self._captured: dict[int, _Captured] = {}
        self.replays = self.eager = 0

    def decode(self, rows: Sequence[int], tokens: Sequence[int], steps: int) -> Iterator[list[int]]:
        """Feeds one token per row and then, `steps` times in all, the most likely next one.

        Args:
            rows: Open rows of the runner; they stay open, and no other step runs, until the loop is through.
            tokens: Tokens to read first.
            steps: Steps.

        Yields:
            The tokens that a step chose, once the step behind it is under way.

        Raises:
            NotFinite: Logits of a row were not finite; one step more was made.
            PoolExhausted: No page for a new slot.
            ValueError: The policy's plan broke a rule.
        """
        chosen: list[list[int]] = []

        def told(values: list[int], finite: list[bool]) -> None:
            if not all(finite):
                raise NotFinite(-1)
            chosen.append(values)

        device, late = self._runner.device, self._store.pages.late
        state = State(StepRows(list(rows), to_device(rows, device)), to_device(tokens, device), told)
        # Whether a bulk eviction is due has to be known before the next step.
        ahead = 1 if late.is_late and not self._runner.policy.compaction else 0
        late.collect()
        given = 0
        for _ in range(steps):
            state = self.advance(state)
            late.collect(leave=ahead)
            yield from chosen[given:]
            given = len(chosen)
        late.collect()
        yield from chosen[given:]

    def step(self, state: State) -> None:
        """One step on the device: plan, room, forward, choice, counts."""
        store, runner, size = self._store, self._runner, len(state.rows.numbers)
        store.begin_step(state.rows)
        positions = store.counters.tokens_seen[state.rows.tensor][:, None]
        past = max(store.counters.seen[row] for row in state.rows.numbers)
        session = hf.Session(store, "decode")
        logits = hf.forward(runner.loaded.model, session, state.tokens[:, None], positions, past, num_logits=1)[:, 0]
        chosen = logits.argmax(-1)
        state.tokens.copy_(chosen)
        state.logits = logits

        def bind() -> Receiver:
            told = state.told
            return lambda values: told(values[:size], [bool(value) for value in values[size:]])

        store.pages.late.post(torch.cat([chosen, torch.isfinite(logits).all(1).long()]), bind)
        store.end_step()

    def advance(self, state: State) -> State:
        """Makes one step, replayed where it can be; returns where the next one reads."""
        size = len(state.rows.numbers)
        held = self._captured.get(size)
        if self._capture is None or not self._store.next_step_is_plain(state.rows.numbers):
            self.eager += 1
            self.step(state)
            return state
        if held is not None and self._store.takes_pages(held.most_pages):
            self._enter(held.state, state)
            held.replay()
            self._store.pages.late.send_again(held.tape)
            self.replays += 1
            return held.state
        self.eager += 1
        if held is None and size in self._warm and self._store.has_pages_for(size):
            self._captured[size] = self._run_captured(state, self._capture)
        else:
            self.step(state)
            self._warm.add(size)
        return state

    def _run_captured(self, state: State, capture: Capture) -> _Captured:
        """Captures the next step, and makes it."""
        late, before = self._store.pages.late, self._store.pages_taken
        self._store.pages.forget_lists()  # a replay finds them anew
        late.tape = tape = Tape()
        try:
            replay = capture(lambda: self.step(state))
        finally:
            late.tape = None
            self._store.pages.forget_lists()
        late.send_again(tape, with_effects=False)  # they took place while it was captured
        return _Captured(state, replay, tape, self._store.pages_taken - before)

    def _enter(self, held: State, state: State) -> None:
        """Puts rows and tokens where a captured step reads them."""
        if held is state:
            return
        held.told = state.told
        held.rows.numbers[:] = state.rows.numbers
        held.rows.tensor.copy_(state.rows.tensor)
        held.tokens.copy_(state.tokens)
        self._store.pages.forget_lists()
