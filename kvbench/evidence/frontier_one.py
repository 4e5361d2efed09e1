"""The picture of a frontier for a paper's column: one panel, names outside of it, and no more words than it needs."""

import textwrap
from typing import TYPE_CHECKING

from kvbench.config.files import FULL
from kvbench.evidence.dominance import DOMINATED, FRONTIER
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.frontier_layout import Drawing
from kvbench.evidence.frontier_marks import (
    GREY,
    LINE_HEIGHT,
    SIZE,
    draw_frame,
    draw_names,
    draw_point,
    limits_of,
    lines_of,
)
from kvbench.results.measures import RESIDENT
from kvbench.show.palette import STYLES, method_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN = 3.4  # a column of a paper with two; more where names are longer than `NAMES_IN`
LEFT_IN, NAMES_IN = 0.68, 0.92  # axis words, and names right of the panel
BESIDE_IN = 0.12  # between the panel and the names, and behind them
TOP_IN, BOTTOM_IN = 0.1, 0.4
LEAST_HEIGHT_IN = 1.75  # of the panel
LINE_IN = LINE_HEIGHT * (SIZE - 1) / 72
FOOT_LENGTH = 62  # characters of a line under the picture


def figure(panel: Panel, axis: str) -> "Figure | None":
    """Draw one group on one axis in one panel: every method a colour, its name at the end of its line.

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
    lines = _lines(drawing)
    words = _words(drawing)
    # As high as the names need, so that none covers another.
    tall = max(LEAST_HEIGHT_IN, (len(lines) + 1) * LINE_HEIGHT * SIZE / 72)
    foot = 0.06 + LINE_IN * len(words)
    height = TOP_IN + tall + BOTTOM_IN + foot
    width = WIDTH_IN - NAMES_IN + max([NAMES_IN, *(_width_in(name) + BESIDE_IN for name, *_ in lines)])
    made = Figure(figsize=(width, height))
    panel_in = WIDTH_IN - LEFT_IN - NAMES_IN
    axes = made.add_axes((LEFT_IN / width, (BOTTOM_IN + foot) / height, panel_in / width, tall / height))
    draw_frame(axes, drawing, limits_of(drawing))
    ends = []
    for name, method, style, points in lines:
        colour, marker = method_style(method)
        xs, ys = [drawing.x(point) for point in points], [drawing.y(point) for point in points]
        axes.plot(xs, ys, color=colour, linewidth=1.0, alpha=0.85, linestyle=style, zorder=3)
        for point in points:
            draw_point(axes, drawing, point, colour, marker, 3.6)
        for x, y in drawing.printed(method) if style == STYLES[0] else ():
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, zorder=2)
        ends.append((name, points[-1], colour))
    full = next((point for point in drawing.points if point.method == FULL), None)
    if full is not None:
        ends.append((FULL, full, "black"))
    draw_names(axes, drawing, ends, height)
    axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}", x=0.6)
    what = f"{panel.what.title}, {panel.what.unit}"
    axes.set_ylabel(f"{what},\ndifference to the full cache" if panel.reference else what)
    made.text(0.02, 0.03 / height, "\n".join(words), fontsize=SIZE - 1, color=GREY, va="bottom", linespacing=1.3)
    return made


def _width_in(name: str) -> float:
    """How wide a name is beside the panel, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), name.replace("$", r"\$"), prop=FontProperties(size=SIZE)).get_extents().width / 72


def _lines(drawing: Drawing) -> list[tuple[str, str, str, list[Point]]]:
    """Name, method, line style and points of every line; a method has several where its settings differ in more than
    numbers."""
    found = []
    methods: dict[str, list[Point]] = {}
    for point in sorted(drawing.points, key=lambda point: point.costs[RESIDENT.name].value):
        if point.method != FULL:
            methods.setdefault(point.method, []).append(point)
    for method, points in sorted(methods.items()):
        parts = lines_of(points)
        for place, (kind, own) in enumerate(parts.items()):
            name = f"{method} {kind}".strip() if len(parts) > 1 else method
            found.append((name, method, STYLES[place % len(STYLES)], own))
    return found


def _words(drawing: Drawing) -> list[str]:
    """What cannot be read without words; a caption says the rest."""
    panel, places = drawing.panel, set(drawing.standing.values())
    words = [f"{panel.title}, n = {panel.num_samples}; whiskers: 95 % intervals."]
    if FRONTIER in places:
        words.append("Ringed: on the frontier.")
    if DOMINATED in places:
        words.append("Hollow: a cheaper run is better.")
    full = panel.find(panel.reference)
    if any(point.interval is None and point is not full for point in drawing.points):
        words.append("Half-filled: NO interval could be computed.")
    if panel.published and drawing.axis.name == RESIDENT.name:
        words.append("Crosses: printed in papers, NOT measured here.")
    return textwrap.wrap(" ".join(words), FOOT_LENGTH)
