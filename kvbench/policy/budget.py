"""How much of the cache a method may keep. Methods import this from `kvbench.policy`."""

import re
from dataclasses import dataclass
from typing import Literal

from kvbench.rules import MAX_BYTES, MAX_TOKENS, shown


@dataclass(frozen=True)
class Budget:
    """How much of the cache a method may keep: a ratio, tokens per KV head, or bytes per sequence.

    Written in a config as 0.25 or 1.0 (a ratio in (0, 1], always with a point), 256 (tokens; 1 is one token) or `8MiB`
    (bytes; B, KiB, MiB, GiB).
    """

    value: float
    unit: Literal["ratio", "tokens", "bytes"]

    @staticmethod
    def parse(text: object, name: str = "budget") -> "Budget":
        """Reads a budget.

        Args:
            text: A number, text or a Budget.
            name: The setting, for messages.

        Raises:
            ValueError: The text is none of the three forms, or out of range.
        """
        if isinstance(text, Budget):
            return text
        rule = (
            "write a ratio in (0, 1] such as 0.25 or 1.0, a whole number of tokens from 1 to "
            f"{MAX_TOKENS}, or bytes such as 8MiB"
        )
        number = None
        if isinstance(text, int | float | str) and not isinstance(text, bool):
            number = _number(text)
        if number is None:
            raise ValueError(f"{name}={shown(text)} is not a budget; {rule}")
        value, unit = number
        lowest, highest = {"ratio": (0, 1), "tokens": (1, MAX_TOKENS), "bytes": (1, MAX_BYTES)}[unit]
        if not lowest <= value <= highest or not value:
            raise ValueError(f"{name}={shown(text)} is out of range; {rule}")
        return Budget(float(value), unit)

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


def read_size(text: str) -> float | None:
    """Bytes of a text such as `8MiB`; None when it is none."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(B|KiB|MiB|GiB)\s*", text)
    return float(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]] if match else None


def _number(text: float | int | str) -> tuple[float, Literal["ratio", "tokens", "bytes"]] | None:
    """The number of a budget and its unit: a whole number is tokens, one with a point a ratio."""
    if isinstance(text, str):
        if (size := read_size(text)) is not None:
            return size, "bytes"
        try:
            text = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,30}\s*", text) else float(text)
        except ValueError:
            return None
    return text, "tokens" if isinstance(text, int) else "ratio"
