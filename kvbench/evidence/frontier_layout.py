"""Where things go in the picture of a frontier: which method in which panel, labels apart, round ticks."""

import math
from collections.abc import Sequence

from kvbench.config.files import FULL
from kvbench.evidence.dominance import best_so_far, standing
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.published import method_name
from kvbench.results.measures import COSTS, RESIDENT
from kvbench.show.palette import method_style


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move labels apart as little as a simple pass can, inside [0, 1].

    Args:
        wanted: Heights where the labels would be.
        gap: Least distance between two.

    Returns:
        Heights in the same order; closer than `gap` only when they cannot all have it.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, 1 / max(1, len(wanted) - 1))
    placed = [min(1.0, max(0.0, wanted[index])) for index in order]
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    over = max(0.0, placed[-1] - 1.0) if placed else 0.0
    if over:
        placed[-1] = 1.0
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = min(placed[index], placed[index + 1] - gap)
    result = [0.0] * len(wanted)
    for place, index in zip(placed, order, strict=True):
        result[index] = place
    return result


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two ends of a logarithmic axis."""
    for steps in (
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
        (1, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    ):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


class Drawing:
    """One panel's data with the axis it is drawn on.

    Args:
        panel: The points.
        axis: Name of the cost.
    """

    def __init__(self, panel: Panel, axis: str) -> None:
        self.panel, self.axis = panel, COSTS[axis]
        self.points = [point for point in panel.points if axis in point.costs]
        self.standing = standing(panel, axis)
        self.scale = panel.what.scale
        self.families = sorted({point.family for point in self.points if point.method != FULL})

    def of_family(self, name: str) -> dict[str, list[Point]]:
        """Method -> its points by resident bytes, whatever the axis: the line follows the setting."""
        result: dict[str, list[Point]] = {}
        for point in sorted(self.points, key=lambda point: point.costs[RESIDENT.name].value):
            if point.family == name and point.method != FULL:
                result.setdefault(point.method, []).append(point)
        return dict(sorted(result.items()))

    def parts(self) -> list[tuple[str, dict[str, list[Point]]]]:
        """What each panel after the first shows: a title and its methods."""
        found = []
        for name in self.families:
            panels: list[dict[str, list[Point]]] = []
            for method, points in self.of_family(name).items():
                colour = method_style(method)[0]
                free = (one for one in panels if colour not in {method_style(other)[0] for other in one})
                place = next(free, None)  # no colour is twice in a panel
                if place is None:
                    place = {}
                    panels.append(place)
                place[method] = points
            for index, members in enumerate(panels):
                title = name if len(panels) == 1 else f"{name} ({index + 1} of {len(panels)})"
                found.append((title, members))
        return found

    def x(self, point: Point) -> float:
        """Cost in shown units."""
        return point.costs[self.axis.name].value * self.axis.scale

    def y(self, point: Point) -> float:
        """Quality in shown units."""
        return point.quality * self.scale

    def spans(self, point: Point) -> tuple[list[list[float]], list[list[float]]]:
        """Lengths of the whiskers below and above, for both axes."""
        cost = point.costs[self.axis.name]
        low, high = (end * self.axis.scale for end in cost.interval or (cost.value, cost.value))
        across = [[max(0.0, self.x(point) - low)], [max(0.0, high - self.x(point))]]
        low, high = (end * self.scale for end in point.interval or (point.quality,) * 2)
        return across, [[max(0.0, self.y(point) - low)], [max(0.0, high - self.y(point))]]

    def printed(self, method: str) -> list[tuple[float, float]]:
        """What papers printed for a method, as cost and quality; only memory can be compared, and only in kind."""
        if self.axis.name != RESIDENT.name:
            return []
        mine = (point for point in self.panel.published if method_name(point.row.method) == method_name(method))
        return [(p.row.memory_pct, p.difference * self.scale) for p in mine if p.row.memory_pct is not None]

    def front(self) -> list[Point]:
        """The frontier by the estimates, by cost."""
        costs, quality = [self.x(p) for p in self.points], [p.quality for p in self.points]
        return [self.points[index] for index in best_so_far(costs, quality, self.panel.what.higher_is_better)]
