"""Batch of rows that are decoded together: requests join as others end, and one is preempted where pages run out.

The next request follows from the requests alone (`RequestQueue`), and its moment from what rows hold, never from a
clock. A prompt is tried where the free pages are enough for what prompts have taken so far; answers get their
pages as they grow. Where a step has no page left, a method that evicts there does so, and where that frees none the
last request is preempted: its rows are closed, and it is read and answered again from its beginning, by the same steps,
once another one has ended. So the first in order always goes on, and only a request that does not fit alone is lost.
"""

from collections.abc import Callable, Generator

from kvbench.engine.admission import Forced
from kvbench.engine.cross_run_batch import Step
from kvbench.engine.decode_loop import DecodeLoop, Spoiled
from kvbench.engine.reading import Reader
from kvbench.engine.request_queue import RequestQueue
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row, Sample
from kvbench.engine.runner import NotFinite, Runner
from kvbench.errors import BrokenRule
from kvbench.kernels.memory import first_line, is_out_of_memory
from kvbench.kernels.pool import PoolExhausted
from kvbench.rules import modes

Live = tuple[Row, Sample]


class Batch:
    """Answers the requests that wait.

    Args:
        forced_tokens: Most tokens of an own answer that are forced; None = all.
        per_token: Outcomes say what was measured of each forced token.
        on_outcome, on_step: As `Engine.run` takes them.
        make_room: Makes the cache, which has no rows, anew with a smaller pool, where other memory ran out; False
            where it cannot.
        restore_room: Makes it anew as it was at first, once that did not help.

    Attributes:
        most: Requests at once at most.
        reason: Why there is no memory for any.
        preemptions: Requests that had to give up their rows for want of pages, and began again.
        compressions: Times that pages ran out and a bulk eviction freed some.
    """

    def __init__(
        self,
        runner: Runner,
        loop: DecodeLoop,
        reader: Reader,
        queue: RequestQueue,
        *,
        forced_tokens: int | None,
        per_token: bool,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None,
        make_room: Callable[[], bool] = lambda: False,
        restore_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner, self._loop, self._reader, self._queue = runner, loop, reader, queue
        self._forced_tokens, self._per_token = forced_tokens, per_token
        self._on_outcome, self._on_step = on_outcome, on_step
        self._make_room, self._restore_room = make_room, restore_room
        self._callers: BaseException | None = None  # what `on_outcome` raised
        self._samples: dict[str, Sample] = {}  # those with rows, in the order in which they joined
        self._reading: tuple[Sample, Generator[list[Row] | None]] | None = None  # a prompt of which chunks are to come
        self._live: list[Live] = []
        self._is_full = False  # nobody joins before somebody has ended
        self._page_rate = 0.0  # most pages per token of a prompt so far
        loop.awaited = self._is_awaited
        self._careful: dict[str, int] = {}  # after memory ran out: requests until whose end so many run at once
        self.most, self.reason, self.preemptions, self.compressions = 1, "", 0, 0
        self._modes = modes.read(quick=True)

    def answer(self) -> Generator[Request | Step]:
        """Answers all requests.

        Yields each before its prompt is read, and shared steps (`DecodeLoop`) before they are made. Whatever is raised,
        no row stays open.
        """
        while self.reason and (request := self._queue.first(0)) is not None:
            self._queue.take()
            self.fail(request, "oom", self.reason, None)
        while (yield from self.advance()):
            if not self._samples and self._reading is None:
                self._queue.wait()
        self._reader.contexts.close()  # it is still open where the last questions could not be answered

    def advance(self) -> Generator[Request | Step, None, bool]:
        """Admits requests, reads on in a prompt, and makes a step, or a run of them; False once no row is left."""
        try:
            self._leave_cancelled()
            admitted = True
            while admitted:  # a row that ends before its first step frees its slot at once
                yield from self._read_on()
                admitted = self._choose() and self._may_join() is not None
            if self._live:
                yield from self._step()
            return bool(self._samples or self._reading or len(self._queue))
        except BaseException as error:
            was_spoiled, reason = isinstance(error, Spoiled), first_line(error)
            in_pool = isinstance(error, PoolExhausted)
            goes_on = (was_spoiled or is_out_of_memory(error)) and (self._samples or self._reading)
            if error is self._callers or not goes_on:
                self._close_all()
                raise
        # Here, not in the handler: until that ends, the error holds every tensor of the pass that failed.
        self._restart(reason, was_spoiled, in_pool)
        return True

    # Members of the batch.

    @property
    def _num_live(self) -> int:
        return len(self._samples) + (self._reading is not None)

    def _may_join(self) -> Request | None:
        """The request that joins now, if one may."""
        if self._num_live >= min([self.most, *self._careful.values()]) or (self._is_full and self._num_live):
            return None
        request = self._queue.first(self._num_live)
        if request is not None and self._num_live and not self._has_room(request):
            self._is_full = True
            return None
        return request

    def _is_awaited(self) -> bool:
        """True if a prompt is being read, or a request has come, or left, since rows began a run of steps."""
        left = not self._queue.cancelled.isdisjoint(self._samples)
        return left or self._reading is not None or self._may_join() is not None

    def _has_room(self, request: Request) -> bool:
        """True if the pages that are free seem enough for a prompt and for a step of all rows."""
        store, shares = self._runner.store, self._reader.contexts.holds(request)
        if all(part.pages.pool.growable for part in store.holding.parts):
            return True
        spare = max(part.pages.lists_per_row * part.most_new_pages for part in store.holding.parts)
        tokens = sum(map(len, request.segments[shares:]))
        return self._free_pages() >= self._page_rate * tokens + spare * (len(self._live) + 1)

    def _free_pages(self) -> int:
        """Pages that are free in every place."""
        return min(part.pages.pool.num_free for part in self._runner.store.holding.parts)

    def _read_on(self) -> Generator[Request]:
        """Reads a chunk of the prompt that is being read; or the prompts of requests that join, up to one in chunks."""
        while self._reading is not None or (request := self._may_join()) is not None:
            if self._reading is None:
                assert request is not None
                self._queue.take()
                yield request
                sample = Sample(request)
                self._reading = sample, self._reader.open(sample)
            if not self._read_piece() and self._live:
                return

    def _read_piece(self) -> bool:
        """Reads on in a prompt; False where a part of it is still to come."""
        assert self._reading is not None
        sample, pieces = self._reading
        free, held, reason, in_pool = self._free_pages(), self._reader.contexts.is_open, "", False
        rows: list[Row] | None = []
        try:
            rows = next(pieces)
        except NotFinite as error:
            self._reading = None
            self._reader.contexts.forget_closed()
            self._end(sample, "nan", str(error), error.layer)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason, in_pool = first_line(error), isinstance(error, PoolExhausted)
        if reason:  # here, not in the handler: until that ends, the error holds every tensor of the pass that failed
            self._reading = None
            self._refuse(sample.request, reason, held, in_pool)
        elif rows is not None:
            self._reading = None
            self._samples[sample.request.sample_id] = sample
            self._queue.note_read(sample.request)
            self._live += [(row, sample) for row in rows]
            tokens = sum(map(len, sample.request.segments[sample.shares_context :]))
            self._page_rate = max(self._page_rate, (free - self._free_pages()) / tokens)
        return rows is not None

    def _refuse(self, request: Request, reason: str, held: bool, in_pool: bool) -> None:
        """Requeues a request that found no memory while others had theirs.

        Alone, it is tried with a smaller pool, unless the pool was what was too small, and else recorded as `oom`.
        """
        if self._num_live or held:
            self._queue.put_back([request])
            self._is_full = True
            if not self._num_live:
                self._reader.contexts.close()
        elif not in_pool and self._make_room():
            self._queue.put_back([request])
        else:
            self._end(Sample(request), "oom", reason, None)
            self._restore_room()

    def _give_way(self, sample: Sample) -> None:
        """Closes the rows of a sample, which begins again once another one has ended."""
        self._forget(sample)
        self._queue.put_back([sample.request])
        self._is_full = True
        self.preemptions += 1

    def _compress(self) -> bool:
        """Evicts from all rows at once, where the method does so as pages run out; True if that freed pages."""
        compaction, free = self._runner.policy.compaction, self._free_pages()
        if compaction is None or not compaction.when_full or not self._runner.shape.is_whole:
            return False
        try:
            self._runner.compact([state.row for state, _ in self._live])
        except PoolExhausted:  # rows that share pages cannot have their own
            return False
        freed = self._free_pages() > free
        self.compressions += freed
        return freed

    def _forget(self, sample: Sample) -> None:
        """Removes a sample from the batch without closing it."""
        self._samples.pop(sample.request.sample_id, None)
        self._live = [each for each in self._live if each[1] is not sample]
        self._reader.close(sample)

    def _end(self, sample: Sample, status: str, message: str, layer: int | None) -> None:
        """Ends a sample that has no answer."""
        self._forget(sample)
        self._note_end(sample.request)
        self.fail(sample.request, status, message, layer)

    def _note_end(self, request: Request) -> None:
        """Notes that a place is free."""
        self._is_full = False
        self._careful.pop(request.sample_id, None)

    def _leave_cancelled(self) -> None:
        """Removes requests for which no one waits any longer."""
        if self._queue.cancelled.isdisjoint(self._samples) and self._reading is None:
            return
        for name in self._queue.cancelled.intersection(self._samples):
            sample = self._samples[name]
            self._forget(sample)
            self._note_end(sample.request)
        if self._reading is not None and self._reading[0].request.sample_id in self._queue.cancelled:
            (sample, pieces), self._reading = self._reading, None
            pieces.close()
            self._note_end(sample.request)

    def _restart(self, reason: str, was_spoiled: bool, in_pool: bool) -> None:
        """Closes all rows and restarts their requests, step by step or half as many at once.

        A single one without memory restarts with a smaller pool, or is recorded as `oom`.
        """
        samples = [*self._samples.values(), *([self._reading[0]] if self._reading else ())]
        held = self._reader.contexts.is_open
        self._close_all()
        if was_spoiled:  # step by step it is known which layer began it
            self._loop.alone.update(sample.request.sample_id for sample in samples)
        elif len(samples) == 1 and not held and (in_pool or not self._make_room()):
            self._end(samples[0], "oom", reason, None)
            self._restore_room()
            return
        else:
            half = max(1, len(samples) // 2)
            self._careful |= {sample.request.sample_id: half for sample in samples}
        self._queue.put_back([sample.request for sample in samples])

    def _close_all(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
        for sample in self._samples.values():
            self._reader.close(sample)
        self._runner.close_all()
        self._reader.contexts.forget_closed()
        self._samples, self._reading, self._live, self._is_full = {}, None, [], False

    # Steps.

    def _choose(self) -> bool:
        """Chooses the next token of every row that has none, and finishes those that are over; True if one was."""
        ended = False
        waits = [each for each in self._live if each[0].token is None]
        for state, sample in waits:  # it grows where an answer that ended is forced next
            if sample.request.sample_id not in self._samples:
                continue
            try:
                state.token = state.coming()
                while state.token is None and state.next_turn(self._runner):
                    state.token = state.next_token()
            except NotFinite as error:
                self._end(sample, "nan", str(error), error.layer)
            except PoolExhausted:  # of what is said after an answer; its rows cannot go on from here
                if len(self._samples) == 1:
                    raise
                self._give_way(sample)
            else:
                if state.token is None:
                    if (forced := self._force_generated(state, sample)) is not None:
                        waits.append((forced, sample))
                        self._live.append((forced, sample))
                    self._finish(state, sample)
                    ended = True
        return ended

    def _step(self) -> Generator[Step]:
        """Makes a step of all rows, or several; where there is no page for it, the last sample is preempted."""
        live = self._live
        for part in self._runner.apart([state.row for state, _ in live]):
            left = {id(state) for state, _ in self._live}  # without those of a sample that has just ended
            rows = [live[index] for index in part if id(live[index][0]) in left]
            if rows and not (yield from self._step_of(rows)):
                return

    def _step_of(self, live: list[Live]) -> Generator[Step, None, bool]:
        """Makes a step of rows that one pass may read; False where a sample gave way."""
        states, tokens = [state for state, _ in live], []
        for state in states:
            assert state.token is not None, "it was chosen"
            tokens.append(state.token)
        while True:
            try:
                bad, rate, steps = yield from self._loop.making(states, tokens)
                break
            except BrokenRule as error:
                names = ", ".join(dict.fromkeys(sample.request.sample_id for _, sample in live))
                raise BrokenRule(f"{error} (samples {names})") from error
            except PoolExhausted:
                if self._compress():
                    continue
                if len(self._samples) == 1 or not self._runner.shape.is_whole:
                    raise
                last = max(self._samples.values(), key=lambda each: self._queue.index(each.request.sample_id))
                self._give_way(last)
                return False
        for state in states:
            state.token = None
        spoiled = {live[index][1].request.sample_id: layer for index, layer in bad.items()}
        for name, layer in spoiled.items():
            self._end(self._samples[name], "nan", str(NotFinite(layer)), layer)
        if self._on_step:
            progress = {"decode_tokens_per_s": rate, "cache_bytes": self._runner.store.used_bytes}
            self._on_step(progress | {"live_rows": len(tokens), "steps": steps})
        return True

    def _force_generated(self, state: Row, sample: Sample) -> ForcedRow | None:
        """Row in which an answer that has just ended is forced, if requested."""
        if sample.generated_row is None or not isinstance(state, AnswerRow) or state.repeat:
            return None
        (row, logits), sample.generated_row, request = sample.generated_row, None, sample.request
        answers = [*(turn["token_ids"] for turn in state.turns), state.answer.token_ids]
        forced = Forced.of(request, [tokens[: self._forced_tokens] for tokens in answers])
        if not forced.gold:  # it ended at once: there is nothing to compare
            self._close(row, sample)
            return None
        return self._reader.force(row, request, logits, forced, self._reader.reference(request, forced))

    # Outcomes.

    def _close(self, row: int, sample: Sample) -> None:
        self._runner.close(row)
        sample.open_rows.remove(row)

    def _finish(self, state: Row, sample: Sample) -> None:
        """Records a finished row, and hands out the sample's outcomes once all its rows are over."""
        if (repeat := state.settle(sample)) is not None:
            sample.outcomes[repeat] = self._outcome(state, sample, repeat)
        self._close(state.row, sample)
        self._live = [each for each in self._live if each[0] is not state]
        if sample.open_rows:
            return
        del self._samples[sample.request.sample_id]
        self._note_end(sample.request)
        for outcome in sample.outcomes.values():
            outcome.fidelity, outcome.drift = sample.fidelity, sample.drift
            outcome.per_token = sample.per_token if self._per_token else None
            outcome.choices = [sample.choices[index] for index in sorted(sample.choices)]
            self._hand_out(outcome)

    def _outcome(self, state: Row, sample: Sample, repeat: int) -> Outcome:
        """The outcome of a sample that a finished row gives."""
        steps = state.timing.pop("row_steps")
        state.timing["batch_rows"] = steps / state.timing["decode_tokens"] if state.timing["decode_tokens"] else 0.0
        held, kept = state.report or self._runner.report(state.row)
        outcome = Outcome(sample_id=state.request.sample_id, repeat=repeat, ledger=held, kept=kept)
        outcome.num_prompt_tokens = state.request.num_prompt_tokens
        outcome.timing = {"prefill_s": sample.prefill_s, **state.timing}
        if sample.probe_s is not None:
            outcome.timing["probe_s"] = sample.probe_s
        if sample.shares_context:
            outcome.timing["shares_context"] = 1.0
        state.describe(outcome)
        return outcome

    def fail(self, request: Request, status: str, message: str, layer: int | None) -> None:
        """Hands out the outcomes of a request that has no answer."""
        for repeat in range(request.num_samples):
            failed = Outcome(sample_id=request.sample_id, repeat=repeat, status=status, message=message)
            failed.nan_layer, failed.num_prompt_tokens = layer, request.num_prompt_tokens
            self._hand_out(failed)

    def _hand_out(self, outcome: Outcome) -> None:
        if changed := modes.changed_since(self._modes):
            raise modes.ChangedMode(
                f"a method or a metric, before sample {outcome.sample_id} ended, {modes.rule(changed)}"
            )
        try:
            self._on_outcome(outcome)
        except BaseException as error:
            self._callers = error  # a sample that the caller could not keep must not pass for one that did not fit
            raise
