"""`kvbench heatmap`: what a method finds at each depth of a text and each length, beside the full cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.evidence.load import Group, StoredRun, load_groups, patterns
from kvbench.evidence.samples import SampleName, measure, values_of
from kvbench.evidence.settings import KINDS, check, out_folder, write_drawn
from kvbench.results.measures import Measure
from kvbench.show import terminal
from kvbench.show.csv_file import Cell, csv_row, records_csv
from kvbench.show.palette import BLUE, VERMILION
from kvbench.show.picture import drawn
from kvbench.show.terminal import number
from kvbench.stats.intervals import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Place = tuple[int, int]  # depth in percent, length in tokens
Cells = dict[Place, list[float]]
MOST = 128  # more rows or columns are no grid, and no picture shows them
VALUES = "cividis"  # even in brightness, told apart with every kind of colour blindness and in grey
EMPTY = "#DDDDDD"
CELL_IN, WIDTH_IN, MARGIN_IN = 0.34, 3.6, 0.95
MOST_NUMBERED = 12  # cells that are smaller have no numbers in them
SMALLEST_SPAN = 0.1  # of the shown unit's whole; a difference of a point is not drawn like one of fifty
STYLE: dict[Any, Any] = {"font.size": 7}


@dataclass(frozen=True, kw_only=True)
class Map:
    """The values of one run in each cell."""

    label: str
    values: Cells
    """One value for each sample, unscaled."""
    differences: Cells | None
    """Run minus full cache, sample by sample; None for the full cache, and without one."""


@dataclass(kw_only=True)
class Panels:
    """The maps of runs that may be compared."""

    title: str
    what: Measure
    depths: list[int]
    lengths: list[int]
    maps: list[Map]
    notes: list[str] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Samples of each map."""
        return sum(map(len, self.maps[0].values.values()))

    def grid(self, cells: Cells) -> np.ndarray:
        """The means of the cells in shown units, NaN where there is no sample: depths by lengths."""
        places = [[cells.get((depth, length)) for length in self.lengths] for depth in self.depths]
        return self.what.scale * np.array([[fmean(cell) if cell else np.nan for cell in row] for row in places])


def place_of(run: StoredRun) -> dict[SampleName, Place]:
    """Depth and length of a run's samples, as far as the task notes them as whole numbers."""
    found = {}
    for record in run.samples.values():
        depth, length = record["meta"].get("depth"), record["meta"].get("length")
        if type(depth) is int and type(length) is int:
            found[record["subset"], record["sample_id"]] = depth, length
    return found


def panels_of(group: Group, metric: str) -> Panels | None:
    """The maps of a group by the metric of that name; None where its samples have no depth and length."""
    runs = [run for run in group.runs if place_of(run)]
    if not runs:
        return None
    what = measure(metric, group)
    values = [values_of(run, what) for run in runs]
    places = place_of(runs[0])
    common = [name for name in sorted(places) if all(name in each for each in values)]
    depths, lengths = (sorted({places[name][side] for name in common}) for side in (0, 1))
    if not common or max(len(depths), len(lengths)) > MOST:
        return None
    panels = Panels(title=group.title, what=what, depths=depths, lengths=lengths, maps=[], notes=list(group.notes))
    most = max(map(len, values))
    if len(common) < most:
        panels.notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    against = values_of(group.reference, what) if group.reference is not None else None
    for run, mine in zip(runs, values, strict=True):
        minus = None
        if against is not None and run.method != FULL:
            minus = _cells(places, {name: mine[name] - against[name] for name in common})
        cells = _cells(places, {name: mine[name] for name in common})
        panels.maps.append(Map(label=run.label, values=cells, differences=minus))
    if against is None:
        panels.notes.append("there is no run of the full cache, so no differences are drawn")
    return panels


def _cells(places: Mapping[SampleName, Place], values: Mapping[SampleName, float]) -> Cells:
    cells: Cells = {}
    for name, value in values.items():
        cells.setdefault(places[name], []).append(value)
    return cells


def differences_colours() -> "Colormap":
    """Vermilion for less, white for the same, blue for more."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("differences", [VERMILION, "white", BLUE])


def figure(panels: Panels) -> "Figure":
    """A row for each run: its values to the left, and what it differs from the full cache to the right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    what, maps = panels.what, panels.maps
    shown = [panels.grid(found.values) for found in maps]
    minus = [panels.grid(found.differences) if found.differences else None for found in maps]
    away = [float(np.nanmax(np.abs(table))) for table in minus if table is not None]
    low, high = (0.0, what.scale) if what.bounded else (np.nanmin(shown), np.nanmax(shown) or 1.0)
    span = max([*away, SMALLEST_SPAN * (what.scale if what.bounded else high)])
    values, differences = mpl.colormaps[VALUES], differences_colours()
    if not what.higher_is_better:
        values, differences = values.reversed(), differences.reversed()
    columns = 2 if away else 1
    height = len(maps) * (CELL_IN * len(panels.depths) + MARGIN_IN) + 0.6
    made = Figure(figsize=(WIDTH_IN * columns, height), dpi=200, layout="constrained")
    each = panels.num_samples / max(1, np.isfinite(shown[0]).sum())
    made.suptitle(f"{panels.title}\nn = {panels.num_samples}, {each:g} in each cell", fontsize=8)
    axes = made.subplots(len(maps), columns, squeeze=False)
    for row, (found, mine, other) in enumerate(zip(maps, shown, minus, strict=True)):
        title = f"{found.label}: {what.title}, {'%' if what.bounded else what.unit}"
        _map(axes[row, 0], mine, panels, title, values, (low, high), "{:.3g}")
        if other is not None:
            title = f"{found.label} minus full, {what.unit}"
            _map(axes[row, 1], other, panels, title, differences, (-span, span), "{:+.3g}")
        elif columns == 2:
            axes[row, 1].set_axis_off()
    return made


def _map(
    axes: "Axes",
    table: np.ndarray,
    panels: Panels,
    title: str,
    colours: "Colormap",
    limits: tuple[float, float],
    form: str,
) -> None:
    """One heat map with its colour bar; numbers in the cells where there is room."""
    colours = colours.with_extremes(bad=EMPTY)
    image = axes.imshow(table, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(panels.lengths)), [str(length) for length in panels.lengths])
    axes.set_yticks(range(len(panels.depths)), [str(depth) for depth in panels.depths])
    if len(panels.lengths) > 6:
        axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth, % of the text")
    axes.set_title(title, fontsize=7.5)
    axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    if max(table.shape) > MOST_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(table):
        if value != value:
            continue
        red, green, blue, _ = colours((value - limits[0]) / ((limits[1] - limits[0]) or 1.0))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue
        text = form.format(value) if abs(value) > 1e-9 else "0"
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="black" if bright > 0.5 else "white")


def render(panels: Panels, console: Console) -> None:
    """Print the maps as tables."""
    scale = panels.what.scale
    for found in panels.maps:

        def cell(place: Place, found: Map = found) -> str:
            mine, minus = found.values.get(place), (found.differences or {}).get(place)
            text = number(fmean(mine), scale) if mine else "-"
            return f"{text} ({number(fmean(minus), scale, signed=True)})" if minus else text

        columns = [("depth, %", [str(depth) for depth in panels.depths])]
        columns += [(f"{length}", [cell((depth, length)) for depth in panels.depths]) for length in panels.lengths]
        console.print(terminal.table_of(f"{found.label}: {panels.title}", None, (), columns))
        console.print()
    terminal.print_notes(panels.notes, console)


def csv_of(several: Sequence[Panels]) -> bytes:
    """Every cell of every map, unrounded, with Wilson's or the bootstrap's 95 % interval."""
    records: list[dict[str, Cell]] = []
    for panels, found in [(one, found) for one in several for found in one.maps]:
        for (depth, length), values in sorted(found.values.items()):
            cell = estimate({"": values}, bounds=(0.0, 1.0) if panels.what.bounded else None)
            minus = fmean(found.differences[depth, length]) if found.differences else None
            records.append(
                csv_row(group=panels.title, run=found.label, metric=panels.what.key, depth_percent=depth)
                | csv_row(length_tokens=length, n=len(values), value=cell.value)
                | csv_row(low=cell.low, high=cell.high, difference=minus)
            )
    return records_csv(records)


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench heatmap`."""
    check(cfg, lists={"kinds": KINDS})
    groups = [group for group in load_groups(cfg) if any(place_of(run) for run in group.runs)]
    several = [panels for group in groups if (panels := panels_of(group, str(cfg.metric))) is not None]
    if not several:
        raise ValueError(
            f"no run under results_dir={cfg.results_dir} that fits the filters has depths and lengths; "
            "`python -m kvbench task=needle` makes one"
        )
    console = terminal.console(120)
    for panels in several:
        render(panels, console)
    kinds = patterns(cfg.kinds) or KINDS
    pictures = [(p.title, f".{kind}", drawn(partial(figure, p), kind, STYLE)) for p in several for kind in kinds]
    written = write_drawn(out_folder(cfg, "heatmap") / "heatmap.csv", csv_of(several), pictures)
    what = "cell: mean over its samples (run minus full cache, the same samples); the CSV has n and 95 % intervals."
    console.print(Text(what, style="dim"))
    terminal.print_paths(written, console)
    return 0
