"""What a search was asked for, what it tried, which of it is worth another look, and the settings that people chose,
which it has to beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbench.calibrate.choose import Measured
from kvbench.calibrate.plan import Plan
from kvbench.calibrate.space import Searched
from kvbench.config import files
from kvbench.config.files import FULL
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.evidence.dominance import best_so_far
from kvbench.results.identity import folder_name
from kvbench.results.measures import LOSSES, RESIDENT, SCORE, score
from kvbench.results.record import RunRecord

STORED, SHIPPED = "stored runs", "shipped settings"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The settings of one search, checked."""

    cfg: DictConfig
    space: list[Searched]
    plan: Plan
    most: float
    """Loss beyond which a setting is of no use."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One method at settings that the search tried or that somebody chose."""

    method: str
    """Name of its configuration."""
    settings: dict[str, Any]
    """What differs from the configuration."""
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


def frontier(tried: Sequence[Tried], criterion: str) -> list[Tried]:
    """Those that no other beats, the cheapest first."""
    kept: list[Tried] = []
    for item in sorted(tried, key=lambda one: (one.bytes_ratio, one.loss(criterion))):
        if not kept or item.loss(criterion) < kept[-1].loss(criterion):
            kept.append(item)
    return kept


def winners(tried: Sequence[Tried], wanted: Wanted) -> list[Tried]:
    """The settings of the frontier that are worth another look: of some use, and spread over it."""
    criterion, count = wanted.plan.rule.criterion, wanted.cfg.winners
    useful = [item for item in frontier(tried, criterion) if item.loss(criterion) <= wanted.most]
    if len(useful) <= count:
        return useful
    places = {round(index * (len(useful) - 1) / max(1, count - 1)) for index in range(count)}
    return [useful[place] for place in sorted(places)]


def by_hand(
    results_dir: Path, task: str, model: str, criterion: str, most: int, space: Sequence[Searched]
) -> tuple[list[Tried], str]:
    """The settings of the stored runs of a task and model; the shipped ones of the searched methods where none is.

    Args:
        results_dir: The results folder.
        task: Name of the task.
        model: Name of the model.
        criterion: What must not be lost, one of `LOSSES`.
        most: Settings at most: first those on the frontier of the stored numbers, then those behind it.
        space: The methods that are searched.

    Returns:
        The settings, and where they are from: `STORED` or `SHIPPED`.
    """
    found: dict[str, tuple[float, float, Tried]] = {}
    what = LOSSES[criterion].measure
    for path in sorted((results_dir / folder_name(task) / folder_name(model)).glob("*/*/run.json")):
        try:
            record = RunRecord.load(path.parent)
        except ValueError:  # `compare` names it
            continue
        if record is None or record.status != "complete" or (settings := _settings(record)) is None:
            continue
        own = score(record.primary, record.metrics[record.primary].higher_is_better) if what is SCORE else what
        places = RESIDENT.of_run(record), own.of_run(record)
        if places[0] is not None and places[1] is not None:
            worse = -places[1] if own.higher_is_better else places[1]
            found.setdefault(f"{settings.method} {settings.settings}", (places[0], worse, settings))
    if not found:
        return [Tried(method=item.method, settings={}) for item in space][:most], SHIPPED
    left = list(found.values())
    ordered: list[tuple[float, float, Tried]] = []
    while left and len(ordered) < most:
        best = [left[index] for index in best_so_far([x[0] for x in left], [x[1] for x in left], False)]
        ordered += best
        left = [item for item in left if item not in best]
    return [settings for _, _, settings in ordered[:most]], STORED


def _settings(record: RunRecord) -> Tried | None:
    """What of a stored run can be made again: a method that is a choice here, at the run's settings. What a results
    folder names is never imported."""
    stored = dict(record.identity.get("method") or {})
    if record.method == FULL or record.method not in files.options("method"):
        return None
    usual = as_dict(method_settings(record.method))
    if stored.pop("_target_", None) != usual.get("_target_"):
        return None
    plain = {name: value for name, value in stored.items() if name in usual and value != usual[name]}
    return Tried(method=record.method, settings=plain)
