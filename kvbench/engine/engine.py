"""Generation through the compressed store: one prompt at a time in, many rows at once on, no padding anywhere."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from kvbench.cache.layout import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine.contexts import SharedContexts
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.probe import plan_passes
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row, Sample
from kvbench.engine.runner import NotFinite, Runner
from kvbench.engine.sampling import Answer, row_generator
from kvbench.kernels.memory import is_out_of_memory
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy


class Engine:
    """Answers requests under one policy.

    Args:
        model: A loaded model; its attention is routed through kvbench from here on.
        policy: The method.
        store: Memory layout.
        batch_size: Requests whose answers are decoded together.
        seed: Base of every answer's own random generator.
        backend: `auto` or a backend's name.
        fidelity_max_tokens: Tokens to force per sample at most, None for all; 0 switches teacher forcing off.
        fidelity_per_token: Outcomes say what was measured of each forced token.
        prompts: Shared by engines that run the same prompts of one model under other settings; None reads every prompt.

    Raises:
        UnsupportedModel: The model's attention cannot be held in the store.
        ValueError: batch_size < 1, or the policy does not fit the model.
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
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self.runner = Runner(model, policy, options=store, backend=backend, prompts=prompts)
        self.loaded, self.policy = model, policy
        self.batch_size, self.seed, self.fidelity_max_tokens = batch_size, seed, fidelity_max_tokens
        self.fidelity_per_token = fidelity_per_token
        self.backend, self.shape = self.runner.backend, self.runner.shape
        self.end_ids = tuple(model.eos_token_ids)
        self._own = False

    @property
    def store(self) -> CompressedStore:
        """The cache of the requests that are being answered."""
        return self.runner.store

    def text_of(self, ids: Sequence[int]) -> str:
        """What tokens say, special tokens shown."""
        return str(self.loaded.tokenizer.decode(list(ids)))

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
            requests: What to answer.
            on_outcome: Called once per (sample, repeat), as soon as the sample is finished.
            on_step: Called after every decode step with `decode_tokens_per_s`, `cache_bytes`, `live_rows`.
            sizing: Requests that the page tables are sized for, when `requests` is only a part of a run: a resumed run
                must count the same bytes as an uninterrupted one.
            own: Force the first answer that each request gets here, in place of its gold answer; for the full cache,
                whose answer other methods are then forced to give.

        Raises:
            ValueError: A prompt is empty or longer than the model, or there is nothing to do for a request.
        """
        everything = list(sizing or requests)
        for request in everything:
            if not 0 < request.num_prompt_tokens < self.loaded.max_tokens or not all(request.segments):
                raise ValueError(
                    f"{request.sample_id}: a prompt of {request.num_prompt_tokens} tokens (segments "
                    f"{[len(s) for s in request.segments]}) must be > 0 and < the model's {self.loaded.max_tokens}; "
                    "truncate it in the task"
                )
            if not self._num_rows(request):
                raise ValueError(
                    f"{request.sample_id} asks for no answer, and there is nothing to force either; set "
                    "fidelity.max_tokens=null"
                )
        if not everything:
            return
        if self.policy.needs_instruction and not all(request.instruction_tokens for request in everything):
            raise ValueError(
                "the method protects the instruction before the user's text, and prompts of this task begin without "
                "one; use a model with a chat template, with protocol.chat_template=auto, or protect something else"
            )
        if (probe := self.policy.score.probe) is not None:  # a prompt without room for it stops the run here
            for asked in everything:
                plan_passes(probe, self.loaded.tokenizer, asked.segments[0], asked.closing, self.loaded.max_tokens)
        self._on_outcome, self._on_step, self._own = on_outcome, on_step, own and self.fidelity_max_tokens != 0
        self._callers: BaseException | None = None  # what `on_outcome` raised
        self._contexts = SharedContexts(self.runner, requests, self._begins_with, self._read)
        size, reason = self._reserve(everything)
        if reason is not None:
            for request in requests:
                self._fail(request, "oom", reason, None)
            return
        if self.policy.byte_budget is not None:
            for request in requests:  # a budget that is too small for one stops the run before the first is read
                self.store.fit.solve(len(request.segments[0]), self._new_tokens(request))
        for begin in range(0, len(requests), size):
            self._run_group(list(requests[begin : begin + size]))
        self._contexts.close()  # it is still open where the last questions could not be answered

    def _reserve(self, requests: list[Request]) -> tuple[int, str | None]:
        """Makes the cache, for fewer requests at once where there is no memory for `batch_size` of them.

        Returns:
            Requests per group, and why not even one fits (None: it does).
        """
        rows_of = [self._num_rows(r) for r in requests]
        prompt_tokens = max(r.num_prompt_tokens for r in requests)
        new_tokens = max(max(r.max_new_tokens, *map(len, (self._gold(r), *r.choices))) for r in requests)
        size = min(self.batch_size, len(requests))  # never more rows than there is to answer
        while True:
            try:
                rows = max(rows_of) * size + self._contexts.num_rows
                self.runner.reserve(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
                return size, None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    return size, _reason(error)
            size //= 2

    def _run_group(self, group: list[Request]) -> None:
        """Runs a group; when memory runs out, its unfinished requests run again in halves, and a single one is recorded
        as `oom`. Whatever is raised, no row stays open."""
        finished: set[str] = set()
        try:
            self._decode(self._prefill_group(group, finished), finished)
            return
        except BaseException as error:
            if error is self._callers or not is_out_of_memory(error):
                self._close_all()
                raise
            reason = _reason(error)
        # Here, not in the handler: until that ends, the error holds every tensor of the pass that failed.
        self._close_all()
        left = [r for r in group if r.sample_id not in finished]
        if len(left) == 1:
            self._fail(left[0], "oom", reason, None)
            return
        half = len(left) // 2
        for part in (left[:half], left[half:]):
            if part:
                self._run_group(part)

    def _prefill_group(self, group: list[Request], finished: set[str]) -> list[tuple[Row, Sample]]:
        """Prefills every request of a group on its own and opens its rows."""
        rows: list[tuple[Row, Sample]] = []
        for request in group:
            begin, before = time.perf_counter(), len(self.runner.open_rows)
            shares = self._contexts.holds(request)
            try:
                row, logits, reference = self._prefill(request)
            except NotFinite as error:
                for opened in self.runner.open_rows[before:]:
                    self.runner.close(opened)
                self._contexts.forget_closed()
                self._fail(request, "nan", str(error), error.layer)
                finished.add(request.sample_id)
                continue
            replays = self.runner.prompts.limit_bytes > 0  # and a replay takes no prefill
            prefill_s = None if replays else time.perf_counter() - begin
            sample = Sample(request, prefill_s, self._num_rows(request), shares_context=shares)
            sample.probe_s = None if replays or shares else self.runner.probe_s or None
            for repeat in range(request.num_samples if request.max_new_tokens else 0):
                own = row if repeat == 0 else self.runner.fork(row)
                answer = Answer(request, self.loaded.tokenizer, self.end_ids, self._room(request))
                random = row_generator(self.seed, request.sample_id, repeat, self.runner.device)
                generator = random if request.temperature > 0 else None
                free = AnswerRow(
                    row=own, request=request, logits=logits, repeat=repeat, answer=answer, generator=generator
                )
                rows.append((free, sample))
            if self._own and request.max_new_tokens:
                sample.own = self.runner.fork(row), logits
            forced: list[tuple[FidelityMeter | ChoiceMeter, int | None]] = []
            if reference is not None:
                exact = len(request.segments) == 1
                forced.append((FidelityMeter(self._gold(request), reference, exact_first=exact), None))
            forced += [(ChoiceMeter(tokens), index) for index, tokens in enumerate(request.choices)]
            for place, (meter, choice) in enumerate(forced):
                copy = self.runner.fork(row) if place or request.max_new_tokens else row
                rows.append((ForcedRow(row=copy, request=request, logits=logits, meter=meter, choice=choice), sample))
        return rows

    def _prefill(self, request: Request) -> tuple[int, Tensor, Tensor | None]:
        """Reads a prompt into a new row; returns the row, next-token logits [vocabulary] and the full cache's
        log-probabilities of the gold tokens."""
        gold, rest = self._gold(request), request.segments[1:]
        # Gold tokens behind the prompt attend to the uncompressed prompt in the same pass: their logits are the
        # full-cache reference.
        if rest:
            row, reference = self._contexts.open_row(request), None
        else:
            row, read = self._read(request, ahead=gold[:-1])
            reference, logits = (read if gold else None), read[0]
        for segment in rest:
            logits = self.runner.append(row, segment)
        if gold and rest:
            everything = [token for segment in request.segments for token in segment] + list(gold[:-1])
            reference = self.runner.full_logits(everything, num_logits=len(gold))
        self.store.ledger.restart(row)  # averages are over the answer, not over a question fed token by token
        return row, logits, reference

    def _begins_with(self, request: Request) -> tuple:
        """Whatever the compressed first segment depends on: a budget in bytes counts the tokens that come after it."""
        planned = self._new_tokens(request) if self.policy.byte_budget is not None else None
        closing = request.closing if self.policy.score.probe is not None else None
        return request.segments[0], request.instruction_tokens, planned, closing

    def _read(self, request: Request, ahead: tuple[int, ...] = ()) -> tuple[int, Tensor]:
        """Reads the first segment of a request into a row; see `Runner.read`."""
        new_tokens, instruction_tokens = self._new_tokens(request), request.instruction_tokens
        return self.runner.read(request.segments[0], ahead, new_tokens, instruction_tokens, request.closing)

    def _close_all(self) -> None:
        self.runner.close_all()
        self._contexts.forget_closed()

    def _decode(self, rows: list[tuple[Row, Sample]], finished: set[str]) -> None:
        """Decodes all rows together until each is over."""
        while rows:
            live, tokens = [], []
            for state, sample in rows:  # it grows where an answer that ended is forced next
                token = state.next_token()
                if token is None:
                    if (following := self._force_own(state, sample)) is not None:
                        rows.append((following, sample))
                    self._finish(state, sample, finished)
                else:
                    live.append((state, sample))
                    tokens.append(token)
            rows = live
            if not rows:
                return
            begin = time.perf_counter()
            logits, bad = self.runner.try_step([state.row for state, _ in rows], tokens)
            elapsed = time.perf_counter() - begin
            for index, (state, _) in enumerate(rows):
                state.logits = logits[index]
                state.timing["decode_s"] += elapsed
                state.timing["decode_share_s"] += elapsed / len(rows)
                state.timing["decode_tokens"] += 1
                state.timing["row_steps"] += len(rows)
            if bad:
                rows = self._drop_bad(rows, bad, finished)
            if self._on_step:
                used, rate = self.store.used_bytes, len(tokens) / elapsed
                self._on_step({"decode_tokens_per_s": rate, "cache_bytes": used, "live_rows": len(tokens)})

    def _force_own(self, state: Row, sample: Sample) -> ForcedRow | None:
        """The row in which an answer that has just ended is forced, where that is wanted."""
        if sample.own is None or not isinstance(state, AnswerRow) or state.repeat:
            return None
        (row, logits), sample.own, request = sample.own, None, sample.request
        tokens = tuple(state.answer.token_ids[: self.fidelity_max_tokens])
        if not tokens:  # it ended at once: there is nothing to compare
            self.runner.close(row)
            sample.open_rows -= 1
            return None
        everything = [token for segment in request.segments for token in segment] + list(tokens[:-1])
        reference = self.runner.full_logits(everything, num_logits=len(tokens))
        meter = FidelityMeter(tokens, reference, exact_first=len(request.segments) == 1)
        return ForcedRow(row=row, request=request, logits=logits, meter=meter)

    def _drop_bad(
        self, rows: list[tuple[Row, Sample]], bad: dict[int, int], finished: set[str]
    ) -> list[tuple[Row, Sample]]:
        """Ends every sample that has a row with non-finite logits; `bad` maps row index to layer."""
        spoiled = {rows[index][0].request.sample_id: layer for index, layer in bad.items()}
        for state, sample in rows:
            if state.request.sample_id in spoiled:
                self.runner.close(state.row)
                if sample.own is not None:
                    self.runner.close(sample.own[0])
                    sample.own = None
                if sample.request.sample_id not in finished:
                    layer = spoiled[state.request.sample_id]
                    self._fail(sample.request, "nan", str(NotFinite(layer)), layer)
                    finished.add(sample.request.sample_id)
        return [(state, sample) for state, sample in rows if state.request.sample_id not in spoiled]

    def _finish(self, state: Row, sample: Sample, finished: set[str]) -> None:
        """Records a finished row, and hands out the sample's outcomes once all its rows are over."""
        if isinstance(state, ForcedRow):
            sample.take(state)
            if not state.request.max_new_tokens and not sample.outcomes:  # there is no answer: its bytes are the text's
                sample.outcomes[0] = self._outcome(state, sample, 0)
        elif isinstance(state, AnswerRow):
            sample.outcomes[state.repeat] = self._outcome(state, sample, state.repeat, state.answer)
        self.runner.close(state.row)
        sample.open_rows -= 1
        if sample.open_rows == 0:
            finished.add(sample.request.sample_id)
            for outcome in sample.outcomes.values():
                outcome.fidelity, outcome.drift = sample.fidelity, sample.drift
                outcome.per_token = sample.per_token if self.fidelity_per_token else None
                outcome.choices = [sample.choices[index] for index in sorted(sample.choices)]
                self._hand_out(outcome)

    def _outcome(self, state: Row, sample: Sample, repeat: int, answer: Answer | None = None) -> Outcome:
        """What a finished row says of its sample."""
        steps = state.timing.pop("row_steps")
        state.timing["batch_rows"] = steps / state.timing["decode_tokens"] if state.timing["decode_tokens"] else 0.0
        held, kept = self.store.ledger.report(state.row)
        told = Outcome(sample_id=state.request.sample_id, repeat=repeat, ledger=held, kept=kept)
        told.num_prompt_tokens = state.request.num_prompt_tokens
        told.timing = {"prefill_s": sample.prefill_s, **state.timing}
        if sample.probe_s is not None:
            told.timing["probe_s"] = sample.probe_s
        if sample.shares_context:
            told.timing["shares_context"] = 1.0
        if answer is not None:
            told.text, told.token_ids = answer.text, answer.token_ids
            told.finish, told.first_end = answer.finish, answer.first_end
        return told

    def _num_rows(self, request: Request) -> int:
        """Rows that a request needs at once: its answers, what is forced, its choices."""
        if not request.max_new_tokens:
            return bool(self._gold(request)) + len(request.choices)
        return request.num_samples + bool(self._own or self._gold(request)) + len(request.choices)

    def _gold(self, request: Request) -> tuple[int, ...]:
        """The tokens that are forced from the start; beyond the model's context only where the request says so."""
        if self._own and request.max_new_tokens:
            return ()
        room = 1 << 62 if request.past_context else self._room(request) - 1
        return tuple(request.gold[: room if self.fidelity_max_tokens is None else min(self.fidelity_max_tokens, room)])

    def _new_tokens(self, request: Request) -> int:
        """Most tokens that are read behind a request's first segment; the last one of an answer is only predicted."""
        own = min(request.max_new_tokens, self._room(request))
        answers = [own, len(self._gold(request)), *map(len, request.choices)]
        return sum(map(len, request.segments[1:])) + max(answers) - 1

    def _room(self, request: Request) -> int:
        """Tokens that fit behind the prompt; the last one is only predicted, never read."""
        return self.loaded.max_tokens - request.num_prompt_tokens + 1

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


def _reason(error: BaseException) -> str:
    """The first line of what an error says; torch's go on with the stack of its own code."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
