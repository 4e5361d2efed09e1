"""Rows and samples in flight while the engine decodes.

In a conversation, what is said after an answer is read into the same compressed cache, and answered in its turn: the
cache keeps what it holds of the prompt and of the answers so far, and nothing is read again.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.engine.answer import Answer
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.requests import Outcome, Request, Turn
from kvbench.engine.runner import Runner
from kvbench.engine.sampling import Drawing, choose


@dataclass(kw_only=True)
class Row(ABC):
    """A sequence in decoding: the runner's row, its request, and fp32 [vocabulary] logits for the next token.

    Args:
        picked: The model's choice under the logits, where all rows of a step made theirs together.
        token: The token to feed next, once it is chosen.
        timing: Seconds, tokens and rows of its steps so far.
        ready: The token to feed where it is known without logits; None in it = the row is over.
        report: Result of `Runner.report` at the row's end, where the device has made a step more since.
    """

    row: int
    request: Request
    logits: Tensor
    picked: int | None = None
    token: int | None = None
    ready: list[int | None] = field(default_factory=list)
    report: tuple[dict, dict] | None = None
    timing: dict = field(
        default_factory=lambda: {"decode_s": 0.0, "decode_share_s": 0.0, "decode_tokens": 0, "row_steps": 0}
    )

    @abstractmethod
    def next_token(self) -> int | None:
        """Consumes the logits; the token to feed, or None when the row is over."""

    @abstractmethod
    def steps_alone(self) -> int:
        """Steps, up to the row's end, whose tokens only the device needs before the next one; 0 = none."""

    @abstractmethod
    def settle(self, sample: "Sample") -> int | None:
        """Keeps in its sample what a finished row measured; the answer whose outcome it gives, or None."""

    @abstractmethod
    def describe(self, outcome: Outcome) -> None:
        """Puts the row's answer, if it is one, into an outcome."""

    @abstractmethod
    def leave_answer(self, runner: Runner) -> tuple[Turn, list[int]] | None:
        """Ends an answer of a conversation; returns the next turn, and the answer's tokens that were not read.

        None where the conversation is over.
        """

    @property
    def drawing(self) -> Drawing | None:
        """Sampling state of the row's next token; None for the likeliest."""
        return None

    def next_turn(self, runner: Runner) -> bool:
        """Reads what is said after an answer that is over into its row; False where the conversation is over."""
        begin = time.perf_counter()
        if (left := self.leave_answer(runner)) is None:
            return False
        turn, unread = left
        with runner.store.ledger.aside(self.row):  # averages are over the answers
            self.logits, self.picked = runner.append(self.row, [*unread, *turn.tokens]), None
        self.timing["turns_s"] = self.timing.get("turns_s", 0.0) + time.perf_counter() - begin
        return True

    def note_step(self, seconds: float, num_rows: int) -> None:
        """Notes the time of a step that fed so many rows."""
        self.timing["decode_s"] += seconds
        self.timing["decode_share_s"] += seconds / num_rows
        self.timing["decode_tokens"] += 1
        self.timing["row_steps"] += num_rows

    def coming(self) -> int | None:
        """The token to feed, which a run of steps left, or from the logits; None when the row is over."""
        return self.ready.pop() if self.ready else self.next_token()


@dataclass(kw_only=True)
class AnswerRow(Row):
    """A free answer, one of several by its index.

    Of a conversation, `turns` are the answers before this one, as they go into the journal.

    Args:
        seed: Seed of its random numbers (`answer_seed`); None for greedy decoding.
        chosen: Tokens that the model has chosen so far, in all answers of the row.
    """

    repeat: int
    answer: Answer
    seed: int | None = None
    chosen: int = 0
    turns: list[dict] = field(default_factory=list)

    def next_token(self) -> int | None:
        if (due := self.answer.due) is not None:
            self.answer.add(due)
            return None if self.answer.finish else due
        banned = self.answer.banned
        token = self._choose() if self.picked is None else self.picked
        if token in banned:  # noted, so that it is known how often answers would have ended here
            self.answer.wants_to_end()
            token = self._choose(banned)
        return self.take(token)

    def _choose(self, banned: Sequence[int] = ()) -> int:
        return choose(self.logits[None], [self.drawing], banned)[0]

    def take(self, token: int) -> int | None:
        """Takes the model's choice; the token to feed, or None when the row is over."""
        self.chosen += 1
        self.answer.add(token)
        return None if self.answer.finish else token

    @property
    def drawing(self) -> Drawing | None:
        request = self.request
        return None if self.seed is None else (self.seed, self.chosen, request.temperature, request.top_p)

    def settle(self, sample: "Sample") -> int | None:
        return self.repeat

    def describe(self, outcome: Outcome) -> None:
        answer = self.answer
        outcome.text, outcome.token_ids = answer.text, answer.token_ids
        outcome.finish, outcome.first_end, outcome.turns = answer.finish, answer.first_end, self.turns

    def leave_answer(self, runner: Runner) -> tuple[Turn, list[int]] | None:
        if len(self.turns) == len(self.request.turns):
            return None
        answer, turn, (held, kept) = self.answer, self.request.turns[len(self.turns)], runner.report(self.row)
        self.turns.append(
            {
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish": answer.finish,
                "resident_bytes": held["resident_bytes"],
                "fp16_bytes": held["fp16_bytes"],
                "tokens_seen": kept["tokens_seen"],
                "num_turn_tokens": len(turn.tokens),
            }
        )
        room = answer.room - len(answer.token_ids) - len(turn.tokens)
        self.answer = Answer(self.request, answer.tokenizer, answer.end_ids, room)
        return turn, answer.unread

    def steps_alone(self) -> int:
        # A turn goes on with the row as it was when the answer ended.
        return 0 if self.request.turns else self.answer.most_left


@dataclass(kw_only=True)
class ForcedRow(Row):
    """Tokens that are being forced, with their meter.

    The index is that of a choice, None for the answer that is compared with the full cache. Of a conversation, `ends`
    are the tokens forced up to the end of each answer but the last.
    """

    meter: ChoiceMeter
    choice: int | None = None
    ends: tuple[int, ...] = ()

    def next_token(self) -> int | None:
        return self.take(self.meter.measure(len(self.meter.nll), self.logits).tolist())

    def take(self, measured: list[float]) -> int | None:
        """Takes what the meter measured on the next token; the token to feed, or None when the row is over."""
        self.meter.take(measured)
        done = len(self.meter.nll)
        return None if self.meter.done or done in self.ends else self.meter.gold[done - 1]

    def settle(self, sample: "Sample") -> int | None:
        if isinstance(self.meter, FidelityMeter):
            sample.fidelity, sample.drift = self.meter.report(), self.meter.drift()
            sample.per_token = self.meter.per_token()
        elif self.choice is not None:
            sample.choices[self.choice] = self.meter.report()
        # Where there is no answer, its bytes are the text's.
        return None if self.request.max_new_tokens or sample.outcomes else 0

    def describe(self, outcome: Outcome) -> None:
        pass

    def leave_answer(self, runner: Runner) -> tuple[Turn, list[int]] | None:
        done = len(self.meter.nll)
        return None if self.meter.done else (self.request.turns[self.ends.index(done)], [self.meter.gold[done - 1]])

    def steps_alone(self) -> int:
        return 0 if self.ends else len(self.meter.gold) - len(self.meter.nll)


@dataclass
class Sample:
    """A request in flight: its open rows, by the runner's numbers, and its outcomes so far.

    With `shares_context`, another request had read its first segment, so that `prefill_s` is of the rest alone.
    """

    request: Request
    prefill_s: float | None = None  # None: not measured
    open_rows: list[int] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    fidelity: dict | None = None
    drift: dict[str, list[float]] | None = None
    per_token: dict[str, list[float]] | None = None
    generated_row: tuple[int, Tensor] | None = None  # copy of the prompt's row, and logits, to force its answer in
    choices: dict[int, dict] = field(default_factory=dict)
    shares_context: bool = False
    probe_s: float | None = None  # of prefill_s; None without a second pass, or not measured
