"""The picture of a calibration, after the paper's figure 10: quality and memory against each threshold, with intervals,
the chosen point, and what it did on the held-out samples."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.calibrate.choose import Measured, beside, value_text
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
    """Draw one column per tuned setting and write `calibration.png` and `.svg`.

    Args:
        result: The calibration. The same one gives the same bytes on the same matplotlib.

    Returns:
        The files.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(result.stages)
    figure = Figure(figsize=(1.2 + 4.4 * count, 5.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, count, squeeze=False, sharex="col", sharey="row")
    for column, item in enumerate(result.stages):
        is_last = column == len(result.stages) - 1
        _quality(axes[0][column], item, result, with_verdict=is_last)
        _memory(axes[1][column], item, result, with_verdict=is_last)
    lost = LOSSES[result.plan.rule.criterion]
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


def _quality(axes: "Axes", item: StageResult, result: Result, with_verdict: bool) -> None:
    rule = result.plan.rule
    scale = LOSSES[rule.criterion].scale
    found = [point.losses.get(rule.criterion) for point in item.points]
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.axhline(
        scale * rule.margin, color=LIMIT, linestyle="--", linewidth=1.1, label=f"margin {scale * rule.margin:g}"
    )
    _series(axes, [(x, e.value, e.low, e.high) for x, e in enumerate(found) if e is not None], scale, QUALITY, "o")
    _choice(axes, item, [None if e is None else e.value for e in found], scale)
    if with_verdict and result.choice is not None and item.chosen is not None:
        held_out = result.choice.held_out
        _verdict(axes, item.chosen, held_out.losses[rule.criterion], scale, held_out)
    _loss_scale(axes, scale * rule.margin)
    text = beside(item.points, item.stage.parameter)
    axes.set_title(f"{item.stage.parameter} ({text})" if text else item.stage.parameter, fontsize=10)
    axes.grid(axis="y", alpha=0.3)


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


def _memory(axes: "Axes", item: StageResult, result: Result, with_verdict: bool) -> None:
    found = [point.bytes_ratio for point in item.points]
    _series(
        axes,
        [(x, e.value, e.low, e.high) for x, e in enumerate(found) if e.value is not None],
        RESIDENT.scale,
        MEMORY,
        "s",
    )
    _choice(axes, item, [e.value for e in found], RESIDENT.scale)
    if with_verdict and result.choice is not None and item.chosen is not None:
        held_out = result.choice.held_out
        _verdict(axes, item.chosen, held_out.bytes_ratio, RESIDENT.scale, held_out)
    axes.set_ylim(0, 1.12 * max(RESIDENT.scale * (e.high or e.value or 0) for e in found))
    labels = [value_text(value).strip("()").replace(", ", "\n") for value in item.stage.values]
    axes.set_xticks(range(len(item.points)), labels)
    axes.set_xlim(-0.6, len(item.points) - 0.4)
    axes.set_xlabel(item.stage.parameter)
    axes.grid(axis="y", alpha=0.3)


def _series(axes: "Axes", points: list[tuple], scale: float, colour: str, marker: str) -> None:
    """Values with their 95 % intervals, joined by a thin line because the grid has an order."""
    xs, values = [p[0] for p in points], [scale * p[1] for p in points]
    below = [scale * (p[1] - (p[1] if p[2] is None else p[2])) for p in points]
    above = [scale * ((p[1] if p[3] is None else p[3]) - p[1]) for p in points]
    span = [[max(0.0, b) for b in below], [max(0.0, a) for a in above]]
    axes.errorbar(
        xs,
        values,
        yerr=span,
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1,
        capsize=3,
        label="tuning samples, 95 % interval",
    )


def _choice(axes: "Axes", item: StageResult, values: list[float | None], scale: float) -> None:
    if item.chosen is None or (value := values[item.chosen]) is None:
        return
    axes.plot(
        item.chosen,
        scale * value,
        marker="o",
        markersize=13,
        color="black",
        fillstyle="none",
        markeredgewidth=1.6,
        linestyle="none",
        label="chosen",
    )


def _verdict(axes: "Axes", place: int, found: Estimate, scale: float, held_out: Measured) -> None:
    if found.value is None:
        return
    value = scale * found.value
    low, high = (value if end is None else scale * end for end in (found.low, found.high))
    axes.errorbar(
        place + 0.25,
        value,
        yerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
        color=HELD_OUT,
        marker="D",
        markersize=6,
        capsize=3,
        linestyle="none",
        label=f"chosen, on {held_out.num_samples} held-out samples",
    )
