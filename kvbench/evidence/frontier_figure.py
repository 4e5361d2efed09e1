"""Pictures of a frontier: small panels by what the methods do; the choice between them and one panel."""

import math
import textwrap
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import TOO_FEW
from kvbench.evidence.drawing import (
    FP8,
    INK,
    PALE,
    SIZE,
    STYLE,
    Drawing,
    Methods,
    draw_lines,
    draw_names,
    draw_point,
    frame,
    lines_of,
    short_label,
)
from kvbench.evidence.frontier import Panel
from kvbench.evidence.legends import BEST, DOMINATED, NEAR
from kvbench.evidence.one_panel import MOST, Look, one_figure
from kvbench.results.measures import RESIDENT
from kvbench.show.picture import NAMES_LEFT, drawn, method_style, width_in
from kvbench.show.terminal import three_digits
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}
# Of panels, in inches: two columns of a paper; axis words, panel, names, what parts two columns, edge.
WIDTH_IN = 7.2
LEFT_IN, PANEL_IN, NAMES_IN, BETWEEN_IN, RIGHT_IN = 0.7, 1.95, 1.08, 0.4, 0.04
FOOT_LINE_IN, FOOT_LENGTH = 0.125, 128  # height and characters of a line under the picture


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Draw everything in grey, and the best estimates by name; a few points in colour, and all by name."""
    if drawing.fits_one_panel:
        ends = draw_lines(axes, drawing, lines_of(drawing.methods()))
        draw_names(axes, drawing, [*ends, *([(FULL, drawing.full, "black")] if drawing.full else [])], height_in)
        axes.set_title("all runs", fontsize=SIZE + 1, loc="left")
        return
    ends = []
    for point in drawing.points:
        where = drawing.standing.get(point.key)
        marker = drawing.shapes[point.family] if point.method != FULL else "*"
        if where in (BEST, NEAR):
            colour = method_style(point.method)[0]
            draw_point(axes, drawing, point, colour, marker, 5)
            ends.append((short_label(point.label), point, colour))
        else:
            face = "white" if where == DOMINATED else PALE
            style: dict[str, Any] = {"color": PALE, "markersize": 4, "markerfacecolor": face, "linestyle": "none"}
            axes.plot(*drawing.at(point), marker, zorder=2, **style)
    draw_names(axes, drawing, ends, height_in)
    axes.set_title(
        "all runs" if drawing.panel.unfit else "all runs, and the best estimates by name", fontsize=SIZE + 1, loc="left"
    )


def _family(axes: "Axes", drawing: Drawing, title: str, methods: Methods, height_in: float) -> None:
    """The methods of one panel in colour, before all others in grey."""
    for other in drawing.points:
        if other.method not in methods and other.method != FULL:
            axes.plot(*drawing.at(other), ".", color="#D9D9D9", markersize=4, zorder=1)
    draw_names(axes, drawing, draw_lines(axes, drawing, lines_of(methods)), height_in)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")


def panels_words(drawing: Drawing) -> list[str]:
    """Lines at the foot of the picture: the legend and caveats needed to read it."""
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
        papers = ", ".join(sorted({point.source for point in panel.published}))
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
    other_width = (NAMES_LEFT - 1) * (PANEL_IN if columns > 1 else 2 * PANEL_IN + NAMES_IN + BETWEEN_IN)
    names = max([NAMES_IN, *(width_in(name, SIZE) + other_width + RIGHT_IN for name in shown)])
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


LAYOUTS = {"panels": lambda drawing, look: panels_figure(drawing), "one": one_figure}


def render(panel: Panel, axis: str, kind: str, layout: str | None = None, look: Look | None = None) -> bytes | None:
    """Draw one group on one axis.

    Args:
        axis: Name of the cost.
        kind: `png`, `svg` or `pdf`.
        layout: One of `LAYOUTS`; None for one panel up to `MOST` settings, and several beyond.
        look: Appearance.

    Returns:
        Content of the file; None where no point has the cost.
    """
    drawing, look = Drawing(panel, axis), look or Look()
    if not drawing.points:
        return None
    style = (
        STYLE | {"font.size": look.size, "text.parse_math": False} | ({"font.family": look.font} if look.font else {})
    )
    draw = LAYOUTS[layout or ("one" if len(drawing.points) <= MOST else "panels")]
    return drawn(lambda: draw(drawing, look), kind, style, dpi=220)
