"""The mean over tasks of the methods that were run on all of them."""

from collections.abc import Sequence

import numpy as np

from kvbench.evidence.costs import Cost, Interval
from kvbench.evidence.frontier import Panel, Point
from kvbench.results.measures import COSTS
from kvbench.stats import paired as stats
from kvbench.stats.intervals import mover

SHIFT = 7  # resamples; those of two groups have nothing to do with each other, so they are shifted against each other


def averages(panels: Sequence[Panel]) -> list[Panel]:
    """Average the groups of each model and version of the code, every group with the same weight.

    Args:
        panels: The groups' panels; they get a note where they are not averaged because their code differs.

    Returns:
        Panels with the points that all of their groups have; none where there are fewer than two of those, or where
        the groups measure different things.
    """
    kins: dict[str, list[Panel]] = {}
    for panel in panels:
        kins.setdefault(panel.kin, []).append(panel)
    if len(kins) > 1:
        for panel in panels:
            panel.notes.append("no mean over groups of different models or versions of the code is taken")
    found = []
    for kin, members in kins.items():
        if len(members) > 1 and len({(panel.what.scale, panel.what.higher_is_better) for panel in members}) == 1:
            title = f"mean over {len(members)} groups with {kin.partition(',')[0]}"
            found.append(_average(title, members))
    return [panel for panel in found if len(panel.points) > 1]


def _average(title: str, panels: Sequence[Panel]) -> Panel:
    found = {point.key: [other for panel in panels if (other := panel.find(point.key))] for point in panels[0].points}
    shared = {key: points for key, points in found.items() if len(points) == len(panels)}
    references = {panel.reference for panel in panels}
    result = Panel(
        title=title,
        kin=panels[0].kin,
        what=panels[0].what,
        points=[_point(points) for points in shared.values()],
        num_samples=sum(panel.num_samples for panel in panels),
        total=sum(panel.total for panel in panels),
        freedom=sum(panel.freedom for panel in panels),
        reference=panels[0].reference if len(references) == 1 and panels[0].reference in shared else None,
    )
    result.notes.append(f"over: {'; '.join(panel.title for panel in panels)}")
    return result


def _point(parts: Sequence[Point]) -> Point:
    costs = {}
    for name in COSTS:
        if all(name in part.costs for part in parts):
            draws = _mean([part.costs[name].draws for part in parts])
            value = float(np.mean([part.costs[name].value for part in parts]))
            costs[name] = Cost(value=value, interval=stats.percentiles(draws), draws=draws)
    return Point(
        key=parts[0].key,
        label=parts[0].label,
        method=parts[0].method,
        family=parts[0].family,
        score=float(np.mean([part.score for part in parts])),
        score_interval=_together([(part.score, part.score_interval) for part in parts]),
        quality=float(np.mean([part.quality for part in parts])),
        interval=_together([(part.quality, part.interval) for part in parts]),
        draws=_mean([part.draws for part in parts]),
        costs=costs,
        names=[name for part in parts for name in part.names],
    )


def _mean(draws: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum([np.roll(values, SHIFT * index) for index, values in enumerate(draws)], axis=0) / len(draws)


def _together(parts: Sequence[tuple[float, Interval | None]]) -> Interval | None:
    """The interval of a mean of independent values; None where one of them has none."""
    ends = [(value, *interval) for value, interval in parts if interval is not None]
    if len(ends) < len(parts):
        return None
    middle = sum(value for value, _ in parts) / len(parts)
    below, above = mover(ends, len(parts))
    return middle - below, middle + above
