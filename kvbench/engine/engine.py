"""Generation through the compressed store: one prompt at a time in, many rows at once on, no padding anywhere."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Literal

from torch import Tensor

from kvbench.cache.layout import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine.answer import Answer
from kvbench.engine.decode_loop import Capture, DecodeLoop, Spoiled
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.following import make_runner
from kvbench.engine.long_logits import Logits, take
from kvbench.engine.needs import Forced, Needs, SharedContexts
from kvbench.engine.probe import plan_passes
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row, Sample
from kvbench.engine.runner import NotFinite
from kvbench.engine.sampling import answer_seed
from kvbench.errors import BrokenRule, nobody_leaves
from kvbench.kernels.memory import first_line, is_out_of_memory
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy


class Engine:
    """Answers requests under one policy, with a loaded model whose attention is routed through kvbench from here on.

    Args:
        batch_size: Requests whose answers are decoded together.
        seed: Base of every answer's own random numbers.
        fidelity_max_tokens: Tokens to force per sample at most, None for all; 0 switches teacher forcing off.
        fidelity_per_token: Outcomes say what was measured of each forced token.
        prompts: Shared by engines that run the same prompts of one model under other settings; None reads every prompt.
        prefill_chunk: Tokens of a prompt that are read before the method compresses; None = all.
        capture: What captures decode steps; `auto` = a CUDA graph on a GPU, and nothing elsewhere; None = nothing.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        *,
        store: StoreOptions,
        batch_size: int,
        seed: int,
        backend: str = "auto",
        fidelity_max_tokens: int | None = 256,
        fidelity_per_token: bool = False,
        prompts: PromptCache | None = None,
        prefill_chunk: int | None = None,
        capture: Capture | Literal["auto"] | None = "auto",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self.runner = make_runner(model, policy, options=store, backend=backend, prompts=prompts, chunk=prefill_chunk)
        self.loaded, self.policy = model, policy
        self.batch_size, self.seed, self.fidelity_max_tokens = batch_size, seed, fidelity_max_tokens
        self.fidelity_per_token = fidelity_per_token
        self.backend, self.shape = self.runner.backend, self.runner.shape
        self.end_ids = tuple(model.eos_token_ids)
        self.steps = DecodeLoop(self.runner, capture)

    @property
    def store(self) -> CompressedStore:
        return self.runner.store

    @property
    def graphs(self) -> dict[str, int]:
        """The ways in which decode steps were made (`DecodeLoop.counts`); empty without graphs, or without a step."""
        return self.steps.counts if self.steps.runs and any(self.steps.counts.values()) else {}

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens shown."""
        return str(self.loaded.tokenizer.decode(list(ids)))

    @nobody_leaves()
    def run(
        self,
        requests: Sequence[Request],
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
        own: bool = False,
    ) -> None:
        """Answers requests in groups of `batch_size`, in order.

        Where requests that follow one another begin with the same segment, it is read and compressed once, and each of
        them goes on from there in a fork: their answers are those of separate runs.

        Args:
            on_outcome: Called once per (sample, repeat), as soon as the sample is finished.
            on_step: Called after every decode step or run of steps (`engine.decode_loop`) with `decode_tokens_per_s`,
                `cache_bytes`, `live_rows`.
            sizing: Requests that the page tables are sized for, when `requests` is only a part of a run: a resumed run
                must count the same bytes as an uninterrupted one.
            own: Force the first answer that each request gets here, in place of its gold answer; for the full cache,
                whose answer other methods are then forced to give.
        """
        for _ in self.running(requests, on_outcome=on_outcome, on_step=on_step, sizing=sizing, own=own):
            pass

    def running(
        self,
        requests: Sequence[Request],
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
        own: bool = False,
    ) -> Generator[Request]:
        """Does what `run` does, and stops before each prompt that it reads, which it gives: several engines that share
        their prompts then take turns."""
        yield from _Run(self, requests, list(sizing or requests), on_outcome, on_step, own).answer()


class _Run:
    """One call of `Engine.run`, whose arguments it takes; `everything` are the requests that tables are sized for."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        everything: list[Request],
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None,
        own: bool,
    ) -> None:
        self._engine, self._requests, self._everything = engine, requests, everything
        self._runner, self._policy, self._loop = engine.runner, engine.policy, engine.steps
        self._on_outcome, self._on_step = on_outcome, on_step
        most = engine.fidelity_max_tokens
        self._needs = Needs(engine.loaded, most, own and most != 0)
        self._callers: BaseException | None = None  # what `on_outcome` raised
        self._contexts = SharedContexts(self._runner, requests, self._begins_with, self._read)
        self._finished: set[str] = set()  # samples of the group

    def answer(self) -> Generator[Request]:
        """Answers all requests; gives each before its prompt is read."""
        for request in self._everything:
            self._needs.check(request)
        if not self._everything:
            return
        if self._policy.needs_instruction and not all(request.instruction_tokens for request in self._everything):
            raise ValueError(
                "the method protects the instruction before the user's text, and prompts of this task begin without "
                "one; use a model with a chat template, with protocol.chat_template=auto, or protect something else"
            )
        if (probe := self._policy.score.probe) is not None:  # a prompt without room for it stops the run here
            model = self._engine.loaded
            for asked in self._everything:
                plan_passes(probe, model.tokenizer, asked.segments[0], asked.closing, model.max_tokens)
        size, reason = self._reserve(self._everything)
        if reason is not None:
            for request in self._requests:
                self._fail(request, "oom", reason, None)
            return
        if self._policy.byte_budget is not None:
            for request in self._requests:  # a budget that is too small for one stops the run before the first is read
                self._runner.store.budget.solve(len(request.segments[0]), self._needs.new_tokens(request))
        for begin in range(0, len(self._requests), size):
            yield from self._run_group(list(self._requests[begin : begin + size]))
        self._contexts.close()  # it is still open where the last questions could not be answered

    def _reserve(self, requests: list[Request]) -> tuple[int, str | None]:
        """Makes the cache, for fewer requests at once where there is no memory for `batch_size` of them: requests per
        group, and why not even one fits (None: it does)."""
        rows_of = [self._needs.rows(r) for r in requests]
        prompt_tokens = max(r.num_prompt_tokens for r in requests)
        new_tokens = max(self._needs.most_behind(r) for r in requests)
        size = min(self._engine.batch_size, len(requests))  # never more rows than there is to answer
        while True:
            try:
                rows = max(rows_of) * size + self._contexts.num_rows
                self._loop.forget()
                self._runner.reserve(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
                return size, None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    return size, first_line(error)
            size //= 2

    def _run_group(self, group: list[Request]) -> Generator[Request]:
        """Runs a group; when memory runs out, its unfinished requests run again in halves, and a single one is recorded
        as `oom`. Whatever is raised, no row stays open."""
        self._finished = set()
        try:
            self._decode((yield from self._prefill_group(group)))
            return
        except BaseException as error:
            was_spoiled = isinstance(error, Spoiled)
            if error is self._callers or not (was_spoiled or is_out_of_memory(error)):
                self._close_all()
                raise
            reason = first_line(error)
        # Here, not in the handler: until that ends, the error holds every tensor of the pass that failed.
        self._close_all()
        left = [r for r in group if r.sample_id not in self._finished]
        if was_spoiled:  # step by step it is known which layer began it
            self._loop.alone.update(r.sample_id for r in left)
            yield from self._run_group(left)
            return
        if len(left) == 1:
            self._fail(left[0], "oom", reason, None)
            return
        half = len(left) // 2
        for part in (left[:half], left[half:]):
            if part:
                yield from self._run_group(part)

    def _prefill_group(self, group: list[Request]) -> Generator[Request, None, list[tuple[Row, Sample]]]:
        """Prefills every request of a group on its own and opens its rows."""
        rows: list[tuple[Row, Sample]] = []
        for request in group:
            yield request
            begin, before = time.perf_counter(), len(self._runner.open_rows)
            shares = self._contexts.holds(request)
            try:
                row, logits, reference = self._prefill(request)
            except BrokenRule as error:
                raise BrokenRule(f"{error} (sample {request.sample_id})") from error
            except NotFinite as error:
                for opened in self._runner.open_rows[before:]:
                    self._runner.close(opened)
                self._contexts.forget_closed()
                self._fail(request, "nan", str(error), error.layer)
                self._finished.add(request.sample_id)
                continue
            replays = self._runner.prompts.limit_bytes > 0  # and a replay takes no prefill
            prefill_s = None if replays else time.perf_counter() - begin
            sample = Sample(request, prefill_s, self._needs.rows(request), shares_context=shares)
            sample.probe_s = None if replays or shares else self._runner.probe_s or None
            for repeat in range(request.num_samples if request.max_new_tokens else 0):
                own = row if repeat == 0 else self._loop.fork(row, request)
                answer = Answer(request, self._engine.loaded.tokenizer, self._engine.end_ids, self._needs.room(request))
                seed = answer_seed(self._engine.seed, request.sample_id, repeat) if request.temperature > 0 else None
                free = AnswerRow(row=own, request=request, logits=logits, repeat=repeat, answer=answer, seed=seed)
                rows.append((free, sample))
            if self._needs.own and request.max_new_tokens:
                sample.own = self._loop.fork(row, request), logits
            forced: list[Row] = []
            if reference is not None:
                forced.append(self._force(row, request, logits, self._needs.forced(request), reference))
            for index, tokens in enumerate(request.choices):
                forced.append(
                    ForcedRow(row=row, request=request, logits=logits, meter=ChoiceMeter(tokens), choice=index)
                )
            for place, state in enumerate(forced):
                if place or request.max_new_tokens:
                    state.row = self._loop.fork(row, request)
                rows.append((state, sample))
        return rows

    def _force(self, row: int, request: Request, logits: Tensor, forced: Forced, reference: Logits) -> ForcedRow:
        """A row in which answers are forced and compared with the full cache's logits behind the prompt."""
        exact = self._sees_all(request)
        meter = FidelityMeter(forced.gold, take(reference, forced.places), exact_first=exact)
        return ForcedRow(row=row, request=request, logits=logits, meter=meter, ends=forced.ends)

    def _prefill(self, request: Request) -> tuple[int, Tensor, Logits | None]:
        """Reads a prompt into a new row; returns the row, next-token logits [vocabulary] and the full cache's logits
        behind the prompt and behind each token that is forced."""
        forced, rest, sees_all = self._needs.forced(request), request.segments[1:], self._sees_all(request)
        # Tokens behind the prompt attend to the uncompressed prompt in the same pass, if there is one: their logits are
        # the full-cache reference.
        reference: Logits | None = None
        if rest:
            row = self._contexts.open_row(request)
        else:
            row, read = self._read(request, ahead=forced.behind if sees_all else ())
            reference, logits = (read if forced.gold and sees_all else None), read[0]
        for segment in rest:
            logits = self._runner.append(row, segment)
        if forced.gold and not sees_all:
            reference = self._reference(request, forced)
        self._runner.store.ledger.restart(row)  # averages are over the answer, not over a question fed token by token
        return row, logits, reference

    def _sees_all(self, request: Request) -> bool:
        """True if the end of a prompt sees all of it uncompressed."""
        return len(request.segments) == 1 and not self._runner.reads_in_chunks(request.segments[0])

    def _reference(self, request: Request, forced: Forced) -> Logits:
        """The full cache's logits behind a prompt and behind each token that is forced."""
        return self._runner.full_logits([*request.prompt, *forced.behind], num_logits=len(forced.behind) + 1)

    def _begins_with(self, request: Request) -> tuple:
        """All that the compressed first segment depends on: a budget in bytes counts the tokens that come after it."""
        planned = self._needs.new_tokens(request) if self._policy.byte_budget is not None else None
        closing = request.closing if self._policy.score.probe is not None else None
        return request.segments[0], request.instruction_tokens, planned, closing

    def _read(self, request: Request, ahead: tuple[int, ...] = ()) -> tuple[int, Logits]:
        new_tokens, instruction_tokens = self._needs.new_tokens(request), request.instruction_tokens
        return self._runner.read(request.segments[0], ahead, new_tokens, instruction_tokens, request.closing)

    def _close_all(self) -> None:
        self._runner.close_all()
        self._contexts.forget_closed()

    def _decode(self, rows: list[tuple[Row, Sample]]) -> None:
        """Decodes all rows together until each is over."""
        while rows:
            live: list[tuple[Row, Sample]] = []
            tokens: list[int] = []
            spoiled: dict[str, int] = {}
            for state, sample in rows:  # it grows where an answer that ended is forced next
                try:
                    token = state.coming()
                    while token is None and state.next_turn(self._runner):
                        token = state.next_token()
                except NotFinite as error:
                    spoiled[sample.request.sample_id], token = error.layer, 0
                if token is None:
                    if (following := self._force_own(state, sample)) is not None:
                        rows.append((following, sample))
                    self._finish(state, sample)
                else:
                    live.append((state, sample))
                    tokens.append(token)
            rows = live
            if spoiled:
                tokens = [
                    token
                    for token, (_, sample) in zip(tokens, rows, strict=True)
                    if sample.request.sample_id not in spoiled
                ]
                rows = self._drop_bad(rows, spoiled)
            if not rows:
                return
            try:
                bad, rate = self._loop.make([state for state, _ in rows], tokens)
            except BrokenRule as error:
                names = ", ".join(dict.fromkeys(sample.request.sample_id for _, sample in rows))
                raise BrokenRule(f"{error} (samples {names})") from error
            if bad:
                layers = {rows[index][0].request.sample_id: layer for index, layer in bad.items()}
                rows = self._drop_bad(rows, layers)
            if self._on_step:
                told = {"decode_tokens_per_s": rate, "cache_bytes": self._runner.store.used_bytes}
                self._on_step(told | {"live_rows": len(tokens)})

    def _force_own(self, state: Row, sample: Sample) -> ForcedRow | None:
        """The row in which an answer that has just ended is forced, where that is wanted."""
        if sample.own is None or not isinstance(state, AnswerRow) or state.repeat:
            return None
        (row, logits), sample.own, request = sample.own, None, sample.request
        answers = [*(turn["token_ids"] for turn in state.turns), state.answer.token_ids]
        forced = Forced.of(request, [tokens[: self._engine.fidelity_max_tokens] for tokens in answers])
        if not forced.gold:  # it ended at once: there is nothing to compare
            self._runner.close(row)
            sample.open_rows -= 1
            return None
        return self._force(row, request, logits, forced, self._reference(request, forced))

    def _drop_bad(self, rows: list[tuple[Row, Sample]], spoiled: dict[str, int]) -> list[tuple[Row, Sample]]:
        """Ends every sample that has a row with non-finite logits; `spoiled` maps its id to the layer."""
        for state, sample in rows:
            if state.request.sample_id in spoiled:
                self._runner.close(state.row)
                if sample.own is not None:
                    self._runner.close(sample.own[0])
                    sample.own = None
                if sample.request.sample_id not in self._finished:
                    layer = spoiled[state.request.sample_id]
                    self._fail(sample.request, "nan", str(NotFinite(layer)), layer)
                    self._finished.add(sample.request.sample_id)
        return [(state, sample) for state, sample in rows if state.request.sample_id not in spoiled]

    def _finish(self, state: Row, sample: Sample) -> None:
        """Records a finished row, and hands out the sample's outcomes once all its rows are over."""
        if (repeat := state.settle(sample)) is not None:
            sample.outcomes[repeat] = self._outcome(state, sample, repeat)
        self._runner.close(state.row)
        sample.open_rows -= 1
        if sample.open_rows == 0:
            self._finished.add(sample.request.sample_id)
            for outcome in sample.outcomes.values():
                outcome.fidelity, outcome.drift = sample.fidelity, sample.drift
                outcome.per_token = sample.per_token if self._engine.fidelity_per_token else None
                outcome.choices = [sample.choices[index] for index in sorted(sample.choices)]
                self._hand_out(outcome)

    def _outcome(self, state: Row, sample: Sample, repeat: int) -> Outcome:
        """The outcome of a sample that a finished row gives."""
        steps = state.timing.pop("row_steps")
        state.timing["batch_rows"] = steps / state.timing["decode_tokens"] if state.timing["decode_tokens"] else 0.0
        held, kept = state.report or self._runner.report(state.row)
        told = Outcome(sample_id=state.request.sample_id, repeat=repeat, ledger=held, kept=kept)
        told.num_prompt_tokens = state.request.num_prompt_tokens
        told.timing = {"prefill_s": sample.prefill_s, **state.timing}
        if sample.probe_s is not None:
            told.timing["probe_s"] = sample.probe_s
        if sample.shares_context:
            told.timing["shares_context"] = 1.0
        state.describe(told)
        return told

    def _hand_out(self, outcome: Outcome) -> None:
        try:
            self._on_outcome(outcome)
        except BaseException as error:
            self._callers = error  # a sample that the caller could not keep must not pass for one that did not fit
            raise

    def _fail(self, request: Request, status: str, message: str, layer: int | None) -> None:
        for repeat in range(request.num_samples):
            failed = Outcome(sample_id=request.sample_id, repeat=repeat, status=status, message=message)
            failed.nan_layer, failed.num_prompt_tokens = layer, request.num_prompt_tokens
            self._hand_out(failed)
