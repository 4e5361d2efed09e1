"""Parts that the pictures of a frontier draw alike: axes, points with whiskers, lines, names apart, round ticks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import DOMINATED, FRONTIER, best_so_far, standing
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.published import method_name
from kvbench.results.measures import COSTS, RESIDENT
from kvbench.show.palette import SKY, STYLES, method_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FP8 = "fp8"
INK, PALE = "#555555", "#B8B8B8"
SIZE = 7  # points; what is smaller is not read in print
LINE_HEIGHT = 1.3  # of the text's size
STYLE: dict[Any, Any] = {
    "font.size": SIZE,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
STEPS = (
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
    (1, 1.5, 2, 3, 4, 5, 6, 8),
    (1, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
End = tuple[str, Point, str]  # a name, the point that it belongs to, a colour


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move heights of labels apart as little as a simple pass can, inside [0, 1], in the same order.

    Two are closer than `gap` only when they cannot all have it.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, 1 / max(1, len(wanted) - 1))
    placed = [min(1.0, max(0.0, wanted[index])) for index in order]
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    if placed and placed[-1] > 1.0:
        placed[-1] = 1.0
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = min(placed[index], placed[index + 1] - gap)
    result = [0.0] * len(wanted)
    for place, index in zip(placed, order, strict=True):
        result[index] = place
    return result


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two ends of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in STEPS:
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


@dataclass(frozen=True)
class Line:
    """Points of a method that one line joins: their settings differ in numbers only."""

    name: str
    method: str
    style: str
    points: list[Point]


class Drawing:
    """One panel's data with the axis it is drawn on, by the name of the cost."""

    def __init__(self, panel: Panel, axis: str) -> None:
        self.panel, self.axis = panel, COSTS[axis]
        self.points = [point for point in panel.points if axis in point.costs]
        self.standing = standing(panel, axis)
        self.scale = panel.what.scale
        self.families = sorted({point.family for point in self.points if point.method != FULL})
        self.quality = f"{panel.what.title}, {panel.what.unit}"

    def methods(self, family: str | None = None) -> dict[str, list[Point]]:
        """Method -> its points by resident bytes, whatever the axis: the line follows the setting."""
        result: dict[str, list[Point]] = {}
        for point in sorted(self.points, key=lambda point: point.costs[RESIDENT.name].value):
            if family in (None, point.family) and point.method != FULL:
                result.setdefault(point.method, []).append(point)
        return dict(sorted(result.items()))

    def parts(self) -> list[tuple[str, dict[str, list[Point]]]]:
        """The panels after the first: a title and its methods."""
        found = []
        for name in self.families:
            panels: list[dict[str, list[Point]]] = []
            for method, points in self.methods(name).items():
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

        def lengths(ends: tuple[float, float], scale: float, middle: float) -> list[list[float]]:
            return [[max(0.0, middle - ends[0] * scale)], [max(0.0, ends[1] * scale - middle)]]

        cost = point.costs[self.axis.name]
        across = lengths(cost.interval or (cost.value, cost.value), self.axis.scale, self.x(point))
        return across, lengths(point.interval or (point.quality, point.quality), self.scale, self.y(point))

    def printed(self, method: str) -> list[tuple[float, float]]:
        """Numbers that papers printed for a method, as cost and quality; only memory can be compared."""
        if self.axis.name != RESIDENT.name:
            return []
        mine = (point for point in self.panel.published if method_name(point.row.method) == method_name(method))
        return [(p.row.memory_pct, p.difference * self.scale) for p in mine if p.row.memory_pct is not None]

    def front(self) -> list[Point]:
        """The frontier by the estimates, by cost."""
        costs, quality = [self.x(p) for p in self.points], [p.quality for p in self.points]
        return [self.points[index] for index in best_so_far(costs, quality, self.panel.what.higher_is_better)]

    def limits(self) -> tuple[float, float, float, float]:
        """Ends of both axes, in shown units, with room for every whisker."""
        xs = [self.x(point) for point in self.points]
        ends = [self.y(point) for point in self.points]
        for point in self.points:
            (below,), (above,) = self.spans(point)[1]
            ends += [self.y(point) - below, self.y(point) + above]
        for x, y in (found for method in {point.method for point in self.points} for found in self.printed(method)):
            xs.append(x)
            ends.append(y)
        ends += [end * self.scale for end in self.panel.band or ()]
        room = 0.05 * (max(ends) - min(ends)) or 0.05 * self.scale
        wide = (max(xs) / min(xs)) ** 0.06 * 1.04
        return min(xs) / wide, max(xs) * wide, min(ends) - room, max(ends) + room


def lines_of(methods: Mapping[str, Iterable[Point]]) -> list[Line]:
    """The lines through the points of some methods.

    A tier is no step on the way from one budget to the next, so a method has several lines where it has several tiers.
    """
    found = []
    for method, points in methods.items():
        series: dict[str, list[Point]] = {}
        for point in points:
            pairs = [word.partition("=") for word in point.label.split()[1:]]
            words = [v for _, _, v in pairs if v != "None" and not v.replace(".", "", 1).isdigit()]
            series.setdefault(" ".join(words), []).append(point)
        for place, (kind, own) in enumerate(series.items()):
            name = f"{method} {kind}".strip() if len(series) > 1 else method
            found.append(Line(name, method, STYLES[place % len(STYLES)], own))
    return found


def draw_frame(axes: "Axes", drawing: Drawing) -> None:
    """Limits, ticks, the full cache's line, its noise band, the FP8 lines and the frontier."""
    left, right, bottom, top = drawing.limits()
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(*((bottom, top) if drawing.panel.what.higher_is_better else (top, bottom)))
    marks = ticks(left, right)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.5)
    axes.set_axisbelow(True)
    full = drawing.panel.find(drawing.panel.reference) or next((p for p in drawing.points if p.method == FULL), None)
    if full is not None:
        if drawing.panel.band is not None:
            low, high = (end * drawing.scale for end in drawing.panel.band)
            axes.axhspan(low, high, color=SKY, alpha=0.22, linewidth=0, zorder=0)
        axes.axhline(drawing.y(full), color="black", linewidth=0.8, zorder=1)
        axes.plot(drawing.x(full), drawing.y(full), "*", color="black", markersize=6, zorder=3)
    incumbent = next((point for point in drawing.points if point.method == FP8), None)
    if incumbent is not None:
        style: dict[str, Any] = {"color": INK, "linewidth": 0.7, "linestyle": (0, (4, 2)), "zorder": 1}
        axes.axhline(drawing.y(incumbent), **style)
        axes.axvline(drawing.x(incumbent), **style)
    front = drawing.front()
    if front:
        xs, ys = [drawing.x(point) for point in front], [drawing.y(point) for point in front]
        axes.step([*xs, right], [*ys, ys[-1]], where="post", color=PALE, linewidth=2.2, zorder=1)


def draw_point(axes: "Axes", drawing: Drawing, point: Point, colour: str, marker: str, size: float = 4.2) -> None:
    """One point with its whiskers; hollow where another one beats it beyond chance, ringed on the frontier."""
    across, along = drawing.spans(point)
    where = drawing.standing.get(point.key)
    whiskers: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.7, "alpha": 0.45, "zorder": 2}
    axes.errorbar(drawing.x(point), drawing.y(point), xerr=across, yerr=along, **whiskers)
    axes.plot(
        drawing.x(point),
        drawing.y(point),
        linestyle="none",
        marker=marker,
        markersize=size,
        zorder=4,
        markerfacecolor="white" if where == DOMINATED else colour,
        markeredgecolor="black" if where == FRONTIER else colour,
        fillstyle="full" if point.interval or point.method == FULL else "top",
        markeredgewidth=1.1 if where == FRONTIER else 0.9,
    )


def draw_lines(axes: "Axes", drawing: Drawing, lines: Sequence[Line], size: float = 4.2) -> list[End]:
    """Lines with their points, and crosses for what papers printed; gives the names at the lines' ends."""
    for line in lines:
        colour, marker = method_style(line.method)
        xs, ys = [drawing.x(point) for point in line.points], [drawing.y(point) for point in line.points]
        axes.plot(xs, ys, color=colour, linewidth=0.9, alpha=0.8, linestyle=line.style, zorder=3)
        for point in line.points:
            draw_point(axes, drawing, point, colour, marker, size)
    for method in dict.fromkeys(line.method for line in lines):
        for x, y in drawing.printed(method):
            colour = method_style(method)[0]
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    return [(line.name, line.points[-1], method_style(line.method)[0]) for line in lines]


def draw_names(axes: "Axes", drawing: Drawing, ends: Sequence[End], height_in: float) -> None:
    """Names in a column right of the panel, each tied to its point by a thin line; `height_in` is the figure's."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform((drawing.x(point), drawing.y(point)))[1] for _, point, _ in ends]
    gap = LINE_HEIGHT * SIZE / 72 / (axes.get_position().height * height_in)
    tie: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3}
    for (text, point, colour), height in zip(ends, spread(heights, gap), strict=True):
        axes.annotate(
            text,
            (drawing.x(point), drawing.y(point)),
            xytext=(1.035, height),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=SIZE,
            color=colour,
            annotation_clip=False,
            arrowprops=tie | {"color": colour, "relpos": (0, 0.5)},
        )
