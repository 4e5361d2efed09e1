"""Frontier of one group in a single panel: every setting by name at its point, one hue per kind of method."""

import math
import textwrap
from dataclasses import dataclass, field
from itertools import combinations
from logging import ERROR, getLogger
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.config.files import FULL
from kvbench.evidence.drawing import INK, PALE, Drawing, End, draw_point, frame, lines_of, short_label
from kvbench.evidence.frontier import Point
from kvbench.evidence.legends import BEST, DOMINATED, NEAR
from kvbench.show.picture import BLUE, LINE_HEIGHT, PURPLE, TEAL, VERMILION, method_style, width_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

MOST = 20  # settings whose names stand in one panel
HUES = {"evicts": VERMILION, "quantises": BLUE, "quantises and evicts": PURPLE, "16 bits, keeps all": TEAL}
WHISKERS = ("frontier", "all", "none")
WIDTH_IN, ASPECT, LEAST_IN = 6.4, 0.6, 2.6  # width by default; height over width; least height
EDGE_IN = 0.04  # left of the words of the upright axis
ROOM_Y = 0.05  # for names below the lowest point and above the highest, in heights of the axis
ROOM = 1.15  # for names right of the dearest point: a factor of the axis' end
FORCES = (0.1, 0.3, 1.0)  # with which names push one another away, until none covers another
CROWD, CROWD_LETTERS = 4, 26  # points on one spot that have one text for all their names, and the length of its lines
TURNS = 400  # of the search for free space: a limit in seconds would give other pictures on other machines


@dataclass(frozen=True, kw_only=True)
class Look:
    """Appearance of a picture.

    Args:
        width: Inches; None for the layout's.
        font: Family of fonts; None for DejaVu Sans.
        size: Size of text, points.
        labels: Method or setting -> its name in the picture.
        whiskers: Points that have whiskers, one of `WHISKERS`.
    """

    width: float | None = None
    font: str | None = None
    size: float = 7.0
    labels: "Mapping[str, str]" = field(default_factory=dict)
    whiskers: str = "frontier"

    def name(self, label: str) -> str:
        """Name of a point in the picture, by its label in tables."""
        method, _, rest = short_label(label).partition(" ")
        return str(self.labels.get(label) or " ".join(filter(None, [str(self.labels.get(method, method)), rest])))


def one_figure(drawing: Drawing, look: Look) -> "Figure":
    """One panel with the names at their points.

    Names are moved apart by adjustText; a thin line ties a name that stands away from its point.
    """
    from matplotlib.figure import Figure

    width, line_in = look.width or WIDTH_IN, LINE_HEIGHT * look.size / 72
    keys = _legend(drawing)
    wide = max(width_in(str(key.get_label()), look.size) for key in keys) + 4 * look.size / 72 if keys else width
    columns = max(1, min(len(keys), int(width / wide))) if width < WIDTH_IN else len(keys)
    title = _wrapped(_title(drawing), 0.97 * width, look.size + 1)
    quality = f"{drawing.quality}, difference to full" if drawing.is_difference else drawing.quality
    side = _wrapped(quality, LEAST_IN, look.size)
    above = line_in * (1.3 * len(title) + math.ceil(len(keys) / max(1, columns)) + 0.4)
    left, below = 0.36 + line_in * len(side), 0.16 + 2 * line_in
    height = above + below + max(LEAST_IN, ASPECT * width - above - below)
    figure = Figure(figsize=(width, height))
    where = (left / width, below / height, 1 - (left + 0.08) / width, 1 - (above + below) / height)
    axes = figure.add_axes(where)
    frame(axes, drawing, whiskers=_barred(drawing, look))
    axes.set_xlim(right=axes.get_xlim()[1] * ROOM)
    low, high = axes.get_ylim()
    axes.set_ylim(low - ROOM_Y * (high - low), high + ROOM_Y * (high - low))
    ends = _draw(axes, drawing, look)
    axes.set_xlabel(f"{drawing.axis.title}, {drawing.axis.unit}")
    axes.set_ylabel("\n".join(side))
    figure.text(0.01, 1 - 0.04 / height, "\n".join(title), fontsize=look.size + 1, va="top", linespacing=1.2)
    corner: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "frameon": False, "borderpad": 0.1}
    axes.legend(handles=keys, ncols=columns, columnspacing=0.9, handletextpad=0.2, labelspacing=0.2, **corner)
    box = axes.get_tightbbox()
    outside = -box.x0 / figure.dpi if box else -EDGE_IN  # ticks of three digits need more room than is left of the axes
    if outside > -EDGE_IN:
        left += outside + EDGE_IN
        axes.set_position((left / width, where[1], 1 - (left + 0.08) / width, where[3]))
    _draw_names(axes, drawing, ends, look)
    return figure


def _barred(drawing: Drawing, look: Look) -> list[Point]:
    """Points whose whiskers are drawn."""
    if look.whiskers == "none":
        return []
    return [
        point
        for point in drawing.points
        if point.method != FULL and (look.whiskers == "all" or drawing.standing.get(point.key) in (BEST, NEAR))
    ]


def _draw(axes: "Axes", drawing: Drawing, look: Look) -> list[End]:
    """Draw the lines and points; gives each point's name and colour."""
    ends, barred = [("full", drawing.full, "black")] if drawing.full else [], _barred(drawing, look)
    for line in lines_of(drawing.methods()):
        colour, marker = HUES.get(line.points[0].family, INK), method_style(line.method)[1]
        xs, ys = zip(*map(drawing.at, line.points), strict=True)
        axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.5, linestyle=line.style, zorder=3)
        for point in line.points:
            draw_point(axes, drawing, point, colour, marker, 4.2, whiskers=point in barred)
            ends.append((look.name(point.label), point, colour))
        for x, y in drawing.printed(line.method):
            axes.plot(x, y, "+", color=colour, markersize=5, markeredgewidth=0.8, alpha=0.9, zorder=2)
    return ends


def _title(drawing: Drawing) -> str:
    panel = drawing.panel
    return f"{panel.title}, n = {panel.num_samples}" + (f"; {panel.unfit}" if panel.unfit else "")


def _wrapped(text: str, width: float, size: float) -> list[str]:
    """Lines of a text that are no wider than so many inches."""
    return textwrap.wrap(text, max(12, round(len(text) * min(1.0, width / width_in(text, size)))))


def _legend(drawing: Drawing) -> "list[Line2D]":
    """Handles of the legend: the kinds by colour, and what marks mean."""
    from matplotlib.lines import Line2D

    kinds = dict.fromkeys(point.family for point in drawing.points if point.method != FULL)
    point: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4}
    handles = [Line2D([], [], color=HUES.get(kind, INK), label=kind, **point) for kind in kinds]
    if DOMINATED in drawing.standing.values():
        hollow = {"color": INK, "markerfacecolor": "white", "label": "a cheaper one is better"}
        handles.append(Line2D([], [], **(point | hollow)))
    if not drawing.panel.unfit:
        handles.append(Line2D([], [], color=PALE, linewidth=2.2, label="best estimates"))
    if any(map(drawing.printed, drawing.methods())):
        handles.append(Line2D([], [], **(point | {"marker": "+", "color": INK, "label": "printed, NOT measured"})))
    return handles


def _draw_names(axes: "Axes", drawing: Drawing, ends: list[End], look: Look) -> None:
    """Write the names next to their points without overlaps."""
    from adjustText import adjust_text
    from matplotlib.patheffects import withStroke

    getLogger("adjustText").setLevel(ERROR)  # it warns of names that are wider than the panel, which cannot be helped
    halo = [withStroke(linewidth=1.8, foreground="white")]
    line = LINE_HEIGHT * look.size / 72 * axes.figure.dpi
    every = [drawing.at(point) for _, point, _ in ends]
    crowds = _crowds(axes.transData.transform(every), line / 2)
    places = [tuple(np.mean([every[each] for each in crowd], 0)) for crowd in crowds]
    pixels = axes.transData.transform(places)
    texts = []
    for number, crowd in enumerate(crowds):
        name = ", ".join(ends[each][0] for each in crowd)
        colours = {ends[each][2] for each in crowd}
        if len(crowd) > 1:
            name = "\n".join(textwrap.wrap(name, CROWD_LETTERS, break_long_words=False))
        colour = colours.pop() if len(colours) == 1 else INK
        # Names of points that cover one another begin on lines of their own: adjustText parts none that coincide.
        near = sum(abs(pixels[number] - other).max() < line / 2 for other in pixels[:number])
        x, y = axes.transData.inverted().transform(pixels[number] + (0, line * near))
        texts.append(
            axes.text(x, y, name, fontsize=look.size, color=colour, zorder=3.5, path_effects=halo, parse_math=False)
        )
    xs, ys = zip(*places, strict=True)
    for force in FORCES:
        adjust_text(texts, x=xs, y=ys, ax=axes, iter_lim=TURNS, expand=(1.2, 1.35), force_text=force)
        if not _overlap([text.get_window_extent() for text in texts]):
            break
    for text, anchor, pixel in zip(texts, places, pixels, strict=True):
        box = text.get_window_extent()
        nearest = np.clip(pixel, (box.x0, box.y0), (box.x1, box.y1))
        if np.hypot(*(nearest - pixel)) > line / 2:
            end = axes.transData.inverted().transform(nearest)
            axes.plot(*zip(anchor, end, strict=True), color=INK, linewidth=0.4, alpha=0.7, zorder=2.5)


def _crowds(pixels: "np.ndarray", near: float) -> list[list[int]]:
    """Numbers of points in groups: of `CROWD` and more that each cover another one, or alone."""
    groups: list[list[int]] = []
    for number, pixel in enumerate(pixels):
        joined = [group for group in groups if any(abs(pixel - pixels[each]).max() < near for each in group)]
        groups = [group for group in groups if group not in joined] + [[*sum(joined, []), number]]
    return [part for group in groups for part in ([sorted(group)] if len(group) >= CROWD else ([n] for n in group))]


def _overlap(boxes: "Sequence[Bbox]") -> bool:
    """True where two of some boxes cover one another."""
    return any(one.overlaps(two) for one, two in combinations(boxes, 2))
