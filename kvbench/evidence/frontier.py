"""Quality against cost: one point per run, measured on the samples that all runs have, and means over groups.

Groups may share questions: under other seeds, protocols or lengths. So a mean over groups resamples questions,
not rows: all answers to one question stay together, and n is the number of distinct questions.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from omegaconf import DictConfig

from kvbench.evidence.budget_curves import series_of
from kvbench.evidence.compare import margin_of
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.printed import PrintedPoint
from kvbench.evidence.samples import ENOUGH, Curve, SampleName, by_subset, curve_of, measure, shared, strata_of
from kvbench.results.measures import COSTS, TIME, Measure
from kvbench.results.summary import values_by_sample
from kvbench.stats import studentised
from kvbench.stats.intervals import BINARY, estimate
from kvbench.stats.paired import Paired, difference
from kvbench.stats.shares import share
from kvbench.stats.strata import FEWEST_SAMPLES, Strata, has_spread, weighed
from kvbench.stats.studentised import RESAMPLES, SEED

Interval = tuple[float, float]
Question = tuple[str, str, str]  # task, subset, sample id
Questions = list[list[Question]]  # of each subset
# Two passes of the same thing at other hours differ by more than the samples of one pass do, so an interval over
# samples would be one of the machine's load. Only interleaved rounds (`kvbench bench`) measure time.
NO_EVIDENCE = frozenset({TIME.name})
LEAST_COST = 1e-12  # of the full cache's bytes, or seconds; what claims to cost less has no place on an axis of ratios


@dataclass(kw_only=True)
class Cost:
    """The cost of one run: bytes against the FP16 cache of the same tokens, or time."""

    value: float
    shares: Strata | None
    """The part that each sample adds to the value, to first order; None for what is no evidence."""
    within: Interval = (-math.inf, math.inf)
    """The least and the largest share of a sample."""

    @cached_property
    def interval(self) -> Interval | None:
        """95 % interval, without width where no sample costs another share; None for a time and for too few samples."""
        shares = self.shares
        if shares is None or shares.count < FEWEST_SAMPLES:
            return None
        value = float(shares.mean())
        pooled = Strata((shares.flat,), (1.0,)) if shares.weighs_samples_alike else shares
        varies = any(map(has_spread, pooled.values))
        return studentised.interval(pooled, within=self.within) if varies else (value, value)


@dataclass(kw_only=True)
class Point:
    """One run: its quality and its costs."""

    key: str
    """Method, settings and conditions, for finding the same thing in another group."""
    label: str
    method: str
    family: str
    """`16 bits, keeps all`, `quantises`, `evicts`, or `quantises and evicts`: what it was seen to do."""
    series: str
    """Name of the runs that one line may join to this one: `series_of`."""
    scores: Strata
    """The metric of each sample."""
    score_interval: Interval | None
    quality: float = 0.0
    """The drawn value: the paired difference to the full cache, or the share of its score that a measure may be; the
    score without one."""
    interval: Interval | None = None
    """95 % interval of the quality; None where it is unknown, and for the full cache against itself."""
    costs: dict[str, Cost]
    names: list[str] = field(default_factory=list)
    """Folders of the runs."""

    @property
    def score(self) -> float:
        """Mean of the metric."""
        return float(self.scores.mean())


@dataclass(kw_only=True, eq=False)
class Panel:
    """All points of one group, or of the average over groups."""

    title: str
    kin: str
    """Model and version of the code: what panels must share to be averaged."""
    what: Measure
    points: list[Point]
    questions: Questions
    reference: str | None
    """Key of the full cache that the quality is a difference to; None when there is none."""
    margin: float
    """Largest difference of quality that counts as none."""
    resamples: int = RESAMPLES
    seed: int = SEED
    unfit: str = ""
    """Reason why the full cache is unfit as a reference; empty where it is fit."""
    axes: Mapping[str, Measure] = field(default_factory=lambda: COSTS)
    """Costs that it can be drawn against."""
    band: Interval | None = None
    """The range in which the full cache lands when it is run again with another batch size or backend."""
    notes: list[str] = field(default_factory=list)
    published: list[PrintedPoint] = field(default_factory=list)
    """Numbers that papers printed for the task; not measured here."""

    @property
    def num_samples(self) -> int:
        """Distinct questions."""
        return sum(map(len, self.questions))

    @cached_property
    def is_enough(self) -> bool:
        """True where there are enough samples to call one run better than another."""
        whole = all(np.isin(point.scores.flat, BINARY).all() for point in self.points)
        return self.num_samples >= FEWEST_SAMPLES and (whole or min(map(len, self.questions)) > 1)

    def find(self, key: str | None) -> Point | None:
        """The point of a key."""
        return next((point for point in self.points if point.key == key), None)

    def difference(self, mine: Point, theirs: Point, resamples: int | None = None) -> Paired:
        """The difference of two points."""
        many = resamples or self.resamples
        return difference(mine.scores, theirs.scores, bounded=self.what.bounded, resamples=many, seed=self.seed)

    def set_quality(self) -> None:
        """Set the drawn quality of each point: the difference to the reference, or the share of it, with its interval.

        Without either, the score.
        """
        full, how = self.find(self.reference), {"resamples": self.resamples, "seed": self.seed}
        for point in self.points:
            if full is None:
                point.quality, point.interval = point.score, point.score_interval
            elif self.what.of is not None:
                ratio = share(point.scores, full.scores, bounded=self.what.bounded, **how)
                assert ratio is not None  # `build` refuses a full cache that scores nothing
                ends = None if point is full else ratio.interval[0]
                point.quality, point.interval = 1 + ratio.value, ends and (1 + ends[0], 1 + ends[1])
            elif point is not full:
                both = self.difference(point, full)
                point.quality, point.interval = both.value, both.interval[0]


def score_interval(scores: Strata, what: Measure) -> Interval | None:
    """95 % interval of a mean, as the table of a run has it."""
    groups = {str(index): values.tolist() for index, values in enumerate(scores.values)}
    alike = scores.weighs_samples_alike and len(set(scores.sizes)) > 1
    return estimate(groups, 0, (0.0, 1.0) if what.bounded else None, "sample" if alike else "subset").ends


def question(group: Group, sample: SampleName) -> Question:
    """Key of a question, independent of length, protocol and batch: its name and its right answers.

    A generated task has other questions under another seed.
    """
    record = next((run.samples[sample[1], 0] for run in group.runs if (sample[1], 0) in run.samples), None)
    gold = json.dumps(record.get("gold") or "") if record else ""
    return group.task, sample[0], f"{sample[1]} {gold}"


def family(runs: Sequence[StoredRun]) -> str:
    """Family of a method by its runs: stores fewer bits, keeps fewer tokens, both or neither."""
    evicts = quantises = False
    for record in (record for run in runs for record in run.samples.values()):
        share = record["kept"].get("slot_ratio")
        payload, fp16 = (record["ledger"].get(name) for name in ("payload_bytes", "fp16_bytes"))
        if record["status"] != "ok" or not share or payload is None or fp16 is None:
            continue
        evicts |= share < 0.999
        # Without a residual the payload of 16-bit slots is exactly their share of the fp16 bytes.
        quantises |= payload < 0.97 * share * fp16
    done = [word for word, is_so in (("quantises", quantises), ("evicts", evicts)) if is_so]
    return " and ".join(done) or "16 bits, keeps all"


def costs_of(axis: Measure, runs: Sequence[StoredRun], samples: list[list[SampleName]]) -> list[Cost | None]:
    """One cost of each run over the same samples, those of each subset; None where its records lack what it needs."""
    above: list[np.ndarray] = []  # of each subset: [n, runs], NaN where a record lacks it
    below: list[np.ndarray] = []
    for parts, pick in ((above, axis.above), (below, axis.below)):
        values = [values_by_sample(run.samples.values(), pick)[0] for run in runs]
        for members in samples:
            rows = [[held.get(subset, {}).get(name, np.nan) for held in values] for subset, name in members]
            parts.append(np.array(rows))
    costs: list[Cost | None] = []
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.concatenate(above).sum(axis=0) / np.concatenate(below).sum(axis=0)
        each = np.concatenate(above) / np.concatenate(below)
        scale = np.concatenate(below).mean(axis=0)
    for index, value in enumerate(ratios):
        both = zip(above, below, strict=True)
        linear = [value + (a[:, index] - value * b[:, index]) / scale[index] for a, b in both]
        shares = None if axis.name in NO_EVIDENCE else weighed(linear, "sample")
        known = np.isfinite(value) and value > LEAST_COST
        within = float(each[:, index].min()), float(each[:, index].max())
        costs.append(Cost(value=float(value), shares=shares, within=within) if known else None)
    return costs


def _drawable(group: Group, what: Measure, incomplete: bool, notes: list[str]) -> dict[str, Curve]:
    """The values of the runs that can be drawn, by folder; the notes say why the others cannot."""
    curves = {run.name: curve_of(run, what) for run in group.runs}
    whole = max((curves[run.name].total for run in group.runs if run.complete), default=0)
    for run in group.runs:
        held = len(curves[run.name].values)
        if not run.complete and not incomplete:
            notes.append(f"{run.label} is not drawn: it is incomplete ({run.progress})")
        elif not held:
            notes.append(f"{run.label} is not drawn: no sample of it has {what.title}")
        elif run.complete and held < ENOUGH * whole:
            notes.append(f"{run.label} is not drawn: only {held} of {whole} samples ended well")
        else:
            continue
        del curves[run.name]
    # One run with other samples would leave none that all runs share.
    first = next((run for run in (group.reference, *group.runs) if run is not None and run.name in curves), None)
    for run in group.runs:
        if first and run.name in curves and not shared([curves[first.name], curves[run.name]]):
            notes.append(f"{run.label} is not drawn: it has no sample of {first.label}'s")
            del curves[run.name]
    return curves


def build(group: Group, cfg: DictConfig, what: Measure | None = None) -> Panel | None:
    """Make the points of a group, over the samples that every drawn run has.

    None when there is nothing to draw; the group's notes then have the reason. Raises ValueError where the metric
    `what` does not exist.
    """
    what, notes = what or measure(str(cfg.metric), group, shares=True), list(group.notes)
    curves = _drawable(group, what, cfg.incomplete, notes)
    runs = [run for run in group.runs if run.name in curves]
    common = shared(curves.values())
    if not common:
        group.notes = [*notes, f"{group.title}: no sample that all runs share, so nothing is drawn"]
        return None
    samples, total = list(by_subset(common).values()), max(curve.total for curve in curves.values())
    if len(common) < total:
        notes.append(f"every number here is over the {len(common)} of {total} samples that all drawn runs have")
    reference = group.reference if group.reference in runs and cfg.quality == "difference" else None
    if cfg.quality == "difference" and reference is None:
        notes.append(f"{group.title}: there is no complete run of the full cache, so scores are drawn, not differences")
    if what.of is not None and (reference is None or not any(curves[reference.name].values[name] for name in common)):
        notes.append(f"{group.title}: no score of the full cache, or 0, so that scores are drawn, not shares of it")
        what, reference = what.of, None
    costs = {name: costs_of(axis, runs, samples) for name, axis in group.axes.items()}
    series = {run.name: (name, family(members)) for name, members in series_of(runs).items() for run in members}
    points = []
    for index, run in enumerate(runs):
        scores = strata_of(curves[run.name].values, samples, run.record.weighting)
        points.append(
            Point(
                key=run.key,
                label=run.label,
                method=run.method,
                series=series[run.name][0],
                family=series[run.name][1],
                scores=scores,
                score_interval=score_interval(scores, what),
                costs={name: cost for name, of_run in costs.items() if (cost := of_run[index]) is not None},
                names=[run.name],
            )
        )
    panel = Panel(
        title=group.title,
        kin=f"{group.model}, code {group.runs[0].version}",
        what=what,
        points=points,
        questions=[[question(group, sample) for sample in members] for members in samples],
        reference=reference.key if reference else None,
        margin=margin_of(cfg, what),
        resamples=cfg.resamples,
        seed=cfg.seed,
        unfit=group.unfit(what),
        notes=notes,
        axes=group.axes,
    )
    for name, axis in group.axes.items():
        lacking = [point.label for point in points if name not in point.costs]
        if lacking and name not in NO_EVIDENCE:
            notes.append(f"not drawn against {axis.title}, which their samples lack: {', '.join(lacking)}")
    panel.set_quality()
    _set_band(panel, [run.key for run in group.repeats if run in runs])
    if not panel.is_enough:
        panel.notes.append(
            f"n too small: {panel.num_samples} samples, and {FEWEST_SAMPLES} are needed (two in each subset), so "
            "nothing is said of which run is better"
        )
    if TIME.name in panel.axes:
        _check_time(panel, runs)
    return panel


def _set_band(panel: Panel, repeats: Sequence[str]) -> None:
    """Set the noise band: the union of the intervals of the full cache's repetitions, which are then no points."""
    points = [point for point in panel.points if point.key in repeats]
    ends = [end for point in points for end in (point.interval or (point.quality, point.quality))]
    if panel.reference is None or not points:
        panel.notes.append(
            "no noise band: run method=full with another backend (or batch_size, where it is part of a run) too, and "
            "it shows what is only noise"
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
        return
    panel.notes.append(
        "times are no evidence: each run was timed by itself, with whatever else the machine did; they have no "
        "interval and no standing. `kvbench bench` times methods in turn"
    )
    if any(run.record.backend == "torch" for run in runs):
        panel.notes.append("times with backend torch are no claim: it is the plain reference, made to be right")


def averages(panels: Sequence[Panel]) -> list[Panel]:
    """Average the groups of each model and code version with equal weights, over the points in all of them.

    Not where there are fewer than two groups or points, or where the groups measure different things. Panels that are
    not averaged because their code differs get a note.
    """
    kins: dict[str, list[Panel]] = {}
    for panel in panels:
        kins.setdefault(panel.kin, []).append(panel)
    if len(kins) > 1:
        for panel in panels:
            panel.notes.append("no mean over groups of different models or versions of the code is taken")
    result = []
    for kin, members in kins.items():
        if len(members) > 1 and len({(panel.what.scale, panel.what.higher_is_better) for panel in members}) == 1:
            title = f"mean over {len(members)} groups with {kin.partition(',')[0]}"
            result.append(_average(title, members))
    return [panel for panel in result if len(panel.points) > 1]


def _average(title: str, panels: Sequence[Panel]) -> Panel:
    by_key = {point.key: [other for panel in panels if (other := panel.find(point.key))] for point in panels[0].points}
    in_all = {key: points for key, points in by_key.items() if len(points) == len(panels)}
    same = len({panel.reference for panel in panels}) == 1
    questions, first = [panel.questions for panel in panels], panels[0]
    result = replace(
        first,
        title=title,
        points=[_mean_point(points, questions, first.what) for points in in_all.values()],
        questions=distinct(questions),
        reference=first.reference if same and first.reference in in_all else None,
        band=None,
        unfit="; ".join(f"{panel.title}: {panel.unfit}" for panel in panels if panel.unfit),
        notes=[f"over: {'; '.join(panel.title for panel in panels)}"],
        published=[],
    )
    result.set_quality()
    rows = sum(panel.num_samples for panel in panels)
    if rows > result.num_samples:
        result.notes.append(
            f"{result.num_samples} distinct questions in {rows} answers: the groups share questions, which were "
            "resampled together"
        )
    return result


def distinct(groups: Sequence[Questions]) -> Questions:
    """The distinct questions of some groups, in subsets of task and subset name."""
    by_subset: dict[tuple[str, str], set[Question]] = {}
    for item in (item for group in groups for members in group for item in members):
        by_subset.setdefault(item[:2], set()).add(item)
    return [sorted(by_subset[name]) for name in sorted(by_subset)]


def pool_strata(questions: Sequence[Questions], values: Sequence[Strata]) -> Strata:
    """Contribution of each distinct question to the mean of some groups' weighted means.

    In subsets as those of `distinct`; a question that is not in every group contributes to its groups. The values are
    those of each group's questions.
    """
    merged = distinct(questions)
    position = {question: (index, row) for index, members in enumerate(merged) for row, question in enumerate(members)}
    sums = [np.zeros(len(members)) for members in merged]
    weights = np.zeros(len(merged))
    for group, strata in zip(questions, values, strict=True):
        for members, scores, weight in zip(group, strata.values, strata.weights, strict=True):
            index, share = position[members[0]][0], weight / len(questions)
            rows = [position[question][1] for question in members]
            weights[index] += share
            sums[index] += share * scores.mean()
            sums[index][rows] += share * (len(merged[index]) / len(scores)) * (scores - scores.mean())
    # Rounded, so that four equal answers of yes are a yes.
    return Strata(tuple(np.round(s / w, 12) for s, w in zip(sums, weights, strict=True)), tuple(weights.tolist()))


def _mean_point(parts: Sequence[Point], questions: Sequence[Questions], what: Measure) -> Point:
    costs = {}
    for name in parts[0].costs:
        held = [part.costs[name] for part in parts if name in part.costs]
        if len(held) < len(parts):
            continue
        known = [cost.shares for cost in held if cost.shares is not None]
        shares = pool_strata(questions, known) if len(known) == len(held) else None
        low, high = (float(np.mean(ends)) for ends in zip(*(cost.within for cost in held), strict=True))
        costs[name] = Cost(value=float(np.mean([cost.value for cost in held])), shares=shares, within=(low, high))
    scores = pool_strata(questions, [part.scores for part in parts])
    return replace(
        parts[0],
        scores=scores,
        score_interval=score_interval(scores, what),
        quality=0.0,
        interval=None,
        costs=costs,
        names=[name for part in parts for name in part.names],
    )
