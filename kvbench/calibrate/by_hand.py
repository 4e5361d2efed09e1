"""The settings that people chose: what a search has to beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.calibrate.space import Searched
from kvbench.config import files
from kvbench.config.files import FULL
from kvbench.config.settings import as_dict, read_config
from kvbench.evidence.dominance import best_so_far
from kvbench.results.identity import folder_name
from kvbench.results.measures import LOSSES, RESIDENT, SCORE, score
from kvbench.results.record import RunRecord

STORED, SHIPPED = "stored runs", "shipped settings"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One method at settings that somebody chose."""

    method: str
    """Name of its configuration."""
    settings: dict[str, Any]
    """What differs from the configuration."""


def by_hand(
    results_dir: Path, task: str, model: str, criterion: str, most: int, space: Sequence[Searched]
) -> tuple[list[Settings], str]:
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
    found: dict[str, tuple[float, float, Settings]] = {}
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
        return [Settings(method=item.method, settings={}) for item in space][:most], SHIPPED
    left = list(found.values())
    ordered: list[tuple[float, float, Settings]] = []
    while left and len(ordered) < most:
        best = [left[index] for index in best_so_far([x[0] for x in left], [x[1] for x in left], False)]
        ordered += best
        left = [item for item in left if item not in best]
    return [settings for _, _, settings in ordered[:most]], STORED


def _settings(record: RunRecord) -> Settings | None:
    """What of a stored run can be made again: a method that is a choice here, at the run's settings. What a results
    folder names is never imported."""
    stored = dict(record.identity.get("method") or {})
    if record.method == FULL or record.method not in files.options("method"):
        return None
    usual = as_dict(read_config(files.path_of("method", record.method)))
    if stored.pop("_target_", None) != usual.get("_target_"):
        return None
    plain = {name: value for name, value in stored.items() if name in usual and value != usual[name]}
    return Settings(method=record.method, settings=plain)
