"""Reads requests: each on its own, into the rows in which its answers are decoded and its texts are forced."""

import time
from collections.abc import Generator, Iterator, Sequence

from torch import Tensor

from kvbench.engine.admission import Admission, Forced, SharedContexts
from kvbench.engine.answer import Answer
from kvbench.engine.decode_loop import DecodeLoop
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter, copied_tokens
from kvbench.engine.long_logits import Logits, take
from kvbench.engine.requests import Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row, Sample
from kvbench.engine.runner import Runner
from kvbench.engine.sampling import answer_seed
from kvbench.errors import BrokenRule


class Reader:
    """Opens the rows of requests, which come in about the order of `requests`.

    Args:
        end_ids: Tokens that end an answer.
        seed: Base of every answer's own random numbers.

    Attributes:
        contexts: First segments that several requests share.
    """

    def __init__(
        self,
        runner: Runner,
        loop: DecodeLoop,
        admission: Admission,
        requests: Sequence[Request],
        end_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        self._runner, self._loop, self._admission, self._end_ids, self._seed = runner, loop, admission, end_ids, seed
        self.contexts = SharedContexts(runner, requests, self._begins_with, self._read)

    def open(self, sample: Sample) -> Generator[list[Row] | None]:
        """Reads a prompt; yields None wherever other rows may make a step, and finally its rows.

        After an exception, or when the generator is closed, no row of it stays open.
        """
        request, spent_s, begin = sample.request, 0.0, time.perf_counter()
        sample.shares_context = self.contexts.holds(request)
        rows: list[Row] = []
        try:
            for prefilled in self._prefill(sample):
                if prefilled is None:
                    spent_s += time.perf_counter() - begin
                    yield None
                    begin = time.perf_counter()
                else:
                    self._note_time(sample, spent_s + time.perf_counter() - begin)
                    rows = self._rows(sample, *prefilled)
        except BaseException as error:
            self.close(sample)
            if isinstance(error, BrokenRule):
                raise BrokenRule(f"{error} (sample {request.sample_id})") from error
            raise
        yield rows

    def close(self, sample: Sample) -> None:
        """Closes all rows of a sample."""
        while sample.open_rows:
            self._runner.close(sample.open_rows[-1])
            sample.open_rows.pop()

    def force(self, row: int, request: Request, logits: Tensor, forced: Forced, reference: Logits) -> ForcedRow:
        """A row in which answers are forced and compared with the full cache's logits after the prompt."""
        exact = self._sees_all(request)
        meter = FidelityMeter(
            forced.gold,
            take(reference, forced.indices),
            exact_first=exact,
            warmup=request.warmup_tokens,
            copied=copied_tokens(request.prompt, [*forced.behind, *forced.gold[-1:]], forced.indices),
        )
        return ForcedRow(row=row, request=request, logits=logits, meter=meter, ends=forced.ends)

    def reference(self, request: Request, forced: Forced) -> Logits:
        """The full cache's logits after a prompt and after each token that is forced."""
        return self._runner.full_logits([*request.prompt, *forced.behind], num_logits=len(forced.behind) + 1)

    def _note_time(self, sample: Sample, seconds: float) -> None:
        replays = self._runner.prompts.limit_bytes > 0  # and a replay takes no prefill
        sample.prefill_s = None if replays else seconds
        sample.probe_s = None if replays or sample.shares_context else self._runner.probe_s or None

    def _rows(self, sample: Sample, row: int, logits: Tensor, reference: Logits | None) -> list[Row]:
        """The rows of a sample whose prompt is read: of each answer, of what is forced, and of each choice."""
        request, room = sample.request, self._admission.room(sample.request)
        rows: list[Row] = []
        for repeat in range(request.num_samples if request.max_new_tokens else 0):
            answer_row = row if repeat == 0 else self._fork(row, sample)
            answer = Answer(request, self._admission.model.tokenizer, self._end_ids, room)
            seed = answer_seed(self._seed, request.sample_id, repeat) if request.temperature > 0 else None
            rows.append(
                AnswerRow(row=answer_row, request=request, logits=logits, repeat=repeat, answer=answer, seed=seed)
            )
        if self._admission.force_generated and request.max_new_tokens:
            sample.generated_row = self._fork(row, sample), logits
        forced: list[Row] = []
        if reference is not None:
            forced.append(self.force(row, request, logits, self._admission.forced(request), reference))
        for index, tokens in enumerate(request.choices):
            forced.append(ForcedRow(row=row, request=request, logits=logits, meter=ChoiceMeter(tokens), choice=index))
        for number, state in enumerate(forced):
            if number or request.max_new_tokens:
                state.row = self._fork(row, sample)
        return rows + forced

    def _fork(self, row: int, sample: Sample) -> int:
        sample.open_rows.append(fork := self._loop.fork(row, sample.request))
        return fork

    def _prefill(self, sample: Sample) -> Iterator[tuple[int, Tensor, Logits | None] | None]:
        """Reads a prompt into a new row; yields None between chunks, and finally the row and logits.

        These are next-token logits [vocabulary], and the full cache's logits after the prompt and after each forced
        token.
        """
        request, runner = sample.request, self._runner
        forced, rest, sees_all = self._admission.forced(request), request.segments[1:], self._sees_all(request)
        # Tokens after the prompt attend to the uncompressed prompt in the same pass, if there is one: their logits are
        # the full-cache reference.
        reference: Logits | None = None
        if rest:
            row = self.contexts.open_row(request)
            runner.store.ledger.resize(row, self._admission.new_tokens(request))  # it may be another one's
        elif sees_all:
            lookahead = () if runner.states.row_bytes else forced.behind
            row, read = self._read(request, lookahead)
            reference, logits = (read if forced.gold and len(lookahead) == len(forced.behind) else None), read[0]
        else:
            new_tokens = self._admission.new_tokens(request)
            for chunk in runner.read_chunks(request.segments[0], new_tokens, request.instruction_tokens):
                if chunk is None:
                    yield None
                else:
                    row, logits = chunk[0], chunk[1][0]
        sample.open_rows.append(row)
        for segment in rest:
            logits = runner.append(row, segment)
        if forced.gold and reference is None:
            reference = self.reference(request, forced)
        runner.store.ledger.restart(row)  # averages are over the answer, not over a question fed token by token
        yield row, logits, reference

    def _sees_all(self, request: Request) -> bool:
        """True if the end of a prompt sees all of it uncompressed."""
        return len(request.segments) == 1 and not self._runner.reads_in_chunks(request.segments[0])

    def _begins_with(self, request: Request) -> tuple:
        """All that the compressed first segment depends on: a budget in bytes counts the tokens that come after it."""
        policy = self._runner.policy
        planned = self._admission.new_tokens(request) if policy.byte_budget is not None else None
        closing = request.closing if policy.score.probe is not None else None
        return request.segments[0], request.instruction_tokens, planned, closing

    def _read(self, request: Request, lookahead: tuple[int, ...] = ()) -> tuple[int, Logits]:
        new_tokens, instruction_tokens = self._admission.new_tokens(request), request.instruction_tokens
        return self._runner.read(request.segments[0], lookahead, new_tokens, instruction_tokens, request.closing)
