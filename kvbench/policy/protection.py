"""Which tokens no eviction takes, beside those that a method keeps itself."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.policy.budget import Budget
from kvbench.policy.views import DecodeView, PrefillView

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

    def check(self, budget: Budget, evicts_later: bool, how_to: str) -> None:
        """Refuses what cannot be protected.

        Args:
            budget: The method's.
            evicts_later: The method evicts while decoding.
            how_to: What to set so that it does.

        Raises:
            ValueError: Names the settings and the remedy.
        """
        if self.of in ("prompt", "answer") and not evicts_later:
            raise ValueError(
                f"protect={self.of} is about evictions while decoding, and these settings make none; {how_to}"
            )
        if self.of == "instruction" and budget.unit == "bytes":
            raise ValueError(
                f"budget={budget.value:g}B counts the whole cache, and how long the instruction is that protect="
                "instruction keeps differs from text to text; give a ratio or tokens"
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

    def first_of_prompt(self, view: PrefillView) -> int:
        """First tokens of a prompt that stay."""
        return self.first(view.instruction_tokens)

    def first_held(self, view: DecodeView) -> Tensor:
        """int64 [S]: first tokens of each sequence that no eviction takes."""
        if self.of == "prompt":
            return view.prompt_tokens
        if self.of == "instruction":
            return view.instruction_tokens
        return torch.full_like(view.prompt_tokens, self.sinks)

    def slots(self, view: DecodeView, pos: Tensor) -> Tensor:
        """bool [S, L, H, n]: slots at these positions that are never evicted."""
        if self.of == "answer":
            return pos >= view.prompt_tokens[:, None, None, None]
        return pos < self.first_held(view)[:, None, None, None]
