"""Picture of a run: quality against bytes, and the items of these bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.results.measures import RESIDENT, SCORE, item_title, ledger_items, score
from kvbench.results.record import RunRecord
from kvbench.results.writing import write_atomic
from kvbench.show.labels import differ_in_length, label_runs
from kvbench.show.picture import (
    HATCHES,
    ITEM_COLOURS,
    STYLES,
    item_index,
    lay_out,
    method_style,
    name_points,
    picture_bytes,
)
from kvbench.show.progress import format_bytes
from kvbench.show.text import safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

SIZE = 10  # of names, in points
ABOUT_IN = 1.5  # above and below the panels: title, legend and words at the axis, at most
SLIGHT_PCT = 0.5  # of the FP16 cache: items below it are in the length of the bar, without a colour of their own


def _quality(axes: "Axes", records: Sequence[RunRecord]) -> list[tuple[str, tuple[float, float], str]]:
    """Draw scores against bytes; returns the arguments of `name_points` for each method's last point."""
    ends = []
    for method in dict.fromkeys(record.method for record in records):
        colour, marker = method_style(method)
        of_method = [record for record in records if record.method == method]
        for index, members in enumerate(_lines(of_method)):
            points = sorted(point for record in members if (point := _point(record)))
            if not points:
                continue
            ratio, value, low, high = zip(*points, strict=True)
            bars = [[a - b for a, b in zip(value, low, strict=True)], [b - a for a, b in zip(value, high, strict=True)]]
            style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": STYLES[index % len(STYLES)]}
            if any(not (a or b) for a, b in zip(*bars, strict=True)):
                style["fillstyle"] = "none"
            axes.errorbar(ratio, value, yerr=bars, capsize=3, markersize=8, linewidth=1.2, **style)
            words = ", no interval" if "fillstyle" in style else ""
            ends.append((f"{safe(method, 40)} {value[-1]:.1f}{words}", (ratio[-1], value[-1]), colour))
    axes.set_xlim(left=0, right=max(110, axes.get_xlim()[1]))
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(-2, bottom - 2), min(102, top + 2))
    axes.set_xlabel("memory, % of an FP16 full cache")
    axes.set_ylabel(f"{score(records[-1].primary or SCORE.name).title}, %")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return ends


def _lines(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs of a method that a line may join: those whose settings differ in numbers only.

    A precision is no step on the way from one budget to the next.
    """
    by_words: dict[str, list[RunRecord]] = {}
    for record in records:
        settings = record.identity.get("method", {})
        words = {key: value for key, value in settings.items() if not isinstance(value, int | float)}
        by_words.setdefault(str(sorted(words.items(), key=str)), []).append(record)
    return list(by_words.values())


def _point(record: RunRecord) -> tuple[float, float, float, float] | None:
    """Bytes, and score with its interval, in percent; None when there is nothing to show."""
    metric, ratio = record.metrics.get(record.primary), RESIDENT.of_run(record)
    if metric is None or metric.value is None or ratio is None:
        return None
    value = SCORE.scale * metric.value
    low = value if metric.low is None else min(value, SCORE.scale * metric.low)
    high = value if metric.high is None else max(value, SCORE.scale * metric.high)
    return RESIDENT.scale * ratio, value, low, high


def _bytes(axes: "Axes", records: Sequence[RunRecord]) -> "list[Text]":
    """Draws the bytes that every method holds, item by item, as shares of an FP16 cache of the same tokens.

    A bar is as long as its percentage, whose label is right of it and of the line at 100 %; returns these labels.
    """
    from matplotlib.patches import Patch

    shown: dict[str, dict[str, Any]] = {}
    right, named = 100.0, list["Text"]()
    for row, record in enumerate(records):
        left = 0.0
        scale = RESIDENT.scale / (record.ledger.get("fp16_bytes") or 1.0)
        for name, count in ledger_items(record.ledger).items():
            if count * scale < SLIGHT_PCT:  # it would be no more than a line
                left += count * scale
                continue
            index = item_index(name)
            style: dict[str, Any] = {"facecolor": ITEM_COLOURS[index], "edgecolor": "white"}
            style["hatch"] = HATCHES[index % len(HATCHES)]
            shown[name] = style
            axes.barh(row, count * scale, left=left, height=0.5, linewidth=0.6, **style)
            left += count * scale
        words = f"{left:.1f} %, {format_bytes(record.ledger.get(RESIDENT.key))}"
        named.append(axes.text(max(left, 100.0) + 2, row, words, va="center"))
        right = max(right, left)
    labels = label_runs(records)
    if differ_in_length(records):
        seen = [record.kept.get("tokens_seen", 0.0) for record in records]
        labels = [f"{label}\n{tokens:.0f} tokens" for label, tokens in zip(labels, seen, strict=True)]
    axes.set_yticks(range(len(records)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * right)
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("% of an FP16 full cache of the same tokens")
    handles = [Patch(label=item_title(name), **style) for name, style in shown.items()]
    if len(handles) > 1:
        axes.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=min(4, len(handles)),
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
        )
    return named


def _make_room(axes: "Axes", named: "Sequence[Text]") -> None:
    """Let an axis that begins at 0 end right of all labels; the layout is that of the figure as it is drawn."""
    width = axes.get_window_extent().width
    ends = [text.get_position()[0] / (1 - min(0.8, text.get_window_extent().width / width)) for text in named]
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.02 * max(ends)))


def draw(records: Sequence[RunRecord], path: Path) -> Path:
    """Draw the picture of one task's and model's runs into a PNG file, in one atomic step; returns its path.

    The same records give the same bytes on the same matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list({(record.method, record.hash): record for record in records}.values())
    last = records[-1]
    records = sorted(records, key=lambda record: (record.method != FULL, record.method, RESIDENT.of_run(record) or 0.0))
    width = 11 + 0.08 * max(0, max(map(len, label_runs(records))) - 12)
    figure = Figure(figsize=(0.82 * width, 3.2 + 0.25 * max(0, len(records) - 3)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    ends = _quality(left, records)
    named = _bytes(right, records)
    counts = sorted({metric.num_samples for record in records if (metric := record.metrics.get(record.primary))})
    number = "-".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "0"
    points = [point for record in records if (point := _point(record))]
    bars = "; bars: 95 % intervals" if any(low < high for _, _, low, high in points) else ""
    figure.suptitle(f"{safe(last.task)} with {safe(last.model)}, {number} samples{bars}", fontsize=10.5)
    name_points(left, ends, figure.get_figheight() - ABOUT_IN, SIZE)
    lay_out(figure)
    _make_room(right, named)
    write_atomic(path, picture_bytes(figure, "png"))
    return path
