"""Settings that are fields of a dataclass: their rules, read from the annotations, and the one place that checks them.

A field says what it may be in its annotation: `window: Annotated[int, Whole(1, unit="tokens")] = 32`. A `bool`, a
`Literal`, and an `int`, `float` or `str` without more, need no rule of their own. `| None` allows None beside it.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvbench.rules.kinds import Choice, Flag, Number, Rule, Text, Whole

PLAIN: Mapping[object, Rule] = {bool: Flag(), int: Whole(), float: Number(), str: Text()}


class Declared:
    """What is declared of one field.

    Args:
        name: The field.
        annotation: Its annotation, evaluated, with what `Annotated` adds.
    """

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
        """What is allowed, in words, where a rule says it."""
        return (self.rule.text if self.rule else "a value") + (", or null" if self.optional else "")

    def check(self, value: object, prefix: str = "") -> None:
        """Refuses a value that the field may not have.

        Raises:
            ValueError: Names the setting, its value and what is allowed.
        """
        if (value is None and self.optional) or self.rule is None:
            return
        try:
            self.rule.check(f"{prefix}{self.name}", value)
        except ValueError as error:
            near = self.rule.near(value)
            hint = f". Did you mean {near}?" if near else ""
            raise ValueError(f"{error}{', or null' if self.optional else ''}{hint}") from None


_READ: dict[type, Mapping[str, Declared]] = {}  # class -> its settings; every object asks


def declared(kind: type) -> Mapping[str, Declared]:
    """The settings of a dataclass by name: the fields that its constructor takes."""
    if kind not in _READ:
        hints = get_type_hints(kind, include_extras=True)
        _READ[kind] = {item.name: Declared(item.name, hints[item.name]) for item in fields(kind) if item.init}
    return _READ[kind]


def check_settings(held: object, prefix: str = "") -> None:
    """Refuses an object one of whose settings may not be what it is.

    Args:
        held: A dataclass object.
        prefix: What stands before the names where the user writes them, for example `store.`.

    Raises:
        ValueError: Names the first such setting, its value and what is allowed.
    """
    for name, field in declared(type(held)).items():
        field.check(getattr(held, name), prefix)


def checked_first(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `__post_init__` that sees only settings that may be what they are."""

    @wraps(post_init)
    def checked(self: Any) -> None:
        check_settings(self)
        post_init(self)

    return checked


def _parts(annotation: object) -> tuple[list[Rule], list[object]]:
    """The rules of an annotation, and its types."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        rules, kinds = _parts(inner)
        return [item for item in more if isinstance(item, Rule)] + rules, kinds
    if get_origin(annotation) in (Union, types.UnionType):
        found = [_parts(item) for item in get_args(annotation)]
        return [rule for rules, _ in found for rule in rules], [kind for _, kinds in found for kind in kinds]
    return [], [annotation]


def _plain(kinds: tuple[object, ...]) -> Rule | None:
    """The rule that a type alone stands for."""
    if len(kinds) != 1:
        return None
    if get_origin(kinds[0]) is Literal:
        return Choice(get_args(kinds[0]))
    return PLAIN.get(kinds[0])
