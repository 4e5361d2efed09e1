"""Quality against cost: one point per run, measured on the samples that all runs have."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from omegaconf import DictConfig

from kvbench.evidence.costs import Cost, Interval, cost_of
from kvbench.evidence.load import version
from kvbench.evidence.pairing import SampleName, measure, num_samples, strata, values_of
from kvbench.evidence.published import PublishedPoint
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import COSTS, Measure
from kvbench.stats import paired as stats
from kvbench.stats.intervals import YES_NO, paired_difference

ENOUGH = 0.9  # a run that lacks more than a tenth of the samples is not drawn: it would take them from all others


@dataclass(kw_only=True)
class Point:
    """One run: its quality and its costs."""

    key: str
    """Method and settings, for finding the same thing in another group."""
    label: str
    method: str
    family: str
    """`16 bits, keeps all`, `quantises`, `evicts`, or `quantises and evicts`: what it was seen to do."""
    score: float
    """Mean of the metric."""
    score_interval: Interval | None
    quality: float
    """What is drawn: the paired difference to the full cache, or the score without one."""
    interval: Interval | None
    draws: np.ndarray
    costs: dict[str, Cost]
    names: list[str] = field(default_factory=list)
    """Folders of the runs."""


@dataclass(kw_only=True)
class Panel:
    """All points of one group, or of the average over groups."""

    title: str
    kin: str
    """Model and version of the code: what panels must share to be averaged."""
    what: Measure
    points: list[Point]
    num_samples: int
    total: int
    freedom: float
    """Degrees of freedom of the pairwise differences."""
    reference: str | None
    """Key of the full cache that the quality is a difference to; None when there is none."""
    band: Interval | None = None
    """Where the full cache lands when it is run again with another batch size or backend."""
    notes: list[str] = field(default_factory=list)
    published: list[PublishedPoint] = field(default_factory=list)
    """What papers printed for the task; not measured here."""

    def find(self, key: str | None) -> Point | None:
        """The point of a key."""
        return next((point for point in self.points if point.key == key), None)


def family(runs: Sequence[StoredRun]) -> str:
    """Say what a method did in any of its runs: store fewer bits, keep fewer tokens, both or neither."""
    evicts = quantises = False
    for run in runs:
        for record in run.samples.values():
            share, payload, fp16 = (
                record["kept"].get("slot_ratio"),
                *(record["ledger"].get(name) for name in ("payload_bytes", "fp16_bytes")),
            )
            if record["status"] != "ok" or not share or payload is None or fp16 is None:
                continue
            evicts |= share < 0.999
            # Without a residual the payload of 16-bit slots is exactly their share of the fp16 bytes.
            quantises |= payload < 0.97 * share * fp16
    if evicts and quantises:
        return "quantises and evicts"
    return "evicts" if evicts else "quantises" if quantises else "16 bits, keeps all"


def _drawable(group: Group, what: Measure, incomplete: bool, notes: list[str]) -> dict[str, dict[SampleName, float]]:
    """The quality values of the runs that can be drawn, by folder."""
    found = {run.name: values_of(run, what) for run in group.runs}
    whole = max((num_samples(run) for run in group.runs if run.complete), default=0)
    result = {}
    for run in group.runs:
        values = found[run.name]
        if not run.complete and not incomplete:
            notes.append(f"{run.label} is not drawn: it is incomplete ({run.progress})")
        elif not values:
            notes.append(f"{run.label} is not drawn: no sample of it has {what.title}")
        elif run.complete and len(values) < ENOUGH * whole:
            notes.append(f"{run.label} is not drawn: only {len(values)} of {whole} samples ended well")
        else:
            result[run.name] = values
    return result


def build(group: Group, cfg: DictConfig) -> Panel | None:
    """Make the points of a group, over the samples that every drawn run has.

    Args:
        group: The runs.
        cfg: `metric`, `quality`, `incomplete`, `resamples`, `seed`.

    Returns:
        None when there is nothing to draw; the group's notes then say why.

    Raises:
        ValueError: The metric does not exist.
    """
    what, notes = measure(str(cfg.metric), group), list(group.notes)
    found = _drawable(group, what, cfg.incomplete, notes)
    runs = [run for run in group.runs if run.name in found]
    shared = set.intersection(*map(set, found.values())) if found else set()
    if not shared:
        group.notes = [*notes, f"{group.title}: no sample that all runs share, so nothing is drawn"]
        return None
    samples, total = strata(shared), max(map(num_samples, runs))
    if len(shared) < total:
        notes.append(f"every number here is over the {len(shared)} of {total} samples that all drawn runs have")
    scores = [np.array([[found[run.name][s] for run in runs] for s in members]) for members in samples.values()]
    reference = group.reference if group.reference in runs and cfg.quality == "difference" else None
    if cfg.quality == "difference" and reference is None:
        notes.append(f"{group.title}: there is no complete run of the full cache, so scores are drawn, not differences")
    column = runs.index(reference) if reference else None
    quality = scores if column is None else [values - values[:, column : column + 1] for values in scores]
    score_draws = stats.resampled_means(scores, cfg.resamples, cfg.seed)
    draws = score_draws if column is None else score_draws - score_draws[:, column : column + 1]
    costs = {name: cost_of(axis, runs, samples, cfg) for name, axis in COSTS.items()}
    points = []
    for index, run in enumerate(runs):
        points.append(
            Point(
                key=_key(run),
                label=run.label,
                method=run.method,
                family=family([other for other in runs if other.method == run.method]),
                score=stats.mean([values[:, index] for values in scores]),
                score_interval=_interval([values[:, index] for values in scores], score_draws[:, index]),
                quality=stats.mean([values[:, index] for values in quality]),
                interval=_interval([values[:, index] for values in quality], draws[:, index])
                or (_unseen(scores, index, column) if column not in (None, index) else None),
                draws=draws[:, index],
                costs={name: cost for name, of_run in costs.items() if (cost := of_run[index]) is not None},
                names=[run.name],
            )
        )
    panel = Panel(
        title=group.title,
        kin=f"{group.model}, code {version(group.runs[0])}",
        what=what,
        points=points,
        num_samples=len(shared),
        total=total,
        freedom=max(1, len(shared) - len(samples)),
        reference=_key(reference) if reference else None,
        notes=notes,
    )
    repeats = [_key(run) for run in group.repeats if run in runs]
    _set_band(panel, repeats)
    _check_time(panel, runs)
    return panel


def _key(run: StoredRun) -> str:
    settings = json.dumps([run.record.identity.get(part) for part in ("method", "store")], sort_keys=True)
    return " ".join([run.method, settings, *run.conditions])


def _interval(values: Sequence[np.ndarray], draws: np.ndarray) -> Interval | None:
    error = stats.standard_error(values)
    return stats.percentiles(draws, error[1]) if error else None


def _unseen(scores: Sequence[np.ndarray], index: int, column: int) -> Interval | None:
    """Newcombe's interval where no yes-or-no answer differs: a bootstrap has no width there, yet doubt remains."""
    if not all(np.isin(values[:, [index, column]], YES_NO).all() for values in scores):
        return None
    found = paired_difference({str(place): list(map(tuple, v[:, [index, column]])) for place, v in enumerate(scores)})
    return found.ends


def _set_band(panel: Panel, repeats: Sequence[str]) -> None:
    """Set the noise band: the union of the intervals of the full cache's repetitions, which are then no points."""
    points = [point for point in panel.points if point.key in repeats]
    ends = [end for point in points for end in (point.interval or (point.quality, point.quality))]
    if panel.reference is None or not points:
        panel.notes.append(
            "no noise band: run method=full with another batch_size or backend too, and it shows what is only noise"
        )
        return
    panel.band = min(ends), max(ends)
    panel.points = [point for point in panel.points if point.key not in repeats]


def _check_time(panel: Panel, runs: Sequence[StoredRun]) -> None:
    """Drop the time axis where the runs come from several machines: their times do not belong on one axis."""
    places = {run.record.machine.device if run.record.machine else "" for run in runs}
    if len(places) > 1:
        for point in panel.points:
            point.costs.pop("time", None)
        panel.notes.append(f"no time axis: the runs were made on {len(places)} machines ({', '.join(sorted(places))})")
    elif any(run.record.backend == "torch" for run in runs):
        panel.notes.append("times with backend torch are no claim: it is the plain reference, made to be right")
