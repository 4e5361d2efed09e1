"""What is in flight while the engine decodes: rows and samples."""

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
    """

    row: int
    request: Request
    logits: Tensor
    timing: dict = field(
        default_factory=lambda: {"decode_s": 0.0, "decode_share_s": 0.0, "decode_tokens": 0, "row_steps": 0}
    )

    @abstractmethod
    def next_token(self) -> int | None:
        """Consumes the logits; the token to feed, or None when the row is over."""


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
        self.answer.add(token)
        return None if self.answer.finish else token


@dataclass(kw_only=True)
class ForcedRow(Row):
    """Tokens that are being forced.

    Args:
        meter: The tokens, and what is measured on them.
        choice: Index of the choice; None for the answer that is compared with the full cache.
        ends: Of a conversation, how many tokens are forced up to the end of each answer but the last.
    """

    meter: FidelityMeter | ChoiceMeter
    choice: int | None = None
    ends: tuple[int, ...] = ()

    def next_token(self) -> int | None:
        self.meter.add(self.logits)
        done = len(self.meter.nll)
        return None if self.meter.done or done in self.ends else self.meter.gold[done - 1]


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

    def take(self, row: ForcedRow) -> None:
        """Keeps what a forced row measured."""
        if isinstance(row.meter, FidelityMeter):
            self.fidelity, self.drift = row.meter.report(), row.meter.drift()
            self.per_token = row.meter.per_token()
        elif row.choice is not None:
            self.choices[row.choice] = row.meter.report()
