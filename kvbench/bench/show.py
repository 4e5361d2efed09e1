"""What a bench shows: a bar while it runs, then a table per cell, the picture, and where the files are."""

import io
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvbench.kernels.bench import report
from kvbench.kernels.bench.report import label_of
from kvbench.models.matrices import PLAIN
from kvbench.results.writing import write_atomic
from kvbench.show import terminal
from kvbench.show.progress import PLAIN_EVERY_S, LiveBar, format_bytes, format_seconds, note

WIDTH = 132
NONE = "-"
MANAGER_NOISE = "A/A: one by one, timed twice in each round; in no cell is a ratio beyond {:.0f} % from 1 noise"
RATE_ROUNDS = 8  # rounds that the time left is told from


class Bar:
    """Rounds done, what is being measured, and the time left; a live bar on a terminal, else a line now and then.

    Args:
        what: Name of the bench.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._live: LiveBar | None = None
        self._label = ""
        self._spoken = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque(maxlen=RATE_ROUNDS)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._live = LiveBar(sys.stderr, self.what, total=None)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, done: int, total: int, label: str) -> None:
        """Takes the number of rounds done and in all, and what is being measured."""
        now = time.monotonic()
        if not self._seen or self._seen[-1][1] != done:
            self._seen.append((now, done))
        # From the last rounds only: what comes before the first one (loading, prompts) says nothing about the rest.
        (then, before), (latest, _) = self._seen[0], self._seen[-1]
        known = before < done < total and len(self._seen) > 2
        left = f", {format_seconds((latest - then) / (done - before) * (total - done))} left" if known else ""
        state = f"{done}/{total} rounds{left}: {label}"
        if self._live is not None:
            self._live.update(done, total, state)
        elif label != self._label or now - self._spoken >= PLAIN_EVERY_S:
            self._spoken, self._label = now, label
            note(f"{self.what}: {state}")


def publish(document: dict, path: Path) -> None:
    """Prints the tables and writes what is not there yet: the JSON file `path`, and beside it table and picture.

    Args:
        document: What was measured.
        path: For example bench.json; the table goes to bench.txt, the picture to bench.png.
    """
    from kvbench.bench import plot

    report.check_document(document)
    if not path.exists():
        report.write(document, path)
    rendered = render(document)
    text = io.StringIO()
    terminal.console(WIDTH, file=text).print(rendered)
    write_atomic(path.with_suffix(".txt"), text.getvalue().encode())
    console = terminal.console(WIDTH)
    console.print(rendered)
    picture = plot.draw(document, path.with_suffix(".png"))
    files = (path, path.with_suffix(".txt"), picture)
    terminal.print_paths([file for file in files if file is not None], console)


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
    scaled = {key: row[key] * factor for key in ("median", "q1", "q3")}
    return f"{span(scaled)} {unit}"


def best_dense(rows: Sequence[dict]) -> str | None:
    """Name of the fastest dense variant."""
    dense = [row for row in rows if row.get("kind") == "dense"]
    return min(dense, key=lambda row: row["median"])["name"] if dense else None


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = terminal.plain_table()
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _share(row: dict) -> str:
    share = row.get("bandwidth_share")
    return NONE if share is None else f"{row['bytes_per_s'] / 1e9:.1f} ({100 * share['median']:.0f} %)"


def _cost(versus: dict | None) -> str:
    """How much longer than the variant it is a change of."""
    if versus is None:
        return ""
    middle, low, high = (100 * (1 / versus[key] - 1) for key in ("median", "q3", "q1"))
    return f"{middle:+.0f} [{low:+.0f}, {high:+.0f}] %"


def _attention(cell: dict) -> Table:
    rows = cell["variants"]
    best = best_dense(rows)
    columns = [name for name in ("sdpa fp32", "sdpa bf16", "sdpa fp16") if any(r["name"] == name for r in rows)]
    columns = columns[:2]  # the third is a row like any other, and all ratios are in the JSON
    headings = ["", "time", *(f"x {name}" for name in columns), "x fastest dense", "GB/s (share)", "scores cost"]
    lines = []
    for row in rows:
        ratios = row["ratios"]
        lines.append(
            [
                row["name"] + (" *" if row["name"] == best else ""),
                duration(row),
                *(span(ratios.get(name)) for name in columns),
                span(ratios.get(best)),
                _share(row),
                _cost(row.get("versus")),
            ]
        )
    return _table(headings, lines)


def _general(cell: dict) -> Table:
    rows = cell["variants"]
    baselines = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    costs = ["costs"] if any("versus" in row for row in rows) else []
    peak = ["peak memory added"] if any(row.get("peak_bytes") for row in rows) else []
    headings = ["", "time", *(f"x {name}" for name in baselines), *costs, *peak]
    lines = []
    for row in rows:
        line = [row["name"], duration(row), *(span(row["ratios"].get(name)) for name in baselines)]
        line += [_cost(row.get("versus")) for _ in costs]
        lines.append([*line, *(format_bytes(row.get("peak_bytes")) for _ in peak)])
    return _table(headings, lines)


def _manager(cells: Sequence[dict]) -> Table:
    """All cells in one table: two rows each would be a page of headings."""
    names = list(dict.fromkeys(row["name"] for cell in cells for row in cell["variants"]))
    base, lines = "one by one", []
    for cell in cells:
        rows = {row["name"]: row for row in cell["variants"]}
        times = [duration(rows[name]) if name in rows else NONE for name in names]
        ratios = [span(rows[name]["ratios"].get(base)) if name in rows else NONE for name in names if name != base]
        lines.append([*(str(value) for value in cell["cell"].values()), *times, *ratios])
    heads = [f"{name}, x {base}" if len(names) > 2 else f"x {base}" for name in names if name != base]
    return _table([*cells[0]["cell"], *names, *heads], lines)


def _baseline(name: str, model: dict | None) -> str:
    """The heading of the ratios to a baseline; transformers' own cache has the model's dtype, the full one 16 bits."""
    if name.partition(", ")[0] != "transformers" or not model:
        return f"x {name}"
    linear = model.get("linear", PLAIN)
    how = [model.get("dtype", "").removeprefix("torch."), linear if linear != PLAIN else ""]
    return f"x {name} ({', '.join(filter(None, how))})"


def _decode(cell: dict, model: dict | None = None) -> Table:
    """Tokens per second and bytes; the rows are (batch x steps) tokens per call."""
    rows = cell["variants"]
    baselines = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    headings = ["", "tokens/s", *(_baseline(name, model) for name in baselines)]
    extra = [("batch", "batch"), ("cache_bytes", "cache")]
    extra = [(key, title) for key, title in extra if any(row.get(key) is not None for row in rows)]
    lines = []
    for row in rows:
        rate = row.get("tokens_per_call")
        speed = {"median": rate / row["median"], "q1": rate / row["q3"], "q3": rate / row["q1"]} if rate else None
        ratio = [row.get("rate_ratios", row["ratios"]).get(name) for name in baselines]
        cells = [str(row[key]) if key == "batch" else format_bytes(row.get(key)) for key, _ in extra]
        lines.append([row["name"], span(speed), *(span(value) for value in ratio), *cells])
    return _table([*headings, *(title for _, title in extra)], lines)


def _title(what: str, cell: dict) -> str:
    return f"{what}: {label_of(cell['cell'])}"


def _tables(document: dict) -> list[Table | Text]:
    what = document["what"]
    if what == "manager" and document["cells"]:
        noise = max((cell["twice"]["noise"] for cell in document["cells"] if cell.get("twice")), default=None)
        said = [] if noise is None else [Text(MANAGER_NOISE.format(100 * noise), style="dim")]
        return [Text(what, style="bold"), _manager(document["cells"]), *said, Text()]
    parts: list[Table | Text] = []
    for cell in document["cells"]:
        if not cell["variants"]:
            parts += [Text(f"{_title(what, cell)}: {cell.get('skipped') or 'nothing could be timed'}"), Text()]
            continue
        parts.append(Text(_title(what, cell), style="bold"))
        if what == "attention":
            parts.append(_attention(cell))
        elif cell["variants"][0].get("tokens_per_call"):
            parts.append(_decode(cell, document.get("model")))
        else:
            parts.append(_general(cell))
        if twice := cell.get("twice"):  # documents of before have none
            parts.append(Text(report.noise_text(twice), style="dim"))
        if probe := cell.get("probe"):
            parts.append(
                Text(f"{probe['name']} in the same rounds: {probe['bytes_per_s'] / 1e9:.1f} GB/s", style="dim")
            )
        parts.append(Text())
    return parts


def render(document: dict) -> Group:
    """The tables of a document, and what a reader must know to read them right."""
    where = document["environment"]
    first = (
        f"{where['device_name']} ({where['device']}), {where['num_cpus']} cores, torch {where['torch']}, backend "
        f"{where['backend']}, OMP_WAIT_POLICY={where['omp_wait_policy'] or 'not set'}, load average "
        f"{_load(where['load_average'])} before and {_load(where['load_average_end'])} after"
    )
    notes = [
        first,
        "Medians [quartiles] over rounds in which every variant ran once, in shuffled order; x = times as fast, formed "
        "within each round.",
    ]
    if document["settings"].get("clock") == "cpu":
        notes.append("clock=cpu: times are CPU seconds of one thread, not seconds on the clock on the wall.")
    if document["what"] == "attention":
        notes.append(
            "* fastest dense variant; grouped = query heads of a KV head as query tokens, which reads K and V once."
        )
    return Group(*_tables(document), *(Text(note, style="dim") for note in [*notes, *document["notes"]]))


def _load(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"
