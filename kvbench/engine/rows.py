"""What is in flight while the engine decodes: rows and samples."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.sampling import Answer, choose_token


@dataclass
class Row:
    """A sequence in decoding: a free answer, or tokens being forced (the gold answer, or choice `choice`)."""

    row: int
    request: Request
    repeat: int
    logits: Tensor  # fp32 [vocabulary], for the next token
    answer: Answer | None = None
    meter: FidelityMeter | ChoiceMeter | None = None
    choice: int | None = None
    generator: torch.Generator | None = None
    timing: dict = field(
        default_factory=lambda: {"decode_s": 0.0, "decode_share_s": 0.0, "decode_tokens": 0, "row_steps": 0}
    )

    def next_token(self) -> int | None:
        """Consumes the logits; the token to feed, or None when the row is over."""
        if self.meter is not None:
            self.meter.add(self.logits)
            return None if self.meter.done else self.meter.gold[len(self.meter.nll) - 1]
        token = choose_token(self.logits, self.request, self.generator, self.answer.banned)
        self.answer.add(token)
        return None if self.answer.finish else token


@dataclass
class Sample:
    """A request in flight: its outcomes so far and how many rows are still open."""

    request: Request
    prefill_s: float | None  # None: not measured
    open_rows: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    fidelity: dict | None = None
    choices: dict[int, dict] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """Keeps what a forced row measured."""
        if row.choice is None:
            self.fidelity = row.meter.report()
        else:
            self.choices[row.choice] = row.meter.report()
