"""The pictures of a frontier: small panels by what the methods do, or one panel for a paper's column. One colour,
marker and line per method, names at the lines' ends."""

import math
import textwrap
from typing import TYPE_CHECKING

from kvbench.config.files import FULL
from kvbench.evidence.dominance import DOMINATED, FRONTIER, NEAR, TOO_FEW
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.frontier_marks import (
    FP8,
    INK,
    LINE_HEIGHT,
    PALE,
    SIZE,
    STYLE,
    Drawing,
    draw_frame,
    draw_lines,
    draw_names,
    draw_point,
    lines_of,
)
from kvbench.results.measures import RESIDENT
from kvbench.show.palette import METHOD_MARKERS, method_style
from kvbench.show.picture import drawn
from kvbench.show.terminal import three_digits
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
FOOT_LINE_IN, FOOT_LENGTH = 0.125, 128  # height and characters of a line under the picture
WIDTH_IN = 7.2  # two columns of a paper
LEFT_IN, PANEL_IN, NAMES_IN, BETWEEN_IN = 0.7, 1.95, 1.08, 0.4  # axis words, panel, names, and what parts two columns


class One:
    """Measures of the picture for a paper's column, in inches."""

    WIDTH = 3.4  # more where names are longer than `NAMES`
    LEFT, NAMES = 0.68, 0.92  # axis words, and names right of the panel
    BESIDE = 0.12  # between the panel and the names, and behind them
    TOP, BOTTOM = 0.1, 0.4
    LEAST_HEIGHT = 1.75  # of the panel
    LINE = LINE_HEIGHT * (SIZE - 1) / 72
    FOOT_LENGTH = 62  # characters of a line under the picture


def short_label(label: str) -> str:
    """A label without the names of its settings, which the table has: `snapkv 0.25`, `diffkv 5, 0`."""
    method, *words = label.split(" ")
    values = [word.partition("=")[2].removesuffix(".0") for word in words if "=" in word]
    return " ".join(filter(None, [method, ", ".join(values), *(word for word in words if "=" not in word)]))


def _shapes(drawing: Drawing) -> dict[str, str]:
    """The marker of each family in the first panel."""
    return dict(zip(drawing.families, METHOD_MARKERS, strict=False))


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Everything in grey, and the points of the frontier by name."""
    shapes = _shapes(drawing)
    ends = []
    for point in drawing.points:
        marker, where = shapes[point.family] if point.method != FULL else "*", drawing.standing.get(point.key)
        if where in (FRONTIER, NEAR):
            colour = method_style(point.method)[0]
            draw_point(axes, drawing, point, colour, marker, 5)
            ends.append((short_label(point.label), point, colour))
        else:
            face, place = "white" if where == DOMINATED else PALE, (drawing.x(point), drawing.y(point))
            axes.plot(*place, marker, color=PALE, markersize=4, markerfacecolor=face, linestyle="none", zorder=2)
    draw_names(axes, drawing, ends, height_in)
    axes.set_title("all runs, and the frontier by name", fontsize=SIZE + 1, loc="left")


def _family(axes: "Axes", drawing: Drawing, title: str, methods: dict[str, list[Point]], height_in: float) -> None:
    """The methods of one panel in colour, before all others in grey."""
    for other in drawing.points:
        if other.method not in methods and other.method != FULL:
            axes.plot(drawing.x(other), drawing.y(other), ".", color="#D9D9D9", markersize=4, zorder=1)
    draw_names(axes, drawing, draw_lines(axes, drawing, lines_of(methods)), height_in)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")


def panels_words(drawing: Drawing) -> list[str]:
    """The lines at the foot of the picture: what a reader must know to read it."""
    panel = drawing.panel
    full = panel.find(panel.reference)
    words = []
    if full is not None:
        text = f"Black line: full cache, {panel.what.title} {full.score * drawing.scale:.3g}"
        if full.score_interval:
            text += " " + three_digits(full.score_interval, drawing.scale)
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
    if _lacks_intervals(drawing):
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


def _lacks_intervals(drawing: Drawing) -> bool:
    full = drawing.panel.find(drawing.panel.reference)
    return any(point.interval is None and point is not full for point in drawing.points)


def panels_figure(drawing: Drawing) -> "Figure":
    """All runs in one panel, then a panel for each kind of method."""
    from matplotlib.figure import Figure

    panel, parts = drawing.panel, drawing.parts()
    count = 1 + len(parts)
    rows = math.ceil(count / 2)
    words = panels_words(drawing)
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
    for index, axes in enumerate(places[:count]):
        draw_frame(axes, drawing)
        if index:
            _family(axes, drawing, *parts[index - 1], height)
        else:
            _overview(axes, drawing, height)
        if index >= count - 2:
            axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}")
        if index % 2 == 0:
            reads = f"difference to the full cache\n({drawing.quality})"
            axes.set_ylabel(reads if panel.reference else drawing.quality)
    made.suptitle(panel.title, fontsize=SIZE + 2, x=0.01, y=1 - 0.06 / height, ha="left", va="top", wrap=True)
    made.text(0.01, 0.04 / height, "\n".join(words), fontsize=SIZE - 0.5, color=INK, va="bottom", linespacing=1.35)
    return made


def one_figure(drawing: Drawing) -> "Figure":
    """One panel as wide as a paper's column, names outside of it, and no more words than it needs."""
    from matplotlib.figure import Figure

    panel, lines, words = drawing.panel, lines_of(drawing.methods()), _one_words(drawing)
    # As high as the names need, so that none covers another.
    tall = max(One.LEAST_HEIGHT, (len(lines) + 1) * LINE_HEIGHT * SIZE / 72)
    foot = 0.06 + One.LINE * len(words)
    height = One.TOP + tall + One.BOTTOM + foot
    width = One.WIDTH - One.NAMES + max([One.NAMES, *(_width_in(line.name) + One.BESIDE for line in lines)])
    made = Figure(figsize=(width, height))
    across = (One.WIDTH - One.LEFT - One.NAMES) / width
    axes = made.add_axes((One.LEFT / width, (One.BOTTOM + foot) / height, across, tall / height))
    draw_frame(axes, drawing)
    ends = draw_lines(axes, drawing, lines, 3.6)
    full = next((point for point in drawing.points if point.method == FULL), None)
    draw_names(axes, drawing, [*ends, *([(FULL, full, "black")] if full else [])], height)
    axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}", x=0.6)
    axes.set_ylabel(f"{drawing.quality},\ndifference to the full cache" if panel.reference else drawing.quality)
    made.text(0.02, 0.03 / height, "\n".join(words), fontsize=SIZE - 1, color=INK, va="bottom", linespacing=1.3)
    return made


def _width_in(name: str) -> float:
    """Width of a name beside the panel, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), name.replace("$", r"\$"), prop=FontProperties(size=SIZE)).get_extents().width / 72


def _one_words(drawing: Drawing) -> list[str]:
    """Words without which the picture cannot be read; a caption says the rest."""
    panel, places = drawing.panel, set(drawing.standing.values())
    words = [f"{panel.title}, n = {panel.num_samples}; whiskers: 95 % intervals."]
    if FRONTIER in places:
        words.append("Ringed: on the frontier.")
    if DOMINATED in places:
        words.append("Hollow: a cheaper run is better.")
    if _lacks_intervals(drawing):
        words.append("Half-filled: NO interval could be computed.")
    if panel.published and drawing.axis.name == RESIDENT.name:
        words.append("Crosses: printed in papers, NOT measured here.")
    return textwrap.wrap(" ".join(words), One.FOOT_LENGTH)


LAYOUTS = {"panels": panels_figure, "one": one_figure}


def render(panel: Panel, axis: str, kind: str, layout: str = "panels") -> bytes | None:
    """Draw one group on one axis as `png`, `svg` or `pdf`, in one of `LAYOUTS`; None when no point has the cost."""
    drawing = Drawing(panel, axis)
    return drawn(lambda: LAYOUTS[layout](drawing), kind, STYLE, dpi=220) if drawing.points else None
