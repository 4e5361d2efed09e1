"""The study that comes with the repository: others made its runs, and they are marked so wherever they count."""

import csv
import os
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvbench.config.files import package_folder
from kvbench.evidence.load import find_runs
from kvbench.results.lines import read_samples
from kvbench.sizing.stored import policy_of, tier_shares

NAME = "results/example/study"
ABSENT = f"The study of the repository ({NAME}) is not installed with the package; a clone has it."

LONGEST_TOKENS = 1024  # of its prompts
POOLED = "mean over"  # both lengths, in its table


def study_folder() -> Path | None:
    """The folder of its runs; None in an installed package, which has none."""
    folder = package_folder().parent / NAME
    return folder if folder.is_dir() else None


def is_study(folder: object) -> bool:
    """True for the folder of its runs, however it is written."""
    root = study_folder()
    return root is not None and os.path.realpath(str(folder)) == os.path.realpath(root)


def shares_in_study(method: str, policy: object) -> tuple[list[float], str]:
    """The shares of tiers that the study measured of a method's policy, over all its runs, and the model; none where it
    has no such run."""
    root = study_folder()
    found = find_runs(root, {}, (None, None, [method])) if root else ()
    same = [(folder, record) for folder, record in found if repr(policy_of(record.identity)) == repr(policy)]
    samples = (
        read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)[0].values() for folder, record in same
    )
    return tier_shares(chain.from_iterable(samples)), same[0][1].model if same else ""


class StudyLoss(NamedTuple):
    """A paired difference to the full cache that the study found, over both of its lengths."""

    label: str
    """Method and settings, such as `kivi bits=2`."""
    method: str
    task: str
    model: str
    samples: int
    difference: float
    """In the metric's unit, of 1 where it is a score."""
    low: float
    high: float


@cache
def losses(metric: str) -> list[StudyLoss]:
    """What the study found of a metric, as its own table has it; empty where it is not there, or has no such metric."""
    root = study_folder()
    if root is None:
        return []
    with (root.parent / "measures.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["group"].startswith(POOLED) and row["metric"] == metric]
    return [
        StudyLoss(
            label=row["run"],
            method=row["method"],
            task="longctx",
            model=row["group"].rpartition(" ")[2],
            samples=int(row["n"]),
            **{name: float(row[name]) for name in ("difference", "low", "high")},
        )
        for row in rows
        if row["low"]
    ]
