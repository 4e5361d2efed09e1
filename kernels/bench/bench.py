"""Parts that every bench shares.

Settings read from `key=value` words without any library, the loop over cells, the JSON document that it fills, a plain
table, and the command line.
"""

import ast
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from kvbench.kernels.bench import machine, roofline
from kvbench.kernels.bench.rounds import CLOCKS, Variant, choose_timer, measure_cell
from kvbench.kernels.dispatch import get_backend

SCHEMA = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
S = TypeVar("S", bound="Common")
Progress = Callable[[int, int, str], object]  # rounds done, rounds in all, what is being measured
Keep = Callable[[dict], object]  # the document so far
NOT_TIMED = "not timed"  # of a row that was refused, whose reason is among the notes
REFUSED = 3  # exit status: all was measured but what is named with its reason; again would give the same


def setting(default: Any, meaning: str, least: int | None = None, among: Any = None) -> Any:
    """Declares a setting, or a list of them where its default is a list.

    `meaning` is for the help; `least` is its smallest whole number, `among` its choices.
    """
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(metadata={"meaning": meaning, "least": least, "among": among}, **made)


@dataclass(kw_only=True)
class Common:
    """Settings of every bench."""

    what: ClassVar[str]
    quick: ClassVar[dict[str, Any]]
    """The values that `quick=true` puts in place of defaults."""

    kernels: str = setting("auto", "auto, or a backend's name.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.")
    threads: list[int] = setting([1, 0], "CPU thread counts, each measured apart; 0 = all cores of this process.", 0)
    rounds: int = setting(11, "Timed rounds.", 1)
    seed: int = setting(0, "Of data and orders.", 0)
    clock: str = setting("wall", "wall, or cpu = CPU time of the calling thread (one thread only).", among=CLOCKS)
    working_set_mb: int = setting(
        0,
        "MB of buffers per variant that a timing goes through; 0 = 64 in main memory and 512 on a GPU, beyond its "
        "second-level cache.",
        0,
    )
    graph: bool = setting(
        True, "Replay CUDA graphs on a GPU, so that kernels are timed and not Python, where a bench calls only kernels."
    )
    max_buffers: int = setting(256, "Buffers per variant at most.", 1)

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        for item in dataclasses.fields(self):
            value, least, among = getattr(self, item.name), item.metadata["least"], item.metadata["among"]
            if item.type is bool and not isinstance(value, bool):
                raise ValueError(f"{item.name}={value} is neither true nor false")
            if least is None and among is None:
                continue
            takes_list = item.default is dataclasses.MISSING
            if takes_list and not (isinstance(value, list) and value):
                example = f"{item.name}=[{next(iter(among)) if among else least + 1}]"
                raise ValueError(f"{item.name}={value} must be a list with at least one value, for example {example}")
            for each in value if takes_list else [value]:
                if least is not None and (type(each) is not int or each < least):
                    raise ValueError(f"{item.name}={each} must be a whole number of at least {least}")
                if among is not None and each not in among:
                    raise ValueError(f"{item.name}={each} does not exist; choose among {', '.join(among)}")
        if self.clock == "cpu" and self.threads != [1]:
            raise ValueError(f"clock=cpu counts one thread, but threads={self.threads}; set threads=[1]")

    @property
    def reported_rounds(self) -> int:
        """Rounds of a cell in what is told of progress, with the one that warms up."""
        return self.rounds + 1

    def working_set(self, device: str) -> int:
        """MB of buffers per variant on a device."""
        return self.working_set_mb or (64 if device == "cpu" else 512)

    def cells(self, threads: list[int]) -> list[dict]:
        """Cells, each measured in one set of rounds.

        `threads` are CPU thread counts without repeats, [0] on a GPU.
        """
        raise NotImplementedError

    def prepare(self, bench: "Bench") -> None:
        """Makes what all cells share."""

    def variants(self, bench: "Bench", cell: dict) -> list[Variant]:
        """The variants that are timed in a cell; raises Skipped where it cannot be measured here."""
        raise NotImplementedError

    def timing(self, bench: "Bench", cell: dict) -> dict[str, Any]:
        """Arguments of `measure_cell`, `baselines` at least."""
        raise NotImplementedError

    def finish(self, figures: dict) -> None:
        """Adds to the figures of a cell."""


class Skipped(Exception):
    """A cell cannot be measured here; the message says why."""


def parse_shape(text: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of `QxKxD`.

    Raises ValueError for another form, or where the KV heads do not divide the query heads.
    """
    parts = str(text).split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shapes={text} is not query heads x KV heads x head dim, for example 32x8x128")
    queries, heads, dim = (int(part) for part in parts)
    if queries % heads:
        raise ValueError(f"shapes={text}: {heads} KV heads do not divide {queries} query heads")
    return queries, heads, dim


def read_words(kind: type[S], words: list[str]) -> S:
    """Builds a settings object from `key=value` words; `quick=true` uses small defaults.

    Raises ValueError for an unknown key or a value of the wrong form.
    """
    known = {item.name: item.default is dataclasses.MISSING for item in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or key not in {*known, "quick", "out"}:
            there = ", ".join([*known, "quick", "out"])
            raise ValueError(f"{word} is no setting; there are {there}, given as key=value")
        parts = [_literal(part.strip()) for part in text.strip("[]").split(",") if part.strip()]
        values[key] = parts if known.get(key) else _literal(text)
    small = kind.quick if values.pop("quick", False) is True else {}
    values.pop("out", None)
    settings = kind(**{key: value for key, value in small.items() if key in known} | values)
    settings.check()
    return settings


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):  # as YAML writes them; Python's own words are capitalised
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def label_of(cell: dict) -> str:
    """A cell in words."""
    return ", ".join(f"{name} {value}" for name, value in cell.items() if value != 0)


class Bench:
    """One start of a bench: records the machine and its load, then fills the document.

    `notes` are for its reader, `more` are further parts of the document.
    """

    def __init__(self, settings: Common, progress: Progress | None = None, keep: Keep = lambda _: None) -> None:
        self.settings, self._keep = settings, keep
        self.device = machine.pick_device(settings.device)
        self._timer = choose_timer(settings.clock, self.device)
        self.backend = get_backend(settings.kernels, self.device)
        threads = [n or machine.num_cpus() for n in settings.threads] if self.device == "cpu" else [0]
        self.cells = settings.cells(list(dict.fromkeys(threads)))
        self.environment = machine.describe(self.device, self.backend)
        self.notes = machine.doubts(self.environment, settings.clock, self.backend)
        self.more: dict[str, Any] = {}
        self._progress, self._label = progress, ""
        self._done, self._rounds = 0, settings.reported_rounds

    @cached_property
    def bandwidth(self) -> machine.Bandwidth:
        """The probe, made when a cell first uses it: it takes a gigabyte."""
        return machine.Bandwidth(self.device)

    def stage(self, text: str = "") -> None:
        """Says what is being prepared or measured."""
        if self._progress is not None:
            self._progress(self._done, len(self.cells) * self._rounds, ": ".join(filter(None, [self._label, text])))

    def advance(self) -> None:
        """Says that a round is done."""
        self._done += 1
        self.stage()

    def run(self, held: dict | None = None) -> dict:
        """Measures every cell with its thread count and passes the document so far to `keep` after each.

        Cells of `held`, where this run continues it (`goes_on`), are not measured again. Returns the document, in JSON
        types.
        """
        before = torch.get_num_threads()
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "what": self.settings.what,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "settings": dataclasses.asdict(self.settings),
            "environment": self.environment,
            "notes": self.notes,
            "cells": [],
        }
        if held is not None and goes_on(held, document):
            document |= {name: held[name] for name in ("started", "cells", "elapsed_s")}
            self.notes += [note for note in held["notes"] if note not in self.notes]
        done, begin = [figures["cell"] for figures in document["cells"]], time.time() - document.get("elapsed_s", 0.0)
        try:
            if left := [cell for cell in self.cells if cell not in done]:
                self.settings.prepare(self)
            self._done = (len(self.cells) - len(left)) * self._rounds
            for cell in left:
                document["cells"].append(self._measured(cell))
                document |= {"left": len(self.cells) - len(document["cells"])}
                document |= {"elapsed_s": time.time() - begin, **self.more}
                document["environment"]["load_average_end"] = machine.load_average()
                self._keep(document)
        finally:
            torch.set_num_threads(before)
        return document

    def _measured(self, cell: dict) -> dict:
        """The figures of one cell; its buffers are free when it returns."""
        begin, self._label = self._done, label_of(cell)
        if cell.get("threads"):
            torch.set_num_threads(cell["threads"])
        self.stage()
        options: dict[str, Any] = {"rounds": self.settings.rounds, "seed": self.settings.seed}
        options |= {"timer": self._timer, "on_round": self.advance}
        try:
            variants = self.settings.variants(self, cell)
        except Skipped as reason:
            self.notes.append(f"{self._label} skipped: {reason}")
            self._done = begin + self._rounds
            return {"cell": cell, "variants": [], "refused": [], "skipped": str(reason)}
        self.stage("first round")
        figures = measure_cell(cell, variants, **options | self.settings.timing(self, cell))
        self._done = begin + self._rounds
        self.settings.finish(figures)
        self.notes += [f"{entry['name']} at {self._label} {entry['reason']}" for entry in figures["refused"]]
        distance, cache = figures["reuse_distance_bytes"], self.environment["cpu_cache_bytes"]
        if self.device == "cpu" and self.settings.what == "attention" and cache and distance < 2 * cache:
            self.notes.append(
                f"{self._label}: only {distance / 1e6:.0f} MB pass between two uses of a buffer; the cache is said "
                f"to hold {cache / 1e6:.0f} MB; raise working_set_mb or max_buffers"
            )
        return figures


def goes_on(held: dict, document: dict) -> bool:
    """True where a document was begun before, with the settings, device and libraries of a new one, and not ended."""
    same = ("schema", "what", "settings")
    there = ("device_name", "torch", "libraries", "backend")
    environment = held.get("environment", {})
    return (
        bool(held.get("left"))
        and all(held.get(name) == document[name] for name in same)
        and all(environment.get(name) == document["environment"][name] for name in there)
    )


def run(
    settings: Common, progress: Progress | None = None, keep: Keep = lambda _: None, held: dict | None = None
) -> dict:
    """The document of a bench; see `Bench`."""
    return Bench(settings, progress, keep).run(held)


def check_document(document: dict) -> None:
    """Raises ValueError when a document is not one of this schema, or its figures contradict each other."""
    if missing := set("schema what started elapsed_s settings environment notes cells".split()) - set(document):
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


def read_document(path: Path) -> dict:
    """A result from its file; ValueError where it is not there, no JSON, or not of this schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"load={path} cannot be read ({error}); give the bench.json of a result") from error
    if not isinstance(document, dict):
        raise ValueError(f"load={path} is not a document of kvbench bench")
    check_document(document)
    return document


def is_complete(document: dict) -> bool:
    """True when no variant was refused except for lack of its library."""
    return all(entry.get("absent") for cell in document["cells"] for entry in cell["refused"])


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
        table = [["variant", "ms [quartiles]", *(f"x {name}" for name in baselines), "share of bandwidth"]]
        has_limits = document["what"] == "attention"
        table[0] += ["of the limit"] * has_limits
        for row in cell["variants"]:
            span = f"{1e3 * row['median']:.4g} [{1e3 * row['q1']:.4g}, {1e3 * row['q3']:.4g}]"
            shares = [*(row["ratios"].get(name) for name in baselines), row.get("bandwidth_share")]
            limit = [roofline.share(row, cell, document["environment"])] if has_limits else []
            table.append([row["name"], span, *map(_span, shares), *limit])
        table += [[entry["name"], NOT_TIMED, *["-"] * (len(table[0]) - 2)] for entry in cell["refused"]]
        width = max([24, *(len(first) + 1 for first, *_ in table)])
        lines += ["  " + first.ljust(width) + "".join(text.rjust(28) for text in rest) for first, *rest in table]
        lines += [f"  {remark}" for remark in remarks(cell)]
    clock = [f"clock={document['settings']['clock']}"] if document["settings"].get("clock") == "cpu" else []
    return "\n".join([*lines, "", *clock, *document["notes"]])


def remarks(cell: dict) -> list[str]:
    """The A/A pair and the bandwidth of a cell in words; documents of before have none."""
    lines = []
    if twice := cell.get("twice"):
        noise = f"ratios within {100 * twice['noise']:.0f} % of 1 are noise"
        lines.append(f"A/A: {twice['name']} timed twice is {_span(twice)} times itself; {noise}")
    if probe := cell.get("probe"):
        lines.append(f"{probe['name']} in the same rounds: {probe['bytes_per_s'] / 1e9:.1f} GB/s")
    if product := cell.get("product"):
        lines.append(f"{product['name']} in the same rounds: {product['flops_per_s'] / 1e9:.0f} GFLOP/s")
    return lines


def _span(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def main(kind: type[Common], words: list[str]) -> int:
    """Command line of one bench; it needs no library for settings.

    Returns 0 when done, 2 for a wrong setting, `REFUSED` where something could not be timed. `out=FILE` is written
    after every cell, and an existing file is continued.
    """
    if {"-h", "--help"} & set(words):
        _print_help(kind)
        return 0
    shown: set[str] = set()

    def speak(done: int, total: int, label: str) -> None:
        if label not in shown:
            shown.add(label)
            print(f"{done}/{total} rounds: {label}", file=sys.stderr, flush=True)

    paths = [Path(word.partition("=")[2]) for word in words if word.startswith("out=")]

    def keep(document: dict) -> None:
        for path in paths:
            write(document, path)

    try:
        held = json.loads(paths[0].read_text(encoding="utf-8")) if paths and paths[0].exists() else None
        document = run(read_words(kind, words), speak, keep, held)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    check_document(document)
    print(plain_table(document))
    for path in paths:
        write(document, path)
        print(path)
    return 0 if is_complete(document) else REFUSED


def _print_help(kind: type[Common]) -> None:
    module = kind.__module__
    if module == "__main__":  # the bench is the program
        module = getattr(sys.modules[module].__spec__, "name", module)
    print(f"usage: python -m {module} [key=value ...]\n\n{kind.__doc__}\n")
    defaults = kind()
    for item in dataclasses.fields(kind):
        value = getattr(defaults, item.name)
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
        print(f"  {item.name}={shown}\n      {item.metadata['meaning']}")
    print("  quick=false\n      true = small settings, about a minute\n  out=FILE\n      JSON of all numbers")


def write(document: dict, path: Path) -> None:
    """Writes a document as JSON, folders included; a file that is there is whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    new.replace(path)
