"""Quality against cost: one point per run, measured on the samples that all runs have."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from omegaconf import DictConfig

from kvbench.evidence.budget_curves import series_of
from kvbench.evidence.comparison import margin_of
from kvbench.evidence.costs import NO_EVIDENCE, Cost, Interval, costs_of
from kvbench.evidence.load import version
from kvbench.evidence.pairing import ENOUGH, SampleName, curve_of, measure, strata
from kvbench.evidence.published import PublishedPoint
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import COSTS, Measure
from kvbench.stats.intervals import YES_NO, estimate
from kvbench.stats.paired import Paired
from kvbench.stats.strata import FEWEST_SAMPLES, Strata, weighed
from kvbench.stats.studentised import RESAMPLES, SEED

Question = tuple[str, str, str]  # task, subset, sample id


@dataclass(kw_only=True)
class Point:
    """One run: its quality and its costs."""

    key: str
    """Method and settings, for finding the same thing in another group."""
    label: str
    method: str
    family: str
    """`16 bits, keeps all`, `quantises`, `evicts`, or `quantises and evicts`: what it was seen to do."""
    scores: Strata
    """The metric of each sample."""
    score_interval: Interval | None
    quality: float
    """What is drawn: the paired difference to the full cache, or the score without one."""
    interval: Interval | None
    """95 % interval of the quality; None where nothing can be said, and for the full cache beside itself."""
    costs: dict[str, Cost]
    names: list[str] = field(default_factory=list)
    """Folders of the runs."""

    @property
    def score(self) -> float:
        """Mean of the metric."""
        return float(self.scores.mean())


@dataclass(kw_only=True)
class Panel:
    """All points of one group, or of the average over groups."""

    title: str
    kin: str
    """Model and version of the code: what panels must share to be averaged."""
    what: Measure
    points: list[Point]
    questions: list[list[Question]]
    """The samples of each subset."""
    total: int
    reference: str | None
    """Key of the full cache that the quality is a difference to; None when there is none."""
    margin: float
    """Largest difference of quality that counts as none."""
    resamples: int = RESAMPLES
    seed: int = SEED
    band: Interval | None = None
    """Where the full cache lands when it is run again with another batch size or backend."""
    notes: list[str] = field(default_factory=list)
    published: list[PublishedPoint] = field(default_factory=list)
    """What papers printed for the task; not measured here."""

    @property
    def num_samples(self) -> int:
        """Distinct questions."""
        return sum(map(len, self.questions))

    @cached_property
    def is_enough(self) -> bool:
        """There are samples enough to say that one run is better than another."""
        whole = all(np.isin(point.scores.flat, YES_NO).all() for point in self.points)
        return self.num_samples >= FEWEST_SAMPLES and (whole or min(map(len, self.questions)) > 1)

    def find(self, key: str | None) -> Point | None:
        """The point of a key."""
        return next((point for point in self.points if point.key == key), None)


def difference(mine: Strata, theirs: Strata, what: Measure, resamples: int, seed: int) -> Paired:
    """Two columns of values as a paired difference."""
    groups = [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in zip(mine.values, theirs.values, strict=True)]
    is_yes_no = what.bounded and bool(np.isin(mine.flat, YES_NO).all() and np.isin(theirs.flat, YES_NO).all())
    return Paired(
        strata=Strata(tuple(a - b for a, b in zip(mine.values, theirs.values, strict=True)), mine.weights),
        pairs=groups if is_yes_no else None,
        bounded=what.bounded,
        resamples=resamples,
        seed=seed,
    )


def score_interval(scores: Strata, what: Measure) -> Interval | None:
    """95 % interval of a mean, as the table of a run has it."""
    groups = {str(index): values.tolist() for index, values in enumerate(scores.values)}
    alike = scores.weighs_samples_alike and len(set(scores.sizes)) > 1
    return estimate(groups, 0, (0.0, 1.0) if what.bounded else None, "sample" if alike else "subset").ends


def question(group: Group, sample: SampleName) -> Question:
    """What is asked, whatever the length, the protocol or the batch: the same name with the same right answers.

    A generated task asks something else under another seed, by the same name.
    """
    record = next((run.samples[sample[1], 0] for run in group.runs if (sample[1], 0) in run.samples), None)
    gold = json.dumps(record.get("gold") or "") if record else ""
    return group.task, sample[0], f"{sample[1]} {gold}"


def family(runs: Sequence[StoredRun]) -> str:
    """Say what a method did in any of some runs: store fewer bits, keep fewer tokens, both or neither."""
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
    curves = {run.name: curve_of(run, what) for run in group.runs}
    whole = max((curves[run.name].total for run in group.runs if run.complete), default=0)
    result = {}
    for run in group.runs:
        values = curves[run.name].values
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
        cfg: `metric`, `quality`, `margin`, `incomplete`, `resamples`, `seed`.

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
    samples, total = strata(shared), max(curve_of(run, what).total for run in runs)
    if len(shared) < total:
        notes.append(f"every number here is over the {len(shared)} of {total} samples that all drawn runs have")
    reference = group.reference if group.reference in runs and cfg.quality == "difference" else None
    if cfg.quality == "difference" and reference is None:
        notes.append(f"{group.title}: there is no complete run of the full cache, so scores are drawn, not differences")
    costs = {name: costs_of(axis, runs, samples) for name, axis in COSTS.items()}
    families = {run.name: family(members) for members in series_of(runs).values() for run in members}
    points = []
    for index, run in enumerate(runs):
        values = [[found[run.name][s] for s in members] for members in samples.values()]
        scores = weighed(values, run.record.weighting)
        points.append(
            Point(
                key=key_of_run(run),
                label=run.label,
                method=run.method,
                family=families[run.name],
                scores=scores,
                score_interval=score_interval(scores, what),
                quality=float(scores.mean()),
                interval=None,
                costs={name: cost for name, of_run in costs.items() if (cost := of_run[index]) is not None},
                names=[run.name],
            )
        )
    panel = Panel(
        title=group.title,
        kin=f"{group.model}, code {version(group.runs[0])}",
        what=what,
        points=points,
        questions=[[question(group, sample) for sample in members] for members in samples.values()],
        total=total,
        reference=key_of_run(reference) if reference else None,
        margin=margin_of(cfg, what),
        resamples=cfg.resamples,
        seed=cfg.seed,
        notes=notes,
    )
    set_quality(panel)
    repeats = [key_of_run(run) for run in group.repeats if run in runs]
    _set_band(panel, repeats)
    if not panel.is_enough:
        panel.notes.append(
            f"n too small: {panel.num_samples} samples, and {FEWEST_SAMPLES} are needed (two in each subset), so "
            "nothing is said of which run is better"
        )
    _check_time(panel, runs)
    return panel


def key_of_run(run: StoredRun) -> str:
    """What finds the same method with the same settings, under the same conditions, in another group."""
    settings = json.dumps([run.record.identity.get(part) for part in ("method", "store")], sort_keys=True)
    return " ".join([run.method, settings, *run.conditions])


def set_quality(panel: Panel) -> None:
    """Set what is drawn of each point: the difference to the reference with its interval, or the score without one."""
    full = panel.find(panel.reference)
    for point in panel.points:
        if full is None:
            point.quality, point.interval = point.score, point.score_interval
        elif point is full:
            point.quality, point.interval = 0.0, None
        else:
            found = difference(point.scores, full.scores, panel.what, panel.resamples, panel.seed)
            point.quality, point.interval = found.value, found.interval[0]


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
            for name in NO_EVIDENCE:
                point.costs.pop(name, None)
        panel.notes.append(f"no time axis: the runs were made on {len(places)} machines ({', '.join(sorted(places))})")
    else:
        panel.notes.append(
            "times are no evidence: each run was timed by itself, with whatever else the machine did; they have no "
            "interval and no standing. `kvbench bench` times methods in turn"
        )
        if any(run.record.backend == "torch" for run in runs):
            panel.notes.append("times with backend torch are no claim: it is the plain reference, made to be right")
