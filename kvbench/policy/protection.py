"""Which tokens no eviction takes, beside those that a method keeps itself."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.views import DecodeView

Protect = Literal["none", "sinks", "instruction", "prompt", "answer"]


@dataclass(frozen=True)
class Protection:
    """What is protected, of a prompt and while decoding.

    Args:
        of: The setting `protect`.
        tokens: First tokens that `sinks` keeps.
    """

    of: Protect = "none"
    tokens: int = 4

    def check(self, given: object, budget: Budget, no_eviction: str) -> None:
        """Refuses what cannot be protected.

        Args:
            given: The method's budget, as it was written.
            budget: The same, as it was read.
            no_eviction: What to set so that the method evicts while decoding; empty = it does.

        Raises:
            ValueError: Names the settings and the remedy.
        """
        if self.of in ("prompt", "answer") and no_eviction:
            raise ValueError(
                f"protect={self.of} is about evictions while decoding, and these settings make none; {no_eviction}"
            )
        if self.of == "instruction" and budget.unit == "bytes":
            raise ValueError(
                f"budget={given} counts the whole cache, and how long the instruction is that protect=instruction "
                "keeps differs from text to text; give a ratio or tokens"
            )

    @property
    def sinks(self) -> int:
        """First tokens that are never evicted, whatever the budget."""
        return self.tokens if self.of == "sinks" else 0

    @property
    def is_first(self) -> bool:
        """Protects first tokens, which take their room in the budget."""
        return self.of in ("sinks", "instruction")

    def first(self, instruction_tokens: int) -> int:
        """First tokens of a sequence that are never evicted, of one with so long an instruction."""
        return max(self.sinks, instruction_tokens)

    def first_held(self, view: DecodeView) -> int | Tensor:
        """First tokens that no eviction takes: int64 [S] where sequences differ, else one number."""
        if self.of == "prompt":
            return view.prompt_tokens
        return view.instruction_tokens if self.of == "instruction" else self.sinks

    def room(self, view: DecodeView, allowed: Tensor) -> Tensor:
        """int64 [S]: tokens that a list may hold where the budget allows so many: those that are first at least."""
        first = self.first_held(view)
        return torch.maximum(allowed, first) if isinstance(first, Tensor) else allowed.clamp(min=first)

    def slots(self, view: DecodeView, pos: Tensor) -> Tensor:
        """bool [S, L, H, n]: slots at these positions that are never evicted."""
        if self.of == "answer":
            return pos >= view.prompt_tokens[:, None, None, None]
        first = self.first_held(view)
        return pos < (first[:, None, None, None] if isinstance(first, Tensor) else first)
