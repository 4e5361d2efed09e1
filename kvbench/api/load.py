"""Stored runs as a pandas DataFrame."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.evidence.load import find_runs, results_root
from kvbench.results.lines import read_samples
from kvbench.results.measures import FIDELITY, RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord, answers_of
from kvbench.show.text import visible
from kvbench.stats.intervals import Estimate

if TYPE_CHECKING:
    from pandas import DataFrame

# Parts of a run's identity that the command line spells otherwise, and those that are no settings.
_SPELLED = {"generation": "protocol", "task.protocol": "task", "task.limit": "limit"}
_SPELLED |= {"task.prefill_chunk": "prefill.chunk"}
_NO_SETTINGS = ("code", "method._target_", "task.name")


def load(results_dir: str | Path = "results", *, samples: bool = False) -> "DataFrame":
    """Read stored runs into a DataFrame; nothing is run.

    A folder that cannot be read is named in a warning and in `.attrs["left_out"]`, and the others are read.

    Args:
        results_dir: The folder that runs landed in.
        samples: One row for each answer; else one for each run.

    Returns:
        Runs: `task`, `model`, `method`, `hash`, `status`, `message`, `folder`; the score as a share with its 95 %
        interval, the metric's name and the number of samples; `difference`, `difference_low`, `difference_high` to the
        full cache; the fidelity and the bytes as `run.json` has them; times; then every setting by the name that the
        command line gives it, such as `method.budget`. Answers: sample, answer, scores, fidelity and bytes.

    Raises:
        ValueError: There is no such folder.
    """
    import pandas as pd

    root = results_root(results_dir)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for folder, record in find_runs(root, left_out):
        if not samples:
            rows.append(run_row(record, folder))
            continue
        try:
            stored, damaged = read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)
        except (ValueError, OSError) as error:
            left_out[folder.relative_to(root).as_posix()] = str(error)
            continue
        if damaged:
            left_out[folder.relative_to(root).as_posix()] = f"{damaged} damaged lines of samples.jsonl do not count"
        rows += [sample_row(record, folder, sample) for sample in stored.values()]
    for name, reason in left_out.items():
        warnings.warn(visible(f"{name}: {reason}"), stacklevel=2)
    table = pd.DataFrame(rows)
    table.attrs["left_out"] = left_out
    return table


def run_row(record: RunRecord, folder: Path) -> dict[str, Any]:
    """One run as a row."""
    score = record.metrics.get(record.primary)
    difference = record.comparison.difference if record.comparison else None
    row: dict[str, Any] = {
        **_name(record, folder),
        "status": record.status,
        "message": record.message,
        "metric": record.primary or None,
        **_interval("score", score),
        "num_samples": score.num_samples if score else 0,
        **_interval("difference", difference),
    }
    row |= {name: measure.of_run(record) for name, measure in FIDELITY.items()}
    row |= dict(record.ledger)
    row |= {name: value for name, value in vars(record.timing).items() if name != "decode_tokens"}
    row |= {"started": record.started, "ended": record.ended}
    return row | settings_of(record)


def sample_row(record: RunRecord, folder: Path, sample: SampleRecord) -> dict[str, Any]:
    """One answer as a row."""
    fidelity = sample["fidelity"] or {}
    return {
        **_name(record, folder),
        **{key: sample[key] for key in ("sample_id", "subset", "repeat", "status", "finish", "text")},
        "answers": answers_of(sample),
        "score": sample["scores"].get(record.primary),
        **{f"scores.{name}": value for name, value in sample["scores"].items()},
        **{name: fidelity.get(measure.key) for name, measure in FIDELITY.items()},
        RESIDENT.key: sample["ledger"].get(RESIDENT.key),
        "fp16_bytes": sample["ledger"].get("fp16_bytes"),
        "peak_bytes": sample["ledger"].get("peak_bytes"),
        "num_prompt_tokens": sample["num_prompt_tokens"],
        "truncated": sample["truncated"],
        **{f"meta.{name}": value for name, value in sample["meta"].items()},
    }


def settings_of(record: RunRecord) -> dict[str, Any]:
    """Every setting that is part of a run's identity, by the name that the command line gives it."""
    result: dict[str, Any] = {}

    def take(name: str, value: object) -> None:
        if name in _NO_SETTINGS:
            return
        if isinstance(value, Mapping):
            for key, item in value.items():
                inner = f"{name}.{key}"
                take(_SPELLED.get(inner, inner), item)
        else:
            result[name] = value

    for part, value in record.identity.items():
        take(_SPELLED.get(part, part), value)
    return result


def _interval(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    value, low, high = (estimate.value, estimate.low, estimate.high) if estimate else (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _name(record: RunRecord, folder: Path) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("task", "model", "method", "hash")} | {"folder": str(folder)}
