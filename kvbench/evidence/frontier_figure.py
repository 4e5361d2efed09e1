"""The picture of a frontier: small multiples by what the methods do, one colour, marker and line per method, names at
the lines' ends.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import DOMINATED, FRONTIER, NEAR, TOO_FEW
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.frontier_layout import Drawing, spread, ticks
from kvbench.results.measures import RESIDENT
from kvbench.show.palette import PANEL_COLOURS, PANEL_MARKERS, SKY, STYLES
from kvbench.show.picture import picture_bytes
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
FP8 = "fp8"
FOOT_LINE_IN = 0.125
FOOT_LENGTH = 128  # characters of a line under the picture
GREY, PALE = "#555555", "#B8B8B8"
WIDTH_IN = 7.2  # two columns of a paper
SIZE = 7  # points; what is smaller is not read in print
LEFT_IN, PANEL_IN, NAMES_IN, BETWEEN_IN = 0.7, 1.95, 1.08, 0.4  # axis words, panel, names, and what parts two columns
LINE_HEIGHT = 1.3  # of the text's size
STYLE: dict[Any, Any] = {
    "font.size": SIZE,
    "font.family": "DejaVu Sans",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "path",
}


def _frame(axes: "Axes", drawing: Drawing, limits: tuple[float, float, float, float]) -> None:
    """Limits, ticks, the full cache's line, its noise band, the FP8 lines and the frontier."""
    left, right, bottom, top = limits
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
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.7, "linestyle": (0, (4, 2)), "zorder": 1}
        axes.axhline(drawing.y(incumbent), **style)
        axes.axvline(drawing.x(incumbent), **style)
    front = drawing.front()
    if front:
        xs, ys = [drawing.x(point) for point in front], [drawing.y(point) for point in front]
        axes.step([*xs, right], [*ys, ys[-1]], where="post", color=PALE, linewidth=2.2, zorder=1)


def _marks(axes: "Axes", drawing: Drawing, point: Point, colour: str, marker: str, size: float = 4.2) -> None:
    """One point with its whiskers; hollow where another one beats it beyond chance, ringed on the frontier."""
    across, along = drawing.spans(point)
    where = drawing.standing.get(point.key)
    axes.errorbar(
        drawing.x(point),
        drawing.y(point),
        xerr=across,
        yerr=along,
        fmt="none",
        ecolor=colour,
        elinewidth=0.7,
        alpha=0.45,
        zorder=2,
    )
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


def _labels(axes: "Axes", drawing: Drawing, ends: Sequence[tuple[str, Point, str]], height_in: float) -> None:
    """Names in a column right of the panel, each tied to its point by a thin line; `height_in` is the figure's."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform((drawing.x(point), drawing.y(point)))[1] for _, point, _ in ends]
    gap = LINE_HEIGHT * SIZE / 72 / (axes.get_position().height * height_in)
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
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.5,
                "color": colour,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _family(axes: "Axes", drawing: Drawing, title: str, methods: dict[str, list[Point]], height_in: float) -> None:
    """The methods of one panel in colour, before all others in grey."""
    for other in drawing.points:
        if other.method not in methods and other.method != FULL:
            axes.plot(drawing.x(other), drawing.y(other), ".", color="#D9D9D9", markersize=4, zorder=1)
    ends = []
    for index, (method, points) in enumerate(methods.items()):
        colour, marker = PANEL_COLOURS[index], PANEL_MARKERS[index]
        series = _series(points)
        for line, (kind, own) in zip(STYLES * len(series), series.items(), strict=False):
            axes.plot(
                [drawing.x(p) for p in own],
                [drawing.y(p) for p in own],
                color=colour,
                linewidth=0.9,
                alpha=0.8,
                linestyle=line,
                zorder=3,
            )
            ends.append((f"{method} {kind}".strip() if len(series) > 1 else method, own[-1], colour))
        for point in points:
            _marks(axes, drawing, point, colour, marker)
        for x, y in drawing.printed(method):
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    _labels(axes, drawing, ends, height_in)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")


def _series(points: list[Point]) -> dict[str, list[Point]]:
    """Group the points of a method so that a line may join them: those whose settings differ in numbers only.

    A tier is no step on the way from one budget to the next.
    """
    series: dict[str, list[Point]] = {}
    for point in points:
        pairs = [word.partition("=") for word in point.label.split()[1:]]
        numbers = [value == "None" or value.replace(".", "", 1).isdigit() for _, _, value in pairs]
        kind = " ".join(value for (_, _, value), number in zip(pairs, numbers, strict=True) if not number)
        series.setdefault(kind, []).append(point)
    return series


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Everything in grey, and the points of the frontier by name."""
    shapes = _shapes(drawing)
    ends = []
    for point in drawing.points:
        marker = shapes[point.family] if point.method != FULL else "*"
        if drawing.standing.get(point.key) in (FRONTIER, NEAR):
            colour = PANEL_COLOURS[0] if point.method != FULL else "black"
            _marks(axes, drawing, point, colour, marker, 5)
            ends.append((_short(point.label), point, colour))
        else:
            hollow = "white" if drawing.standing.get(point.key) == DOMINATED else PALE
            axes.plot(
                drawing.x(point),
                drawing.y(point),
                marker=marker,
                color=PALE,
                markersize=4,
                markerfacecolor=hollow,
                linestyle="none",
                zorder=2,
            )
    _labels(axes, drawing, ends, height_in)
    axes.set_title("all runs, and the frontier by name", fontsize=SIZE + 1, loc="left")


def _shapes(drawing: Drawing) -> dict[str, str]:
    """The marker of each family in the first panel."""
    return dict(zip(drawing.families, PANEL_MARKERS, strict=False))


def _short(label: str) -> str:
    """A label without the names of its settings, which the table has: `snapkv 0.25`, `diffkv 5, 0`."""
    method, *words = label.split(" ")
    values = [word.partition("=")[2].removesuffix(".0") for word in words if "=" in word]
    return " ".join(filter(None, [method, ", ".join(values), *(word for word in words if "=" not in word)]))


def _limits(drawing: Drawing) -> tuple[float, float, float, float]:
    xs = [drawing.x(point) for point in drawing.points]
    ends = [drawing.y(point) for point in drawing.points]
    for point in drawing.points:
        (below,), (above,) = drawing.spans(point)[1]
        ends += [drawing.y(point) - below, drawing.y(point) + above]
    for method in {point.method for point in drawing.points}:
        for x, y in drawing.printed(method):
            xs.append(x)
            ends.append(y)
    ends += [end * drawing.scale for end in drawing.panel.band or ()]
    room = 0.05 * (max(ends) - min(ends)) or 0.05 * drawing.scale
    wide = (max(xs) / min(xs)) ** 0.06 * 1.04
    return min(xs) / wide, max(xs) * wide, min(ends) - room, max(ends) + room


def _words(drawing: Drawing) -> list[str]:
    """The lines at the foot of the picture: what a reader must know to read it."""
    panel = drawing.panel
    full = panel.find(panel.reference)
    words = []
    if full is not None:
        text = f"Black line: full cache, {panel.what.title} {full.score * drawing.scale:.3g}"
        if full.score_interval:
            low, high = (end * drawing.scale for end in full.score_interval)
            text += f" [{low:.3g}, {high:.3g}]"
        words.append(f"{text}.")
    if panel.band:
        words.append("Blue band: the full cache run again with other batches or kernels.")
    if any(point.method == FP8 for point in drawing.points):
        words.append("Dashed: FP8.")
    lines = [" ".join([*words, "Wide grey: frontier of the estimates."])]
    margin = f"{panel.margin * drawing.scale:.2g} {panel.what.unit}"
    if TOO_FEW in drawing.standing.values():
        lines.append(f"n = {panel.num_samples} is too small to say which run is better.")
    elif drawing.standing:
        lines.append(
            f"Ringed: better by more than {margin} than all that is cheaper. Hollow: a cheaper run is better (p < "
            f"{ALPHA:.2g}, Holm over all pairs of the table). Others: may be chance."
        )
    else:
        lines.append(
            "Times of runs are no evidence: each was measured by itself. They have no whiskers and no standing."
        )
    if any(point.interval is None and point is not full for point in drawing.points):
        lines.append("Half-filled: NO interval could be computed.")
    shapes = ", ".join(f"{SHAPES[shape]} {name}" for name, shape in _shapes(drawing).items())
    lines.append(f"First panel: {shapes}, star 16 bits and all tokens.")
    if panel.published and drawing.axis.name == RESIDENT.name:
        papers = ", ".join(sorted({point.row.paper for point in panel.published}))
        lines.append(f"Crosses: printed by {papers} for other models, memory as stated there; NOT measured here.")
    lines.append(
        f"Whiskers: 95 % intervals over the {panel.num_samples} questions that all runs share (Newcombe's for yes or "
        "no, else the studentised bootstrap's)."
    )
    return [piece for line in lines for piece in textwrap.wrap(line, FOOT_LENGTH)]


def figure(panel: Panel, axis: str) -> "Figure | None":
    """Draw one group on one axis.

    Args:
        panel: The points.
        axis: Name of the cost.

    Returns:
        None when no point has the cost.
    """
    from matplotlib.figure import Figure

    drawing = Drawing(panel, axis)
    if not drawing.points:
        return None
    parts = drawing.parts()
    count = 1 + len(parts)
    rows = math.ceil(count / 2)
    words = _words(drawing)
    foot = 0.1 + FOOT_LINE_IN * len(words)
    made = Figure(figsize=(WIDTH_IN, 0.95 + foot + 2.35 * rows))
    places = made.subplots(rows, 2, squeeze=False).ravel()
    height = made.get_figheight()
    made.subplots_adjust(
        left=LEFT_IN / WIDTH_IN,
        right=(LEFT_IN + 2 * PANEL_IN + NAMES_IN + BETWEEN_IN) / WIDTH_IN,
        wspace=(NAMES_IN + BETWEEN_IN) / PANEL_IN,
        hspace=0.36,
        top=1 - 0.5 / height,
        bottom=(0.48 + foot) / height,
    )
    for axes in places[count:]:
        axes.set_visible(False)
    limits = _limits(drawing)
    for index, axes in enumerate(places[:count]):
        _frame(axes, drawing, limits)
        if index:
            _family(axes, drawing, *parts[index - 1], height)
        else:
            _overview(axes, drawing, height)
        if index >= count - 2:
            axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}")
        if index % 2 == 0:
            what = f"{panel.what.title}, {panel.what.unit}"
            axes.set_ylabel(f"difference to the full cache\n({what})" if panel.reference else what)
    made.suptitle(panel.title, fontsize=SIZE + 2, x=0.01, y=1 - 0.06 / height, ha="left", va="top", wrap=True)
    made.text(0.01, 0.04 / height, "\n".join(words), fontsize=SIZE - 0.5, color=GREY, va="bottom", linespacing=1.35)
    return made


def render(panel: Panel, axis: str, kind: str, dpi: int = 220) -> bytes | None:
    """The picture as a file's bytes; the same results give the same bytes on the same matplotlib.

    Args:
        panel: The points.
        axis: Name of the cost.
        kind: `png` or `svg`.
        dpi: Dots per inch of a PNG.

    Returns:
        None when no point has the cost.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(STYLE):
        made = figure(panel, axis)
        if made is None:
            return None
        FigureCanvasAgg(made)
        return picture_bytes(made, kind, dpi=dpi)
