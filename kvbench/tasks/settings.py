"""Checks that the task groups of the configuration share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench import errors


def check_keys(cfg: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse settings that the task does not have.

    Args:
        cfg: The `task` group.
        known: The task's keys; `name` is always allowed.

    Raises:
        ValueError: names the key, what exists and the nearest.
    """
    errors.check_keys(cfg, ("name", *known), what="task key")


def name_list(
    key: str, value: str | Sequence[str], known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Read a setting that lists names.

    Args:
        key: The setting, for messages.
        value: A name or a list of names.
        known: All valid names.
        groups: Short names that stand for several.

    Returns:
        The names in the order given, groups replaced by their members, each name once.

    Raises:
        ValueError: the list is empty, a name is unknown or is there twice.
    """
    groups = groups or {}
    names: dict[str, None] = {}
    if not isinstance(value, Sequence):
        raise ValueError(
            f"{key}={value!r} is neither a name nor a list of names; known: {', '.join((*groups, *known))}"
        )
    given = [value] if isinstance(value, str) else list(value)
    for place, item in enumerate(given):
        if item in given[:place]:
            raise ValueError(f"{key}={given} names {item} twice; name it once")
        if not isinstance(item, str) or item not in known and item not in groups:
            raise errors.unknown_name(key, item, (*known, *groups))
        names.update(dict.fromkeys(groups.get(item, (item,))))
    if not names:
        raise ValueError(f"{key}={list(value)} names nothing; known: {', '.join((*groups, *known))}")
    return list(names)


def one_of(key: str, value: object, known: Sequence[str]) -> str:
    """Read a setting that names one of several choices.

    Args:
        key: The setting, for messages.
        value: What was given.
        known: The choices.

    Raises:
        ValueError: Names the value, the choices and the nearest.
    """
    if value not in known:
        raise errors.unknown_name(key, value, known)
    return str(value)


def whole_list(key: str, value: object, minimum: int) -> list[int]:
    """Read a setting that is a whole number or a list of different ones.

    Args:
        key: The setting, for messages.
        value: What was given.
        minimum: The smallest that is allowed.

    Raises:
        ValueError: It is something else.
    """
    given = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    good = [item for item in given if isinstance(item, int) and not isinstance(item, bool) and item >= minimum]
    if not given or len(good) < len(given) or len(set(good)) < len(good):
        shown = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        raise ValueError(f"{key}={shown!r} must be a whole number of at least {minimum}, or a list of different ones")
    return good


def flag(key: str, value: object) -> bool:
    """Read a setting that is true or false.

    Args:
        key: The setting, for messages.
        value: What was given.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return value


def draw_sizes(cfg: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The setting `task.k`: of how many answers pass@k and maj@k are to be reported; None for the task's own choice.

    Raises:
        ValueError: It is no list of different whole numbers above 0.
    """
    value = cfg.get("k")
    if value is None:
        return None
    sizes = [value] if isinstance(value, int) else list(value) if isinstance(value, Sequence) else []
    good = all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in sizes)
    if isinstance(value, bool | str) or not sizes or not good or len(set(sizes)) < len(sizes):
        raise ValueError(
            f"task.k={value!r} must be a list of different whole numbers above 0, for example task.k=[1,8,64], or null "
            "for 1, 2, 4, ... and protocol.num_samples"
        )
    return tuple(sizes)
