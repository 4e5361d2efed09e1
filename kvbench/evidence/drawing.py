"""One panel of a frontier: its points, lines and names on one axis.

One colour, marker and line per method, names at the lines' ends.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import best_so_far, standing
from kvbench.evidence.frontier import Interval, Panel, Point
from kvbench.evidence.legends import BEST, DOMINATED
from kvbench.results.measures import RESIDENT
from kvbench.show.picture import METHOD_MARKERS, SKY, STYLES, method_style, name_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FP8 = "fp8"
INK, PALE = "#555555", "#B8B8B8"
SIZE = 7  # points; what is smaller is not read in print
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
FEW = 12  # points whose names fit next to one panel
Methods = Mapping[str, Sequence[Point]]
End = tuple[str, Point, str]  # a name, the point that it belongs to, a colour


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two ends of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in STEPS:
        candidates = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(candidates) <= most:
            break
    if len(candidates) < 2:  # a narrow axis
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        candidates = [value for value in values if low <= value <= high]
    return candidates[:: math.ceil(len(candidates) / most)]


def short_label(label: str) -> str:
    """Short label without setting names, which the table has: `snapkv 0.25`, `diffkv 5, 0`.

    Names of settings that are on or off, or none, are kept.
    """
    method, *words = label.split(" ")
    values = []
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        said = {"True": name, "False": f"no {name}", "off": f"{name} off", "none": f"{name} none"}
        values.append(said.get(value, value.removesuffix(".0")))
    return " ".join(filter(None, [method, ", ".join(values), *(word for word in words if "=" not in word)]))


@dataclass(frozen=True)
class Line:
    """Points of a method that one line joins: a tier is no step on the way from one budget to the next."""

    name: str
    method: str
    style: str
    points: list[Point]


def lines_of(methods: Methods) -> list[Line]:
    """The lines through the points of some methods."""
    lines = []
    for method, points in methods.items():
        series: dict[str, list[Point]] = {}
        for point in points:
            series.setdefault(point.series, []).append(point)
        for index, (kind, members) in enumerate(series.items()):
            words = [word.partition("=")[2] or word for word in kind.split()[1:]]
            name = " ".join([method, *words]) if len(series) > 1 else method
            lines.append(Line(name, method, STYLES[index % len(STYLES)], members))
    return lines


class Drawing:
    """One panel's data with the axis it is drawn on, by the name of the cost."""

    def __init__(self, panel: Panel, axis: str) -> None:
        self.panel, self.axis = panel, panel.axes[axis]
        self.points = [point for point in panel.points if axis in point.costs]
        self.standing = standing(panel, axis)
        self.scale = panel.what.scale
        families = sorted({point.family for point in self.points if point.method != FULL})
        self.shapes = dict(zip(families, METHOD_MARKERS, strict=False))
        """Family -> its marker in the first panel."""
        self.quality = f"{panel.what.title}, {panel.what.unit}"
        self.is_difference = panel.reference is not None and panel.what.of is None
        """Drawn are differences to the full cache, not scores or shares."""
        self.reference = panel.find(panel.reference)
        self.full = self.reference or next((point for point in self.points if point.method == FULL), None)
        colours = {method: method_style(method)[0] for method in self.methods()}
        self.fits_one_panel = len(self.points) <= FEW and len(set(colours.values())) == len(colours)
        """The first panel has room for every name, and a colour for every method."""
        self.lacks_intervals = any(p.interval is None and p is not self.reference for p in self.points)

    def methods(self, family: str | None = None) -> dict[str, list[Point]]:
        """Method -> its points by resident bytes on either axis, so that the line follows the setting.

        By the axis where a record lacks them.
        """
        axis, result = self.axis.name, dict[str, list[Point]]()
        for point in sorted(self.points, key=lambda point: point.costs.get(RESIDENT.name, point.costs[axis]).value):
            if family in (None, point.family) and point.method != FULL:
                result.setdefault(point.method, []).append(point)
        return dict(sorted(result.items()))

    def parts(self) -> list[tuple[str, Methods]]:
        """The panels after the first, none where it names all: a title and methods, of which no two have one colour."""
        parts: list[tuple[str, Methods]] = []
        if self.fits_one_panel:
            return parts
        for family in self.shapes:
            panels: list[dict[str, list[Point]]] = []
            for method, points in self.methods(family).items():
                colour = method_style(method)[0]
                free = (one for one in panels if colour not in {method_style(other)[0] for other in one})
                panel = next(free, None)
                if panel is None:
                    panels.append(panel := {})
                panel[method] = points
            for index, members in enumerate(panels, 1):
                parts.append((family if len(panels) == 1 else f"{family} ({index} of {len(panels)})", members))
        return parts

    def at(self, point: Point) -> tuple[float, float]:
        """Cost and quality in shown units."""
        return point.costs[self.axis.name].value * self.axis.scale, point.quality * self.scale

    def whiskers(self, point: Point) -> tuple[Interval, Interval]:
        """The ends of both intervals in shown units; the value itself where there is none."""
        cost = point.costs[self.axis.name]
        low, high = cost.interval or (cost.value, cost.value)
        worst, best = point.interval or (point.quality, point.quality)
        return (low * self.axis.scale, high * self.axis.scale), (worst * self.scale, best * self.scale)

    def printed(self, method: str) -> list[tuple[float, float]]:
        """Numbers that papers printed for a method, as cost and quality; only memory can be compared."""
        if self.axis.name != RESIDENT.name:
            return []
        mine = (point for point in self.panel.published if point.method == method)
        return [(p.memory_pct, p.difference * self.scale) for p in mine]

    def limits(self, whiskers: Collection[Point] | None = None) -> tuple[float, float, float, float]:
        """Ends of both axes, in shown units, with room for the whiskers of some points; None = of all."""
        printed = [
            printed_point
            for method in {point.method for point in self.points}
            for printed_point in self.printed(method)
        ]
        xs, ys = zip(*map(self.at, self.points), *printed, strict=True)
        barred = self.points if whiskers is None else whiskers
        ends = [*ys, *(end for point in barred for end in self.whiskers(point)[1])]
        ends += [end * self.scale for end in self.panel.band or ()]
        room = 0.05 * (max(ends) - min(ends)) or 0.05 * self.scale
        wide = (max(xs) / min(xs)) ** 0.06 * 1.04
        return min(xs) / wide, max(xs) * wide, min(ends) - room, max(ends) + room


def frame(axes: "Axes", drawing: Drawing, most_ticks: int = 6, whiskers: Collection[Point] | None = None) -> None:
    """Draw limits, ticks, the full cache's line, its noise band, the FP8 lines and the best estimates."""
    left, right, bottom, top = drawing.limits(whiskers)
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(*((bottom, top) if drawing.panel.what.higher_is_better else (top, bottom)))
    marks = ticks(left, right, most_ticks)
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.5)
    axes.set_axisbelow(True)
    full = drawing.reference or drawing.full
    if full is not None:
        if drawing.panel.band is not None:
            low, high = (end * drawing.scale for end in drawing.panel.band)
            axes.axhspan(low, high, color=SKY, alpha=0.22, linewidth=0, zorder=0)
        x, y = drawing.at(full)
        axes.axhline(y, color="black", linewidth=0.8, zorder=1)
        axes.plot(x, y, "*", color="black", markersize=6, zorder=3)
    incumbent = next((point for point in drawing.points if point.method == FP8), None)
    if incumbent is not None:
        style: dict[str, Any] = {"color": INK, "linewidth": 0.7, "linestyle": (0, (4, 2)), "zorder": 1}
        x, y = drawing.at(incumbent)
        axes.axhline(y, **style)
        axes.axvline(x, **style)
    if drawing.panel.unfit:
        return
    xs, ys = zip(*map(drawing.at, drawing.points), strict=True)
    front = best_so_far(xs, ys, drawing.panel.what.higher_is_better)
    steps = [*(ys[index] for index in front), ys[front[-1]]]
    axes.step([*(xs[index] for index in front), right], steps, where="post", color=PALE, linewidth=2.2, zorder=1)


def draw_point(
    axes: "Axes", drawing: Drawing, point: Point, colour: str, marker: str, size: float = 4.2, whiskers: bool = True
) -> None:
    """Draw a point: hollow where another one beats it beyond chance, ringed at the best estimates."""
    (x, y), where = drawing.at(point), drawing.standing.get(point.key)
    if whiskers:
        pairs = zip((x, y), drawing.whiskers(point), strict=True)
        across, along = ([[max(0.0, middle - low)], [max(0.0, high - middle)]] for middle, (low, high) in pairs)
        style: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.7, "alpha": 0.45, "zorder": 2}
        axes.errorbar(x, y, xerr=across, yerr=along, **style)
    axes.plot(
        x,
        y,
        linestyle="none",
        marker=marker,
        markersize=size,
        zorder=4,
        markerfacecolor="white" if where == DOMINATED else colour,
        markeredgecolor="black" if where == BEST else colour,
        fillstyle="full" if point.interval or point.method == FULL else "top",
        markeredgewidth=1.1 if where == BEST else 0.9,
    )


def draw_lines(axes: "Axes", drawing: Drawing, lines: Sequence[Line], size: float = 4.2) -> list[End]:
    """Draw lines with their points, and crosses for what papers printed; gives the names at the lines' ends."""
    for line in lines:
        colour, marker = method_style(line.method)
        xs, ys = zip(*map(drawing.at, line.points), strict=True)
        axes.plot(xs, ys, color=colour, linewidth=0.9, alpha=0.8, linestyle=line.style, zorder=3)
        for point in line.points:
            draw_point(axes, drawing, point, colour, marker, size)
    for method in dict.fromkeys(line.method for line in lines):
        for x, y in drawing.printed(method):
            colour = method_style(method)[0]
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    return [(line.name, line.points[-1], method_style(line.method)[0]) for line in lines]


def draw_names(axes: "Axes", drawing: Drawing, ends: Sequence[End], height_in: float) -> None:
    """Write names in a column right of the panel; `height_in` is the figure's."""
    where = [(text, drawing.at(point), colour) for text, point, colour in ends]
    name_points(axes, where, axes.get_position().height * height_in, SIZE)
