"""The pictures of a frontier: small panels by what the methods do, or one panel for a paper's column."""

import math
import textwrap
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.dominance import BEST, DOMINATED, NEAR, TOO_FEW
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
from kvbench.results.measures import RESIDENT
from kvbench.show.picture import LINE_HEIGHT, NAMES_LEFT, drawn, method_style, width_in
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
# Of the picture for a paper's column: its width, which is more where names are longer than `ONE_NAMES_IN`; axis words,
# names, and what is between them and the panel; above and below the panel; its least height; characters of a line.
ONE_WIDTH_IN, ONE_LEFT_IN, ONE_NAMES_IN, BESIDE_IN = 3.4, 0.68, 0.92, 0.12
ONE_TOP_IN, ONE_BOTTOM_IN, LEAST_HEIGHT_IN, ONE_FOOT_LENGTH = 0.1, 0.4, 1.75, 62


def _overview(axes: "Axes", drawing: Drawing, height_in: float) -> None:
    """Everything in grey, and the best estimates by name; a few points in colour, and all by name."""
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
    draw_names(axes, drawing, [*ends, *([(FULL, drawing.full, "black")] if drawing.full else [])], height)
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
