"""End of a search: is a point beyond the settings made by hand?

Judged on held-out samples by the code of `pareto`; with its printed and written form.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from rich.text import Text

from kvbench.config.settings import as_dict
from kvbench.evidence.dominance import best_so_far, is_cheaper
from kvbench.evidence.frontier import Panel, Point, build
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.pareto import quality_text
from kvbench.extensions.calibrate.measure import Trial
from kvbench.extensions.calibrate.plan import Rule
from kvbench.extensions.search.space import STORED, Tried, Wanted
from kvbench.results import summary
from kvbench.results.measures import LOSSES, RESIDENT
from kvbench.results.record import Counts, RunRecord, now
from kvbench.results.sample import key_of
from kvbench.results.writing import plain, write_atomic
from kvbench.show import terminal
from kvbench.show.terminal import number
from kvbench.show.text import LINE_LENGTH, safe
from kvbench.stats.paired import ALPHA, holm
from kvbench.stats.strata import FEWEST_SAMPLES

BETTER, AS_GOOD = "better", "as good"


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """A point of the search, a costlier point made by hand, and how much less the first loses."""

    point: Point
    hand: Point
    how: str
    """`BETTER`: it loses less, beyond chance; `AS_GOOD`: it loses at most the margin more."""
    gain: float


@dataclass(kw_only=True)
class Judged:
    """The held-out samples' verdict."""

    panel: Panel | None
    """None where nothing was measured that could be drawn."""
    searched: set[str] = field(default_factory=set)
    """Keys of the points that the search found."""
    beyond: list[Beyond] = field(default_factory=list)
    """Proven, the largest gain first."""
    maybe: list[Point] = field(default_factory=list)
    """Points found that no point made by hand beats by the estimates, without proof."""
    notes: list[str] = field(default_factory=list)


def judge(full: Trial, trials: Sequence[tuple[str, Trial, bool]], rule: Rule) -> Judged:
    """Puts the measured trials on one frontier: label, trial, and True where the search found it."""
    runs = [_stored("full", full), *(_stored(label, trial) for label, trial, _ in trials)]
    group = Group(task=full.experiment.task.name, model=full.experiment.model.name, title="held-out samples", runs=runs)
    settings = {"metric": rule.criterion, "quality": "difference", "margin": rule.margin, "incomplete": False}
    panel = build(group, OmegaConf.create(settings | {"resamples": rule.resamples, "seed": rule.seed}))
    if panel is None:
        return Judged(panel=None, notes=group.notes)
    labels = {label for label, _, is_searched in trials if is_searched}
    searched = [point for point in panel.points if point.label in labels]
    hand = [point for point in panel.points if point.label not in labels and point.key != panel.reference]
    beyond = _beyond(panel, searched, hand)
    named = {item.point.key for item in beyond}
    maybe = [point for point in _unbeaten(panel, searched, hand) if point.key not in named]
    small = f"n too small: {panel.num_samples} held-out samples prove nothing; raise search.held_out_samples"
    notes = [small] if panel.num_samples < FEWEST_SAMPLES else []
    return Judged(panel=panel, searched={point.key for point in searched}, beyond=beyond, maybe=maybe, notes=notes)


def _stored(label: str, trial: Trial) -> StoredRun:
    """A trial as the code of `compare` and `pareto` takes a run."""
    experiment, task = trial.experiment, trial.experiment.task
    record = RunRecord(
        status="complete",
        task=task.name,
        model=experiment.model.name,
        method=experiment.method,
        hash=experiment.hash,
        identity=experiment.identity,
        started=now(),
        weighting=task.weighting,
        counts=Counts(total=len(experiment.keys), samples=len(task.requests), done=len(trial.records)),
        metrics=summary.metrics(trial.records, task.metrics, task.primary, task.weighting),
        backend=experiment.backend,
    )
    samples = {key_of(item): item for item in trial.records}
    return StoredRun(name=experiment.hash, record=record, samples=samples, total=len(experiment.keys), label=label)


def _beyond(panel: Panel, searched: Sequence[Point], hand: Sequence[Point]) -> list[Beyond]:
    """Points of the search that dominate one on the frontier made by hand.

    `BETTER` is corrected (Holm) over all pairs of a searched point and a dearer point made by hand.
    """
    sign = 1 if panel.what.higher_is_better else -1
    costs = [point.costs[RESIDENT.name] for point in hand]
    best = best_so_far([cost.value for cost in costs], [p.quality for p in hand], panel.what.higher_is_better)
    pairs = [
        (mine, hand[index])
        for mine in searched
        for index in best
        if is_cheaper(mine.costs[RESIDENT.name], costs[index])
    ]
    tests = [panel.difference(a, b) for a, b in pairs]
    corrected = holm([test.p if sign * test.value > 0 else 1.0 for test in tests])
    result = []
    for (mine, theirs), test, p in zip(pairs, tests, corrected, strict=True):
        ends = test.interval[0]
        worst = None if ends is None else ends[0] if sign > 0 else -ends[1]
        if p is not None and p < ALPHA:
            result.append(Beyond(point=mine, hand=theirs, how=BETTER, gain=sign * test.value))
        elif worst is not None and worst >= -panel.margin:
            result.append(Beyond(point=mine, hand=theirs, how=AS_GOOD, gain=sign * test.value))
    return sorted(result, key=lambda item: (item.how != BETTER, -item.gain))


def _unbeaten(panel: Panel, searched: Sequence[Point], hand: Sequence[Point]) -> list[Point]:
    """Points of the search that no point made by hand, as cheap or cheaper, equals by the estimates.

    Between the cheapest and the dearest of these.
    """
    sign = 1 if panel.what.higher_is_better else -1
    result = []
    for point in searched:
        cheaper = [p for p in hand if p.costs[RESIDENT.name].value <= point.costs[RESIDENT.name].value]
        if cheaper and all(sign * other.quality < sign * point.quality for other in cheaper):
            result.append(point)
    return result


def write(folder: Path, wanted: Wanted, tried: Sequence[Tried], judged: Judged, origin: str) -> list[Path]:
    """Writes `search.json`: every setting that was tried, the held-out points, and the verdict."""
    criterion = wanted.plan.rule.criterion
    points = judged.panel.points if judged.panel else []
    content = {
        "search": as_dict(wanted.cfg),
        "by_hand": origin,
        "verdict": verdict(judged, origin, wanted),
        "tried": [
            {
                "method": item.method,
                "settings": item.settings,
                "hash": item.measured.hash,
                "bytes_ratio": item.bytes_ratio,
                "loss": dataclasses.asdict(item.measured.losses[criterion]),
            }
            for item in tried
            if item.measured is not None
        ],
        "held_out": [
            {
                "point": point.label,
                "found": point.key in judged.searched,
                "bytes_ratio": point.costs[RESIDENT.name].value,
                "quality": point.quality,
                "interval": point.interval,
            }
            for point in points
        ],
    }
    path = folder / "search.json"
    write_atomic(path, json.dumps(plain(content), indent=2).encode("ascii") + b"\n")
    return [path, folder / "study.log"]


def verdict(judged: Judged, origin: str, wanted: Wanted) -> list[str]:
    """The result in sentences."""
    if judged.panel is None:
        return ["nothing could be judged: no setting ended well on the held-out samples"]
    what, count = judged.panel.what, judged.panel.num_samples
    made = "the stored runs' settings" if origin == STORED else "the shipped settings (no run of this task is stored)"
    lines = []
    for item in judged.beyond:
        mine, theirs = (100 * point.costs[RESIDENT.name].value for point in (item.point, item.hand))
        gain = number(abs(item.gain), what.scale)
        how = f"loses {gain} {what.unit} less (p < 0.05, Holm)"
        if item.how != BETTER:
            how = f"loses no more than {number(judged.panel.margin, what.scale)} {what.unit} more (95 % interval)"
        both = f"{item.point.label} holds {mine:.1f} % where {item.hand.label} holds {theirs:.1f} %"
        lines.append(f"beyond: {both}; it {how}")
    if not judged.beyond:
        lines.append(f"found no point that is proven beyond {made}, on {count} held-out samples")
    else:
        lines.insert(0, f"found points beyond {made}, on {count} held-out samples that took no part in the search:")
    if named := "; ".join(point.label for point in judged.maybe):
        said = "better by the estimates alone, which can be chance"
        lines.append(f"{said}: {named}; more search.held_out_samples would tell")
    return lines


def show(
    wanted: Wanted, tried: Sequence[Tried], judged: Judged, origin: str, task: str, model: str, paths: Sequence[Path]
) -> None:
    """Prints the held-out table, the cheapest first, and the verdict."""
    console = terminal.console(80)
    criterion = wanted.plan.rule.criterion
    methods = len({item.method for item in tried})
    console.print(Text(f"\nTried {len(tried)} settings of {methods} methods on {task} with {model}."))
    if judged.panel is not None:
        what = judged.panel.what
        table = terminal.plain_table(f"Held out: {judged.panel.num_samples} samples, difference to full")
        terminal.add_names(table, "settings", [point.label for point in judged.panel.points])
        for heading in ("by", "% of FP16", f"{what.short}, {what.unit}"):
            table.add_column(heading, justify="right", no_wrap=True)
        for point in sorted(judged.panel.points, key=lambda one: one.costs[RESIDENT.name].value):
            by = "search" if point.key in judged.searched else "-" if point.key == judged.panel.reference else "hand"
            held = f"{100 * point.costs[RESIDENT.name].value:.1f}"
            table.add_row(safe(point.label, LINE_LENGTH), by, held, quality_text(judged.panel, point))
        console.print(table)
    for line in (*judged.notes, *verdict(judged, origin, wanted)):
        console.print(Text(line))
    rule = "A point is beyond the settings made by hand when it holds at least 1 % less than one on their frontier and "
    rule += "loses less, or at most the margin more."
    console.print(Text(f"Loss: {LOSSES[criterion].rule}. {rule}", style="dim"))
    terminal.print_paths(paths, console)
