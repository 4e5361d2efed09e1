"""The kinds of values that settings have. A rule says what it takes, in words and in code."""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TypeGuard

MAX_TOKENS = 2**24  # no model reads more; a larger number is a slip
MAX_BYTES = 2**50


class Rule(ABC):
    """What one setting may be."""

    unit: str = ""
    """What a number counts: `tokens`, `layers`, `bits`, ...; empty where it counts nothing."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What is allowed, as the end of `x must be ...`."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """True for a value that is allowed."""

    def near(self, value: object) -> str:
        """The allowed text that is nearest to a value that is not allowed; empty for none."""
        return ""

    def check(self, name: str, value: object) -> None:
        """Refuses a value that is not allowed.

        Args:
            name: The setting, as the user writes it.
            value: What was given.

        Raises:
            ValueError: Names the setting, its value and what is allowed.
        """
        if not self.fits(value):
            raise ValueError(f"{name}={shown(value)} must be {self.text}")


@dataclass(frozen=True)
class Whole(Rule):
    """A whole number; True and 1.0 are none.

    Args:
        low: Smallest; None = no limit.
        high: Largest; None = `MAX_TOKENS` for tokens, otherwise no limit.
        unit: What it counts.
        multiple_of: It is a multiple of this.
        odd: It is odd.
        also: Further values, for example -1 for all or `auto`.
    """

    low: int | None = None
    high: int | None = None
    unit: str = ""
    multiple_of: int = 1
    odd: bool = False
    also: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        if self.high is None and self.unit == "tokens":
            object.__setattr__(self, "high", MAX_TOKENS)

    @property
    def text(self) -> str:
        what = "an odd whole number" if self.odd else "a whole number"
        of = "of " if self.multiple_of == 1 else ""
        what = what if of else f"a multiple of {self.multiple_of}"
        return what + (f" {of}{self.unit}" if self.unit else "") + _range(self.low, self.high) + _or(self.also)

    def fits(self, value: object) -> bool:
        if any(is_same(value, other) for other in self.also):
            return True
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return inside and value % self.multiple_of == 0 and (not self.odd or value % 2 == 1)


@dataclass(frozen=True)
class Number(Rule):
    """A finite number, whole or not; NaN and the infinities are none.

    Args:
        low: Smallest; None = no limit.
        high: Largest; None = no limit.
        unit: What it counts.
        above: `low` itself is not allowed.
        also: Further values, for example 0 for never.
    """

    low: float | None = None
    high: float | None = None
    unit: str = ""
    above: bool = False
    also: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        if self.low is not None and self.high is not None:
            limits = f" in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"
        else:
            limits = _range(self.low, self.high)
        return "a number" + (f" of {self.unit}" if self.unit else "") + limits + _or(self.also)

    def fits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if value in self.also:
            return True
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or value <= self.high


@dataclass(frozen=True)
class Flag(Rule):
    """True or false; neither text nor 0 and 1."""

    @property
    def text(self) -> str:
        return "true or false"

    def fits(self, value: object) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Choice(Rule):
    """One of several values.

    Args:
        options: All there are.
        unit: What they count.
    """

    options: tuple[object, ...]
    unit: str = ""

    @property
    def text(self) -> str:
        *first, last = map(repr, self.options)
        return (f"{', '.join(first)} or {last}" if first else last) + (f" {self.unit}" if self.unit else "")

    def fits(self, value: object) -> bool:
        return any(is_same(value, option) for option in self.options)

    def near(self, value: object) -> str:
        names = [option for option in self.options if isinstance(option, str)]
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.4) if isinstance(value, str) else []
        return near[0] if near else ""


@dataclass(frozen=True)
class Text(Rule):
    """Text.

    Args:
        empty: It may be empty.
    """

    empty: bool = False

    @property
    def text(self) -> str:
        return "text" if self.empty else "text that is not empty"

    def fits(self, value: object) -> bool:
        return isinstance(value, str) and (self.empty or bool(value))


@dataclass(frozen=True)
class Day(Rule):
    """A day of the calendar, as YYYY-MM-DD."""

    @property
    def text(self) -> str:
        return "a day, written as YYYY-MM-DD"

    def fits(self, value: object) -> bool:
        try:
            return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
        except ValueError:
            return False


@dataclass(frozen=True)
class Several(Rule):
    """A list of different values.

    Args:
        item: What each of them may be.
        alone: What may stand there without a list; None = nothing.
        least: How many there are at least.
    """

    item: Rule
    alone: Rule | None = None
    least: int = 1

    @property
    def text(self) -> str:
        if self.alone == self.item:
            return f"{self.item.text}, or a list of different ones"
        first = "" if self.alone is None else f"{self.alone.text}, or "
        return f"{first}a list of different values, each {self.item.text}"

    def fits(self, value: object) -> bool:
        if self.alone is not None and self.alone.fits(value):
            return True
        if not _is_list(value) or len(value) < self.least or not all(map(self.item.fits, value)):
            return False
        return not any(is_same(item, other) for at, item in enumerate(value) for other in value[:at])

    def near(self, value: object) -> str:
        items = value if _is_list(value) else [value]
        return next((self.item.near(item) for item in items if not self.item.fits(item)), "")


@dataclass(frozen=True)
class TableOrPath(Rule):
    """A path, or rows of finite numbers."""

    @property
    def text(self) -> str:
        return "the path of a file, or a list of lists of numbers"

    def fits(self, value: object) -> bool:
        if isinstance(value, str):
            return bool(value)
        return all(_is_list(row) and all(map(Number().fits, row)) for row in value) if _is_list(value) else False


@dataclass(frozen=True)
class Values(Rule):
    """Names with plain values, for a program that is not ours."""

    @property
    def text(self) -> str:
        return "names with values, each a number, text, true or false, or a list of these: {name: value}"

    def fits(self, value: object) -> bool:
        if not isinstance(value, Mapping) or not value:
            return False
        named = all(isinstance(key, str) and key for key in value)
        return named and all(all(map(_is_plain, one)) if _is_list(one) else _is_plain(one) for one in value.values())


def is_same(value: object, other: object) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values."""
    return type(value) is type(other) and value == other


def shown(value: object) -> str:
    """A value in a message; of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bool) or Number().fits(value)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return "" if high is None else f", at most {high}"


def _or(also: Sequence[object]) -> str:
    return "".join(f", or {item}" for item in also)
