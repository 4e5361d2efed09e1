"""The picture of a bench: ratios with their quartiles, one panel for each setting that must not be mixed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.results.writing import write_atomic
from kvbench.show.palette import COLOURS, MARKERS
from kvbench.show.picture import picture_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MANAGERS = {"all at once": "-", "one by one": "--", "on the device": ":"}
_COLOURS = [colour for colour in COLOURS if colour != "#999999"]  # grey is dense attention's
BASELINE_STYLE: dict[str, Any] = {"color": "black", "linewidth": 1.0, "linestyle": "--"}


def draw(document: dict, path: Path) -> Path | None:
    """Draws the picture and writes it in one atomic step; nothing for a document without timings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in document["cells"] if cell["variants"]]
    if not cells:
        return None
    figure = Figure(dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    _DRAW[document["what"]](figure, cells)
    where = document["environment"]
    figure.suptitle(f"{document['what']} on {where['device_name']} (backend {where['backend']})", fontsize=11)
    write_atomic(path, picture_bytes(figure, "png"))
    return path


def _style(index: int) -> dict[str, Any]:
    colour, turn = index % len(_COLOURS), index // len(_COLOURS)
    return {"color": _COLOURS[colour], "marker": MARKERS[(colour + 3 * turn) % len(MARKERS)]}


def _dense_style(name: str) -> dict[str, Any]:
    """Grey: the shape tells the element type, a filled one is what models call, an open one the grouped form."""
    shape = next((mark for dtype, mark in (("fp32", "o"), ("bf16", "s"), ("fp16", "^")) if dtype in name), "x")
    shape = {"flash-attn": "*", "flashinfer": "P"}.get(name.split()[0], shape)
    return {"color": "0.4", "marker": shape, "markerfacecolor": "white" if "grouped" in name else "0.4"}


def _points(axes: "Axes", names: Sequence[str], groups: Sequence[dict[str, dict | None]], styles: dict) -> None:
    """One dodged point with quartiles per name and group."""
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        xs = [g + (index - (len(names) - 1) / 2) * width for g, group in enumerate(groups) if group.get(name)]
        found = [values for group in groups if (values := group.get(name))]
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


def _ratio_axis(axes: "Axes", baseline: str) -> None:
    axes.set_yscale("log", base=2)
    _plain_ticks(axes.yaxis, "{:g}x")
    axes.axhline(1.0, **BASELINE_STYLE)
    axes.set_ylabel(f"speed relative to {baseline}", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(labelsize=8)


def _panels(cells: Sequence[dict], keys: Sequence[str]) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for cell in cells:
        found.setdefault(tuple(cell["cell"].get(key) for key in keys), []).append(cell)
    return found


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
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def _attention(figure: "Figure", cells: Sequence[dict]) -> None:
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
        _ratio_axis(axes, baseline)
        where = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
        axes.set_title(f"{shape} (query heads x KV heads x dim){where}", fontsize=9)
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, 5)


def _prefill(figure: "Figure", cells: Sequence[dict]) -> None:
    """How many times as long as attention alone each row takes; a marker per cell."""
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"] if row["name"] != "attention"))
    figure.set_size_inches(8.5, 1.9 + 0.4 * len(names))
    axes = figure.subplots()
    for index, cell in enumerate(cells):
        found = {row["name"]: row["ratios"].get("attention") for row in cell["variants"]}
        rows = [i for i, name in enumerate(names) if found.get(name)]
        values = [_inverse(found[names[i]]) for i in rows]
        shift = 0.5 * ((index + 0.5) / len(cells) - 0.5)
        where = [row + shift for row in rows]
        _across(axes, where, values, label=_line(cell["cell"]), **_style(index))
    axes.set_xscale("log", base=2)
    _plain_ticks(axes.xaxis, "{:g}x")
    axes.axvline(1.0, **BASELINE_STYLE)
    axes.set_xlabel("time relative to the prompt's attention alone", fontsize=9)
    _names(axes, names)
    _legend(figure, 2)


def _manager(figure: "Figure", cells: Sequence[dict]) -> None:
    """Time against the number of lists, a panel per operation."""
    panels = _panels(cells, ("operation",))
    figure.set_size_inches(max(7.0, 1.0 + 3.6 * len(panels)), 4.2)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, ((operation,), group) in zip(grid, panels.items(), strict=True):
        lines = _panels(group, ("threads",))
        for index, ((threads,), own) in enumerate(lines.items()):
            for turn, (name, dash) in enumerate(_MANAGERS.items()):
                rows = [(c["cell"]["lists"], r) for c in own for r in c["variants"] if r["name"] == name]
                label = f"{name}, threads {threads}" if len(lines) > 1 else name
                if not rows:
                    continue
                style = _style(len(_MANAGERS) * index + turn) | {"linestyle": dash}
                _upright(axes, [x for x, _ in rows], [_scaled(r, 1e3) for _, r in rows], label=label, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({c["cell"]["lists"] for c in group}))
        _plain_ticks(axes.xaxis, "{:g}", keep=True)
        _plain_ticks(axes.yaxis, "{:g}", keep=True)
        axes.set_title(operation, fontsize=9)
        axes.set_xlabel("lists", fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    grid[0].set_ylabel("ms", fontsize=9)
    _legend(figure, 4)


def _decode(figure: "Figure", cells: Sequence[dict]) -> None:
    """Tokens per second against what the cache holds, a panel per batch; seconds per prompt in front."""
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    styles = {name: _style(index) for index, name in enumerate(names)}
    figure.set_size_inches(max(7.0, 0.5 + 4.4 * len(cells)), 4.6)
    for axes, cell in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True):
        axes.set_title(_line(cell["cell"]), fontsize=9)
        for name, row in {row["name"]: row for row in cell["variants"]}.items():
            if rate := row.get("tokens_per_call"):
                _upright(axes, [row["cache_bytes"] / 1e6], [_rate(row, rate)], label=name, **styles[name])
            else:
                _across(axes, [names.index(name)], [_scaled(row, 1.0)], label=name, **styles[name])
        if cell["cell"]["phase"] == "prompt":
            axes.set_xlabel("seconds to read the prompt", fontsize=9)
            axes.set_xlim(left=0)
            _names(axes, names)
        else:
            axes.set_xlabel("MB that the cache holds after the prompt", fontsize=9)
            axes.set_ylabel("tokens/s", fontsize=9)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
    _legend(figure, 4)


def _throughput(figure: "Figure", cells: Sequence[dict]) -> None:
    """Tokens per second and sequences in the same memory."""
    (cell,) = cells[:1]
    rows = cell["variants"]
    figure.set_size_inches(8.5, 1.9 + 0.4 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    for index, row in enumerate(rows):
        _across(left, [index], [_rate(row, row["tokens_per_call"])], **_style(index))
        right.plot([row["batch"]], [index], linestyle="none", markersize=6, **_style(index))
        right.annotate(
            f" {row['batch']}",
            (row["batch"], index),
            fontsize=8,
            va="center",
            xytext=(5, 0),
            textcoords="offset points",
        )
    for axes, label in ((left, "tokens/s, all sequences together"), (right, "sequences")):
        axes.set_xlabel(label, fontsize=9)
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(labelsize=8)
    right.xaxis.get_major_locator().set_params(integer=True)
    _names(left, [row["name"] for row in rows])
    left.set_title(_line(cell["cell"]), fontsize=9, loc="left")


def _across(axes: "Axes", rows: Sequence[float], values: Sequence[dict], **style: Any) -> None:
    """Points with horizontal quartiles."""
    low = [max(0.0, v["median"] - v["q1"]) for v in values]
    high = [max(0.0, v["q3"] - v["median"]) for v in values]
    axes.errorbar(
        [v["median"] for v in values], rows, xerr=[low, high], linestyle="none", markersize=6, capsize=3, **style
    )


def _upright(axes: "Axes", xs: Sequence[float], values: Sequence[dict], **style: Any) -> None:
    """Points with vertical quartiles."""
    low = [max(0.0, v["median"] - v["q1"]) for v in values]
    high = [max(0.0, v["q3"] - v["median"]) for v in values]
    style = {"linestyle": "none"} | style
    axes.errorbar(xs, [v["median"] for v in values], yerr=[low, high], markersize=6, capsize=3, linewidth=1.2, **style)


def _names(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=8)


def _plain_ticks(axis: "Axis", form: str, keep: bool = False) -> None:
    """Numbers instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not keep:
        axis.set_major_locator(LogLocator(base=2, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axis.set_minor_formatter(NullFormatter())


def _inverse(ratio: dict) -> dict:
    return {"median": 1 / ratio["median"], "q1": 1 / ratio["q3"], "q3": 1 / ratio["q1"]}


def _scaled(row: dict, factor: float) -> dict:
    return {key: row[key] * factor for key in ("median", "q1", "q3")}


def _rate(row: dict, tokens: int) -> dict:
    return {"median": tokens / row["median"], "q1": tokens / row["q3"], "q3": tokens / row["q1"]}


def _line(cell: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cell.items() if value != 0)


_DRAW = {
    "attention": _attention,
    "prefill": _prefill,
    "manager": _manager,
    "decode": _decode,
    "throughput": _throughput,
}
