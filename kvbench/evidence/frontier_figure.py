"""The picture of a frontier: small multiples by what the methods do, one colour, marker and line per method, names at
the lines' ends.
"""

import math
import textwrap
from typing import TYPE_CHECKING

from kvbench.config.files import FULL
from kvbench.evidence import frontier_one
from kvbench.evidence.dominance import DOMINATED, FRONTIER, NEAR, TOO_FEW
from kvbench.evidence.frontier import Panel, Point
from kvbench.evidence.frontier_layout import Drawing
from kvbench.evidence.frontier_marks import (
    FP8,
    GREY,
    PALE,
    SIZE,
    STYLE,
    draw_frame,
    draw_names,
    draw_point,
    limits_of,
    lines_of,
    short_label,
)
from kvbench.results.measures import RESIDENT
from kvbench.show.palette import METHOD_MARKERS, STYLES, method_style
from kvbench.show.picture import picture_bytes
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
FOOT_LINE_IN = 0.125
FOOT_LENGTH = 128  # characters of a line under the picture
WIDTH_IN = 7.2  # two columns of a paper
LEFT_IN, PANEL_IN, NAMES_IN, BETWEEN_IN = 0.7, 1.95, 1.08, 0.4  # axis words, panel, names, and what parts two columns


def _family(axes: "Axes", drawing: Drawing, title: str, methods: dict[str, list[Point]], height_in: float) -> None:
    """The methods of one panel in colour, before all others in grey."""
    for other in drawing.points:
        if other.method not in methods and other.method != FULL:
            axes.plot(drawing.x(other), drawing.y(other), ".", color="#D9D9D9", markersize=4, zorder=1)
    ends = []
    for method, points in methods.items():
        colour, marker = method_style(method)
        series = lines_of(points)
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
            draw_point(axes, drawing, point, colour, marker)
        for x, y in drawing.printed(method):
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    draw_names(axes, drawing, ends, height_in)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Everything in grey, and the points of the frontier by name."""
    shapes = _shapes(drawing)
    ends = []
    for point in drawing.points:
        marker = shapes[point.family] if point.method != FULL else "*"
        if drawing.standing.get(point.key) in (FRONTIER, NEAR):
            colour = method_style(point.method)[0]
            draw_point(axes, drawing, point, colour, marker, 5)
            ends.append((short_label(point.label), point, colour))
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
    draw_names(axes, drawing, ends, height_in)
    axes.set_title("all runs, and the frontier by name", fontsize=SIZE + 1, loc="left")


def _shapes(drawing: Drawing) -> dict[str, str]:
    """The marker of each family in the first panel."""
    return dict(zip(drawing.families, METHOD_MARKERS, strict=False))


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
    limits = limits_of(drawing)
    for index, axes in enumerate(places[:count]):
        draw_frame(axes, drawing, limits)
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


LAYOUTS = {"panels": figure, "one": frontier_one.figure}


def render(panel: Panel, axis: str, kind: str, dpi: int = 220, layout: str = "panels") -> bytes | None:
    """The picture as a file's bytes; the same results give the same bytes on the same matplotlib.

    Args:
        panel: The points.
        axis: Name of the cost.
        kind: `png`, `svg` or `pdf`.
        dpi: Dots per inch of a PNG.
        layout: One of `LAYOUTS`.

    Returns:
        None when no point has the cost.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(STYLE):
        made = LAYOUTS[layout](panel, axis)
        if made is None:
            return None
        FigureCanvasAgg(made)
        return picture_bytes(made, kind, dpi=dpi)
