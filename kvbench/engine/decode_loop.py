"""The engine's decode steps: one at a time, or on a GPU a run of them that waits for nothing.

A step, from the plan to the chosen tokens, is captured once for 1, 2, 4, 8, ... rows and replayed (`CapturedSteps`):
rows, tokens, random numbers and counts lie in tensors that stay where they are, so that a replay serves any rows, fewer
ones with a row after them that holds nothing. Rows may end and others join without a further capture. The host's part
of a step is done again at every replay (`CompressedStore.note_replay`). Steps that a graph cannot hold run as they are:
where rows share pages, where a bulk eviction is due, and where too few pages are free for the worst case.

In a run the device feeds itself: a step's tokens, chosen or forced, are the next one's input where they are, and the
host receives them during the next step. A row that ended is therefore in one step too many, of which nothing counts:
neither tokens nor bytes nor measures. Made one at a time are steps in which the host has a say: a token that may not
come yet, thoughts with a budget, conversations, bulk eviction, shared pages, a pool that may be full.
"""

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.cache.async_counts import Receiver, ReplayLog, Rows, to_device
from kvbench.cache.counters import CountsBeforeStep
from kvbench.engine import hf, sessions
from kvbench.engine.cross_run_batch import Step
from kvbench.engine.requests import Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row
from kvbench.engine.runner import Runner, finite_rows
from kvbench.engine.sampling import Drawing, Draws, choose, draws_of
from kvbench.errors import Unsupported
from kvbench.kernels.graphs import Capture, cuda_graphs
from kvbench.kernels.memory import first_line, is_out_of_memory

Made = tuple[dict[int, int], float, int]  # first bad layers by row, tokens per second, steps
MOST_STEPS = 64  # of a run: in between, progress is shown and what graders found is written


@dataclass
class State:
    """Static tensors of a captured step.

    Rows (their numbers in a list) with padding, int64 [S] next tokens, sampler state (None = greedy), fp32 [S,
    vocabulary] logits of the last step. `receive` takes each step's chosen tokens, and which logits were finite.
    """

    rows: Rows
    tokens: Tensor
    receive: Callable[[list[int], list[bool]], None]
    draws: Draws | None = None
    logits: Tensor | None = None

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Key of a captured step: its size, whether rows draw, and whether from a part of the mass."""
        return len(self.rows), self.draws is not None, self.draws is not None and self.draws.top_p is not None


@dataclass(frozen=True)
class _Captured:
    """A captured step of one kind; `most_pages` of a row, by kind of layers."""

    state: State
    replay: Callable[[], None]
    log: ReplayLog
    most_pages: list[int]


class CapturedSteps:
    """Captured steps of a runner, one per kind of `State`; none without `capture`.

    The runner's cache must have been reserved, and a new one needs new graphs. Counts the steps that were replayed,
    those that ran eagerly or were captured (`eager`), and the `captures`.
    """

    def __init__(self, runner: Runner, capture: Capture | None) -> None:
        self._runner, self._store, self._capture = runner, runner.store, capture
        if not runner.shape.is_whole:
            raise Unsupported(
                f"a captured step is of a cache in one place, and this one lies in {len(runner.shape.parts())} places "
                f"of {runner.shape.ranks.size} processes; give model.device one device and set "
                "model.tensor_parallel=null, or decode with Runner.step"
            )
        if capture is not None and runner.shape.state_bytes:
            raise Unsupported(
                f"a captured step is of layers with keys and values, and {runner.loaded.name} has states beside them; "
                "decode with Runner.step"
            )
        self._warm: set[tuple] = set()  # kinds whose kernels are compiled, and whose small tables are made
        self._captured: dict[tuple, _Captured] = {}
        self.replays = self.eager = 0

    @property
    def captures(self) -> int:
        return len(self._captured)

    def begin(
        self,
        numbers: Sequence[int],
        tokens: Sequence[int],
        receive: Callable[[list[int], list[bool]], None],
        drawing: Sequence[Drawing | None] = (),
    ) -> State:
        """The state of rows before a step: their numbers, the tokens to be read, and what draws the next ones."""
        device, spare, count = self._runner.device, self._store.spare_row, len(numbers)
        if self._capture is None or spare is None:
            return State(Rows.of(list(numbers), device), to_device(tokens, device), receive, draws_of(drawing, device))
        size = min(1 << (count - 1).bit_length(), spare)  # at most all rows of the cache
        rows, pads = Rows.padded(list(numbers), spare, size, device), size - count
        fed, draws = to_device([*tokens, *[0] * pads], device), draws_of([*drawing, *[None] * pads], device)
        return State(rows, fed, receive, draws)

    def step(self, state: State) -> None:
        """One step on the device: plan, room, forward, choice, counts."""
        store, rows, size = self._store, state.rows, len(state.rows)
        store.begin_step(rows)
        session, positions, draws = sessions.Decode(store), store.positions[:, None], state.draws
        past = max(store.counters.seen[row] for row in rows.numbers)
        model = self._runner.loaded.model
        state.logits = logits = hf.forward(model, session, state.tokens[:, None], positions, past, 1)[:, 0]
        numbers = torch.empty(2, size, dtype=torch.int64, device=logits.device)  # tokens, and which are of finite rows
        chosen = torch.argmax(logits, -1, out=numbers[0]) if draws is None else numbers[0].copy_(draws.next(logits))
        state.tokens.copy_(chosen)
        finite_rows(logits, out=numbers[1])

        def bind() -> Receiver:
            receive, live = state.receive, len(rows.numbers)
            return lambda values: receive(values[:live], [bool(value) for value in values[size : size + live]])

        store.pages.counts.post(numbers, bind)
        store.end_step()

    def advance(self, state: State) -> State:
        """Makes one step, replayed where it can be; returns where the next one reads."""
        kind, store, numbers = state.kind, self._store, state.rows.numbers
        held, is_plain = self._captured.get(kind), self._capture is not None and store.next_step_is_plain(numbers)
        if is_plain and held is not None and store.takes([most * len(numbers) for most in held.most_pages]):
            self._enter(held.state, state)
            held.replay()
            store.note_replay(held.state.rows.numbers, held.log)
            self.replays += 1
            return held.state
        self.eager += 1
        is_cold = is_plain and kind not in self._warm
        captures = is_plain and not is_cold and held is None and store.has_pages_for(len(state.rows))
        if self._capture is not None and captures:
            self._captured[kind] = self._run_captured(state, self._capture)
            return state
        counts = store.pages.counts
        counts.at_full_width = is_cold  # what is compiled for a width must be before the capture, which loads no code
        try:
            self.step(state)
        finally:
            counts.at_full_width = False
        if is_cold:
            self._warm.add(kind)
        return state

    def _run_captured(self, state: State, capture: Capture) -> _Captured:
        """Captures the next step, and makes it."""
        kinds, counts = [each.pages for each in self._store.kinds], self._store.pages.counts
        before = [pages.pool.taken for pages in kinds]
        self._forget_lists()  # a replay finds them anew
        counts.log = log = ReplayLog()
        try:
            replay = capture(lambda: self.step(state))
        except Exception as problem:  # drivers and libraries have kinds of their own
            if is_out_of_memory(problem):
                raise
            warnings.warn(
                f"a decode step of {type(self._runner.policy).__name__} could not be captured "
                f"({type(problem).__name__}: {first_line(problem)}); steps are made one after the other",
                stacklevel=2,
            )
            raise NotCaptured("a step was captured in part: the cache is not what the host knows") from None
        finally:
            counts.log = None
            self._forget_lists()
        counts.resend(log)  # the host's part took place while it was captured
        size = len(state.rows)  # lists are alike
        most = [(pages.pool.taken - first) // size for pages, first in zip(kinds, before, strict=True)]
        return _Captured(state, replay, log, most)

    def _forget_lists(self) -> None:
        for each in self._store.kinds:
            each.pages.forget_lists()

    def _enter(self, held: State, state: State) -> None:
        """Puts rows and tokens where a captured step reads them."""
        if held is state:
            return
        held.receive = state.receive
        held.rows.take(state.rows)
        held.tokens.copy_(state.tokens)
        if held.draws is not None and state.draws is not None:
            held.draws.take(state.draws)
        self._forget_lists()


class Spoiled(ArithmeticError):
    """A run of steps cannot continue.

    Logits were not finite, and the first such layer is known only where steps are made one by one; or a step could not
    be captured. Its rows can only be closed, and read again.
    """


class NotCaptured(Spoiled):
    """A step could not be captured; no further one should be tried."""


class DecodeLoop:
    """Makes the decode steps of an engine.

    Attributes:
        runs: True if runs are made: of a cache on one device, where the backend keeps its tables, with a capture of
            steps (`auto` = a CUDA graph where there is CUDA). Not of a model with rotary tables that depend on a
            row's length, which are chosen on the host, nor with states, shared keys, latent or chunked attention.
        counts: Steps that replayed a graph, that ran eagerly within a run, and that were made one at a time; captures,
            and those that failed, after which none is tried.
        alone: Requests whose steps are always made one at a time.
        shared: Yield single steps from `making` before they are made, so that a caller can batch them with others.
        awaited: Returns True if a request waits for a run to end; called after each of its steps.
    """

    def __init__(self, runner: Runner, capture: Capture | Literal["auto"] | None = "auto") -> None:
        if capture == "auto" and runner.device.type != "cuda":
            capture = None
        self._runner, self._capture = runner, capture
        shape, self.runs = runner.shape, capture is not None and runner.backend.keeps_tables and not runner.lengths
        self.runs = self.runs and shape.is_whole and not (shape.state_bytes or shape.shared or shape.keys_only)
        self.runs = self.runs and not any(each.window and each.window.in_chunks for each in shape.other_kinds)
        self.counts = dict.fromkeys(("replayed", "eager_in_runs", "one_at_a_time", "captures", "failed_captures"), 0)
        self.alone: set[str] = set()
        self.shared = False
        self.awaited: Callable[[], bool] = lambda: False
        self._graphs: CapturedSteps | None = None
        self._before: CountsBeforeStep | None = None

    def forget(self) -> None:
        """Forgets what was captured, and the cache that it was captured of, before a new one is made."""
        self._graphs = self._before = None

    def _loop(self) -> tuple[CapturedSteps, CountsBeforeStep]:
        if self._graphs is None or self._before is None:
            capture = cuda_graphs() if self._capture == "auto" else self._capture
            self._graphs = CapturedSteps(self._runner, capture)
            self._before = self._runner.store.counts_before_step()
        return self._graphs, self._before

    def fork(self, row: int, request: Request) -> int:
        """A row that holds what another one does; in pages of its own where runs are made, which cannot copy them."""
        return self._runner.fork(row, share=not self.runs or bool(request.turns))

    def warm_up(self, most: int, prompt: Sequence[int]) -> None:
        """Reads a prompt, and captures steps of 1, 2, 4, ..., `most` rows of an empty cache, as servers do at first."""
        if not self.runs or self._capture is None:
            return
        (graphs, _), counts = self._loop(), self._runner.store.pages.counts
        try:
            self._runner.close(self._runner.read(prompt)[0])
            first, _ = self._runner.read([0])
            rows = [first, *(self._runner.fork(first, share=False) for _ in range(most - 1))]
            for size in [*(1 << power for power in range((most - 1).bit_length())), most]:
                state = graphs.begin(rows[:size], [0] * size, lambda *_: None)
                for _ in range(2):  # the first one compiles
                    state = graphs.advance(state)
                    counts.send()
                    counts.collect()
        except Exception as error:
            if isinstance(error, NotCaptured):
                self._give_up()
            elif not is_out_of_memory(error):  # the requests themselves show what does not fit
                raise
        finally:
            self._runner.close_all()
        self.counts["captures"] += graphs.captures

    def _give_up(self) -> None:
        """Captures nothing from here on."""
        self._capture = None
        self.counts["failed_captures"] += 1
        self.forget()

    def making(self, rows: Sequence[Row], tokens: Sequence[int]) -> Generator[Step, None, Made]:
        """Makes one step of rows or several, and notes their times. Spoiled: the rows must be closed and read again."""
        if self.runs and self.alone.isdisjoint(row.request.sample_id for row in rows):
            # Of a single step, which has been waited for: is a bulk eviction due?
            self._runner.store.pages.counts.collect()
            most = min(MOST_STEPS, *(row.steps_alone() for row in rows))
            if most > 1 and self._is_free([row.row for row in rows]):
                return {}, *self._run(rows, tokens, most)
        step = Step(self._runner, [row.row for row in rows], tokens)
        if self.shared:
            yield step
        begin = time.perf_counter()
        logits, bad = step.finish()
        elapsed = step.taken_s + time.perf_counter() - begin
        self.counts["one_at_a_time"] += 1
        answers = any(isinstance(row, AnswerRow) for row in rows)  # what is forced has nothing to choose
        chosen = choose(logits, [row.drawing for row in rows]) if answers else [None] * len(rows)
        for row, row_logits, token in zip(rows, logits.unbind(), chosen, strict=True):
            row.logits, row.picked = row_logits, token
            row.note_step(elapsed, len(rows))
        return bad, len(tokens) / elapsed, 1

    def _is_free(self, numbers: list[int]) -> bool:
        """True if the next step of rows needs nothing of the host, and has pages for sure."""
        store = self._runner.store
        return store.next_step_is_plain(numbers) and store.has_pages_for(len(numbers))

    def _run(self, rows: Sequence[Row], tokens: Sequence[int], most: int) -> tuple[float, int]:
        """Makes up to `most` steps, until a row has ended or a request waits.

        Returns tokens per second and the number of steps.
        """
        (graphs, before), numbers = self._loop(), [row.row for row in rows]
        counts, device = self._runner.store.pages.counts, self._runner.device
        replays, eager, captures = graphs.replays, graphs.eager, graphs.captures
        run = _Run(rows, most, device)
        state = graphs.begin(numbers, tokens, run.choose, [row.drawing for row in rows])
        # Whether a bulk eviction is due has to be known before the next step.
        in_flight = 0 if self._runner.policy.compaction else 1
        made, begin = 0, time.perf_counter()
        while made < most and not run.over and (not made or (self._is_free(numbers) and not self.awaited())):
            before.note()
            try:
                state = graphs.advance(state)
            except NotCaptured:
                self._give_up()
                raise
            sent = run.force(state, made, counts.post)
            counts.send()
            made += 1
            counts.collect(leave=in_flight * sent)
            run.take()
        ended = list(run.over) if run.steps < made else []
        for index in ended:
            self._runner.store.ledger.leave(numbers[index])
        counts.collect()
        for index in ended:
            with before.restored(numbers[index]):
                rows[index].report = self._runner.report(numbers[index])
        run.take()
        self.counts["replayed"] += graphs.replays - replays
        self.counts["eager_in_runs"] += graphs.eager - eager
        self.counts["captures"] += graphs.captures - captures
        return run.num_tokens / (time.perf_counter() - begin), made


class _Run:
    """Tokens and measurements of a run of at most `most` steps, before its rows receive them.

    `over` are rows that have ended, by index; `steps` those that the rows have received, `num_tokens` the tokens that
    counted.
    """

    def __init__(self, rows: Sequence[Row], most: int, device: torch.device) -> None:
        self._rows = rows
        self.over: dict[int, None] = {}
        self.steps = self.num_tokens = 0
        self._chosen: list[tuple[list[int], list[bool]]] = []
        self._measured: list[list[list[float]]] = []
        self._since = time.perf_counter()
        self._forced = [(index, row) for index, row in enumerate(rows) if isinstance(row, ForcedRow)]
        if self._forced:
            begins = [len(row.meter.nll) for _, row in self._forced]
            gold = [row.meter.gold[begin : begin + most] for begin, (_, row) in zip(begins, self._forced, strict=True)]
            self._begins, self._gold = begins, to_device(gold, device)
            self._where = to_device([index for index, _ in self._forced], device)

    def choose(self, values: list[int], finite: list[bool]) -> None:
        self._chosen.append((values, finite))

    def force(self, state: State, step: int, post: Callable[[Tensor, Callable[[], Receiver]], None]) -> int:
        """Puts forced tokens in the place of chosen ones, and measures them; how many copies leave in the step."""
        if not self._forced:
            return 1
        assert state.logits is not None
        state.tokens.index_copy_(0, self._where, self._gold[:, step])
        measured: list[Tensor] = []
        for begin, (index, row) in zip(self._begins, self._forced, strict=True):
            measured.append(row.meter.measure(begin + step, state.logits[index]))
        sizes = [len(each) for each in measured]

        def bind() -> Receiver:
            def receive(bits: list[int]) -> None:
                values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
                self._measured.append([each.tolist() for each in values.split(sizes)])

            return receive

        post(torch.cat(measured).view(torch.int32), bind)
        return 2

    def take(self) -> None:
        """Lets the rows take in what has arrived, step by step, up to the end of each."""
        while self.steps < len(self._chosen) and (not self._forced or self.steps < len(self._measured)):
            chosen, finite = self._chosen[self.steps]
            live = [index for index in range(len(self._rows)) if index not in self.over]
            if not all(finite[index] for index in live):
                raise Spoiled("logits of a run of steps are not finite")
            now = time.perf_counter()
            forced = iter(self._measured[self.steps]) if self._forced else iter(())
            values = {index: next(forced) for index, _ in self._forced}
            for index in live:
                row = self._rows[index]
                row.note_step(now - self._since, len(live))
                if isinstance(row, ForcedRow):
                    token = row.take(values[index])
                else:
                    assert isinstance(row, AnswerRow), "rows are answers, or forced"
                    token = row.take(chosen[index])
                row.ready = [token]
                if token is None:
                    self.over[index] = None
            self._since = now
            self.steps += 1
            self.num_tokens += len(live)
