"""The picture of a bench: ratios with their quartiles, one panel for each setting that must not be mixed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.figure import COLOURS, MARKERS
from kvbench.journal import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE_STYLE = {"color": "black", "linewidth": 1.0, "linestyle": "--"}


def draw(document: dict, path: Path) -> Path | None:
    """Draws the picture and writes it in one atomic step; nothing for a document without timings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in document["cells"] if cell["variants"]]
    if not cells:
        return None
    figure = Figure(dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    _DRAW[document["what"]](figure, document, cells)
    where = document["environment"]
    figure.suptitle(f"{document['what']} on {where['device_name']} (backend {where['backend']})", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomic(path, buffer.getvalue())
    return path


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]}


def _dense_style(name: str) -> dict:
    """Grey: the shape tells the element type, a filled one is what models call, an open one the grouped form."""
    shape = next((mark for dtype, mark in (("fp32", "o"), ("bf16", "s"), ("fp16", "^")) if dtype in name), "x")
    shape = {"flash-attn": "*", "flashinfer": "P"}.get(name.split()[0], shape)
    return {"color": "0.4", "marker": shape, "markerfacecolor": "white" if "grouped" in name else "0.4"}


def _points(axes: "Axes", names: Sequence[str], groups: Sequence[dict[str, dict | None]], styles: dict) -> None:
    """One dodged point with quartiles per name and group."""
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        xs = [g + (index - (len(names) - 1) / 2) * width for g, group in enumerate(groups) if group.get(name)]
        found = [group[name] for group in groups if group.get(name)]
        if not found:
            continue
        middle = [value["median"] for value in found]
        low = [max(0.0, value["median"] - value["q1"]) for value in found]
        high = [max(0.0, value["q3"] - value["median"]) for value in found]
        axes.errorbar(
            xs, middle, yerr=[low, high], linestyle="none", markersize=5, capsize=2, label=name, **styles[name]
        )
    for edge in range(1, len(groups)):
        axes.axvline(edge - 0.5, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlim(-0.5, len(groups) - 0.5)


def _ratio_axis(axes: "Axes", baseline: str, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    if log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_locator(LogLocator(base=2, subs=(), numticks=2))
    axes.axhline(1.0, **BASELINE_STYLE)
    axes.set_ylabel(f"speed relative to {baseline}", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(labelsize=8)


def _panels(cells: Sequence[dict], keys: Sequence[str]) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for cell in cells:
        found.setdefault(tuple(cell["cell"].get(key) for key in keys), []).append(cell)
    return found


def _legend(figure: object, axes: "Axes", columns: int) -> None:
    handles, labels = {}, []
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = list(handles)
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def _attention(figure: object, document: dict, cells: Sequence[dict]) -> None:
    """Every format's speed relative to fp32 SDPA, per shape and thread count; other dense types as bars across."""
    panels = _panels(cells, ("shape", "threads"))
    names = list(
        dict.fromkeys(
            r["name"] for c in cells for r in c["variants"] if r.get("kind") != "paged" or r["scores"] == "none"
        )
    )
    baseline = next((n for n in names if n == "sdpa fp32"), names[0])
    names = [name for name in names if name != baseline]
    paged = [n for n in names if not n.startswith(("sdpa", "flash"))]
    dense = [n for n in names if n not in paged]
    styles = {name: _style(index) for index, name in enumerate(paged)}
    styles |= {name: _dense_style(name) for name in dense}
    widest = max(len(group) for group in panels.values())
    across = 1 if widest > 3 else min(2, len(panels))
    down = -(-len(panels) // across)
    figure.set_size_inches(max(7.0, min(13.0, 1.0 + across * widest * 1.9)), 1.4 + 3.1 * down)
    for axes, ((shape, threads), group) in zip(
        figure.subplots(down, across, squeeze=False).flat, panels.items(), strict=False
    ):
        values = [{r["name"]: r["ratios"].get(baseline) for r in cell["variants"]} for cell in group]
        _points(axes, [*dense, *paged], values, styles)
        ticks = [f"{c['cell']['length']} x {c['cell']['batch']}" for c in group]
        axes.set_xticks(range(len(group)), ticks)
        axes.set_xlabel("tokens x sequences", fontsize=9)
        _ratio_axis(axes, baseline, log=True)
        where = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
        axes.set_title(f"{shape} (query heads x KV heads x dim){where}", fontsize=9)
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, figure.axes[0], 5)


def _bars(figure: object, document: dict, cells: Sequence[dict]) -> None:
    """Speed relative to the first baseline, a panel per cell."""
    rows = [row for cell in cells for row in cell["variants"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    styles = {name: _style(index) for index, name in enumerate(names)}
    baseline = next(iter(rows[0]["ratios"]))
    figure.set_size_inches(max(7.0, min(13.0, 1.5 + 1.9 * len(cells))), 4.6)
    axes = figure.subplots()
    values = [{r["name"]: r.get("rate_ratios", r["ratios"]).get(baseline) for r in cell["variants"]} for cell in cells]
    _points(axes, names, values, styles)
    axes.set_xticks(range(len(cells)), [_tick(cell["cell"]) for cell in cells])
    peak = max(v["q3"] for group in values for v in group.values() if v)
    low = min(v["q1"] for group in values for v in group.values() if v)
    is_log = peak > 4 * max(low, 1e-9)
    _ratio_axis(axes, baseline, log=is_log)
    if not is_log:
        axes.set_ylim(bottom=0)
    _legend(figure, axes, 5)


def _tick(cell: dict) -> str:
    return "\n".join(f"{name} {value}" for name, value in cell.items() if value != 0)


_DRAW = {"attention": _attention, "prefill": _bars, "manager": _bars, "decode": _bars, "throughput": _bars}
