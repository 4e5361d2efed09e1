"""The picture of a bench: a row for each variant, with quartiles, a panel for each setting that must not be mixed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.kernels.bench.bench import label_of
from kvbench.results.writing import write_atomic
from kvbench.show.palette import COLOURS, MARKERS
from kvbench.show.picture import picture_bytes
from kvbench.show.progress import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE_STYLE: dict[str, Any] = {"color": "black", "linewidth": 1.0, "linestyle": "--"}
ROW_IN, POINT_IN, PANEL_IN = 0.3, 0.11, 4.4  # inches of a row, of a point in it, and of a panel without the names


@dataclass(frozen=True)
class View:
    """The content of a bench's picture."""

    panel: tuple[str, ...]
    """Names of what tells panels apart; what else tells cells apart tells the points of a row apart."""
    value: Callable[[dict, str], dict | None]
    """Median and quartiles of a row, given the name of the baseline; None = no point."""
    label: str
    is_log: bool = False
    """On a logarithmic axis, with a line at 1 where it is relative; else from 0 on."""
    note: Callable[[dict], str] = lambda _: ""
    """Beside a point."""


def scaled(row: dict, factor: float) -> dict:
    """Median and quartiles times a factor."""
    return {key: row[key] * factor for key in ("median", "q1", "q3")}


def rate(row: dict) -> dict:
    """Tokens per second of a row."""
    tokens = row["tokens_per_call"]
    return {"median": tokens / row["median"], "q1": tokens / row["q3"], "q3": tokens / row["q1"]}


def _speed(row: dict, base: str) -> dict | None:
    return None if row["name"] == base else row["ratios"].get(base)


def _time(row: dict, base: str) -> dict | None:
    found = _speed(row, base)
    return found and {"median": 1 / found["median"], "q1": 1 / found["q3"], "q3": 1 / found["q1"]}


def _rate_or_seconds(row: dict, base: str) -> dict:
    return rate(row) if row.get("tokens_per_call") else scaled(row, 1.0)


VIEWS = {
    "attention": View(("shape", "threads"), _speed, "speed relative to {}", is_log=True),
    "prefill": View(("shape", "threads"), _time, "time relative to the prompt's {} alone", is_log=True),
    "manager": View(("operation", "threads"), lambda row, _: scaled(row, 1e3), "ms", is_log=True),
    "decode": View(
        ("phase", "batch", "context", "threads"),
        _rate_or_seconds,
        "tokens/s, and what the cache holds; for prompts, seconds",
        note=lambda row: format_bytes(row["cache_bytes"]) if "cache_bytes" in row else "",
    ),
    "throughput": View(
        ("kv_mb", "context", "new_tokens", "threads"),
        _rate_or_seconds,
        "tokens/s, all sequences together",
        note=lambda row: f"{row['batch']} sequences",
    ),
}


def draw(document: dict, path: Path) -> Path | None:
    """Draws the picture and writes it in one atomic step; nothing for a document without timings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in document["cells"] if cell["variants"]]
    if not cells:
        return None
    view = VIEWS[document["what"]]
    rows = [row for cell in cells for row in cell["variants"]]
    base = next(iter(rows[0]["ratios"]), "")
    shown = [row["name"] for row in rows if row.get("scores") != "return" and view.value(row, base) is not None]
    names = list(dict.fromkeys(shown))
    panels: dict[str, list[tuple[str, dict]]] = {}
    for cell in cells:
        own = {key: value for key, value in cell["cell"].items() if key in view.panel}
        rest = {key: value for key, value in cell["cell"].items() if key not in view.panel}
        panels.setdefault(label_of(own), []).append((label_of(rest), cell))
    series = list(dict.fromkeys(label for panel in panels.values() for label, _ in panel))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    size = 1.6 + across * PANEL_IN, 1.3 + down * (0.8 + max(ROW_IN, POINT_IN * len(series)) * len(names))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(title, fontsize=9, loc="left")
        _panel(axes, view, panel, names, series, base)
        axes.set_xlabel(view.label.format(base), fontsize=8)
    if series != [""]:
        _legend(figure, 5)
    where = document["environment"]
    figure.suptitle(f"{document['what']} on {where['device_name']} (backend {where['backend']})", fontsize=11)
    write_atomic(path, picture_bytes(figure, "png"))
    return path


def _panel(
    axes: "Axes", view: View, panel: Sequence[tuple[str, dict]], names: list[str], series: list[str], base: str
) -> None:
    """The points of one panel: a row per name, and in it one per cell, with quartiles."""
    for label, cell in panel:
        index = series.index(label)
        shift = 0.7 * ((index + 0.5) / len(series) - 0.5)
        found = {row["name"]: (row, view.value(row, base)) for row in cell["variants"] if row["name"] in names}
        points = [(names.index(name) + shift, row, value) for name, (row, value) in found.items() if value]
        middle, low, high = ([value[key] for _, _, value in points] for key in ("median", "q1", "q3"))
        ends = [np.subtract(middle, low), np.subtract(high, middle)]
        style: dict[str, Any] = {"linestyle": "none", "markersize": 5, "capsize": 2} | _style(index)
        axes.errorbar(middle, [place for place, *_ in points], xerr=np.maximum(0.0, ends), label=label, **style)
        for place, row, value in points:
            where: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(view.note(row), (value["q3"], place), **where)
    if view.is_log:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # numbers instead of powers
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    if view.value in (_speed, _time):
        axes.axvline(1.0, **BASELINE_STYLE)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=8)


def _style(index: int) -> dict[str, Any]:
    """Colour and marker of a series; together they tell more apart than there are colours."""
    colour, again = index % len(COLOURS), index // len(COLOURS)
    return {"color": COLOURS[colour], "marker": MARKERS[(colour + 3 * again) % len(MARKERS)]}


# Inches that a legend's entry takes: for its marker with the space around it, and for each letter, which is a wide one.
_MARKER_IN, _LETTER_IN = 0.55, 0.068


def _legend(figure: "Figure", columns: int) -> None:
    """One legend of all panels below the picture, in so many columns at most as its labels have room for; each label
    once."""
    handles: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    widest_in = _MARKER_IN + _LETTER_IN * max(map(len, handles), default=0)
    columns = max(1, min(columns, int(figure.get_figwidth() / widest_in)))
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 8}
    figure.legend(list(handles.values()), list(handles), **where)
