"""`kvbench export`: stored runs in the formats of other programs.

`lm_eval`: lm-eval's own files, results_DATE.json and samples_TASK_DATE.jsonl, which its table, its hub upload and other
tools read. `parquet`: a row for each run, and a row for each answer, for DuckDB, Polars, pandas and the hub.
`leaderboard`: the folders that kvpress's evaluation writes, and that its leaderboard takes, of runs of task=ruler.

Source: lm-eval 0.4.13, loggers/evaluation_tracker.py and evaluator.py; kvpress evaluation/evaluate.py (get_results_dir,
    save_config, _save_results) and benchmarks/ruler/calculate_metrics.py at 8bb29b9.
Differs: lm-eval's `arguments` holds the end of the prompt, which is what a journal keeps; `prompt_hash` is over token
    ids; `results` has `kvbench` in addition to lm-eval's keys: method, bytes, and the difference to the full cache.
    kvpress's predictions.csv has no question and no answer prefix, which a journal does not keep; config.yaml has the
    measurements under `kvbench`. `compression_ratio` is the nominal one where the method's budget is a share of the
    prompt, else one minus the share of bytes that was held.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from omegaconf import DictConfig

from kvbench.api.load import run_row, sample_row, settings_of
from kvbench.config.files import FULL
from kvbench.errors import SettingMissing, SettingsConflict, Unsupported, unknown_name
from kvbench.evidence.load import find_runs, patterns, results_root
from kvbench.results.lines import read_samples
from kvbench.results.measures import RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.refusals import NoResults
from kvbench.results.sample import SampleRecord, answers_of
from kvbench.results.summary import values_by_sample
from kvbench.results.writing import plain, write_files
from kvbench.show import terminal
from kvbench.show.csv_file import csv_bytes
from kvbench.show.progress import note
from kvbench.show.text import safe
from kvbench.stats.strata import standard_error, weighed

NONE = "none"  # lm-eval's name of the filter that does nothing
RULER = "ruler"  # the task of kvpress's leaderboard
NO_PRESS = "no_press"  # kvpress's name of the full cache


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One complete run, with its samples of any status in the order of the journal."""

    folder: Path
    record: RunRecord
    samples: list[SampleRecord]


def file_name(text: str) -> str:
    """A text as part of a file name that every system takes, as lm-eval writes task names."""
    return re.sub(r"\W", "_", text)[:80] or "_"


def gold_of(record: SampleRecord) -> list[str]:
    """The right answers; in older journals, those that the task kept with the sample."""
    gold = record.get("gold")
    if gold is None:
        kept = record["meta"].get("answers", record["meta"].get("answer"))
        gold = kept if isinstance(kept, list) else [] if kept is None else [kept]
    return [str(one) for one in gold]


def write_lm_eval(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write one folder for each run, `<model>__<method>__<hash>`, into a folder; returns the files."""
    written: list[Path] = []
    for run in runs:
        record = run.record
        folder = to / "__".join(file_name(part) for part in (record.model, record.method, record.hash[:12]))
        date = re.sub(r"[^0-9A-Za-z+.-]", "-", record.ended or record.started or "0")
        made = {}
        for subset, samples in by_subset(run).items():
            path = folder / f"samples_{file_name(task_name(run, subset))}_{date}.jsonl"
            lines = [json.dumps(sample_of(run, index, item)) for index, item in enumerate(samples)]
            made[path] = "".join(f"{line}\n" for line in lines).encode()
        made[folder / f"results_{date}.json"] = json.dumps(plain(results_of(run)), indent=2, allow_nan=False).encode()
        written += write_files(to, made)
    return written


def first_answers(run: Stored, key: Callable[[SampleRecord], str]) -> dict[str, list[SampleRecord]]:
    """First answer to each sample, the only one in other formats, by a key of the sample."""
    by_sample: dict[str, list[SampleRecord]] = {}
    for sample in run.samples:
        if sample["repeat"] == 0:
            by_sample.setdefault(key(sample), []).append(sample)
    return by_sample


def by_subset(run: Stored) -> dict[str, list[SampleRecord]]:
    """The first answers of each subset."""
    return first_answers(run, lambda sample: sample["subset"])


def task_name(run: Stored, subset: str) -> str:
    """The name of a subset among lm-eval's tasks: the task's where it is the only one."""
    task = run.record.task
    return task if subset == task else f"{task}_{subset}"


def results_of(run: Stored) -> dict[str, Any]:
    """The content of results_DATE.json."""
    record, names = run.record, by_subset(run)
    tasks = {task_name(run, subset): subset for subset in names}
    results = {task: {"alias": task} | _scores(run, [subset]) for task, subset in tasks.items()}
    groups = {}
    if len(tasks) > 1:
        groups[record.task] = {"alias": record.task} | _scores(run, list(names))
    better = {name: metric.higher_is_better for name, metric in record.metrics.items()}
    counts = {task: {"original": len(names[subset]), "effective": len(names[subset])} for task, subset in tasks.items()}
    settings = settings_of(record)
    return {
        "results": groups | results,
        **({"groups": groups} if groups else {}),
        "group_subtasks": {record.task: list(tasks)} if groups else {task: [] for task in tasks},
        "configs": {task: {"task": task, "metadata": {"protocol": record.protocol}} for task in tasks},
        "versions": dict.fromkeys([*groups, *tasks], record.identity.get("task", {}).get("fingerprint", "")[:8]),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": dict.fromkeys([*groups, *tasks], better),
        "n-samples": counts,
        "config": {
            "model": "kvbench",
            "model_args": settings,
            "limit": settings.get("limit"),
            "random_seed": record.seed,
        },
        "git_hash": record.git.commit,
        "date": record.started,
        "model_name": record.model,
        "kvbench": {
            "method": record.method,
            "hash": record.hash,
            "ledger": record.ledger,
            "comparison": vars(record.comparison) | {"difference": vars(record.comparison.difference)}
            if record.comparison
            else None,
        },
    }


def _scores(run: Stored, subsets: Sequence[str]) -> dict[str, Any]:
    """Means and standard errors as lm-eval names them; `N/A` where there is no standard error."""
    scores: dict[str, Any] = {}
    chosen = [sample for sample in run.samples if sample["subset"] in subsets]
    for name in run.record.metrics:
        metric, _, filter_name = name.partition(",")
        key = filter_name or NONE
        values = values_by_sample(chosen, lambda sample, name=name: sample["scores"][name])[0]  # type: ignore[misc]
        if not values:
            continue
        strata = weighed([list(part.values()) for part in values.values()], run.record.weighting)
        error = standard_error(strata)
        scores[f"{metric},{key}"] = float(strata.mean())
        scores[f"{metric}_stderr,{key}"] = error[0] if error else "N/A"
        scores["sample_len"] = strata.count
    return scores


def sample_of(run: Stored, position: int, sample: SampleRecord) -> dict[str, Any]:
    """One line of samples_TASK_DATE.jsonl."""
    gold, prompt = gold_of(sample), sample.get("prompt")
    doc = {"sample_id": sample["sample_id"], **sample["meta"]}
    choices = [[choice["loglikelihood"], choice["greedy"]] for choice in sample.get("choices", [])]
    answer: list[Any] = choices or answers_of(sample)
    scores: Mapping[str, float | None] = sample["scores"]
    index = sample["meta"].get("index")
    return {
        "doc_id": index if isinstance(index, int) else position,
        "doc": doc,
        "target": gold[0] if len(gold) == 1 else str(gold),
        "arguments": {"gen_args_0": {"arg_0": prompt["tail"] if prompt else ""}},
        "resps": [[str(one)] for one in answer],
        "filtered_resps": [str(one) for one in answer],
        "filter": NONE,
        "metrics": list(scores),
        "doc_hash": _hash(json.dumps(doc, sort_keys=True)),
        "prompt_hash": prompt["sha256"] if prompt else "",
        "target_hash": _hash(str(gold)),
        "status": sample["status"],
        **scores,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def write_parquet(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write runs.parquet and samples.parquet into a folder; returns the two files."""
    answers: list[dict[str, Any]] = []
    for run, sample in [(one, sample) for one in runs for sample in one.samples]:
        prompt = sample.get("prompt")
        row = sample_row(run.record, run.folder, sample) | {"gold": gold_of(sample)}
        answers.append(row | {f"prompt_{key}": prompt[key] if prompt else None for key in ("sha256", "tail")})
    made = {"runs": [run_row(run.record, run.folder) for run in runs], "samples": answers}
    return write_files(to, {to / f"{name}.parquet": parquet_bytes(rows) for name, rows in made.items()})


def parquet_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as a parquet file; a column that holds values of several types holds them as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            columns[name] = pa.array([None if value is None else str(value) for value in values])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def write_leaderboard(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write one folder for each run of task=ruler and length, for a submission's `benchmark/`; returns the files."""
    chosen = [run for run in runs if run.record.task == RULER]
    if not chosen:
        there = ", ".join(sorted({run.record.task for run in runs}))
        raise Unsupported(
            f"format=leaderboard takes runs of task={RULER} alone, and these are of {there}; run task={RULER}",
            setting="format",
        )
    written: dict[Path, bytes] = {}
    for run in chosen:
        good = replace(run, samples=[sample for sample in run.samples if sample["status"] == "ok"])
        for length, samples in first_answers(good, lambda sample: str(sample["meta"].get("length", ""))).items():
            folder = to / folder_name(run.record, length)
            if folder / "config.yaml" in written:
                raise SettingsConflict(
                    f"two runs would be written to {folder}; choose one with methods=, models= or another to="
                )
            written[folder / "config.yaml"] = yaml.safe_dump(
                plain(config_of(run.record, length)), sort_keys=False
            ).encode()
            written[folder / "metrics.json"] = json.dumps(metrics_of(run.record, samples), indent=4).encode()
            written[folder / "predictions.csv"] = predictions_of(run.record, samples)
    return write_files(to, written)


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
    """`ruler__4096__Qwen--Qwen3-8B__snapkv__0.75`, and `__query_aware` after it where the question was seen."""
    parts = [RULER, file_name(length) if length else "", _model(record), press_of(record), f"{ratio_of(record):.2f}"]
    if record.protocol.get("query_aware", True):
        parts.append("query_aware")
    return "__".join(part for part in parts if part)


def _model(record: RunRecord) -> str:
    """Model name in a file name: slashes become two dashes, other forbidden characters one."""
    kept = "".join(char if char.isalnum() or char in ".-_" else "-" for char in record.model.replace("/", "--"))
    return kept.replace("__", "_").lstrip(".")[:80] or "model"


def config_of(record: RunRecord, length: str) -> dict[str, Any]:
    """The content of config.yaml."""
    settings = settings_of(record)
    return {
        "dataset": RULER,
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


FORMATS: dict[str, Callable[[list[Stored], Path], list[Path]]] = {
    "lm_eval": write_lm_eval,
    "parquet": write_parquet,
    "leaderboard": write_leaderboard,
}


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench export`."""
    if cfg.format not in FORMATS:
        raise unknown_name("format", cfg.format, FORMATS)
    if not cfg.to:
        raise SettingMissing(
            f"export needs a folder to write into: python -m kvbench export format={cfg.format} to=DIR", setting="to"
        )
    root = results_root(cfg.results_dir)
    runs = list(_wanted(cfg, root))
    if not runs:
        raise NoResults(f"no complete run under results_dir={root} fits tasks, models and methods")
    written = FORMATS[cfg.format](runs, Path(str(cfg.to)))
    terminal.print_paths(written, terminal.console(100))
    return 0


def _wanted(cfg: DictConfig, root: Path) -> Iterator[Stored]:
    """The complete runs that the filters let through; the others are named."""
    filters = [patterns(cfg.get(name)) for name in ("tasks", "models", "methods")]
    left_out: dict[str, str] = {}
    for folder, record in find_runs(root, left_out, filters):
        name = folder.relative_to(root).as_posix()
        if record.status != "complete":
            left_out[name] = f"it is {record.status}"
            continue
        try:
            samples, damaged = read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)
        except (ValueError, OSError) as error:
            left_out[name] = str(error)
            continue
        if damaged or not samples:
            left_out[name] = f"samples.jsonl has {damaged} damaged lines and {len(samples)} samples"
            continue
        yield Stored(folder=folder, record=record, samples=list(samples.values()))
    for name, reason in left_out.items():
        note(f"{safe(name)} is left out: {safe(reason, 400)}")
