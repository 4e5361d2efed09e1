"""Rules of settings: type, range and unit, declared once in the field's annotation, in words and in code.

A field says it in its annotation: `window: Annotated[int, Whole(1, unit="tokens")] = 32`. A `bool`, a `Literal`, and an
`int`, `float` or `str` without more, need no rule of their own. `| None` also allows None.
"""

import difflib
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from kvbench.errors import BrokenRule, SettingValue

MAX_TOKENS = 2**24  # no model reads more; a larger number is a slip
MAX_BYTES = 2**50


class Rule(ABC):
    """Values that one setting may have."""

    unit: str = ""
    """What a number counts: `tokens`, `layers`, `bits`, ...; empty where it counts nothing."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Allowed values, as the end of `x must be ...`."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """True for a value that is allowed."""

    def read(self, value: Any) -> Any:
        """An allowed value as it counts: values that mean the same are equal then. Default: unchanged."""
        return value

    def near(self, value: object) -> str:
        """The allowed text that is nearest to a value that is not allowed; empty for none."""
        return ""

    def check(self, name: str, value: object) -> None:
        """Refuses a value of a setting, named as the user writes it, with a ValueError that says what is allowed."""
        if not self.fits(value):
            raise SettingValue(f"{name}={shown(value)} must be {self.text}", setting=name)


class Readable(Rule):
    """Values that a function reads; a subclass defines `check`, which lets it refuse the rest in its own words."""

    def fits(self, value: object) -> bool:
        try:
            self.check("it", value)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Whole(Rule):
    """A whole number; True and 1.0 are none.

    Args:
        low: Smallest; None = no limit.
        high: Largest; None = `MAX_TOKENS` for tokens, otherwise no limit.
        unit: Unit of the number.
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
        if self.multiple_of > 1:
            what = f"a multiple of {self.multiple_of}" + (f" {self.unit}" if self.unit else "")
        else:
            what = ("an odd" if self.odd else "a") + " whole number" + (f" of {self.unit}" if self.unit else "")
        return what + _range(self.low, self.high) + _or(self.also)

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
        unit: Unit of the number.
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
        limits = _range(self.low, self.high)
        if self.low is not None and self.high is not None:
            limits = f" in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"
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
class Choice(Rule):
    """One of several values.

    Args:
        options: All there are.
        unit: Unit of the numbers.
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
class Several(Rule):
    """A list of different values.

    Args:
        item: Rule of each of them.
        alone: Rule of a value without a list; None = not allowed.
        least: Least number of them.
        ordered: Their order means something.
    """

    item: Rule
    alone: Rule | None = None
    least: int = 1
    ordered: bool = True

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

    def read(self, value: Any) -> Any:
        return value if self.ordered or not isinstance(value, list | tuple) else type(value)(sorted(value))

    def near(self, value: object) -> str:
        items = value if _is_list(value) else [value]
        return next((self.item.near(item) for item in items if not self.item.fits(item)), "")


@dataclass(frozen=True)
class Text(Rule):
    """Text, which may be `empty`."""

    empty: bool = False

    @property
    def text(self) -> str:
        return "text" if self.empty else "text that is not empty"

    def fits(self, value: object) -> bool:
        return isinstance(value, str) and (self.empty or bool(value))

    def check(self, name: str, value: object) -> None:
        super().check(name, value)
        if isinstance(value, str) and is_half(value):
            raise SettingValue(
                f"{name}={shown(value)} holds half of a character pair, which is no UTF-8; write it anew", setting=name
            )


@dataclass(frozen=True)
class Form(Rule):
    """A value that a function accepts, and its form in words."""

    text: str = ""
    fits: Callable[[object], bool] = bool  # type: ignore[assignment]  # a field in place of a method


def _is_day(value: object) -> bool:
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _is_table_or_path(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return _is_list(value) and bool(value) and all(_is_list(row) and all(map(Number().fits, row)) for row in value)


def _has_values(value: object) -> bool:
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) and key for key in value):
        return False
    return all(all(map(_is_plain, one)) if _is_list(one) else _is_plain(one) for one in value.values())


FLAG = Form("true or false", lambda value: isinstance(value, bool))  # neither text nor 0 and 1
DAY = Form("a day, written as YYYY-MM-DD", _is_day)
TABLE_OR_PATH = Form("the path of a file, or a list of lists of numbers", _is_table_or_path)
VALUES = Form(
    "names with values, each a number, text, true or false, or a list of these: {name: value}", _has_values
)  # for a program that is not ours
PLAIN: Mapping[object, Rule] = {bool: FLAG, int: Whole(), float: Number(), str: Text()}


class Declared:
    """Declaration of one field: its annotation, evaluated, with what `Annotated` adds."""

    def __init__(self, name: str, annotation: object) -> None:
        self.name = name
        rules, kinds = _parts(annotation)
        self.optional = type(None) in kinds
        """None is allowed."""
        self.kinds = tuple(kind for kind in kinds if kind is not type(None))
        """Its types, without None."""
        self.rule: Rule | None = rules[0] if rules else _plain(self.kinds)
        """What it may be; None where only the class itself can tell."""

    @property
    def text(self) -> str:
        """Allowed values, in words, where a rule has them."""
        return (self.rule.text if self.rule else "a value") + (", or null" if self.optional else "")

    def read(self, value: Any) -> Any:
        """A value as it counts, where the field may have it: 0 and -0.0 of a field that is a float are 0.0."""
        if value is None or self.rule is None or not self.rule.fits(value):
            return value
        if isinstance(self.rule, Number) and self.kinds == (float,):
            return float(value) + 0.0
        return self.rule.read(value)

    def check(self, value: object, prefix: str = "", group: str | None = None) -> None:
        """Refuse a value that the field may not have; see `check_settings`."""
        if (value is None and self.optional) or self.rule is None:
            return
        try:
            self.rule.check(f"{prefix}{self.name}", value)
        except ValueError as error:
            near = self.rule.near(value)
            hint = f". Did you mean {near}?" if near else ""
            said = f"{error}{', or null' if self.optional else ''}{hint}"
            raise SettingValue(said, setting=f"{prefix if group is None else group}{self.name}") from None


_READ: dict[type, Mapping[str, Declared]] = {}  # class -> its settings; looked up by every object


def declared(kind: type) -> Mapping[str, Declared]:
    """The settings of a dataclass by name: the fields that its constructor takes.

    Raises:
        ValueError: An annotation of the class is none.
    """
    if kind not in _READ:
        try:
            hints = get_type_hints(kind, include_extras=True)
        except Exception as error:  # whatever evaluating somebody's text raises
            raise BrokenRule(
                f"the annotations of {kind.__name__} cannot be read ({type(error).__name__}: {error}); a setting has "
                "a type, such as Annotated[int, Whole(1)]"
            ) from error
        _READ[kind] = {item.name: Declared(item.name, hints[item.name]) for item in fields(kind) if item.init}
    return _READ[kind]


def check_settings(held: object, prefix: str = "", group: str | None = None) -> None:
    """Refuses an object with a setting outside its rule.

    Args:
        held: A dataclass object.
        prefix: Prefix of the names on the command line, for example `store.`.
        group: Prefix of the name in the error's `setting`; `prefix` by default. A method's message names a field as
            Python does, `budget`, its setting as the command line does, `method.budget`.

    Raises:
        SettingValue: Names the first such setting, its value and what is allowed.
    """
    for name, field in declared(type(held)).items():
        field.check(getattr(held, name), prefix, group)


def is_same(value: object, other: object) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values."""
    return type(value) is type(other) and value == other


def is_half(text: str) -> bool:
    """True if a text holds half of a character pair (a lone surrogate), which no tokenizer reads and no file holds."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def shown(value: object) -> str:
    """A value in a message; of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _parts(annotation: object) -> tuple[list[Rule], list[object]]:
    """The rules of an annotation, and its types."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        rules, kinds = _parts(inner)
        return [item for item in more if isinstance(item, Rule)] + rules, kinds
    if get_origin(annotation) in (Union, types.UnionType):
        members = [_parts(item) for item in get_args(annotation)]
        return [rule for rules, _ in members for rule in rules], [kind for _, kinds in members for kind in kinds]
    return [], [annotation]


def _plain(kinds: tuple[object, ...]) -> Rule | None:
    """The rule that a type alone stands for."""
    if len(kinds) != 1:
        return None
    if get_origin(kinds[0]) is Literal:
        return Choice(get_args(kinds[0]))
    return PLAIN.get(kinds[0])


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
