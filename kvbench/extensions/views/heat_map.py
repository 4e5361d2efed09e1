"""`kvbench report view=heatmap`: retrieval by depth in the text and length, against the full cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.evidence.load import Group, StoredRun
from kvbench.evidence.samples import SampleName, curve_of, measure
from kvbench.evidence.view import Grid, Part, View, ViewResult, frame_of, notes
from kvbench.results.measures import Measure
from kvbench.results.refusals import NoResults
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.picture import BLUE, VERMILION, drawn
from kvbench.show.terminal import number
from kvbench.stats.intervals import estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MOST = 128  # more rows or columns are no grid, and no picture shows them
VALUES = "cividis"  # even in brightness, told apart with every kind of colour blindness and in grey
EMPTY = "#DDDDDD"
CELL_IN, WIDTH_IN, MARGIN_IN = 0.34, 3.6, 0.95
MOST_NUMBERED = 12  # cells that are smaller have no numbers in them
SMALLEST_SPAN = 0.1  # of the shown unit's whole; a difference of a point is not drawn like one of fifty
STYLE: dict[Any, Any] = {"font.size": 7}


@dataclass(kw_only=True)
class Panels:
    """The maps of runs that may be compared."""

    title: str
    what: Measure
    samples: "pd.DataFrame"
    """A row for each run and sample that all runs have: `run`, `depth` in percent, `length` in tokens, `value`, and
    `difference` to the full cache, NaN for the full cache and without one."""
    notes: list[str]

    @property
    def runs(self) -> list[str]:
        """Labels of the runs."""
        return list(self.samples["run"].unique())

    def grid(self, run: str, column: str = "value") -> "pd.DataFrame":
        """The means of a run's cells, depths by lengths; NaN where there is no sample."""
        cells = self.samples[self.samples["run"] == run].groupby(["depth", "length"])[column]
        return cells.agg(fmean).unstack()


def cells_of(run: StoredRun) -> dict[SampleName, tuple[int, int]]:
    """Depth and length of a run's samples, as far as the task notes them as whole numbers."""
    cells = {}
    for record in run.samples.values():
        depth, length = record["meta"].get("depth"), record["meta"].get("length")
        if type(depth) is int and type(length) is int:
            cells[record["subset"], record["sample_id"]] = depth, length
    return cells


def panels_of(group: Group, metric: str) -> Panels | None:
    """The maps of a group by the metric of that name; None where its samples have no depth and length."""
    import pandas as pd

    runs = [run for run in group.runs if cells_of(run)]
    if not runs:
        return None
    what, places = measure(metric, group), cells_of(runs[0])
    values = [curve_of(run, what).values for run in runs]
    common = [name for name in sorted(places, key=lambda name: (places[name], name)) if all(name in v for v in values)]
    if not common or any(len({places[name][side] for name in common}) > MOST for side in (0, 1)):
        return None
    notes, most = [*filter(None, [group.unfit(what)]), *group.notes], max(map(len, values))
    if len(common) < most:
        notes.append(f"drawn from the {len(common)} of {most} samples that every run has")
    against = curve_of(group.reference, what).values if group.reference is not None else None
    if against is None:
        notes.append("there is no run of the full cache, so no differences are drawn")
    rows = []
    for run, mine in zip(runs, values, strict=True):
        reference = against if run.method != FULL else None
        for name in common:
            depth, length = places[name]
            minus = mine[name] - reference[name] if reference else np.nan
            rows.append({"run": run.label, "depth": depth, "length": length, "value": mine[name], "difference": minus})
    return Panels(title=group.title, what=what, samples=pd.DataFrame(rows), notes=notes)


def figure(panels: Panels) -> "Figure":
    """A row for each run: its values to the left, and the difference to the full cache to the right."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    what, runs = panels.what, panels.runs
    shown = [what.scale * panels.grid(run) for run in runs]
    minus = [what.scale * panels.grid(run, "difference") for run in runs]
    has_differences = panels.samples["difference"].notna().any()
    away = float(np.nanmax(np.abs(minus))) if has_differences else 0.0
    low, high = (0.0, what.scale) if what.bounded else (np.nanmin(shown), np.nanmax(shown) or 1.0)
    span = max(away, SMALLEST_SPAN * (what.scale if what.bounded else high))
    # Vermilion for less, white for the same, blue for more.
    differences = LinearSegmentedColormap.from_list("differences", [VERMILION, "white", BLUE])
    values = mpl.colormaps[VALUES]
    if not what.higher_is_better:
        values, differences = values.reversed(), differences.reversed()
    columns = 2 if has_differences else 1
    height = len(runs) * (CELL_IN * len(shown[0]) + MARGIN_IN) + 0.6
    made = Figure(figsize=(WIDTH_IN * columns, height), dpi=200, layout="constrained")
    count = len(panels.samples) // len(runs)
    each = count / max(1, shown[0].count().sum())
    made.suptitle(f"{panels.title}\nn = {count}, {each:g} in each cell", fontsize=8)
    axes = made.subplots(len(runs), columns, squeeze=False)
    for row, (run, mine, other) in enumerate(zip(runs, shown, minus, strict=True)):
        title = f"{run}: {what.title}, {'%' if what.bounded else what.unit}"
        _map(axes[row, 0], mine, title, values, (low, high), "{:.3g}")
        if other.notna().any(axis=None):
            _map(axes[row, 1], other, f"{run} minus full, {what.unit}", differences, (-span, span), "{:+.3g}")
        elif columns == 2:
            axes[row, 1].set_axis_off()
    return made


def _map(
    axes: "Axes", table: "pd.DataFrame", title: str, colours: "Colormap", limits: tuple[float, float], form: str
) -> None:
    """One heat map with its colour bar; numbers in the cells where there is room."""
    colours = colours.with_extremes(bad=EMPTY)
    image = axes.imshow(table, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(table.columns)), [str(length) for length in table.columns])
    axes.set_yticks(range(len(table)), [str(depth) for depth in table.index])
    if len(table.columns) > 6:
        axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth, % of the text")
    axes.set_title(title, fontsize=7.5)
    axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    if max(table.shape) > MOST_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(table.to_numpy()):
        if value != value:
            continue
        red, green, blue, _ = colours((value - limits[0]) / ((limits[1] - limits[0]) or 1.0))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue
        text = form.format(value) if abs(value) > 1e-9 else "0"
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="black" if bright > 0.5 else "white")


def tables(panels: Panels) -> list[Part]:
    """The maps as tables, and notes."""
    scale, parts = panels.what.scale, list[Part]()
    for run in panels.runs:
        values, differences = panels.grid(run), panels.grid(run, "difference")

        def cell(value: float, minus: float) -> str:
            text = "-" if value != value else number(value, scale)
            return text if minus != minus else f"{text} ({number(minus, scale, signed=True)})"

        columns = [("depth, %", [str(depth) for depth in values.index])]
        columns += [(f"{n}", [cell(*both) for both in zip(values[n], differences[n], strict=True)]) for n in values]
        parts += [Grid(title=f"{run}: {panels.title}", heading=None, columns=columns), Text()]
    return [*parts, *notes(panels.notes)]


def records(panels: Panels) -> Iterator[dict[str, Cell]]:
    """Every cell of every map, unrounded, with Wilson's or the bootstrap's 95 % interval."""
    bounds = (0.0, 1.0) if panels.what.bounded else None
    for (run, depth, length), cell in panels.samples.groupby(["run", "depth", "length"], sort=False):
        cell_estimate, minus = estimate({"": cell["value"].tolist()}, bounds=bounds), fmean(cell["difference"])
        yield (
            csv_row(group=panels.title, run=run, metric=panels.what.key, depth_percent=depth)
            | csv_row(length_tokens=length, n=len(cell), value=cell_estimate.value)
            | csv_row(low=cell_estimate.low, high=cell_estimate.high, difference=None if minus != minus else minus)
        )


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The maps of all groups; raises ValueError where no run has depths and lengths."""
    groups = [group for group in groups if any(cells_of(run) for run in group.runs)]
    several = [panels for group in groups if (panels := panels_of(group, str(cfg.metric))) is not None]
    if not several:
        raise NoResults(
            f"no run under results_dir={cfg.results_dir} that fits the filters has depths and lengths; "
            "`python -m kvbench task=needle` makes one"
        )
    words = "cell: mean over its samples (run minus full cache, the same samples); the CSV has n and 95 % intervals."
    return ViewResult(
        parts=[*(part for panels in several for part in tables(panels)), Text(words, style="dim")],
        frame=frame_of(record for panels in several for record in records(panels)),
        figures=[(panels.title, "", partial(drawn, partial(figure, panels), style=STYLE)) for panels in several],
    )


main = View(name="heatmap", compute=compute)
