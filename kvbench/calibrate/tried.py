"""What a search was asked for, what it tried, and which of it is worth another look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from kvbench.calibrate.choose import Measured
from kvbench.calibrate.plan import Plan
from kvbench.calibrate.space import Searched


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
    """One setting that the search measured."""

    method: str
    settings: dict[str, Any]
    measured: Measured

    @property
    def bytes_ratio(self) -> float:
        """Resident bytes as a share of an FP16 full cache."""
        assert self.measured.bytes_ratio.value is not None
        return self.measured.bytes_ratio.value

    def loss(self, criterion: str) -> float:
        """Mean loss against the full cache."""
        value = self.measured.losses[criterion].value
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
