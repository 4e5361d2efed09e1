"""The record of a bench: one JSON document, a plain table, and the loop over cells that fills them."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import machine
from kvbench.kernels.bench.settings import Common, S, help_text, out_path, read_words

SCHEMA = 1
Progress = Callable[[int, int, str], object]  # rounds done, rounds in all, what is being measured

PURPOSES = {
    "attention": "Decode attention over pages of every format beside dense attention.",
    "prefill": "The score pass over a prompt beside its attention.",
    "manager": "Allocating, freeing and compacting pages of many lists at once, beside one list after the other.",
    "decode": "Whole-model decoding and prompt reading beside transformers' own cache.",
    "throughput": "A fixed amount of KV memory: how many sequences fit, and how many tokens per second they make.",
}


def quiet(done: int, total: int, label: str) -> None:
    """Says nothing."""


class Speaker:
    """Prints one line to stderr when a new cell begins; a `Progress`."""

    def __init__(self) -> None:
        self._last: str | None = None

    def __call__(self, done: int, total: int, label: str) -> None:
        if label != self._last:
            self._last = label
            print(f"{done}/{total} rounds: {label}", file=sys.stderr, flush=True)


def label_of(cell: dict) -> str:
    """A cell in words."""
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value != 0)


class Bench:
    """A document being filled; made by `begin`."""

    def __init__(self, what: str, settings: Common, device: str, backend: Backend, cells: list[dict]) -> None:
        self.what, self.settings, self.device, self.cells = what, settings, device, cells
        self.environment = machine.describe(device, backend)
        self.notes = machine.doubts(self.environment, settings.clock, backend)
        self.rounds = settings.rounds + 1  # with the one that warms up
        self._found: list[dict] = []
        self._done, self._started = 0, time.time()
        self._progress: Progress = quiet
        self._label = ""

    @cached_property
    def bandwidth(self) -> machine.Bandwidth:
        """The probe, made when a cell first asks for it: it takes a gigabyte."""
        return machine.Bandwidth(self.device)

    def todo(self, progress: Progress) -> Iterator[dict]:
        """The cells in turn, with the thread count of each in force; restores the count at the end."""
        before, self._progress = torch.get_num_threads(), progress
        try:
            for index, cell in enumerate(self.cells):
                self._done, self._label = index * self.rounds, label_of(cell)
                if cell.get("threads"):
                    torch.set_num_threads(cell["threads"])
                progress(self._done, len(self.cells) * self.rounds, self._label)
                yield cell
        finally:
            torch.set_num_threads(before)

    def on_round(self) -> None:
        """Counts a round."""
        self._done += 1
        self._progress(self._done, len(self.cells) * self.rounds, self._label)

    def stage(self, text: str) -> None:
        """Says what is being prepared."""
        self._progress(self._done, len(self.cells) * self.rounds, f"{self._label}: {text}")

    def add(self, found: dict) -> None:
        """Adds the figures of a cell, and a note for every variant that was refused."""
        self._found.append(found)
        for entry in found["refused"]:
            self.notes.append(f"{entry['name']} at {label_of(found['cell'])} {entry['reason']}")
        distance, cache = found["reuse_distance_bytes"], self.environment["cpu_cache_bytes"]
        if self.device == "cpu" and self.what == "attention" and cache and distance < 2 * cache:
            self.notes.append(
                f"{label_of(found['cell'])}: only {distance / 1e6:.0f} MB pass between two uses of a buffer; the cache "
                f"is said to hold {cache / 1e6:.0f} MB; raise working_set_mb or max_buffers"
            )

    def skip(self, cell: dict, reason: str) -> None:
        """Records a cell that cannot be measured here."""
        self._found.append({"cell": cell, "variants": [], "refused": [], "skipped": reason})
        self.notes.append(f"{label_of(cell)} skipped: {reason}")

    def document(self) -> dict:
        """Everything in JSON types: schema, what, settings, environment, notes, cells, started, elapsed_s."""
        self.environment["load_average_end"] = machine.load_average()
        return {
            "schema": SCHEMA,
            "what": self.what,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "elapsed_s": time.time() - self._started,
            "settings": dataclasses.asdict(self.settings),
            "environment": self.environment,
            "notes": self.notes,
            "cells": self._found,
        }


def begin(what: str, settings: Common, device: str, backend: Backend, cells: list[dict]) -> Bench:
    """Starts a document: notes the machine and its load before anything runs.

    Args:
        what: Name of the bench.
        settings: What to measure.
        device: Where the work runs.
        backend: The kernels' backend.
        cells: Settings that are measured one after the other.
    """
    return Bench(what, settings, device, backend, cells)


def check_document(document: dict) -> None:
    """Raises ValueError when a document is not one of this schema, or its figures contradict each other."""
    missing = {"schema", "what", "started", "elapsed_s", "settings", "environment", "notes", "cells"} - set(document)
    if missing:
        raise ValueError(f"not a document of kvbench bench: {', '.join(sorted(missing))} missing")
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']} is not {SCHEMA}, the one this version reads; measure again")
    for cell in document["cells"]:
        for row in cell["variants"]:
            numbers = [row["median"], row["q1"], row["q3"], *row["seconds"]]
            if not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in numbers):
                raise ValueError(f"{row['name']} at {label_of(cell['cell'])}: a time is no number of at least 0")
            if not row["q1"] <= row["median"] <= row["q3"]:
                raise ValueError(f"{row['name']} at {label_of(cell['cell'])}: the quartiles are out of order")


def is_complete(document: dict) -> bool:
    """True when no variant was refused."""
    return not any(cell["refused"] for cell in document["cells"])


def plain_table(document: dict) -> str:
    """All cells as text, for a machine without rich."""
    lines = []
    for cell in document["cells"]:
        lines.append(f"\n{document['what']}: {label_of(cell['cell'])}")
        if cell.get("skipped"):
            lines.append(f"  skipped: {cell['skipped']}")
            continue
        # The other ways to compute the same are rows of their own; a column each would be too wide.
        baselines = [name for row in cell["variants"][:1] for name in row["ratios"] if not name.endswith(" grouped")]
        heads = ["ms [quartiles]", *(f"x {name}" for name in baselines), "share of bandwidth"]
        width = max([24, *(len(row["name"]) + 1 for row in cell["variants"])])
        lines.append("  " + f"{'variant':<{width}}" + "".join(f"{head:>28}" for head in heads))
        for row in cell["variants"]:
            parts = [f"{1e3 * row['median']:.4g} [{1e3 * row['q1']:.4g}, {1e3 * row['q3']:.4g}]"]
            parts += [_span(row["ratios"].get(name)) for name in baselines]
            parts.append(_span(row.get("bandwidth_share")))
            lines.append("  " + f"{row['name']:<{width}}" + "".join(f"{part:>28}" for part in parts))
        if twice := cell.get("twice"):
            lines.append(f"  {noise_text(twice)}")
        if probe := cell.get("probe"):
            lines.append(f"  {probe['name']}: {probe['bytes_per_s'] / 1e9:.1f} GB/s")
    clock = [f"clock={document['settings']['clock']}"] if document["settings"].get("clock") == "cpu" else []
    return "\n".join([*lines, "", *clock, *document["notes"]])


def noise_text(twice: dict) -> str:
    """The A/A pair of a cell in words."""
    return (
        f"A/A: {twice['name']} timed twice is {_span(twice)} times itself; ratios within "
        f"{100 * twice['noise']:.0f} % of 1 are noise"
    )


def _span(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def main(
    what: str,
    kind: type[S],
    quick: dict,
    run: Callable[[S, Progress], dict],
    words: list[str],
    package: str = "kvbench.kernels.bench",
) -> int:
    """The command line of one bench that needs no library for settings.

    Args:
        what: Name of the bench.
        kind: Its settings dataclass.
        quick: What `quick=true` changes.
        run: The bench.
        words: `key=value` words.
        package: Where its module lies.

    Returns:
        Exit code: 0 done, 1 a variant was wrong and not timed, 2 a setting is wrong.
    """
    if {"-h", "--help"} & set(words):
        print(help_text(f"{package}.{what}", kind, PURPOSES[what]))
        return 0
    try:
        document = run(read_words(kind, words, quick), Speaker())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    check_document(document)
    print(plain_table(document))
    if path := out_path(words):
        write(document, Path(path))
        print(path)
    return 0 if is_complete(document) else 1


def write(document: dict, path: Path) -> None:
    """Writes a document as JSON, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
