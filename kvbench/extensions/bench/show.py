"""Output of a bench: a bar while it runs, then a table per cell, the paths of the files, and the picture.

The picture has a row for each variant, with quartiles, and a panel for each setting that must not be mixed.
"""

import io
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbench.extensions.bench import capacity_show, parts_show, serve_show
from kvbench.kernels.bench import bench
from kvbench.kernels.bench.bench import NOT_TIMED, label_of
from kvbench.kernels.bench.roofline import share
from kvbench.models.matrices import PLAIN
from kvbench.results.writing import write_atomic
from kvbench.show import terminal
from kvbench.show.picture import COLOURS, MARKERS, legend_below, picture_bytes
from kvbench.show.progress import PLAIN_EVERY_S, LiveBar, format_bytes, format_seconds, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 132
NONE = "-"
MANAGER_NOISE = "A/A: one by one, timed twice in each round; in no cell is a ratio beyond {:.0f} % from 1 noise"
MEDIANS = (
    "Medians [quartiles] over rounds in which every variant ran once, in shuffled order; x = times as fast, formed "
)
MEDIANS += "within each round."
SHOWN_APART: dict[str, Any] = {
    "parts": parts_show,
    "serve": serve_show,
    "capacity": capacity_show,
}  # tables and pictures of their own
BASELINE_STYLE: dict[str, Any] = {"color": "black", "linewidth": 1.0, "linestyle": "--"}
ROW_IN, POINT_IN, PANEL_IN = 0.3, 0.11, 4.4  # inches of a row, of a point in it, and of a panel without the names
RATE_ROUNDS = 8  # rounds that the time left is estimated from


@contextmanager
def rounds_shown(what: str) -> Iterator[bench.Progress]:
    """Shows rounds done, the current measurement, and the time left; yields the callbacks of a bench.

    On a live bar on a terminal, else in a line now and then.
    """
    live = LiveBar(sys.stderr, what, total=None) if sys.stderr.isatty() else None
    seen: deque[tuple[float, int]] = deque(maxlen=RATE_ROUNDS)
    spoken = time.monotonic(), ""

    def update(done: int, total: int, label: str) -> None:
        nonlocal spoken
        now = time.monotonic()
        if not seen or seen[-1][1] != done:
            seen.append((now, done))
        elif len(seen) == 1:  # loading and prompts, which come before the first round, say nothing about the rest
            seen[0] = now, done
        (then, before), (latest, _) = seen[0], seen[-1]
        known = before < done < total
        left = f", {format_seconds((latest - then) / (done - before) * (total - done))} left" if known else ""
        state = f"{done}/{total} rounds{left}: {label}"
        if live is not None:
            live.update(done, total, state)
        elif label != spoken[1] or now - spoken[0] >= PLAIN_EVERY_S:
            spoken = now, label
            note(f"{what}: {state}")

    try:
        yield update
    finally:
        if live is not None:
            live.stop()


def publish(document: dict, path: Path) -> None:
    """Print the tables and write missing files.

    The JSON file `path`, and next to it a table (.txt) and a picture (.png).
    """
    bench.check_document(document)
    if not path.exists():
        bench.write(document, path)
    rendered = render(document)
    text = io.StringIO()
    terminal.console(WIDTH, file=text).print(rendered)
    write_atomic(path.with_suffix(".txt"), text.getvalue().encode())
    console = terminal.console(WIDTH)
    console.print(rendered)
    picture = draw(document, path.with_suffix(".png"))
    terminal.print_paths([path, path.with_suffix(".txt"), *([picture] if picture else [])], console)


def number(value: float) -> str:
    """Three significant digits, in columns that line up."""
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def span(value: dict | None) -> str:
    """A median with its quartiles, for example `2.10 [2.04, 2.15]`."""
    if value is None:
        return NONE
    return f"{number(value['median'])} [{number(value['q1'])}, {number(value['q3'])}]"


def duration(row: dict) -> str:
    """A row's seconds per call in the unit that suits its median."""
    unit, factor = ("us", 1e6) if row["median"] < 1e-3 else ("ms", 1e3) if row["median"] < 1 else ("s", 1.0)
    return f"{span(scaled(row, factor))} {unit}"


def ratio(row: dict, name: str | None) -> str:
    """The speed of a row as a multiple of a baseline's, in tokens per second where batches differ."""
    return span(row.get("rate_ratios", row["ratios"]).get(name))


def _share(row: dict) -> str:
    share = row.get("bandwidth_share")
    return NONE if share is None else f"{row['bytes_per_s'] / 1e9:.1f} ({100 * share['median']:.0f} %)"


def _cost(row: dict) -> str:
    """Additional time of a row over the variant that it changes."""
    if (versus := row.get("versus")) is None:
        return ""
    middle, low, high = (100 * (1 / versus[key] - 1) for key in ("median", "q3", "q1"))
    return f"{middle:+.0f} [{low:+.0f}, {high:+.0f}] %"


def _of_limit(row: dict) -> str:
    """The share of a row's rate in what the machine can do, and that."""
    limit = row.get("limit_tokens_per_s")
    return NONE if limit is None else f"{100 * row['tokens_per_call'] / row['median'] / limit:.0f} % of {number(limit)}"


def _baseline(name: str, model: dict | None) -> str:
    """The heading of the ratios to a baseline; transformers' own cache has the model's dtype, the full one 16 bits."""
    if name.partition(", ")[0] != "transformers" or not model:
        return f"x {name}"
    linear = model.get("linear", PLAIN)
    how = [model.get("dtype", "").removeprefix("torch."), linear if linear != PLAIN and ", " not in name else ""]
    return f"x {name} ({', '.join(filter(None, how))})"


def _cell_table(document: dict, cell: dict) -> Table:
    """One row per variant, refused ones included; columns that no variant has are left out."""
    rows: list[dict] = cell["variants"]
    more: dict[str, Callable[[dict], str]]
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    if document["what"] == "attention":
        kinds = [row for row in rows if row.get("kind") == "dense"]
        best = min(kinds, key=lambda row: row["median"])["name"] if kinds else None
        dense = [name for name in ("sdpa fp32", "sdpa bf16", "sdpa fp16") if any(row["name"] == name for row in rows)]
        names = dense[:2]  # the third is a row like any other, and all ratios are in the JSON
        columns: dict[str, Callable[[dict], str]]
        columns = {"": lambda row: row["name"] + (" *" if row["name"] == best else ""), "time": duration}
        more = {
            "x fastest dense": lambda row: ratio(row, best),
            "GB/s (share)": _share,
            "of the limit": lambda row: share(row, cell, document["environment"]),
            "scores cost": _cost,
        }
    else:
        columns = {"": lambda row: row["name"]}
        if rows[0].get("tokens_per_call"):
            columns["tokens/s"] = lambda row: span(_rate_or_seconds(row, ""))
        else:
            columns["time"] = duration
        more = {
            title: show
            for title, key, show in (
                ("costs", "versus", _cost),
                ("of the limit", "limit_tokens_per_s", _of_limit),
                ("peak memory added", "peak_bytes", lambda row: format_bytes(row.get("peak_bytes"))),
                ("batch", "batch", lambda row: str(row["batch"])),
                ("cache", "cache_bytes", lambda row: format_bytes(row.get("cache_bytes"))),
            )
            if any(row.get(key) is not None for row in rows)
        }
    model = document.get("model") if rows[0].get("tokens_per_call") else None
    columns |= {_baseline(name, model): partial(ratio, name=name) for name in names} | more
    refused = [[entry["name"], NOT_TIMED, *[""] * (len(columns) - 2)] for entry in cell["refused"]]
    return _table(list(columns), [*([show(row) for show in columns.values()] for row in rows), *refused])


def _manager(cells: Sequence[dict]) -> Table:
    """All cells in one table: two rows each would be a page of headings."""
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    base, lines = "one by one", []
    others = [name for name in names if name != base]
    for cell in cells:
        rows = {row["name"]: row for row in cell["variants"]}
        times = [duration(rows[name]) if name in rows else NONE for name in names]
        ratios = [ratio(rows[name], base) if name in rows else NONE for name in others]
        lines.append([*(str(value) for value in cell["cell"].values()), *times, *ratios])
    heads = [f"{name}, x {base}" if len(others) > 1 else f"x {base}" for name in others]
    return _table([*cells[0]["cell"], *names, *heads], lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = terminal.plain_table()
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def _tables(document: dict) -> list[Table | Text]:
    what = document["what"]
    if what == "manager" and document["cells"]:
        noise = max((cell["twice"]["noise"] for cell in document["cells"] if cell.get("twice")), default=None)
        said = [] if noise is None else [Text(MANAGER_NOISE.format(100 * noise), style="dim")]
        return [Text(what, style="bold"), _manager(document["cells"]), *said, Text()]
    if (view := SHOWN_APART.get(what)) is not None:
        said = [Text(remark) for remark in view.remarks(document)]
        return [Text(view.title(document), style="bold"), _table(*view.table(document["cells"])), *said, Text()]
    parts: list[Table | Text] = []
    for cell in document["cells"]:
        title = f"{what}: {label_of(cell['cell'])}"
        if cell["variants"]:
            parts += [Text(title, style="bold"), _cell_table(document, cell)]
            parts += [Text(remark, style="dim") for remark in bench.remarks(cell)]
        else:
            parts.append(Text(f"{title}: {cell.get('skipped') or 'nothing could be timed'}"))
        parts.append(Text())
    return parts


def render(document: dict) -> Group:
    """Tables of a document, and notes on them."""
    where = document["environment"]
    turns = f", GOMP_SPINCOUNT={where['gomp_spincount']}" if where.get("gomp_spincount") else ""
    first = (
        f"{where['device_name']} ({where['device']}), {where['num_cpus']} cores, torch {where['torch']}, backend "
        f"{where['backend']}, OMP_WAIT_POLICY={where['omp_wait_policy'] or 'not set'}{turns}, load average "
        f"{_load(where['load_average'])} before and {_load(where['load_average_end'])} after"
    )
    notes = [first, SHOWN_APART[document["what"]].SAID if document["what"] in SHOWN_APART else MEDIANS]
    if document["settings"].get("clock") == "cpu":
        notes.append("clock=cpu: times are CPU seconds of one thread, not seconds on the clock on the wall.")
    if document["what"] == "attention":
        notes.append(
            "* fastest dense variant; grouped = query heads of a KV head as query tokens, which reads K and V once."
        )
    return Group(*_tables(document), *(Text(note, style="dim") for note in [*notes, *document["notes"]]))


def _load(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


@dataclass(frozen=True)
class View:
    """The content of a bench's picture."""

    panel: tuple[str, ...]
    """Settings that distinguish panels; other settings of cells distinguish the points of a row."""
    value: Callable[[dict, str], dict | None]
    """Median and quartiles of a row, given the name of the baseline; None = no point."""
    label: str
    is_log: bool = False
    """On a logarithmic axis, with a line at 1 where it is relative; else from 0 on."""
    note: Callable[[dict], str] = lambda _: ""
    """Beside a point."""


def scaled(row: dict, factor: float) -> dict:
    """Median and quartiles times a factor."""
    return {key: row[key] * factor for key in ("median", "q1", "q3")}


def inverted(row: dict, factor: float = 1.0) -> dict:
    """A factor over median and quartiles, such as tokens per second."""
    return {"median": factor / row["median"], "q1": factor / row["q3"], "q3": factor / row["q1"]}


def _speed(row: dict, base: str) -> dict | None:
    return None if row["name"] == base else row["ratios"].get(base)


def _time(row: dict, base: str) -> dict | None:
    speed = _speed(row, base)
    return speed and inverted(speed)


def _rate_or_seconds(row: dict, base: str) -> dict:
    return inverted(row, row["tokens_per_call"]) if row.get("tokens_per_call") else scaled(row, 1.0)


VIEWS = {
    "attention": View(("shape", "threads"), _speed, "speed relative to {}", is_log=True),
    "sweep": View(("format", "shape", "threads"), lambda row, _: scaled(row, 1e6), "microseconds", is_log=True),
    "answers": View(("file",), lambda row, _: scaled(row, 1.0), "seconds for all answers"),
    "prefill": View(("shape", "threads"), _time, "time relative to the prompt's {} alone", is_log=True),
    "manager": View(("operation", "threads"), lambda row, _: scaled(row, 1e3), "ms", is_log=True),
    "products": View(("dtype", "threads"), _rate_or_seconds, "tokens/s through the matrices", is_log=True),
    "decode": View(
        ("phase", "batch", "threads"),
        _rate_or_seconds,
        "tokens/s, and what the cache holds",
        note=lambda row: format_bytes(row["cache_bytes"]) if "cache_bytes" in row else "",
    ),
    "throughput": View(
        ("kv_mb", "new_tokens", "threads"),
        _rate_or_seconds,
        "tokens/s, all sequences together",
        note=lambda row: f"{row['batch']} sequences",
    ),
}


def draw(document: dict, path: Path) -> Path | None:
    """Draw the picture and write it in one atomic step; does nothing for a document without timings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in document["cells"] if cell["variants"]]
    if not cells:
        return None
    if (apart := SHOWN_APART.get(document["what"])) is not None:
        write_atomic(path, picture_bytes(apart.figure(document), "png"))
        return path
    view = VIEWS[document["what"]]
    rows = [row for cell in cells for row in cell["variants"]]
    base = next(iter(rows[0]["ratios"]), "")
    shown = [row["name"] for row in rows if row.get("scores") != "return" and view.value(row, base) is not None]
    names = list(dict.fromkeys(shown))
    panels: dict[str, list[tuple[str, dict]]] = {}
    for cell in cells:
        panel_settings = {key: value for key, value in cell["cell"].items() if key in view.panel}
        rest = {key: value for key, value in cell["cell"].items() if key not in view.panel}
        panels.setdefault(label_of(panel_settings), []).append((label_of(rest), cell))
    series = list(dict.fromkeys(label for panel in panels.values() for label, _ in panel))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    size = 1.6 + across * PANEL_IN, 1.3 + down * (0.8 + max(ROW_IN, POINT_IN * len(series)) * len(names))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(title, fontsize=9, loc="left")
        _panel(axes, view, panel, names, series, base)
        is_seconds = view.value is _rate_or_seconds and not panel[0][1]["variants"][0].get("tokens_per_call")
        axes.set_xlabel("seconds" if is_seconds else view.label.format(base), fontsize=8)
    if series != [""]:
        legend_below(figure, 8)
    where = document["environment"]
    model = f" of {document['model']['name']}\n" if "model" in document else " "
    figure.suptitle(f"{document['what']}{model}on {where['device_name']} (backend {where['backend']})", fontsize=11)
    write_atomic(path, picture_bytes(figure, "png"))
    return path


def _panel(
    axes: "Axes", view: View, panel: Sequence[tuple[str, dict]], names: list[str], series: list[str], base: str
) -> None:
    """The points of one panel: a row per name, and in it one per cell, with quartiles."""
    for label, cell in panel:
        index = series.index(label)
        shift = 0.7 * ((index + 0.5) / len(series) - 0.5)
        by_name = {row["name"]: (row, view.value(row, base)) for row in cell["variants"] if row["name"] in names}
        points = [(names.index(name) + shift, row, value) for name, (row, value) in by_name.items() if value]
        middle, low, high = ([value[key] for _, _, value in points] for key in ("median", "q1", "q3"))
        ends = [np.subtract(middle, low), np.subtract(high, middle)]
        style: dict[str, Any] = {"linestyle": "none", "markersize": 5, "capsize": 2} | _style(index)
        axes.errorbar(middle, [height for height, *_ in points], xerr=np.maximum(0.0, ends), label=label, **style)
        for height, row, value in points:
            where: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(view.note(row), (value["q3"], height), **where)
    if view.is_log:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # numbers instead of powers
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    if view.value in (_speed, _time):
        axes.axvline(1.0, **BASELINE_STYLE)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelsize=8)


def _style(index: int) -> dict[str, Any]:
    """Colour and marker of a series; their combinations distinguish more series than there are colours."""
    colour, cycle = index % len(COLOURS), index // len(COLOURS)
    return {"color": COLOURS[colour], "marker": MARKERS[(colour + 3 * cycle) % len(MARKERS)]}
