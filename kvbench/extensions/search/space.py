"""Space of a search, as methods declare it, and the settings in it.

Those tried, those worth a held-out trial, and those made by hand, which a search has to beat.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from kvbench.config import files
from kvbench.config.files import FULL, SHARED
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.errors import SettingValue, unknown_name
from kvbench.evidence.dominance import best_so_far
from kvbench.extensions.calibrate.choose import Measured
from kvbench.extensions.calibrate.plan import Plan
from kvbench.policy.budget import BudgetRule
from kvbench.policy.settings import TierRule
from kvbench.results.identity import folder_name
from kvbench.results.measures import LOSSES, RESIDENT, SCORE, score
from kvbench.results.record import RunRecord
from kvbench.rules import Choice, Declared, Number, declared
from kvbench.runs.parts import policy_class

if TYPE_CHECKING:
    import optuna

STORED, SHIPPED = "stored runs", "shipped settings"
DIGITS = 3  # of a budget: two budgets that differ by less are one


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting that is varied: a budget in a range, or any other one among `options`."""

    name: str
    low: float = 0.0
    high: float = 0.0
    options: tuple[Any, ...] = ()

    def suggest(self, trial: "optuna.Trial", method: str) -> Any:
        """Suggest a value."""
        name = f"{method}.{self.name}"
        if self.options:
            return self.options[trial.suggest_categorical(name, tuple(range(len(self.options))))]
        return float(f"{trial.suggest_float(name, self.low, self.high, log=True):.{DIGITS}g}")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One method, by the name of its configuration, and its varied settings."""

    method: str
    knobs: tuple[Knob, ...]

    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """Suggest values for all of its knobs."""
        return {knob.name: knob.suggest(trial, self.method) for knob in self.knobs}


def read_space(cfg: DictConfig) -> list[Searched]:
    """Methods of a search with the varied settings of each.

    Raises ValueError for one that does not exist or cannot be varied.

    Two configurations of one class that differ in nothing but what is varied are one, the first by name.
    """
    low, high = _range(cfg.budget)
    known = files.options("method")
    patterns = None if cfg.methods is None else [cfg.methods] if isinstance(cfg.methods, str) else list(cfg.methods)
    for pattern in patterns or ():
        if not fnmatch.filter(known, pattern):
            raise unknown_name("search.methods", pattern, known)
    space: dict[str, Searched] = {}
    for method in known:
        if method == FULL or (patterns is not None and not any(fnmatch.fnmatchcase(method, p) for p in patterns)):
            continue
        settings = as_dict(method_settings(method))
        fields = declared(policy_class(settings["_target_"]))
        # Settings shared by all ranking methods are varied where a method's file lists them: else they would dominate.
        method_fields = {name: field for name, field in fields.items() if name in settings or name not in SHARED}
        knobs = tuple(knob for name, field in method_fields.items() if (knob := _knob(name, field, cfg, low, high)))
        rest = {name: value for name, value in settings.items() if name not in {knob.name for knob in knobs}}
        if knobs:
            space.setdefault(repr(sorted(rest.items(), key=str)), Searched(method=method, knobs=knobs))
    if not space:
        raise SettingValue(
            f"search.methods={cfg.methods}: none of them has a setting to vary; `kvbench help` shows them",
            setting="search.methods",
        )
    return list(space.values())


def _range(budget: Any) -> tuple[float, float]:
    ends = list(budget) if not isinstance(budget, int | float | str) and budget is not None else []
    if len(ends) != 2 or not all(map(Number(0, 1, above=True).fits, ends)) or ends[0] >= ends[1]:
        raise SettingValue(
            f"search.budget={budget} is no range; give two shares, the smaller first, such as [0.05,0.9]",
            setting="search.budget",
        )
    return float(ends[0]), float(ends[1])


def _knob(name: str, field: Declared, cfg: DictConfig, low: float, high: float) -> Knob | None:
    """The knob of a setting; None where nothing is varied."""
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The settings of one search, checked; `most` is the loss beyond which a setting is of no use."""

    cfg: DictConfig
    space: list[Searched]
    plan: Plan
    most: float


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One method at settings, as they differ from its configuration, that the search tried or a user chose."""

    method: str
    settings: dict[str, Any]
    measured: Measured | None = None
    """On the tuning samples; None where it was not tried."""

    @property
    def bytes_ratio(self) -> float:
        """Resident bytes as a share of an FP16 full cache."""
        assert self.measured is not None and self.measured.bytes_ratio.value is not None
        return self.measured.bytes_ratio.value

    def loss(self, criterion: str) -> float:
        """Mean loss against the full cache."""
        value = None if self.measured is None else self.measured.losses[criterion].value
        assert value is not None
        return value


def words(settings: dict[str, Any]) -> str:
    """Settings as `budget=0.25 tier=int8`."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def winners(tried: Sequence[Tried], wanted: Wanted) -> list[Tried]:
    """The settings of the frontier that are worth another look: of some use, and spread over it."""
    criterion, count = wanted.plan.rule.criterion, wanted.cfg.winners
    losses = [item.loss(criterion) for item in tried]
    best = best_so_far([item.bytes_ratio for item in tried], losses, higher_is_better=False)
    useful = [tried[index] for index in best if losses[index] <= wanted.most]
    if len(useful) <= count:
        return useful
    places = {round(index * (len(useful) - 1) / max(1, count - 1)) for index in range(count)}
    return [useful[number] for number in sorted(places)]


def by_hand(results_dir: Path, task: str, model: str, wanted: Wanted) -> tuple[list[Tried], str]:
    """Settings of the stored runs of a task and model, at most `most`, the best first.

    The shipped ones of the searched methods where none is stored. Also their source: `STORED` or `SHIPPED`.
    """
    by_label: dict[str, tuple[float, float, Tried]] = {}
    what, most = LOSSES[wanted.plan.rule.criterion].measure, wanted.cfg.by_hand
    for path in sorted((results_dir / folder_name(task) / folder_name(model)).glob("*/*/run.json")):
        try:
            record = RunRecord.load(path.parent)
        except ValueError:  # `compare` names it
            continue
        if record is None or record.status != "complete" or (settings := _settings(record)) is None:
            continue
        quality = score(record.primary, record.metrics[record.primary].higher_is_better) if what is SCORE else what
        places = RESIDENT.of_run(record), quality.of_run(record)
        if places[0] is not None and places[1] is not None:
            worse = -places[1] if quality.higher_is_better else places[1]
            by_label.setdefault(f"{settings.method} {settings.settings}", (places[0], worse, settings))
    if not by_label:
        return [Tried(method=item.method, settings={}) for item in wanted.space][:most], SHIPPED
    left = list(by_label.values())
    ordered: list[tuple[float, float, Tried]] = []
    while left and len(ordered) < most:
        best = [left[index] for index in best_so_far([x[0] for x in left], [x[1] for x in left], False)]
        ordered += best
        left = [item for item in left if item not in best]
    return [settings for _, _, settings in ordered[:most]], STORED


def _settings(record: RunRecord) -> Tried | None:
    """Reproducible part of a stored run: a method that is a choice here, at the run's settings.

    No class that a results folder names is imported.
    """
    stored = dict(record.identity.get("method") or {})
    if record.method == FULL or record.method not in files.options("method"):
        return None
    usual = as_dict(method_settings(record.method))
    if stored.pop("_target_", None) != usual.get("_target_"):
        return None
    plain = {name: value for name, value in stored.items() if name in usual and value != usual[name]}
    return Tried(method=record.method, settings=plain)
