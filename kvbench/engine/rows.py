"""Rows and samples in flight while the engine decodes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.engine.answer import Answer
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.sampling import choose_token


@dataclass(kw_only=True)
class Row(ABC):
    """A sequence in decoding.

    Args:
        row: The runner's row.
        request: What it belongs to.
        logits: fp32 [vocabulary], for the next token.
        timing: Seconds, tokens and rows of its steps so far.
        ready: The token to feed where it is known without logits; None in it = the row is over.
        report: What `Runner.report` said when the row ended, where the device has made a step more since.
    """

    row: int
    request: Request
    logits: Tensor
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
        """Steps, up to the row's end, whose tokens nobody but the device has to know before the next one; 0 = none."""

    @abstractmethod
    def settle(self, sample: "Sample") -> int | None:
        """Keeps in its sample what a finished row measured; the answer whose outcome it gives, or None."""

    @abstractmethod
    def describe(self, outcome: Outcome) -> None:
        """Puts the row's answer, if it is one, into an outcome."""

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
    """A free answer.

    Args:
        repeat: Index of the answer.
        answer: Its tokens and the rule that ends it.
        generator: The row's own random numbers; None for greedy decoding.
        turns: Of a conversation, the answers before this one, as they go into the journal.
    """

    repeat: int
    answer: Answer
    generator: torch.Generator | None = None
    turns: list[dict] = field(default_factory=list)

    def next_token(self) -> int | None:
        if (due := self.answer.due) is not None:
            self.answer.add(due)
            return None if self.answer.finish else due
        banned = self.answer.banned
        token = choose_token(self.logits, self.request, self.generator, [])
        if token in banned:  # noted, so that it is known how often answers would have ended here
            self.answer.wants_to_end()
            token = choose_token(self.logits, self.request, self.generator, banned)
        return self.take(token)

    def take(self, token: int) -> int | None:
        """Takes the model's first choice; the token to feed, or None when the row is over."""
        self.answer.add(token)
        return None if self.answer.finish else token

    def settle(self, sample: "Sample") -> int | None:
        return self.repeat

    def describe(self, outcome: Outcome) -> None:
        answer = self.answer
        outcome.text, outcome.token_ids = answer.text, answer.token_ids
        outcome.finish, outcome.first_end, outcome.turns = answer.finish, answer.first_end, self.turns

    def steps_alone(self) -> int:
        # A turn goes on with the row as it was when the answer ended; and draws come from the host's own order.
        return 0 if self.generator is not None or self.request.turns else self.answer.most_left


@dataclass(kw_only=True)
class ForcedRow(Row):
    """Tokens that are being forced.

    Args:
        meter: The tokens, and what is measured on them.
        choice: Index of the choice; None for the answer that is compared with the full cache.
        ends: Of a conversation, how many tokens are forced up to the end of each answer but the last.
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

    def steps_alone(self) -> int:
        return 0 if self.ends else len(self.meter.gold) - len(self.meter.nll)


@dataclass
class Sample:
    """A request in flight: its outcomes so far and how many rows are still open.

    With `shares_context`, another request had read its first segment, so `prefill_s` is of the rest alone.
    """

    request: Request
    prefill_s: float | None  # None: not measured
    open_rows: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    fidelity: dict | None = None
    drift: dict[str, list[float]] | None = None
    per_token: dict[str, list[float]] | None = None
    own: tuple[int, Tensor] | None = None  # a copy of the prompt's row, and its logits, that the own answer will take
    choices: dict[int, dict] = field(default_factory=dict)
    shares_context: bool = False
    probe_s: float | None = None  # of prefill_s; None without a second pass, or not measured
