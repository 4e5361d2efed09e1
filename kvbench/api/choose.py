"""What a Python call asks for, as the words that Hydra composes and as a policy."""

import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config.compose import compose
from kvbench.runs import calibration
from kvbench.runs.parts import make_policy

if TYPE_CHECKING:
    from kvbench.policy import Policy


def hydra_value(key: str, value: object) -> str:
    """A Python value as Hydra's command line writes it; text is quoted, so that it stays text.

    Args:
        key: The setting, for messages.
        value: None, a truth value, a number, text, a path, or lists and mappings of these.

    Raises:
        ValueError: It is something else.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):  # numpy's too
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        # Backslashes mean themselves, except those before a quote, of which every one is doubled.
        doubled = re.sub(r"(\\*)'", lambda found: 2 * found[1] + "\\'", str(value))
        return "'" + re.sub(r"(\\+)$", r"\1\1", doubled) + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{hydra_value(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(hydra_value(key, item) for item in value) + "]"
    raise ValueError(
        f"{key}={value!r} is a {type(value).__name__}, which no setting can be; give None, a truth value, a number, "
        "text, or lists and mappings of these"
    )


def words(settings: Mapping[str, object], prefix: str = "") -> list[str]:
    """Settings as `key=value` words; `prefix` stands before each key."""
    return [f"{prefix}{key}={hydra_value(prefix + key, value)}" for key, value in settings.items()]


def choose_policy(method: "str | Policy", settings: Mapping[str, object]) -> "Policy":
    """The policy that a call asks for.

    Args:
        settings: Its settings by name; what is left out has the default of the YAML.

    Raises:
        ValueError: There is no such method or setting, a value is out of range, or a policy came with settings.
    """
    if not isinstance(method, str):
        if settings:
            raise ValueError(
                f"{', '.join(settings)} cannot be set beside a policy that was made already; give it to "
                f"{type(method).__name__}(...)"
            )
        return method
    if settings.get(calibration.KEY) is not None:
        raise ValueError(
            f"{calibration.KEY}={settings[calibration.KEY]} is for one model, which cannot be checked for a model in "
            "memory; give the settings of that file instead, or use kvbench.run"
        )
    return make_policy(compose([f"method={method}", *words(settings, "method.")]).method)
