"""Small multiples of a frontier: a small picture for each subset or category of a task, with all methods."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from kvbench.errors import SettingsConflict, SettingValue
from kvbench.evidence.drawing import SIZE, STYLE, Drawing, draw_lines, frame, lines_of
from kvbench.evidence.frontier import Panel, build
from kvbench.evidence.load import Group
from kvbench.evidence.samples import measure
from kvbench.results.measures import BENCHMARKS, CATEGORIES, SHARE_MARK, Measure, of_full, of_subsets, plain_subset
from kvbench.show.picture import STYLES, drawn, method_style
from kvbench.stats.paired import ALPHA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY = ("subset", "category")
COLUMNS, WIDTH_IN, ROW_IN, TOP_IN, FOOT_IN = 4, 7.2, 1.55, 0.45, 0.95


def panels_of(group: Group, cfg: DictConfig) -> list[Panel]:
    """The panels of a group, in the benchmark's own order; without what no run has.

    Raises:
        ValueError: The task has no categories, or the metric is one of them already.
    """
    return [panel for what in _measures(group, cfg) if (panel := build(group, cfg, what)) is not None]


def _measures(group: Group, cfg: DictConfig) -> list[Measure]:
    name = str(cfg.metric)
    if name.removesuffix(SHARE_MARK) in CATEGORIES:
        raise SettingsConflict(
            f"metric={name} is one category already; take metric=score{SHARE_MARK} with by={cfg.by}", setting="metric"
        )
    whole = measure(name, group, shares=True)
    base = whole.of or whole
    there = {record["subset"] for run in group.runs for record in run.samples.values()}
    known = BENCHMARKS.get(group.task, {})
    if cfg.by == "category":
        if not known:
            raise SettingValue(f"by=category: {group.title} has no categories; take by=subset", setting="by")
        parts = [(title, title, part) for title, part in known.items() if {*map(plain_subset, there)} & set(part)]
    else:
        titles = {subset: title for part in known.values() for subset, title in part.items()}
        order = list(titles) if {*map(plain_subset, there)} <= set(titles) else sorted({*map(plain_subset, there)})
        parts = [(name, titles.get(name, name), {name: ""}) for name in order if name in {*map(plain_subset, there)}]
    each = [of_subsets(base, name, title, subsets) for name, title, subsets in parts]
    return [of_full(what) if whole.of else what for what in each]


def figure(title: str, panels: Sequence[Panel], axis: str) -> "Figure":
    """The small pictures, with one key of the methods below them."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows, columns = math.ceil(len(panels) / COLUMNS), min(COLUMNS, len(panels))
    height = TOP_IN + ROW_IN * rows + FOOT_IN
    made = Figure(figsize=(WIDTH_IN, height))
    places = made.subplots(rows, columns, squeeze=False).ravel()
    inner = {"left": 0.09, "right": 0.985, "top": 1 - TOP_IN / height, "bottom": FOOT_IN / height}
    made.subplots_adjust(**inner, wspace=0.3, hspace=0.45)
    styles = _styles(panels, axis)
    first = next((panel for panel in panels if panel.what.of), panels[0])
    for index, (axes, panel) in enumerate(zip(places, panels, strict=False)):
        drawing = Drawing(panel, axis)
        frame(axes, drawing, most_ticks=4)
        lines = [replace(line, style=styles[line.method]) for line in lines_of(drawing.methods())]
        draw_lines(axes, drawing, lines, 3.0)
        # Where the full cache scores nothing there is no share of it.
        unit = "" if panel.what.unit == first.what.unit else f", {panel.what.unit}"
        axes.set_title(f"{panel.what.short}, n = {panel.num_samples}{unit}", fontsize=SIZE, loc="left", pad=3)
        if index % columns == 0:
            axes.set_ylabel(panel.what.unit)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    handles = []
    for method, style in styles.items():
        colour, marker = method_style(method)
        look: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "linestyle": style,
            "markersize": 3.5,
            "linewidth": 0.9,
        }
        handles.append(Line2D([], [], label=method, **look))
    where: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.01, 0.3 / height), "ncols": 7, "frameon": False}
    made.legend(handles=handles, fontsize=SIZE - 0.5, handlelength=1.6, columnspacing=1.1, **where)
    reference_text = "difference to the full cache, " if Drawing(first, axis).is_difference else ""
    words = f"Up: {first.what.title.partition(' of ')[0]}, {reference_text}{first.what.unit}; "
    words += f"across: {first.axes[axis].title}, {first.axes[axis].unit}. Black: the full cache. "
    words += f"Whiskers: 95 % intervals.\nHollow: a cheaper run is better (p < {ALPHA:.2g}, Holm in each picture). "
    words += "Ringed, wide grey: the best estimates, by no test."
    if any(Drawing(panel, axis).lacks_intervals for panel in panels):
        words += " Half-filled: NO interval."
    made.text(0.01, 0.04 / height, words, fontsize=SIZE - 0.5, va="bottom", linespacing=1.3)
    made.suptitle(title, fontsize=SIZE + 2, x=0.01, y=1 - 0.06 / height, ha="left", va="top")
    return made


def _styles(panels: Sequence[Panel], axis: str) -> dict[str, str]:
    """The line of each method: another one where methods share a colour."""
    styles: dict[str, str] = {}
    used: Counter[str] = Counter()
    for method in dict.fromkeys(method for panel in panels for method in Drawing(panel, axis).methods()):
        colour = method_style(method)[0]
        styles[method] = STYLES[used[colour] % len(STYLES)]
        used[colour] += 1
    return styles


def render(title: str, panels: Sequence[Panel], axis: str, kind: str) -> bytes | None:
    """Draw the small pictures as `png`, `svg` or `pdf`; None where no point has the cost."""
    shown = [panel for panel in panels if any(axis in point.costs for point in panel.points)]
    return drawn(partial(figure, title, shown, axis), kind, STYLE, dpi=220) if shown else None
