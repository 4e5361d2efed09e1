"""The table and the picture of `bench what=serve`: latency over the rate of requests, and pages over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.show.picture import COLOURS, MARKERS
from kvbench.show.progress import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS = (
    *("arrivals", "method", "first token, s: 50 %", "95 %", "99 %", "per token, ms: 50 %", "95 %", "99 %"),
    *("requests/s", "in time/s", "tokens/s", "batch", "gave way", "oom", "most pages"),
)


def table(cells: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: one for each method at each rate."""
    lines = []
    for cell in cells:
        when = cell["cell"]["arrivals"] + (f", {cell['cell']['rate']:g}/s" if "rate" in cell["cell"] else "")
        for row in cell["variants"]:
            ttft = [_figure(row[f"ttft_p{share}_s"], 1.0) for share in (50, 95, 99)]
            tpot = [_figure(row[f"tpot_p{share}_s"], 1e3) for share in (50, 95, 99)]
            rates = [f"{row[name]:.3g}" for name in ("requests_per_s", "goodput_per_s", "tokens_per_s")]
            counts = [
                f"{row['mean_batch']:.1f} of {row['most_requests']}",
                f"{row['preemptions']:g}",
                f"{row['oom']:g}",
            ]
            pages = format_bytes(max((held for _, held in row["pages"]), default=None))
            lines.append([when, row["name"], *ttft, *tpot, *rates, *counts, pages])
    return list(HEADINGS), lines


def _figure(seconds: float | None, factor: float) -> str:
    return "-" if seconds is None else f"{factor * seconds:.3g}"


def figure(document: dict) -> "Figure":
    """Both latencies (95 % of requests stay below) and the requests answered in time, over the rate at which requests
    come; and the pages that are held over time in the last cell. Of requests that all come at once, points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in document["cells"] if cell["variants"]]
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    made = Figure(figsize=(13.0, 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(made)
    panels = (
        ("seconds to the first token, 95 %", "ttft_p95_s", document["settings"]["ttft_s"]),
        ("seconds per further token, 95 %", "tpot_p95_s", document["settings"]["tpot_s"]),
        ("requests per second answered within both targets", "goodput_per_s", None),
    )
    *grid, last = made.subplots(2, 2).flat
    for axes, (label, key, target) in zip(grid, panels, strict=True):
        for index, name in enumerate(names):
            rows = [(cell["cell"].get("rate", 0.0), row) for cell in cells for row in cell["variants"]]
            found = [(rate, row[key]) for rate, row in rows if row["name"] == name and row[key] is not None]
            axes.plot([rate for rate, _ in found], [value for _, value in found], **_style(index), label=name)
        if target is not None:
            axes.axhline(target, color="black", linestyle="--", linewidth=1.0)
            axes.set_yscale("log")
        axes.set_xlabel("requests per second", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
    for row in cells[-1]["variants"]:
        seconds, held = zip(*row["pages"], strict=True) if row["pages"] else ((), ())
        last.plot(seconds, [each / 1e6 for each in held], color=_style(names.index(row["name"]))["color"])
    last.set_xlabel("seconds, in the last cell", fontsize=8)
    last.set_ylabel("MB of pages", fontsize=8)
    for each in made.axes:
        each.grid(alpha=0.3)
        each.tick_params(labelsize=8)
    handles, labels = made.axes[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    where = document["environment"]
    made.suptitle(f"serve on {where['device_name']} (backend {where['backend']})", fontsize=11)
    return made


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
