"""What every row has seen: the numbers that positions, budgets and shares are counted from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counters:
    """Tokens per row, and what the prompt's plan gave each list.

    Args:
        tokens_seen: int64 [rows]: tokens before the incoming one.
        prompt_tokens: int64 [rows].
        prompt_slots: int32 [lists]; empty where nobody asks, since only bulk eviction does.
        instruction_tokens: int64 [rows], likewise.
        seen: `tokens_seen` as the host counts it, so that nobody asks a device; change both by `hold`.
    """

    tokens_seen: Tensor
    prompt_tokens: Tensor
    prompt_slots: Tensor
    instruction_tokens: Tensor
    seen: list[int] = field(default_factory=list)

    def open(self, row: int, instruction_tokens: int) -> None:
        """Begins a row anew, of whose prompt so many first tokens are the instruction."""
        self.hold(row, 0)
        self.prompt_tokens[row] = 0
        if self.instruction_tokens.numel():
            self.instruction_tokens[row] = instruction_tokens

    def copy(self, source: int, row: int) -> None:
        """Lets a row have seen what another one has."""
        for counter in (self.tokens_seen, self.prompt_tokens, self.instruction_tokens):
            if counter.numel():
                counter[row] = counter[source]
        self.seen[row] = self.seen[source]
        if self.prompt_slots.numel():
            slots = self.prompt_slots.view(len(self.tokens_seen), -1)
            slots[row] = slots[source]

    def hold(self, row: int, tokens: int) -> None:
        """Notes that a row has seen so many tokens."""
        self.tokens_seen[row] = self.seen[row] = tokens

    def step(self, rows: Tensor) -> None:
        """Notes that rows (distinct) have each seen one more; `step_on_host` is the host's part."""
        self.tokens_seen.scatter_(0, rows, 1, reduce="add")

    def step_on_host(self, numbers: Sequence[int]) -> None:
        """The same for the host."""
        for number in numbers:
            self.seen[number] += 1

    @staticmethod
    def make(rows: int, lists: int, device: torch.device, needs_instruction: bool = False) -> "Counters":
        """Counters at 0; `lists` = 0 keeps no prompt slots."""
        seen, prompt = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        instruction = torch.zeros(rows if needs_instruction else 0, dtype=torch.int64, device=device)
        return Counters(seen, prompt, torch.zeros(lists, dtype=torch.int32, device=device), instruction, [0] * rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the counters, as the tensors hold them."""
        held = (self.tokens_seen, self.prompt_tokens, self.prompt_slots, self.instruction_tokens)
        return sum(counter.nbytes for counter in held)

    @property
    def repeated_bytes(self) -> int:
        """What of a row's part is about all its lists, and so the same wherever some of them lie."""
        return (self.allocated_bytes - self.prompt_slots.nbytes) // len(self.tokens_seen)

    @property
    def row_bytes(self) -> int:
        """One row's part of them."""
        return self.allocated_bytes // len(self.tokens_seen)
