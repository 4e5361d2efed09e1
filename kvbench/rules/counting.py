"""Marks of settings that are not part of a run's identity as they stand; every other setting is."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Outside:
    """Mark of a setting that changes no answer.

    Args:
        why: Reason, in a few words.
    """

    why: str


@dataclass(frozen=True)
class Through:
    """Mark of a setting that counts by what it resolves to.

    Args:
        where: Dotted name in the identity; it may be absent where the setting has no effect.
    """

    where: str


@dataclass(frozen=True)
class Unless:
    """Mark of a setting that counts in the identity, unless it is what every run had before there was the setting.

    Args:
        value: Their previous value.
    """

    value: object


Mark = Outside | Through | Unless


def marks_of(kind: type) -> dict[str, Mark | None]:
    """Marks of a settings dataclass by field, None for a field that always counts as it stands."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: _mark(hints[item.name]) for item in dataclasses.fields(kind) if item.init}


def counted(settings: Any) -> dict[str, Any]:
    """Settings that count in the identity, by field, those of a nested dataclass included.

    Args:
        settings: A dataclass object. A nested one whose fields are all marked is left out.
    """
    entries: dict[str, Any] = {}
    for name, mark in marks_of(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(mark, Outside | Through) or (isinstance(mark, Unless) and value == mark.value):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = counted(value)
            if not value:
                continue
        entries[name] = value
    return entries


def unmarked(settings: Mapping[str, Any], marks: Mapping[str, Mark]) -> dict[str, Any]:
    """Entries of a group of settings that have no mark, and so count as they stand."""
    return {name: value for name, value in settings.items() if name not in marks}


def _mark(annotation: object) -> Mark | None:
    return next((item for item in get_args(annotation)[1:] if isinstance(item, Mark)), None)
