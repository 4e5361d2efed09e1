"""Studies that come with the repository; their runs are marked as others' evidence wherever they count."""

import csv
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvbench.config.files import package_folder
from kvbench.evidence.load import find_runs
from kvbench.extensions.advise.named import NamedMethod, stored_method
from kvbench.results.lines import read_samples
from kvbench.sizing.stored import tier_shares

FOLDER = "results/example"
STUDY, BENCHMARKS = f"{FOLDER}/study", f"{FOLDER}/benchmarks"  # generated questions; real benchmarks
ABSENT = f"The studies of the repository ({FOLDER}) are not installed with the package; a clone has them."

LONGEST_TOKENS = 1024  # of the first study's prompts
POOLED = "mean over"  # both lengths, in its table
TEXT_MODEL, TEXT = "qwen2.5-coder-0.5b", "the documentation of Python"  # of shipped.csv, which names neither


def study_folders() -> list[Path]:
    """The folders of their runs; none in an installed package."""
    return [folder for name in (STUDY, BENCHMARKS) if (folder := package_folder().parent / name).is_dir()]


def is_study(folder: object) -> bool:
    """True for the folder of a study's runs, however it is written."""
    return os.path.realpath(str(folder)) in map(os.path.realpath, study_folders())


def state() -> str:
    """Digest of what the files of the studies' runs are called, their sizes and times of change."""
    files = sorted(path for folder in study_folders() for path in folder.glob("**/*") if path.is_file())
    each = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(each).encode()).hexdigest()


def shares_in_study(method: str, known: NamedMethod, model: str = "") -> tuple[list[float], str]:
    """Shares of tiers that the studies measured of a method with its settings, over all its runs on one model, and it.

    The wanted model where it was measured; none where no study has such a run.
    """
    filters = (None, None, [method])
    runs = [one for root in study_folders() for one in find_runs(root, {}, filters)]
    same = [one for one in runs if (stored := stored_method(one[1].identity)) and stored.text == known.text]
    names = [record.model for _, record in same]
    chosen = model if model in names else next(iter(names), "")
    samples = (
        read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)[0].values()
        for folder, record in same
        if record.model == chosen
    )
    return tier_shares(chain.from_iterable(samples)), chosen


class StudyLoss(NamedTuple):
    """A paired difference to the full cache that a study found."""

    study: str
    """Its folder."""
    label: str
    """Method and settings, such as `kivi bits=2`."""
    method: str
    task: str
    model: str
    samples: int
    longest_tokens: int
    """Of its prompts."""
    difference: float
    """In the metric's unit, of 1 where it is a score."""
    low: float
    high: float


def _rows(name: str) -> list[dict[str, str]]:
    """Rows of a table of the studies; none where the file is absent."""
    path = package_folder().parent / FOLDER / name
    if not study_folders() or not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def losses(metric: str) -> list[StudyLoss]:
    """Losses of a metric in the tables of the repository's studies; empty without studies or metric.

    Of the generated questions over both of their lengths, of the benchmarks task by task.
    """
    pooled = [row for row in _rows("measures.csv") if row["group"].startswith(POOLED)]
    both = [{"study": STUDY, "task": "longctx", "model": row["group"].rpartition(" ")[2], **row} for row in pooled]
    both += [{"study": BENCHMARKS, **row} for row in _rows("benchmarks.csv")]
    return [
        StudyLoss(
            study=row["study"],
            label=row["run"],
            method=row["method"],
            task=row["task"],
            model=row["model"],
            samples=int(row["n"]),
            longest_tokens=int(row.get("longest_tokens", LONGEST_TOKENS)),
            **{name: float(row[name]) for name in ("difference", "low", "high")},
        )
        for row in both
        if row["low"] and row["metric"] == metric
    ]


class TextLoss(NamedTuple):
    """Loss of an engine's format on running text, against a cache of 16 bits."""

    command: str
    """The engine's, with its flags."""
    tokens: int
    """Measured ones."""
    perplexity: tuple[float, float, float]
    """Ratio less 1, and its 95 % interval."""
    same_first_choice: tuple[float, float, float]
    """Share of tokens, and its interval."""


def text_losses() -> list[TextLoss]:
    """The table of engines' formats on running text, those that flags alone choose; empty where the study is absent."""
    named = [row for row in _rows("shipped.csv") if row["flags"] and "," not in row["flags"]]
    return [
        TextLoss(
            command=f"{row['engine']} {row['flags']}",
            tokens=int(row["n"]),
            perplexity=_with_interval(row, "log_ratio", math.expm1),
            same_first_choice=_with_interval(row, "same_first_choice", float),
        )
        for row in named
    ]


def _with_interval(row: Mapping[str, str], name: str, scale: Callable[[float], float]) -> tuple[float, float, float]:
    value, low, high = (scale(float(row[f"{name}{end}"])) for end in ("", "_low", "_high"))
    return value, low, high


class Order(NamedTuple):
    """Rank agreement of two measured models on the same methods."""

    runs: str
    """The compared methods: all that both have, or those at one budget."""
    num_methods: int
    places: tuple[str, str]
    """Task and model of each."""
    correlation: float
    """Spearman's."""
    low: float
    high: float


def orders(metric: str) -> list[Order]:
    """The rank correlations of methods between models, by a metric; empty where the studies are not there."""
    return [
        Order(
            runs=row["runs"],
            num_methods=int(row["count"]),
            places=(f"{row['task']} with {row['model']}", f"{row['other_task']} with {row['other_model']}"),
            **{name: float(row[name]) for name in ("correlation", "low", "high")},
        )
        for row in _rows("across.csv")
        if row["metric"] == metric and row["model"] != row["other_model"] and row["low"]
    ]
