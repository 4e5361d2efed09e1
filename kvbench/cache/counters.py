"""Tokens that every row has seen: the numbers that positions, budgets and shares are counted from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.cache.async_counts import Rows


@dataclass(frozen=True)
class Counters:
    """Tokens per row (int64 [rows], `tokens_seen` without the incoming one), and what the prompt's plan gave each list.

    `prompt_slots` (int32 [lists]) and `instruction_tokens` are empty where no method needs them. `seen` is the host's
    count of `tokens_seen`, so that no device is read; change both by `hold`.
    """

    tokens_seen: Tensor
    prompt_tokens: Tensor
    prompt_slots: Tensor
    instruction_tokens: Tensor
    seen: list[int] = field(default_factory=list)

    @staticmethod
    def make(rows: int, lists: int, device: torch.device, needs_instruction: bool = False) -> "Counters":
        """Counters at 0; `lists` = 0 keeps no prompt slots."""
        seen, prompt = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        instruction = torch.zeros(rows if needs_instruction else 0, dtype=torch.int64, device=device)
        return Counters(seen, prompt, torch.zeros(lists, dtype=torch.int32, device=device), instruction, [0] * rows)

    def open(self, row: int, instruction_tokens: int) -> None:
        """Begins a row anew, of whose prompt so many first tokens are the instruction."""
        self.hold(row, 0)
        self.prompt_tokens[row] = 0
        if self.instruction_tokens.numel():
            self.instruction_tokens[row] = instruction_tokens

    def instruction_of(self, row: int) -> int:
        """First tokens of a row's prompt that are its instruction; 0 where no method needs them."""
        return int(self.instruction_tokens[row]) if self.instruction_tokens.numel() else 0

    def copy(self, source: int, row: int) -> None:
        for counter in (self.tokens_seen, self.prompt_tokens, self.instruction_tokens):
            if counter.numel():
                counter[row] = counter[source]
        self.seen[row] = self.seen[source]
        if self.prompt_slots.numel():
            slots = self.prompt_slots.view(len(self.tokens_seen), -1)
            slots[row] = slots[source]

    def hold(self, row: int, tokens: int) -> None:
        self.tokens_seen[row] = self.seen[row] = tokens

    def step(self, rows: Rows) -> None:
        """Notes that rows (distinct) have each seen one more."""
        self.tokens_seen.scatter_(0, rows.tensor, 1, reduce="add")
        self.step_on_host(rows.numbers)

    def step_on_host(self, numbers: Sequence[int]) -> None:
        """The host's part, which is all of it where a captured step counts on the device."""
        for number in numbers:
            self.seen[number] += 1

    @property
    def allocated_bytes(self) -> int:
        held = (self.tokens_seen, self.prompt_tokens, self.prompt_slots, self.instruction_tokens)
        return sum(counter.nbytes for counter in held)

    @property
    def repeated_bytes(self) -> int:
        """Bytes of a row's part that is about all its lists, and so the same wherever some of them lie."""
        return (self.allocated_bytes - self.prompt_slots.nbytes) // len(self.tokens_seen)

    @property
    def row_bytes(self) -> int:
        return self.allocated_bytes // len(self.tokens_seen)


class CountsBeforeStep:
    """Copies of the counts that a step changes and the ledger reads, on their device.

    They serve rows that turn out, at the step's end, to have ended before it. `seen` are the tokens that the host has
    counted.
    """

    def __init__(self, held: list[Tensor], seen: list[int]) -> None:
        self._held, self._seen = held, seen
        self._before = [count.clone() for count in held]

    def note(self) -> None:
        """Notes what all rows hold; waits for nothing."""
        torch._foreach_copy_(self._before, self._held)

    @contextmanager
    def restored(self, row: int) -> Iterator[None]:
        """Context in which the ledger reports a row as it was at `note`, one step ago.

        The row can only be closed afterwards: its pages still hold one token more.
        """
        now = [count.clone() for count in self._held]
        torch._foreach_copy_(self._held, self._before)
        self._seen[row] -= 1
        try:
            yield
        finally:
            torch._foreach_copy_(self._held, now)
            self._seen[row] += 1
