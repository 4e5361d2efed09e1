"""The folders that kvpress's evaluation writes, and that its leaderboard takes: runs of task=ruler.

Source: kvpress evaluation/evaluate.py (get_results_dir, save_config, _save_results) and benchmarks/ruler/
    calculate_metrics.py at 8bb29b9.
Differs: predictions.csv has no question and no answer prefix, which a journal does not keep; config.yaml has what was
    measured, under `kvbench`. `compression_ratio` is the nominal one where the method's budget is a share of the
    prompt, else one minus the share of bytes that was held.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from kvbench.api.load import settings_of
from kvbench.config.files import FULL
from kvbench.results.measures import RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord
from kvbench.results.writing import plain, write_file
from kvbench.show.csv_file import csv_bytes

TASK = "ruler"
NO_PRESS = "no_press"  # kvpress's name of the full cache


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One complete run."""

    folder: Path
    record: RunRecord
    samples: list[SampleRecord]
    """In the order of the journal, of any status."""


def file_name(text: str) -> str:
    """A text as part of a file name that every system takes, as lm-eval writes task names."""
    return re.sub(r"\W", "_", text)[:80] or "_"


def gold_of(record: SampleRecord) -> list[str]:
    """The right answers; in journals of before, what the task kept beside the sample."""
    found = record.get("gold")
    if found is None:
        kept = record["meta"].get("answers", record["meta"].get("answer"))
        found = kept if isinstance(kept, list) else [] if kept is None else [kept]
    return [str(one) for one in found]


def write(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write one folder for each run and length, for a submission's `benchmark/`; gives the files.

    Runs of other tasks are no part of the leaderboard.

    Raises:
        ValueError: There is no run of task=ruler, or two runs would have the same folder.
    """
    chosen = [run for run in runs if run.record.task == TASK]
    if not chosen:
        there = ", ".join(sorted({run.record.task for run in runs}))
        raise ValueError(
            f"format=leaderboard takes runs of task={TASK} alone, and these are of {there}; run task={TASK}"
        )
    written: dict[Path, bytes] = {}
    for run in chosen:
        for length, samples in _by_length(run).items():
            folder = to / folder_name(run.record, length)
            if folder / "config.yaml" in written:
                raise ValueError(
                    f"two runs would be written to {folder}; choose one with methods=, models= or another to="
                )
            written[folder / "config.yaml"] = yaml.safe_dump(
                plain(config_of(run.record, length)), sort_keys=False
            ).encode()
            written[folder / "metrics.json"] = json.dumps(metrics_of(run.record, samples), indent=4).encode()
            written[folder / "predictions.csv"] = predictions_of(run.record, samples)
    for path, content in written.items():
        write_file(path, content)
    return list(written)


def _by_length(run: Stored) -> dict[str, list[SampleRecord]]:
    """The first answers that ended well, by the length of their prompts."""
    found: dict[str, list[SampleRecord]] = {}
    for sample in run.samples:
        if sample["status"] == "ok" and sample["repeat"] == 0:
            found.setdefault(str(sample["meta"].get("length", "")), []).append(sample)
    return found


def ratio_of(record: RunRecord) -> float:
    """The compression ratio as kvpress has it: the share that is taken away."""
    if record.method == FULL:
        return 0.0
    budget = settings_of(record).get("method.budget")
    if isinstance(budget, float) and 0 < budget < 1:
        return 1 - budget
    return 1 - (RESIDENT.of_run(record) or 1.0)


def press_of(record: RunRecord) -> str:
    """The method, as a name without the mark that parts the words of a folder."""
    return NO_PRESS if record.method == FULL else file_name(record.method).replace("__", "_")


def folder_name(record: RunRecord, length: str) -> str:
    """`ruler__4096__Qwen--Qwen3-8B__snapkv__0.75`, and `__query_aware` behind it where the question was seen."""
    parts = [TASK, length, _model(record), press_of(record), f"{ratio_of(record):.2f}"]
    if record.protocol.get("query_aware", True):
        parts.append("query_aware")
    return "__".join(part for part in parts if part)


def _model(record: RunRecord) -> str:
    """Slashes are two dashes there; what else a file name does not take is one."""
    kept = "".join(char if char.isalnum() or char in ".-_" else "-" for char in record.model.replace("/", "--"))
    return kept.replace("__", "_").lstrip(".") or "model"


def config_of(record: RunRecord, length: str) -> dict[str, Any]:
    """The content of config.yaml."""
    settings = settings_of(record)
    return {
        "dataset": TASK,
        "data_dir": length,
        "model": record.model,
        "device": record.machine.device if record.machine else None,
        "press_name": press_of(record),
        "compression_ratio": ratio_of(record),
        "fraction": 1.0,
        "max_new_tokens": None,
        "max_context_length": None,
        "query_aware": bool(record.protocol.get("query_aware", True)),
        "press_init_command": f"kvbench method={record.method}",
        "seed": record.seed,
        "kvbench": {
            "hash": record.hash,
            "settings": {key: value for key, value in settings.items() if key.startswith("method.")},
            "resident_ratio": RESIDENT.of_run(record),
        },
    }


def _task(sample: SampleRecord) -> str:
    return str(sample["meta"].get("task") or sample["subset"].partition("/")[0])


def metrics_of(record: RunRecord, samples: Sequence[SampleRecord]) -> dict[str, dict[str, float]]:
    """The content of metrics.json: RULER's string match of each of its tasks, in percent."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        scores.setdefault(_task(sample), []).append(float(sample["scores"][record.primary] or 0.0))
    return {task: {"string_match": round(100 * fmean(values), 2)} for task, values in sorted(scores.items())}


def predictions_of(record: RunRecord, samples: Sequence[SampleRecord]) -> bytes:
    """The content of predictions.csv."""
    headings = ("task", "answer", "predicted_answer", "compression_ratio")
    ratio = ratio_of(record)
    return csv_bytes(headings, [(_task(item), str(gold_of(item)), item["text"], ratio) for item in samples])
