"""The picture of heat maps: a row for each run, its values to the left and what it differs from the full cache to the
right.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvbench.show.palette import BLUE, VERMILION
from kvbench.show.picture import picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

    from kvbench.evidence.heat_cells import Panels, Place

# Even in brightness, told apart with every kind of colour blindness and in grey.
VALUES = "cividis"
EMPTY = "#DDDDDD"
CELL_IN, WIDTH_IN, MARGIN_IN = 0.34, 3.6, 0.95
# Cells that are smaller have no numbers in them.
MOST_NUMBERED = 12
SMALLEST_SPAN = 0.1  # of the shown unit's whole; a difference of a point is not drawn like one of fifty
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "path",
}


def differences_colours() -> "Colormap":
    """Vermilion for less, white for the same, blue for more."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("differences", [VERMILION, "white", BLUE])


def grid(cells: "Mapping[Place, Sequence[float]]", depths: Sequence[int], lengths: Sequence[int]) -> list[list[float]]:
    """The means of the cells, NaN where there is no sample: a row for each depth, a column for each length."""
    return [
        [fmean(cells[depth, length]) if cells.get((depth, length)) else float("nan") for length in lengths]
        for depth in depths
    ]


def render(panels: "Panels", kind: str) -> bytes:
    """Draw the maps of a group.

    Args:
        panels: At least one map.
        kind: `png` or `svg`.

    Returns:
        The file. The same panels give the same bytes on the same matplotlib.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    what, maps = panels.what, panels.maps
    shown = [grid(found.values, panels.depths, panels.lengths) for found in maps]
    minus = [grid(found.differences, panels.depths, panels.lengths) if found.differences else None for found in maps]
    flat = [what.scale * value for table in shown for row in table for value in row if value == value]
    away = [abs(what.scale * value) for table in minus if table for row in table for value in row if value == value]
    low, high = (0.0, what.scale) if what.bounded else (min(flat), max(flat) or 1.0)
    span = max([*away, SMALLEST_SPAN * (what.scale if what.bounded else high)])
    if not what.higher_is_better:
        values, differences = mpl.colormaps[VALUES].reversed(), differences_colours().reversed()
    else:
        values, differences = mpl.colormaps[VALUES], differences_colours()
    columns = 2 if any(minus) else 1
    height = len(maps) * (CELL_IN * len(panels.depths) + MARGIN_IN) + 0.6
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN * columns, height), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        each = panels.num_samples / max(1, sum(value == value for row in shown[0] for value in row))
        figure.suptitle(f"{panels.title}\nn = {panels.num_samples}, {each:g} in each cell", fontsize=8)
        axes = figure.subplots(len(maps), columns, squeeze=False)
        for row, (found, mine, other) in enumerate(zip(maps, shown, minus, strict=True)):
            title = f"{found.label}: {what.title}, {'%' if what.bounded else what.unit}"
            _map(axes[row, 0], mine, panels, title, values, (low, high), "{:.3g}")
            if columns == 2 and other:
                title = f"{found.label} minus full, {what.unit}"
                _map(axes[row, 1], other, panels, title, differences, (-span, span), "{:+.3g}")
            elif columns == 2:
                axes[row, 1].set_axis_off()
        return picture_bytes(figure, kind)


def _map(
    axes: "Axes",
    table: list[list[float]],
    panels: "Panels",
    title: str,
    colours: "Colormap",
    limits: tuple[float, float],
    form: str,
) -> None:
    """One heat map with its colour bar; numbers in the cells where there is room."""
    import numpy as np

    scaled = panels.what.scale * np.array(table)
    colours = colours.with_extremes(bad=EMPTY)
    image = axes.imshow(scaled, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(panels.lengths)), [str(length) for length in panels.lengths])
    axes.set_yticks(range(len(panels.depths)), [str(depth) for depth in panels.depths])
    if len(panels.lengths) > 6:
        axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth, % of the text")
    axes.set_title(title, fontsize=7.5)
    axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    if max(scaled.shape) > MOST_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(scaled):
        if value != value:
            continue
        red, green, blue, _ = colours((value - limits[0]) / ((limits[1] - limits[0]) or 1.0))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue
        text = form.format(value) if abs(value) > 1e-9 else "0"
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="black" if bright > 0.5 else "white")
