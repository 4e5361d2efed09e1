"""The study that comes with the repository: others made its runs, and they are marked so wherever they count."""

from itertools import chain
from pathlib import Path

from kvbench.config.files import package_folder
from kvbench.evidence.load import find_runs
from kvbench.results.sample import read_samples
from kvbench.sizing.stored import policy_of, tier_shares

NAME = "results/example/study"
ABSENT = f"The study of the repository ({NAME}) is not installed with the package; a clone has it."


def study_folder() -> Path | None:
    """The folder of its runs; None in an installed package, which has none."""
    folder = package_folder().parent / NAME
    return folder if folder.is_dir() else None


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
