"""The picture of drift: KL with the noise band, first choices and perplexity along answers or streams."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.evidence.drift_curves import KL, NLL, SAME, Curve, Drawing
from kvbench.show.palette import GREY, STYLES, method_style
from kvbench.show.picture import picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, PANEL_IN = 6.4, 2.1
# Below this a KL is rounding; a logarithmic axis would give it half of the picture.
FLOOR = 1e-4
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "path",
}


def _kl(value: float) -> float:
    return max(value, FLOOR)


def _percent(value: float) -> float:
    return 100 * value


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))  # the end of an interval of few answers may be no float any more


def render(drawing: Drawing, kind: str) -> bytes:
    """Draw the curves of a group.

    Args:
        drawing: At least one curve.
        kind: `png` or `svg`.

    Returns:
        The file. The same curves give the same bytes on the same matplotlib.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: tuple[tuple[str, str, Callable[[float], float]], ...] = (
        (KL, "KL to the full cache, nats per token", _kl),
        (SAME, "same first choice, %", _percent),
        (NLL, "perplexity", _perplexity),
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, PANEL_IN * len(panels) + 0.9), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{drawing.title}\nn = {drawing.num_samples}, bins of {drawing.width} tokens", fontsize=9)
        for axes, (column, title, shown) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
            if column == KL:
                _band(axes, drawing)
            elif column == NLL and _spans_decades(drawing):
                _decades(axes)
            room = _room(drawing, column, shown, axes.get_yscale() == "log")
            for curve, line in _lines(drawing):
                _curve(axes, curve, column, shown, line, room)
            axes.set_ylabel(title, fontsize=7)
            axes.grid(color="#EEEEEE", linewidth=0.6)
        axes.set_xlabel(drawing.axis)
        axes.set_xlim(left=min(one.first for curve in drawing.curves for one in curve.bins))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=7, frameon=False)
        return picture_bytes(figure, kind)


def _lines(drawing: Drawing) -> list[tuple[Curve, str]]:
    """Every curve with its kind of line: several runs of a method differ in it."""
    seen: dict[str, int] = {}
    found = []
    for curve in drawing.curves:
        place = seen.setdefault(curve.method, 0)
        seen[curve.method] += 1
        found.append((curve, STYLES[place % len(STYLES)]))
    return found


def _curve(
    axes: "Axes", curve: Curve, column: str, shown: Callable[[float], float], line: str, room: tuple[float, float]
) -> None:
    """One run: its line, its interval as a shade as far as there is room, and a marker where it leaves the noise."""
    colour, marker = method_style(curve.method)
    bins = [one for one in curve.bins if one.values[column].value is not None]
    middles = [one.middle for one in bins]
    values = [shown(one.values[column].value or 0.0) for one in bins]
    name = f"{curve.label} (prompt only)" if curve.prompt_only else curve.label
    axes.plot(middles, values, color=colour, linestyle=line, linewidth=1.1, label=name, zorder=3)
    gap = (math.nan, math.nan)  # no shade where a bin has no interval
    ends = [(one.middle, *(one.values[column].ends or gap)) for one in bins]
    if curve.method != FULL:
        x, low, high = zip(*((at, shown(low), shown(high)) for at, low, high in ends), strict=True)
        bottom, top = ([min(max(one, room[0]), room[1]) if one == one else one for one in side] for side in (low, high))
        axes.fill_between(x, bottom, top, color=colour, alpha=0.15, linewidth=0, zorder=2)
        if any(one < room[0] for one in low) or any(one > room[1] for one in high):
            axes.set_title("intervals are cut", fontsize=7, loc="left")
    if column == KL and curve.leaves is not None:
        place = next(place for place, one in enumerate(bins) if one.first == curve.leaves)
        axes.plot(
            middles[place], values[place], marker=marker, color=colour, markersize=6, markeredgecolor="black", zorder=4
        )


def _band(axes: "Axes", drawing: Drawing) -> None:
    """The noise band, on a logarithmic axis."""
    _decades(axes)
    axes.fill_between(
        [middle for middle, _ in drawing.band],
        FLOOR,
        [_kl(high) for _, high in drawing.band],
        color=GREY,
        alpha=0.3,
        linewidth=0,
        zorder=1,
    )
    text = "grey: noise; marked: it leaves the noise for good" if drawing.judged else "grey: noise; too few samples"
    axes.set_title(text, fontsize=7, loc="right")


def _decades(axes: "Axes") -> None:
    """A logarithmic axis whose numbers are plain text: pictures read no formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, place: "")


def _spans_decades(drawing: Drawing) -> bool:
    values = _values(drawing, NLL)
    return max(values) - min(values) > math.log(10)


def _values(drawing: Drawing, column: str) -> list[float]:
    """What the lines of a panel go through."""
    found = (one.values[column].value for curve in drawing.curves for one in curve.bins)
    return [value for value in found if value is not None]


def _room(drawing: Drawing, column: str, shown: Callable[[float], float], log: bool) -> tuple[float, float]:
    """The least and the largest number that a panel shows: intervals of few answers can reach over hundreds of decades,
    and would press the curves flat."""
    values = [shown(value) for value in _values(drawing, column)]
    least, most = min(values), max(values)
    across = most - least or most
    return (least / 10, most * 10) if log else (least - across, most + across)
