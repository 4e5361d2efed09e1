"""The cells of heat maps: which samples lie at which depth of which length, in every run of a group."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.config.files import FULL
from kvbench.evidence.pairing import SampleName, measure, values_of
from kvbench.evidence.runs import Group, StoredRun
from kvbench.results.measures import Measure

Place = tuple[int, int]  # depth in percent, length in tokens
# More rows or columns are no grid, and no picture shows them.
MOST = 128


@dataclass(frozen=True, kw_only=True)
class Map:
    """What one run has in each cell."""

    label: str
    values: dict[Place, list[float]]
    """One value for each sample, unscaled."""
    differences: dict[Place, list[float]] | None
    """Run minus full cache, sample by sample; None for the full cache, and without one."""


@dataclass(kw_only=True)
class Panels:
    """The maps of runs that may be compared."""

    title: str
    what: Measure
    depths: list[int]
    lengths: list[int]
    maps: list[Map]
    notes: list[str] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Samples of each map."""
        return sum(map(len, self.maps[0].values.values()))


def place_of(run: StoredRun) -> dict[SampleName, Place]:
    """Depth and length of a run's samples, as far as the task notes them as whole numbers."""
    found = {}
    for record in run.samples.values():
        depth, length = record["meta"].get("depth"), record["meta"].get("length")
        if type(depth) is int and type(length) is int:
            found[record["subset"], record["sample_id"]] = depth, length
    return found


def panels_of(group: Group, metric: str) -> Panels | None:
    """The maps of a group; None where its samples have no depth and length.

    Args:
        group: Runs that may be compared.
        metric: As the setting.

    Raises:
        ValueError: No run has the metric.
    """
    runs = [run for run in group.runs if place_of(run)]
    if not runs:
        return None
    what = measure(metric, group)
    values = [values_of(run, what) for run in runs]
    places = place_of(runs[0])
    common = [name for name in sorted(places) if all(name in each for each in values)]
    panels = Panels(title=group.title, what=what, depths=[], lengths=[], maps=[], notes=list(group.notes))
    panels.depths = sorted({places[name][0] for name in common})
    panels.lengths = sorted({places[name][1] for name in common})
    if not common or max(len(panels.depths), len(panels.lengths)) > MOST:
        return None
    most = max(map(len, values))
    if len(common) < most:
        panels.notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    reference = group.reference
    against = values_of(reference, what) if reference is not None else None
    for run, mine in zip(runs, values, strict=True):
        minus = None
        if against is not None and run.method != FULL:
            minus = _cells(places, {name: mine[name] - against[name] for name in common})
        cells = _cells(places, {name: mine[name] for name in common})
        panels.maps.append(Map(label=run.label, values=cells, differences=minus))
    if against is None:
        panels.notes.append("there is no run of the full cache, so no differences are drawn")
    return panels


def _cells(places: Mapping[SampleName, Place], values: Mapping[SampleName, float]) -> dict[Place, list[float]]:
    cells: dict[Place, list[float]] = {}
    for name, value in values.items():
        cells.setdefault(places[name], []).append(value)
    return cells
