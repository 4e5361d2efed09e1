"""The one picture of a run: quality against bytes, and what the bytes are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.results.measures import RESIDENT, SCORE, item_title, ledger_items
from kvbench.results.record import RunRecord
from kvbench.results.writing import write_atomic
from kvbench.show.labels import label_runs
from kvbench.show.palette import COLOURS, HATCHES, MARKERS, STYLES
from kvbench.show.picture import picture_bytes
from kvbench.show.progress import format_bytes
from kvbench.show.text import safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _quality(axes: "Axes", records: Sequence[RunRecord]) -> None:
    for index, method in enumerate(dict.fromkeys(record.method for record in records)):
        points = [point for record in records if record.method == method and (point := _point(record))]
        if not points:
            continue
        points.sort()
        ratio, value, low, high, count = zip(*points, strict=True)
        span = [[a - b for a, b in zip(value, low, strict=True)], [b - a for a, b in zip(value, high, strict=True)]]
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        # From the ninth method on colours come again: the lines tell those apart.
        style |= {"linestyle": STYLES[index // len(COLOURS) % len(STYLES)], "linewidth": 1.2}
        counts = f"{min(count)}" if min(count) == max(count) else f"{min(count)}-{max(count)}"
        if any(not (a or b) for a, b in zip(*span, strict=True)):
            counts += ", no interval"
            style["fillstyle"] = "none"
        axes.errorbar(ratio, value, yerr=span, capsize=4, markersize=7, label=f"{safe(method)} (n={counts})", **style)
    axes.set_xlim(left=0, right=max(110, 1.1 * axes.get_xlim()[1]))
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(-2, bottom - 2), min(102, top + 2))
    axes.set_xlabel(f"resident bytes, {RESIDENT.unit}")
    axes.set_ylabel(f"{records[-1].primary or 'score'}, % (95 % interval)")
    axes.set_title("Quality against memory", fontsize=11)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)


def _point(record: RunRecord) -> tuple[float, float, float, float, int] | None:
    """Bytes, score and its interval in percent, and n; None when there is nothing to show."""
    metric, ratio = record.metrics.get(record.primary), RESIDENT.of_run(record)
    if metric is None or metric.value is None or ratio is None:
        return None
    value = SCORE.scale * metric.value
    low = value if metric.low is None else min(value, SCORE.scale * metric.low)
    high = value if metric.high is None else max(value, SCORE.scale * metric.high)
    return RESIDENT.scale * ratio, value, low, high, metric.num_samples


def _bytes(axes: "Axes", records: Sequence[RunRecord]) -> None:
    from matplotlib.patches import Patch

    # An item keeps its colour whether or not the others are there, so that two pictures can be laid side by side.
    names = list(dict.fromkeys(name for record in records for name in ledger_items(record.ledger)))
    styles: dict[str, dict[str, Any]] = {
        name: {"facecolor": COLOURS[index % len(COLOURS)], "hatch": HATCHES[index % len(HATCHES)], "edgecolor": "white"}
        for index, name in enumerate(names)
    }
    for row, record in enumerate(records):
        left = 0.0
        scale = RESIDENT.scale / (record.ledger.get("fp16_bytes") or 1.0)
        for name, count in ledger_items(record.ledger).items():
            axes.barh(row, count * scale, left=left, height=0.55, linewidth=0.6, **styles[name])
            left += count * scale
        axes.text(left + 1, row, format_bytes(record.ledger.get(RESIDENT.key)), va="center", fontsize=9)
    handles = [
        Patch(label=item_title(name), **styles[name])
        for name in names
        if any(ledger_items(record.ledger).get(name) for record in records)
    ]
    axes.set_yticks(range(len(records)), label_runs(records))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(100.0, axes.get_xlim()[1]))
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"resident bytes per sample, {RESIDENT.unit}")
    axes.set_title("What the bytes are", fontsize=11)
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9
        )


def draw(records: Sequence[RunRecord], path: Path) -> Path:
    """Draw the picture and write it in one atomic step.

    Args:
        records: Runs of one task and model, the full cache first.
        path: PNG file to write. The same records give the same bytes on the same matplotlib.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list({(record.method, record.hash): record for record in records}.values())
    last = records[-1]
    width = 11 + 0.08 * max(0, max(map(len, label_runs(records))) - 12)
    figure = Figure(figsize=(width, 4.2 + 0.25 * max(0, len(records) - 3)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _quality(left, records)
    _bytes(right, records)
    figure.suptitle(f"{safe(last.task)} with {safe(last.model)}", fontsize=12)
    write_atomic(path, picture_bytes(figure, "png"))
    return path
