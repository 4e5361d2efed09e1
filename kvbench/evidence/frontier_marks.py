"""What the pictures of a frontier draw alike: axes, points with whiskers, names at the lines' ends, lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import DOMINATED, FRONTIER
from kvbench.evidence.frontier import Point
from kvbench.evidence.frontier_layout import Drawing, spread, ticks
from kvbench.show.palette import SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FP8 = "fp8"
GREY, PALE = "#555555", "#B8B8B8"
SIZE = 7  # points; what is smaller is not read in print
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


def draw_frame(axes: "Axes", drawing: Drawing, limits: tuple[float, float, float, float]) -> None:
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


def draw_point(axes: "Axes", drawing: Drawing, point: Point, colour: str, marker: str, size: float = 4.2) -> None:
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


def draw_names(axes: "Axes", drawing: Drawing, ends: Sequence[tuple[str, Point, str]], height_in: float) -> None:
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


def lines_of(points: list[Point]) -> dict[str, list[Point]]:
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


def short_label(label: str) -> str:
    """A label without the names of its settings, which the table has: `snapkv 0.25`, `diffkv 5, 0`."""
    method, *words = label.split(" ")
    values = [word.partition("=")[2].removesuffix(".0") for word in words if "=" in word]
    return " ".join(filter(None, [method, ", ".join(values), *(word for word in words if "=" not in word)]))


def limits_of(drawing: Drawing) -> tuple[float, float, float, float]:
    """Ends of both axes, in shown units, with room for every whisker."""
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
