"""The picture of a calibration, after the paper's figure 10: quality and memory against each threshold, with intervals,
the chosen point, and what it did on the held-out samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.calibrate.choose import beside, value_text
from kvbench.calibrate.write import Result, StageResult
from kvbench.results.measures import LOSSES, RESIDENT
from kvbench.results.writing import write_atomic
from kvbench.show.palette import BLUE, GREEN, VERMILION
from kvbench.show.picture import picture_bytes
from kvbench.show.text import safe
from kvbench.stats.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUALITY, MEMORY, HELD_OUT, LIMIT = BLUE, GREEN, VERMILION, "#333333"


def draw(result: Result) -> list[Path]:
    """Draws one column per tuned setting and writes `calibration.png` and `.svg`; the same calibration gives the same
    bytes on the same matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(result.stages)
    figure = Figure(figsize=(1.2 + 4.4 * count, 5.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, count, squeeze=False, sharex="col", sharey="row")
    rule, memory = result.plan.rule, RESIDENT
    lost = LOSSES[rule.criterion]
    for column, item in enumerate(result.stages):
        quality = [point.losses.get(rule.criterion) for point in item.points]
        held_out = result.choice.held_out if column == count - 1 and result.choice is not None else None
        judged = (held_out.losses[rule.criterion], held_out.bytes_ratio) if held_out is not None else (None, None)
        num = 0 if held_out is None else held_out.num_samples
        top, bottom = axes[0][column], axes[1][column]
        margin = lost.scale * rule.margin
        top.axhline(0, color="#999999", linewidth=0.8)
        top.axhline(margin, color=LIMIT, linestyle="--", linewidth=1.1, label=f"margin {margin:g}")
        _series(top, item, quality, lost.scale, QUALITY, "o")
        _verdict(top, item, judged[0], lost.scale, num)
        _loss_scale(top, margin)
        text = beside(item.points, item.stage.parameter)
        top.set_title(f"{item.stage.parameter} ({text})" if text else item.stage.parameter, fontsize=10)
        ratios = [point.bytes_ratio for point in item.points]
        _series(bottom, item, ratios, memory.scale, MEMORY, "s")
        _verdict(bottom, item, judged[1], memory.scale, num)
        bottom.set_ylim(0, 1.12 * max(memory.scale * (found.high or found.value or 0) for found in ratios))
        labels = [value_text(value).strip("()").replace(", ", "\n") for value in item.stage.values]
        bottom.set_xticks(range(len(item.points)), labels)
        bottom.set_xlim(-0.6, len(item.points) - 0.4)
        bottom.set_xlabel(item.stage.parameter)
    axes[0][0].set_ylabel(f"{lost.title}\n({lost.unit})")
    axes[1][0].set_ylabel(f"resident bytes\n({RESIDENT.unit})")
    handles = dict(zip(*reversed(axes[0][-1].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    run = result.default
    num = result.stages[0].points[0].num_samples
    figure.suptitle(
        f"{result.method} on {safe(run.task.name)} with {safe(run.model.name)}: {num} tuning samples", fontsize=11
    )
    files = []
    for suffix in ("png", "svg"):
        with matplotlib.rc_context({"svg.hashsalt": "kvbench", "svg.fonttype": "none"}):
            content = picture_bytes(figure, suffix)
        files.append(result.folder / f"calibration.{suffix}")
        write_atomic(files[-1], content)
    return files


def _loss_scale(axes: "Axes", margin: float) -> None:
    """Losses span decades and the margin must stay visible: linear to twice the margin, logarithmic beyond."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_yscale("symlog", linthresh=2 * margin)
    steps = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    # Above the linear part every step; inside it only what is not crowded.
    ticks = [0.0, margin, *(step for step in steps if step > 1.5 * margin)]
    axes.yaxis.set_major_locator(FixedLocator([-margin, *ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _series(
    axes: "Axes", item: StageResult, found: Sequence[Estimate | None], scale: float, colour: str, marker: str
) -> None:
    """Values with their 95 % intervals, joined by a thin line because the grid has an order, and a ring around the
    choice."""
    points = [(x, estimate) for x, estimate in enumerate(found) if estimate is not None and estimate.value is not None]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
    _errorbar(axes, points, scale, **style, label="tuning samples, 95 % interval")
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "fillstyle": "none", "markeredgewidth": 1.6}
    for x, estimate in points:
        if x == item.chosen:
            axes.plot(x, scale * (estimate.value or 0), linestyle="none", color="black", label="chosen", **ring)
    axes.grid(axis="y", alpha=0.3)


def _verdict(axes: "Axes", item: StageResult, found: Estimate | None, scale: float, num_samples: int) -> None:
    """The choice on the held-out samples."""
    if found is None or found.value is None or item.chosen is None:
        return
    label = f"chosen, on {num_samples} held-out samples"
    point = [(item.chosen + 0.25, found)]
    _errorbar(axes, point, scale, color=HELD_OUT, marker="D", markersize=6, linestyle="none", label=label)


def _errorbar(axes: "Axes", points: Sequence[tuple[float, Estimate]], scale: float, **style: Any) -> None:
    values = np.array([scale * (estimate.value or 0) for _, estimate in points])
    low, high = (
        [value if end is None else scale * end for value, end in zip(values, ends, strict=True)]
        for ends in ([e.low for _, e in points], [e.high for _, e in points])
    )
    span = np.maximum(0.0, [values - low, high - values])
    axes.errorbar([x for x, _ in points], values, yerr=span, capsize=3, **style)
