"""The pictures of a frontier: small panels by what the methods do, or one panel for a paper's column. One colour,
marker and line per method, names at the lines' ends."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import BEST, DOMINATED, NEAR, TOO_FEW, best_so_far, standing
from kvbench.evidence.frontier import Interval, Panel, Point
from kvbench.evidence.published import method_name
from kvbench.results.measures import RESIDENT
from kvbench.show.picture import (
    LINE_HEIGHT,
    METHOD_MARKERS,
    NAMES_LEFT,
    SKY,
    STYLES,
    drawn,
    method_style,
    name_points,
    width_in,
)
from kvbench.show.terminal import three_digits
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
FEW = 12  # points whose names fit beside one panel
SHAPES = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
# Of panels, in inches: two columns of a paper; axis words, panel, names, what parts two columns, edge.
WIDTH_IN = 7.2
LEFT_IN, PANEL_IN, NAMES_IN, BETWEEN_IN, RIGHT_IN = 0.7, 1.95, 1.08, 0.4, 0.04
FOOT_LINE_IN, FOOT_LENGTH = 0.125, 128  # height and characters of a line under the picture
# Of the picture for a paper's column: its width, which is more where names are longer than `ONE_NAMES_IN`; axis words,
# names, and what is between them and the panel; above and below the panel; its least height; characters of a line.
ONE_WIDTH_IN, ONE_LEFT_IN, ONE_NAMES_IN, BESIDE_IN = 3.4, 0.68, 0.92, 0.12
ONE_TOP_IN, ONE_BOTTOM_IN, LEAST_HEIGHT_IN, ONE_FOOT_LENGTH = 0.1, 0.4, 1.75, 62
Methods = Mapping[str, Sequence[Point]]
End = tuple[str, Point, str]  # a name, the point that it belongs to, a colour


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two ends of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in STEPS:
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= most:
            break
    if len(found) < 2:  # a narrow axis
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        found = [value for value in values if low <= value <= high]
    return found[:: math.ceil(len(found) / most)]


def short_label(label: str) -> str:
    """A label without the names of its settings, which the table has: `snapkv 0.25`, `diffkv 5, 0`."""
    method, *words = label.split(" ")
    values = [word.partition("=")[2].removesuffix(".0") for word in words if "=" in word]
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
    found = []
    for method, points in methods.items():
        series: dict[str, list[Point]] = {}
        for point in points:
            series.setdefault(point.series, []).append(point)
        for place, (kind, own) in enumerate(series.items()):
            words = [word.partition("=")[2] or word for word in kind.split()[1:]]
            name = " ".join([method, *words]) if len(series) > 1 else method
            found.append(Line(name, method, STYLES[place % len(STYLES)], own))
    return found


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
        self.full = next((point for point in self.points if point.method == FULL), None)
        colours = {method: method_style(method)[0] for method in self.methods()}
        self.fits_one_panel = len(self.points) <= FEW and len(set(colours.values())) == len(colours)
        """The first panel has room for every name, and a colour for every method."""
        self.lacks_intervals = any(p.interval is None and p is not self.reference for p in self.points)

    def methods(self, family: str | None = None) -> dict[str, list[Point]]:
        """Method -> its points by resident bytes, whatever the axis: the line follows the setting. By the axis where a
        record lacks them."""
        axis, result = self.axis.name, dict[str, list[Point]]()
        for point in sorted(self.points, key=lambda point: point.costs.get(RESIDENT.name, point.costs[axis]).value):
            if family in (None, point.family) and point.method != FULL:
                result.setdefault(point.method, []).append(point)
        return dict(sorted(result.items()))

    def parts(self) -> list[tuple[str, Methods]]:
        """The panels after the first, none where it names all: a title and methods, of which no two have one colour."""
        found: list[tuple[str, Methods]] = []
        if self.fits_one_panel:
            return found
        for family in self.shapes:
            panels: list[dict[str, list[Point]]] = []
            for method, points in self.methods(family).items():
                colour = method_style(method)[0]
                free = (one for one in panels if colour not in {method_style(other)[0] for other in one})
                place = next(free, None)
                if place is None:
                    panels.append(place := {})
                place[method] = points
            for index, members in enumerate(panels, 1):
                found.append((family if len(panels) == 1 else f"{family} ({index} of {len(panels)})", members))
        return found

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
        mine = (point for point in self.panel.published if method_name(point.method) == method_name(method))
        return [(p.memory_pct, p.difference * self.scale) for p in mine]

    def limits(self) -> tuple[float, float, float, float]:
        """Ends of both axes, in shown units, with room for every whisker."""
        printed = [found for method in {point.method for point in self.points} for found in self.printed(method)]
        xs, ys = zip(*map(self.at, self.points), *printed, strict=True)
        ends = [*ys, *(end for point in self.points for end in self.whiskers(point)[1])]
        ends += [end * self.scale for end in self.panel.band or ()]
        room = 0.05 * (max(ends) - min(ends)) or 0.05 * self.scale
        wide = (max(xs) / min(xs)) ** 0.06 * 1.04
        return min(xs) / wide, max(xs) * wide, min(ends) - room, max(ends) + room


def frame(axes: "Axes", drawing: Drawing, most_ticks: int = 6) -> None:
    """Draw limits, ticks, the full cache's line, its noise band, the FP8 lines and the best estimates."""
    left, right, bottom, top = drawing.limits()
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


def _point(axes: "Axes", drawing: Drawing, point: Point, colour: str, marker: str, size: float = 4.2) -> None:
    """One point with its whiskers; hollow where another one beats it beyond chance, ringed at the best estimates."""
    (x, y), where = drawing.at(point), drawing.standing.get(point.key)
    pairs = zip((x, y), drawing.whiskers(point), strict=True)
    across, along = ([[max(0.0, middle - low)], [max(0.0, high - middle)]] for middle, (low, high) in pairs)
    whiskers: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.7, "alpha": 0.45, "zorder": 2}
    axes.errorbar(x, y, xerr=across, yerr=along, **whiskers)
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
            _point(axes, drawing, point, colour, marker, size)
    for method in dict.fromkeys(line.method for line in lines):
        for x, y in drawing.printed(method):
            colour = method_style(method)[0]
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    return [(line.name, line.points[-1], method_style(line.method)[0]) for line in lines]


def _names(axes: "Axes", drawing: Drawing, ends: Sequence[End], height_in: float) -> None:
    """Names in a column right of the panel; `height_in` is the figure's."""
    where = [(text, drawing.at(point), colour) for text, point, colour in ends]
    name_points(axes, where, axes.get_position().height * height_in, SIZE)


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Everything in grey, and the best estimates by name; a few points in colour, and all by name."""
    if drawing.fits_one_panel:
        ends = draw_lines(axes, drawing, lines_of(drawing.methods()))
        _names(axes, drawing, [*ends, *([(FULL, drawing.full, "black")] if drawing.full else [])], height_in)
        axes.set_title("all runs", fontsize=SIZE + 1, loc="left")
        return
    ends = []
    for point in drawing.points:
        where = drawing.standing.get(point.key)
        marker = drawing.shapes[point.family] if point.method != FULL else "*"
        if where in (BEST, NEAR):
            colour = method_style(point.method)[0]
            _point(axes, drawing, point, colour, marker, 5)
            ends.append((short_label(point.label), point, colour))
        else:
            face = "white" if where == DOMINATED else PALE
            style: dict[str, Any] = {"color": PALE, "markersize": 4, "markerfacecolor": face, "linestyle": "none"}
            axes.plot(*drawing.at(point), marker, zorder=2, **style)
    _names(axes, drawing, ends, height_in)
    axes.set_title(
        "all runs" if drawing.panel.unfit else "all runs, and the best estimates by name", fontsize=SIZE + 1, loc="left"
    )


def _family(axes: "Axes", drawing: Drawing, title: str, methods: Methods, height_in: float) -> None:
    """The methods of one panel in colour, before all others in grey."""
    for other in drawing.points:
        if other.method not in methods and other.method != FULL:
            axes.plot(*drawing.at(other), ".", color="#D9D9D9", markersize=4, zorder=1)
    _names(axes, drawing, draw_lines(axes, drawing, lines_of(methods)), height_in)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")


def panels_words(drawing: Drawing) -> list[str]:
    """The lines at the foot of the picture: what a reader must know to read it."""
    panel, full, words = drawing.panel, drawing.reference, []
    if full is not None:
        text = f"Black line: full cache, {panel.what.title} {full.score * drawing.scale:.3g}"
        if full.score_interval:
            text += " " + three_digits(full.score_interval, drawing.scale)
        words.append(f"{text}.")
    if panel.band:
        words.append("Blue band: the full cache run again with other batches or kernels.")
    if any(point.method == FP8 for point in drawing.points):
        words.append("Dashed: FP8.")
    lines = [f"{panel.unfit}." if panel.unfit else "Wide grey: the best estimates.", " ".join(words)]
    if TOO_FEW in drawing.standing.values():
        lines.append(f"n = {panel.num_samples} is too small to say which run is better.")
    elif drawing.standing and not panel.unfit:
        margin = f"{panel.margin * drawing.scale:.2g} {panel.what.unit}"
        lines.append(f"Ringed: better by more than {margin} than all that is cheaper, by the estimates alone.")
        lines.append(f"Hollow: a cheaper run is better (p < {ALPHA:.2g}, Holm over all pairs). Others: may be chance.")
    elif not drawing.standing:
        lines.append("Times of runs are no evidence and have no whiskers and no standing: each was measured by itself.")
    if drawing.lacks_intervals:
        lines.append("Half-filled: NO interval could be computed.")
    if not drawing.fits_one_panel:
        shapes = ", ".join(f"{SHAPES[shape]} {name}" for name, shape in drawing.shapes.items())
        lines.append(f"First panel: {shapes}, star 16 bits and all tokens.")
    if panel.published and drawing.axis.name == RESIDENT.name:
        papers = ", ".join(sorted({point.paper for point in panel.published}))
        lines.append(f"Crosses: printed by {papers} for other models, memory as stated there; NOT measured here.")
    kinds = "Newcombe's for yes or no, else the studentised bootstrap's"
    if panel.what.of is not None:
        kinds = "Donner and Zou's for yes or no, else Fieller's"
    lines.append(f"Whiskers: 95 % intervals over the {panel.num_samples} questions that all runs share ({kinds}).")
    return [piece for line in lines for piece in textwrap.wrap(line, FOOT_LENGTH)]


def panels_figure(drawing: Drawing) -> "Figure":
    """All runs in one panel, then a panel for each kind of method; a few runs in one panel as wide as the picture."""
    from matplotlib.figure import Figure

    parts, words = drawing.parts(), panels_words(drawing)
    count = 1 + len(parts)
    columns = min(2, count)
    rows, foot = math.ceil(count / columns), 0.1 + FOOT_LINE_IN * len(words)
    height = 0.95 + foot + 2.35 * rows
    best = [short_label(p.label) for p in drawing.points if drawing.standing.get(p.key) in (BEST, NEAR)]
    shown = [line.name for line in lines_of(drawing.methods())] + ([] if drawing.fits_one_panel else best)
    beside = (NAMES_LEFT - 1) * (PANEL_IN if columns > 1 else 2 * PANEL_IN + NAMES_IN + BETWEEN_IN)
    names = max([NAMES_IN, *(width_in(name, SIZE) + beside + RIGHT_IN for name in shown)])
    width = WIDTH_IN + columns * (names - NAMES_IN)  # wider where a name would lie beyond the edge
    made = Figure(figsize=(width, height))
    places = made.subplots(rows, columns, squeeze=False).ravel()
    made.subplots_adjust(
        left=LEFT_IN / width,
        right=1 - (names + RIGHT_IN) / width,
        wspace=(names + BETWEEN_IN) / PANEL_IN,
        hspace=0.36,
        top=1 - 0.5 / height,
        bottom=(0.48 + foot) / height,
    )
    for axes in places[count:]:
        axes.set_visible(False)
    for index, axes in enumerate(places[:count]):
        frame(axes, drawing)
        if index:
            _family(axes, drawing, *parts[index - 1], height)
        else:
            _overview(axes, drawing, height)
        if index >= count - columns:
            axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}")
        if index % columns == 0:
            label = f"difference to the full cache\n({drawing.quality})" if drawing.is_difference else drawing.quality
            axes.set_ylabel(label)
    made.suptitle(drawing.panel.title, fontsize=SIZE + 2, x=0.01, y=1 - 0.06 / height, ha="left", va="top", wrap=True)
    made.text(0.01, 0.04 / height, "\n".join(words), fontsize=SIZE - 0.5, color=INK, va="bottom", linespacing=1.35)
    return made


def one_figure(drawing: Drawing) -> "Figure":
    """One panel as wide as a paper's column, names outside of it, and no more words than it needs."""
    from matplotlib.figure import Figure

    lines, words = lines_of(drawing.methods()), _one_words(drawing)
    # As high as the names need, so that none covers another.
    tall = max(LEAST_HEIGHT_IN, (len(lines) + 1) * LINE_HEIGHT * SIZE / 72)
    foot = 0.06 + LINE_HEIGHT * (SIZE - 1) / 72 * len(words)
    height = ONE_TOP_IN + tall + ONE_BOTTOM_IN + foot
    width = (
        ONE_WIDTH_IN - ONE_NAMES_IN + max([ONE_NAMES_IN, *(width_in(line.name, SIZE) + BESIDE_IN for line in lines)])
    )
    made = Figure(figsize=(width, height))
    across = (ONE_WIDTH_IN - ONE_LEFT_IN - ONE_NAMES_IN) / width
    axes = made.add_axes((ONE_LEFT_IN / width, (ONE_BOTTOM_IN + foot) / height, across, tall / height))
    frame(axes, drawing)
    ends = draw_lines(axes, drawing, lines, 3.6)
    _names(axes, drawing, [*ends, *([(FULL, drawing.full, "black")] if drawing.full else [])], height)
    axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}", x=0.6)
    axes.set_ylabel(f"{drawing.quality},\ndifference to the full cache" if drawing.is_difference else drawing.quality)
    made.text(0.02, 0.03 / height, "\n".join(words), fontsize=SIZE - 1, color=INK, va="bottom", linespacing=1.3)
    return made


def _one_words(drawing: Drawing) -> list[str]:
    """Words without which the picture cannot be read; a caption says the rest."""
    panel, places = drawing.panel, set(drawing.standing.values())
    words = [f"{panel.unfit}. {panel.title}, n = {panel.num_samples}; whiskers: 95 % intervals.".removeprefix(". ")]
    if BEST in places:
        words.append("Ringed: the best estimates.")
    if DOMINATED in places:
        words.append("Hollow: a cheaper run is better.")
    if drawing.lacks_intervals:
        words.append("Half-filled: NO interval could be computed.")
    if panel.published and drawing.axis.name == RESIDENT.name:
        words.append("Crosses: printed in papers, NOT measured here.")
    return textwrap.wrap(" ".join(words), ONE_FOOT_LENGTH)


LAYOUTS = {"panels": panels_figure, "one": one_figure}


def render(panel: Panel, axis: str, kind: str, layout: str = "panels") -> bytes | None:
    """Draw one group on one axis, in one of `LAYOUTS`, as `png`, `svg` or `pdf`; None when no point has the cost."""
    drawing = Drawing(panel, axis)
    return drawn(lambda: LAYOUTS[layout](drawing), kind, STYLE, dpi=220) if drawing.points else None
