"""The budget of a method. Methods import this from `kvbench.policy`."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from kvbench.errors import SettingValue
from kvbench.rules import MAX_BYTES, MAX_TOKENS, Readable, shown
from kvbench.rules.sizes import NUMBER, read_size

Unit = Literal["ratio", "seen", "tokens", "bytes"]


@dataclass(frozen=True)
class Budget:
    """Share of the cache that a method may keep.

    A ratio of the prompt, a share of all tokens seen so far, tokens per KV head, or bytes per sequence.

    Written in a config as 0.25 or 1.0 (a ratio in (0, 1], always with a point), `50%seen` (a share of the prompt and of
    the answer so far, kept to at every step), 256 (tokens; 1 is one token) or `8MiB` (bytes; B, KiB, MiB, GiB).

    Attributes:
        value: The ratio, the share in (0, 1], tokens, or bytes.
    """

    value: float
    unit: Unit

    @staticmethod
    def parse(text: object, name: str = "budget") -> "Budget":
        """Reads a budget.

        Args:
            text: A number, text or a Budget.
            name: The setting, for messages.

        Raises:
            ValueError: The text is none of the four forms, or out of range.
        """
        if isinstance(text, Budget):
            return text
        rule = (
            "write a ratio in (0, 1] of the prompt such as 0.25 or 1.0, a share of all tokens seen, above 0% and at "
            f"most 100%, such as 50%seen, a whole number of tokens from 1 to {MAX_TOKENS}, or bytes such as 8MiB"
        )
        number = None
        if isinstance(text, int | float | str) and not isinstance(text, bool):
            number = _number(text)
        if number is None:
            raise SettingValue(f"{name}={shown(text)} is not a budget; {rule}", setting=name)
        value, unit = number
        ranges = {"ratio": (0, 1), "seen": (0, 1), "tokens": (1, MAX_TOKENS), "bytes": (1, MAX_BYTES)}
        lowest, highest = ranges[unit]
        if not lowest <= value <= highest or not value:
            raise SettingValue(f"{name}={shown(text)} is out of range; {rule}", setting=name)
        return Budget(float(value), unit)

    @property
    def of_seen(self) -> bool:
        """True for a share of all tokens seen, which lists keep to while an answer grows."""
        return self.unit == "seen"

    @property
    def text(self) -> str:
        """The budget as written in messages; a share of all tokens seen is written so everywhere."""
        return f"{100 * self.value:.12g}%seen" if self.of_seen else f"{self.value:g} {self.unit}"

    def tokens(self, num_tokens: int, lists: int, token_bytes: float) -> int:
        """Tokens per list, >= 1, that the budget allows a sequence with a prompt of `num_tokens`.

        Args:
            num_tokens: Prompt length, which a ratio refers to; the tokens seen, which a share of them refers to.
            lists: Layers x KV heads.
            token_bytes: Bytes of one slot.

        Raises:
            ValueError: A byte budget is below one token per list.
        """
        if self.unit in ("ratio", "seen"):
            return max(1, int(self.value * num_tokens + 1e-9))  # 0.3 * 10 must give 3, not 2
        if self.unit == "tokens":
            return int(self.value)
        tokens = int(self.value / (lists * token_bytes))
        if tokens < 1:
            raise SettingValue(
                f"budget={int(self.value)}B holds less than one token per KV head ({lists} lists x {token_bytes:g} B); "
                "raise it",
                setting="method.budget",
            )
        return tokens


@dataclass(frozen=True)
class BudgetRule(Readable):
    """Rule of settings that `Budget.parse` reads."""

    text = (
        "a ratio in (0, 1] of the prompt such as 0.25, a share of all tokens seen such as 50%seen, a whole number of "
        "tokens per KV head, or bytes such as 8MiB"
    )

    def check(self, name: str, value: object) -> None:
        Budget.parse(value, name)

    def read(self, value: Any) -> Any:
        budget = Budget.parse(value)
        return {"ratio": budget.value, "seen": budget.text, "tokens": int(budget.value)}.get(budget.unit, value)


BudgetText = Annotated[float | int | str, BudgetRule()]
"""A setting that says how much may be kept."""


def _number(text: float | int | str) -> tuple[float, Unit] | None:
    """The number of a budget and its unit: a whole number is tokens, one with a point a ratio."""
    if isinstance(text, str):
        if (size := read_size(text)) is not None:
            return size, "bytes"
        if share := re.fullmatch(rf"\s*{NUMBER}\s*%\s*seen\s*", text):
            return float(share[1]) / 100, "seen"
        try:
            text = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,30}\s*", text) else float(text)
        except ValueError:
            return None
    return text, "tokens" if isinstance(text, int) else "ratio"
