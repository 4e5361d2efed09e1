"""What a search may vary of each method: the settings that the method declares to be a budget, a precision, or a
choice.

There is no list of methods here: a method of one's own is searched as soon as its fields are declared.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import DictConfig

from kvbench.config import files
from kvbench.config.files import FULL, SHARED
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.errors import unknown_name
from kvbench.policy.settings import BudgetRule, TierRule
from kvbench.rules import Choice, Declared, declared
from kvbench.runs.parts import policy_class

DIGITS = 3  # of a budget: two budgets that differ by less are one


class Suggests(Protocol):
    """What proposes values: a trial of Optuna."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number in a range."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of several values."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting that is varied."""

    name: str
    low: float = 0.0
    high: float = 0.0
    """A budget's range."""
    options: tuple[Any, ...] = ()
    """The values of any other setting."""

    def suggest(self, trial: Suggests, method: str) -> Any:
        """A value."""
        name = f"{method}.{self.name}"
        if self.options:
            return self.options[trial.suggest_categorical(name, tuple(range(len(self.options))))]
        return float(f"{trial.suggest_float(name, self.low, self.high, log=True):.{DIGITS}g}")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One method and what is varied of it."""

    method: str
    """Name of its configuration."""
    knobs: tuple[Knob, ...]

    def suggest(self, trial: Suggests) -> dict[str, Any]:
        """Values for all of its knobs."""
        return {knob.name: knob.suggest(trial, self.method) for knob in self.knobs}


def read_space(cfg: DictConfig) -> list[Searched]:
    """The methods of a search with what is varied of each.

    Two configurations of one class that differ in nothing but what is varied are one, the first by name.

    Args:
        cfg: The `search` settings.

    Raises:
        ValueError: A method does not exist or has nothing to vary, or a range is none.
    """
    low, high = _range(cfg.budget)
    known = files.options("method")
    patterns = None if cfg.methods is None else [cfg.methods] if isinstance(cfg.methods, str) else list(cfg.methods)
    for pattern in patterns or ():
        if not fnmatch.filter(known, pattern):
            raise unknown_name("search.methods", pattern, known)
    found: dict[str, Searched] = {}
    for method in known:
        if method == FULL or (patterns is not None and not any(fnmatch.fnmatchcase(method, p) for p in patterns)):
            continue
        settings = as_dict(method_settings(method))
        fields = declared(policy_class(settings["_target_"]))
        # What every ranking method shares is varied where a method's file lists it: else it would be most of a space.
        own = {name: field for name, field in fields.items() if name in settings or name not in SHARED}
        knobs = tuple(knob for name, field in own.items() if (knob := _knob(name, field, cfg, low, high)))
        rest = {name: value for name, value in settings.items() if name not in {knob.name for knob in knobs}}
        if knobs:
            found.setdefault(repr(sorted(rest.items(), key=str)), Searched(method=method, knobs=knobs))
    if not found:
        raise ValueError(f"search.methods={cfg.methods}: none of them has a setting to vary; `kvbench help` shows them")
    return list(found.values())


def _range(budget: Any) -> tuple[float, float]:
    ends = list(budget) if not isinstance(budget, int | float | str) and budget is not None else []
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or not 0 < ends[0] < ends[1] <= 1:
        raise ValueError(f"search.budget={budget} is no range; give two shares, the smaller first, such as [0.05,0.9]")
    return float(ends[0]), float(ends[1])


def _knob(name: str, field: Declared, cfg: DictConfig, low: float, high: float) -> Knob | None:
    """What is varied of a setting; None where nothing is."""
    rule = field.rule
    if rule is None:
        return None
    if name in cfg.grid:
        values = [float(item) if field.kinds == (float,) else item for item in cfg.grid[name]]
        for value in values:
            field.check(value, "search.grid.")
        return Knob(name=name, options=tuple(values))
    if isinstance(rule, BudgetRule):
        return Knob(name=name, low=low, high=high)
    if isinstance(rule, TierRule):
        for value in cfg.precision:
            rule.check("search.precision", value)
        return Knob(name=name, options=tuple(cfg.precision))
    if isinstance(rule, Choice) and (rule.unit == "bits" or name in cfg.also):
        return Knob(name=name, options=tuple(rule.options))
    return None
