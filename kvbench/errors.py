"""Errors that a user can act on; every one is a ValueError and is shown without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class MissingWeightsError(ValueError):
    """Model files are neither on this machine nor to be had from it; the message holds the command that gets them."""


class UnsupportedModel(ValueError):
    """The model's attention is not one that the store can hold."""


class NotForModel(ValueError):
    """A method does not fit the model, for example because it needs a table that was measured for another one."""


def check_whole(key: str, value: object, minimum: int, otherwise: str = "") -> int:
    """Read a setting that is a whole number of at least `minimum`; True and 1.0 are none.

    Args:
        otherwise: What else may be written, as the end of the message; the caller takes it out first.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key}={value!r} must be a whole number of at least {minimum}{otherwise}")
    return value


def check_keys(given: Iterable[object], known: Iterable[str], *, what: str | None = None, prefix: str = "") -> None:
    """Refuse settings that do not exist.

    Args:
        given: The keys that were set.
        what: The kind of key, as the message says it; a setting of the command line by default.
        prefix: What stands before each key where the user writes it, for example `store.`.

    Raises:
        ValueError: Names the first unknown key, those that exist, and the nearest.
    """
    names = list(known)
    for key in given:
        if key not in names:
            all_names = [f"{prefix}{name}" for name in names]
            asked = f"{prefix}{key}"
            raise unknown_name(what, asked, all_names) if what else unknown_setting(asked, all_names)


def unknown_name(what: str, value: object, known: Iterable[str]) -> ValueError:
    """Build the error for a name that does not exist: what does exist, and the nearest to what was asked.

    Args:
        what: The setting that held the name, for example `model.preset`.
    """
    return ValueError(f"{what}={value} does not exist.{_near(value, known)}")


def unknown_setting(name: str, known: Iterable[str]) -> ValueError:
    """Build the error for a setting that does not exist: those that do, and the nearest."""
    return ValueError(f"there is no setting {name}.{_near(name, known)}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Hint at the nearest of the known names, for the end of a message; empty where none is near."""
    near = get_close_matches(str(value), list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]}?" if near else ""


def _near(value: object, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{did_you_mean(value, names)} Known: {', '.join(names)}."
