"""The table and the picture of `bench what=serve`: latency over the rate of requests, and pages over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.show.picture import COLOURS, MARKERS, legend_below
from kvbench.show.progress import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS = (
    *("arrivals", "method", "first token, s", "per token, ms", "requests/s", "in time/s", "tokens/s"),
    *("batch", "gave way", "oom", "most pages"),
)
LIMIT: dict = {"color": "black", "linestyle": "--", "linewidth": 1.0}
NEAR: dict = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 8}
SAID = (
    "Latencies: what 50/95/99 % of requests stay below. x measured: tokens/s, and the medians of both latencies. Each "
    "method answered each load once. Time in which there was nothing to do counts, but was passed over."
)
MEASURED = ("tokens_per_s", "ttft_p50_s", "tpot_p50_s")


def table(cells: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: one for each method at each rate.

    Where pages ran out, the number of compressions that followed; of a simulation, relative to the measured value, if
    any.
    """
    rows = [(cell["cell"], row) for cell in cells for row in cell["variants"]]
    measured_column = ["x measured"] if any(row.get("measured") for _, row in rows) else []
    squeezed = ["compressed"] if any(row.get("compressions") for _, row in rows) else []
    lines = []
    for cell, row in rows:
        when = cell["arrivals"] + (f", {cell['rate']:g}/s" if "rate" in cell else "")
        ttft, tpot = (
            "/".join(_figure(row[f"{name}_p{share}_s"], factor) for share in (50, 95, 99))
            for name, factor in (("ttft", 1.0), ("tpot", 1e3))
        )
        rates = [f"{row[name]:.3g}" for name in ("requests_per_s", "goodput_per_s", "tokens_per_s")]
        counts = [f"{_figure(row['mean_batch'], 1.0)} of {row['most_requests']}"]
        counts += [_figure(row[name], 1.0) for name in ("preemptions", "oom")]
        pages = format_bytes(max((held for _, held in row["pages"]), default=None))
        extra = [_figure(row.get("compressions"), 1.0) for _ in squeezed] + [_of_measured(row) for _ in measured_column]
        lines.append([when, row["name"], ttft, tpot, *rates, *counts, pages, *extra])
    return [*HEADINGS, *squeezed, *measured_column], lines


def _of_measured(row: dict) -> str:
    """Tokens per second, and the median latencies, over what was measured."""
    return "/".join(f"{row[key] / row['measured'][key]:.2f}" for key in MEASURED) if row.get("measured") else "-"


def remarks(document: dict) -> list[str]:
    """Lines with the highest goodput of each method: requests per second answered in time, over all rates."""
    most: dict[str, float] = {}
    for row in (row for cell in document["cells"] for row in cell["variants"]):
        most[row["name"]] = max(most.get(row["name"], 0.0), row["goodput_per_s"])
    first = next(iter(most.values()), 0.0)
    over = ((name, each, f" ({each / first:.2f} x)" if first else "") for name, each in most.items())
    said = ", ".join(f"{name} {each:.3g}{times}" for name, each, times in over)
    targets = (document["settings"][name] for name in ("ttft_s", "tpot_s"))
    return ["In time: first token within {:g} s, {:g} s per further one. Most per second: ".format(*targets) + said]


def _figure(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{factor * value:.3g}"


def title(document: dict) -> str:
    """Title of the bench and its machine."""
    where = document["environment"]
    if simulated := document.get("times_of"):
        return f"serve, simulated with times of {simulated}"
    return f"serve on {where['device_name']} (backend {where['backend']})"


def figure(document: dict) -> "Figure":
    """Both latencies (95 % of requests stay below) and the requests answered in time, over the arrival rate.

    And the pages that are held over time in the last cell. Points if all requests come at once.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    cells, settings = [cell for cell in document["cells"] if cell["variants"]], document["settings"]
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    made = Figure(figsize=(10.0, 7.6), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    first, further, goodput, pages = made.subplots(2, 2).flat
    panels = (
        (first, "seconds to the first token, 95 % below", "ttft_p95_s", settings["ttft_s"]),
        (further, "seconds per further token, 95 % below", "tpot_p95_s", settings["tpot_s"]),
        (goodput, "requests per second answered in time", "goodput_per_s", None),
    )
    rates = [cell["cell"].get("rate", 0.0) for cell in cells]
    for axes, label, key, target in panels:
        for index, name in enumerate(names):
            rows = [(rate, row) for rate, cell in zip(rates, cells, strict=True) for row in cell["variants"]]
            points = [(rate, row[key]) for rate, row in rows if row["name"] == name and row[key] is not None]
            axes.plot([rate for rate, _ in points], [value for _, value in points], **_style(index), label=name)
        if target is not None:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # numbers instead of powers
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.axhline(target, **LIMIT)
            axes.annotate("target", (0.0, target), xytext=(4, 3), **NEAR)
        axes.set_xlim(0.0, 1.05 * max(rates) or 1.0)
        axes.set_xlabel("requests that come per second", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
    goodput.set_ylim(bottom=0.0)
    goodput.plot(span := [0.0, max(rates)], span, **LIMIT)
    goodput.set_ylim(top=1.15 * max(row["goodput_per_s"] for cell in cells for row in cell["variants"]) or 1.0)
    goodput.annotate("all that come", (0.02, 0.96), xycoords="axes fraction", fontsize=8, va="top")
    for row in cells[-1]["variants"]:
        seconds, held = zip(*row["pages"], strict=True) if row["pages"] else ((), ())
        pages.plot(seconds, [each / 1e6 for each in held], color=_style(names.index(row["name"]))["color"])
    pages.axhline(settings["kv_mb"], **LIMIT)
    pages.annotate("memory", (1.0, settings["kv_mb"]), xytext=(-2, 3), ha="right", **NEAR)
    when = f", {rates[-1]:g} requests per second" if rates[-1] else ""
    pages.set_xlabel(f"seconds{when}", fontsize=9)
    pages.set_ylabel("MB of pages in use", fontsize=9)
    for each in made.axes:
        each.grid(alpha=0.3)
        each.tick_params(labelsize=8)
    legend_below(made, 9)
    made.suptitle(title(document), fontsize=11)
    return made


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
