"""How much of the cache a method may keep. Methods import this from `kvbench.policy`."""

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Budget:
    """How much of the cache a method may keep: a ratio, tokens per KV head, or bytes per sequence.

    Written in a config as 0.25 (ratio in (0, 1]), 256 (tokens, an integer >= 2) or `8MiB` (bytes; B, KiB, MiB, GiB).
    """

    value: float
    unit: Literal["ratio", "tokens", "bytes"]

    @staticmethod
    def parse(text: "float | int | str | Budget") -> "Budget":
        """Reads a budget.

        Raises:
            ValueError: The text is none of the three forms, or out of range.
        """
        if isinstance(text, Budget):
            return text
        rule = "write a ratio in (0, 1], a whole number of tokens >= 2, or bytes such as 8MiB"
        match = re.fullmatch(r"\s*([0-9.]+)\s*(B|KiB|MiB|GiB)\s*", str(text))
        if match:
            scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]]
            return Budget(float(match[1]) * scale, "bytes")
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"budget={text!r} is not a budget; {rule}") from None
        if 0 < value <= 1:
            return Budget(value, "ratio")
        if value >= 2 and value == int(value):
            return Budget(value, "tokens")
        raise ValueError(f"budget={text} is out of range; {rule}")

    def tokens(self, num_tokens: int, lists: int, token_bytes: float) -> int:
        """Tokens per list, >= 1, that the budget allows a sequence with a prompt of `num_tokens`.

        Args:
            num_tokens: Prompt length, which a ratio refers to.
            lists: Layers x KV heads.
            token_bytes: Bytes of one slot.

        Raises:
            ValueError: A byte budget is below one token per list.
        """
        if self.unit == "ratio":
            return max(1, int(self.value * num_tokens + 1e-9))  # 0.3 * 10 must give 3, not 2
        if self.unit == "tokens":
            return int(self.value)
        tokens = int(self.value / (lists * token_bytes))
        if tokens < 1:
            raise ValueError(
                f"budget={int(self.value)}B holds less than one token per KV head ({lists} lists x {token_bytes:g} B); "
                "raise it"
            )
        return tokens
