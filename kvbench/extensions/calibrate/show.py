"""End of a calibration.

On the terminal every grid point, the verdict and how to use the file; and the picture, after the paper's figure 10:
loss and bytes against each threshold, the choice, and its held-out verdict.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.extensions.calibrate.choose import ALLOWED, Measured, losses_by_value, settings_text, value_text
from kvbench.extensions.calibrate.layers import LayerSearch
from kvbench.extensions.calibrate.plan import PAPER, Rule
from kvbench.extensions.calibrate.write import Choice, Result, StageResult
from kvbench.results.measures import LOSSES, RESIDENT, SCORE
from kvbench.results.writing import write_atomic
from kvbench.show import terminal
from kvbench.show.picture import BLUE, GREEN, VERMILION, picture_bytes
from kvbench.show.progress import format_bytes
from kvbench.show.text import safe
from kvbench.stats.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUALITY, MEMORY, HELD_OUT, LIMIT = BLUE, GREEN, VERMILION, "#333333"


def show(result: Result, files: Sequence[Path]) -> None:
    """Prints the tables, the verdict and the files, the file to use first."""
    rule = result.plan.rule
    tables = [] if result.layers is None else [_layer_table(result.layers, rule)]
    tables += [_stage_table(item, rule) for item in result.stages]
    if result.choice is not None:
        tables.append(_held_out_table(result, result.choice))
    console = terminal.console(120)
    console.print(Group(*(item for table in tables for item in (Text(), table))))
    for item in result.stages:
        console.print(f"{rule.name}: {item.why}", markup=False, highlight=False)
    console.print(verdict(result), markup=False, highlight=False)
    for path in files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    if result.choice is not None:
        use = f"kvbench method={result.method} method.calibration={files[0]}"
        console.print(f"use it: {use}", markup=False, highlight=False, soft_wrap=True)


def verdict(result: Result) -> str:
    """The result in one sentence."""
    rule = result.plan.rule
    lost = LOSSES[rule.criterion]
    what = f"{lost.short} at most {lost.scale * rule.margin:g} ({rule.proof})"
    choice = result.choice
    if choice is None:
        stage = result.stages[-1].stage
        return (
            f"No value of {stage.parameter} is good enough: {what} was asked. Try gentler values, more samples "
            "(calibrate.tuning_samples), or another margin; no calibration file was written."
        )
    loss = interval(choice.held_out.losses[rule.criterion], lost.scale)
    state = "confirmed" if choice.confirmed else "NOT confirmed"
    state += " (refuted: all of the interval is above the margin)" if choice.refuted(rule) else ""
    return (
        f"{settings_text(choice.settings)}: {state} on {choice.held_out.num_samples} held-out samples, {lost.short} "
        f"{loss}, asked {what}; {RESIDENT.scale * (choice.held_out.bytes_ratio.value or 0):.1f} % of the FP16 bytes."
        + _doubt(result)
    )


def _doubt(result: Result) -> str:
    """The limits of trust in a confirmation."""
    rate = result.false_confirmations
    if rate is None:
        return ""
    text = f" If every setting truly lost the margin, this plan would confirm one in {100 * rate:.1f} % of cases"
    if result.looks > 1:
        text += (
            f"; these held-out samples have judged {result.looks} calibrations, so count on up to "
            f"{100 * min(1.0, rate * result.looks):.1f} %"
        )
    if min(1.0, rate * result.looks) > ALLOWED:
        text += ". That is too often: take more held-out samples, calibrate.proof=interval, or another split_seed"
    return f"{text}."


def interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """A value with its 95 % interval; points get one digit, nats three."""
    if estimate is None or estimate.value is None:
        return "-"
    digits = 3 if scale == 1.0 else 1
    value, *ends = (
        round(scale * end, digits) + 0.0 for end in (estimate.value, estimate.low, estimate.high) if end is not None
    )
    return f"{value:+.{digits}f}" + (f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else "")


def _table(title: str, first: str, rule: Rule) -> Table:
    table = terminal.plain_table(title)
    table.add_column(first, no_wrap=True)
    for name in ("score, %", *(LOSSES[key].short for key in _losses(rule)), RESIDENT.short, "%", ""):
        table.add_column(name, justify="right")
    return table


def _losses(rule: Rule) -> tuple[str, ...]:
    return ("score", "nll") if rule.criterion == "score" else ("nll", "kl")


def _row(table: Table, name: str, point: Measured, mark: str, rule: Rule) -> None:
    losses = [interval(point.losses.get(key), LOSSES[key].scale) for key in _losses(rule)]
    score = "-" if point.score is None else f"{SCORE.scale * point.score:.1f}"
    ratio = f"{RESIDENT.scale * (point.bytes_ratio.value or 0):.1f}"
    failed = f"{point.num_failed} failed" if point.num_failed else ""
    table.add_row(name, score, *losses, format_bytes(point.resident_bytes), ratio, failed or mark)


def _layer_table(search: LayerSearch, rule: Rule) -> Table:
    """The cost of one layer alone at each precision."""
    lost, costs = LOSSES[rule.criterion], search.costs(rule.criterion)
    table = terminal.plain_table(f"{lost.short}, of one layer alone beside {search.plan.usual}")
    for heading in ("layer", *costs):
        table.add_column(heading, justify="right")
    for layer, row in enumerate(zip(*costs.values(), strict=True)):
        table.add_row(str(layer), *(f"{lost.scale * cost:+.4f}" for cost in row))
    return table


def _stage_table(item: StageResult, rule: Rule) -> Table:
    text = losses_by_value(item.points, item.stage.parameter)
    title = f"{item.stage.parameter} on {item.points[0].num_samples} tuning samples" + (f" ({text})" if text else "")
    table = _table(title, item.stage.parameter, rule)
    _row(table, FULL, item.full, "", rule)
    for index, (value, point) in enumerate(zip(item.stage.values, item.points, strict=True)):
        others = "" if rule.name == PAPER else "within" if point.within else "too much"
        _row(table, settings_text({"": value})[1:], point, "chosen" if index == item.chosen else others, rule)
    return table


def _held_out_table(result: Result, choice: Choice) -> Table:
    table = _table(f"{choice.held_out.num_samples} held-out samples", "method", result.plan.rule)
    settings = result.default.identity["method"]
    replaced = {item.parameter: settings[item.parameter] for item in result.plan.stages}
    _row(table, FULL, choice.held_out_full, "", result.plan.rule)
    for name, used, point in (
        ("uncalibrated", replaced, choice.held_out_default),
        ("calibrated", choice.settings, choice.held_out),
    ):
        mark = "within" if point.within else "too much"
        _row(table, f"{name}\n{settings_text(used)}", point, mark, result.plan.rule)
    return table


def draw(result: Result) -> list[Path]:
    """Draw one column per tuned setting and write `calibration.png` and `.svg`.

    The same calibration gives the same bytes on the same matplotlib.
    """
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
        text = losses_by_value(item.points, item.stage.parameter)
        top.set_title(f"{item.stage.parameter} ({text})" if text else item.stage.parameter, fontsize=10)
        ratios = [point.bytes_ratio for point in item.points]
        _series(bottom, item, ratios, memory.scale, MEMORY, "s")
        _verdict(bottom, item, judged[1], memory.scale, num)
        most = max(memory.scale * (ratio.high or ratio.value or 0) for ratio in ratios)
        bottom.set_ylim(0, max(bottom.get_ylim()[1], 1.12 * most))  # all stages share it
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
    low, high = axes.get_ylim()
    digits = (1,) if max(high, -low) > 40 * margin else (1, 2, 5)  # beyond, three to a decade crowd each other
    steps = [digit * 10.0**power for power in range(-6, 7) for digit in digits]
    # Above the linear part every step; inside it only what is not crowded.
    ticks = [margin, *(step for step in steps if step > 1.5 * margin)]
    axes.yaxis.set_major_locator(FixedLocator([0.0, *ticks, *(-tick for tick in ticks)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _series(
    axes: "Axes", item: StageResult, estimates: Sequence[Estimate | None], scale: float, colour: str, marker: str
) -> None:
    """Values with their 95 % intervals, joined by a thin line in the grid's order; a ring marks the choice."""
    points = [
        (x, estimate) for x, estimate in enumerate(estimates) if estimate is not None and estimate.value is not None
    ]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
    _errorbar(axes, points, scale, **style, label="tuning samples, 95 % interval")
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "fillstyle": "none", "markeredgewidth": 1.6}
    for x, estimate in points:
        if x == item.chosen:
            axes.plot(x, scale * (estimate.value or 0), linestyle="none", color="black", label="chosen", **ring)
    axes.grid(axis="y", alpha=0.3)


def _verdict(axes: "Axes", item: StageResult, estimate: Estimate | None, scale: float, num_samples: int) -> None:
    """The choice on the held-out samples."""
    if estimate is None or estimate.value is None or item.chosen is None:
        return
    label = f"chosen, on {num_samples} held-out samples"
    point = [(item.chosen + 0.25, estimate)]
    _errorbar(axes, point, scale, color=HELD_OUT, marker="D", markersize=6, linestyle="none", label=label)


def _errorbar(axes: "Axes", points: Sequence[tuple[float, Estimate]], scale: float, **style: Any) -> None:
    values = np.array([scale * (estimate.value or 0) for _, estimate in points])
    low, high = (
        [value if end is None else scale * end for value, end in zip(values, ends, strict=True)]
        for ends in ([e.low for _, e in points], [e.high for _, e in points])
    )
    span = np.maximum(0.0, [values - low, high - values])
    axes.errorbar([x for x, _ in points], values, yerr=span, capsize=3, **style)
