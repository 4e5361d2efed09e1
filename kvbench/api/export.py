"""`kvbench export`: stored runs in the formats of other programs.

`lm_eval`: lm-eval's own files, results_DATE.json and samples_TASK_DATE.jsonl, which its table, its hub upload and other
tools read. `parquet`: a row for each run, and a row for each answer, for DuckDB, Polars, pandas and the hub.
`leaderboard`: the folders of kvpress's evaluation, in `leaderboard.py`.

Source: lm-eval 0.4.13, loggers/evaluation_tracker.py and evaluator.py.
Differs: `arguments` holds the end of the prompt, which is what a journal keeps; `prompt_hash` is over token ids;
    `results` has `kvbench` beside lm-eval's keys: method, bytes, and the difference to the full cache.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbench.api import leaderboard
from kvbench.api.leaderboard import Stored, file_name, gold_of
from kvbench.api.load import run_row, sample_row, settings_of
from kvbench.errors import unknown_name
from kvbench.evidence.load import find_runs, patterns, results_root
from kvbench.results.sample import SampleRecord, answers_of, read_samples
from kvbench.results.summary import values_by_sample
from kvbench.results.writing import plain, write_file
from kvbench.show import terminal
from kvbench.show.progress import note
from kvbench.show.text import safe
from kvbench.stats.strata import standard_error, weighed

NONE = "none"  # lm-eval's name of the filter that does nothing


def write_lm_eval(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write one folder for each run, `<model>__<method>__<hash>`, into a folder; gives the files."""
    written = []
    for run in runs:
        record = run.record
        folder = to / "__".join(file_name(part) for part in (record.model, record.method, record.hash[:12]))
        date = re.sub(r"[^0-9A-Za-z+.-]", "-", record.ended or record.started or "0")
        for subset, samples in by_subset(run).items():
            path = folder / f"samples_{file_name(task_name(run, subset))}_{date}.jsonl"
            lines = [json.dumps(sample_of(run, place, item)) for place, item in enumerate(samples)]
            write_file(path, "".join(f"{line}\n" for line in lines).encode())
            written.append(path)
        path = folder / f"results_{date}.json"
        write_file(path, json.dumps(plain(results_of(run)), indent=2, allow_nan=False).encode())
        written.append(path)
    return written


def by_subset(run: Stored) -> dict[str, list[SampleRecord]]:
    """The first answers of each subset; lm-eval knows one to a document."""
    found: dict[str, list[SampleRecord]] = {}
    for sample in run.samples:
        if sample["repeat"] == 0:
            found.setdefault(sample["subset"], []).append(sample)
    return found


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
    found: dict[str, Any] = {}
    chosen = [sample for sample in run.samples if sample["subset"] in subsets]
    for name in run.record.metrics:
        metric, _, filter_name = name.partition(",")
        key = filter_name or NONE
        values = values_by_sample(chosen, lambda sample, name=name: sample["scores"][name])[0]  # type: ignore[misc]
        if not values:
            continue
        strata = weighed([list(part.values()) for part in values.values()], run.record.weighting)
        error = standard_error(strata)
        found[f"{metric},{key}"] = float(strata.mean())
        found[f"{metric}_stderr,{key}"] = error[0] if error else "N/A"
        found["sample_len"] = strata.count
    return found


def sample_of(run: Stored, place: int, sample: SampleRecord) -> dict[str, Any]:
    """One line of samples_TASK_DATE.jsonl."""
    gold, prompt = gold_of(sample), sample.get("prompt")
    doc = {"sample_id": sample["sample_id"], **sample["meta"]}
    choices = [[choice["loglikelihood"], choice["greedy"]] for choice in sample.get("choices", [])]
    answer: list[Any] = choices or answers_of(sample)
    scores: Mapping[str, float | None] = sample["scores"]
    index = sample["meta"].get("index")
    return {
        "doc_id": index if isinstance(index, int) else place,
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
    """Write runs.parquet and samples.parquet into a folder; gives the two files."""
    answers: list[dict[str, Any]] = []
    for run, sample in [(one, sample) for one in runs for sample in one.samples]:
        prompt = sample.get("prompt")
        row = sample_row(run.record, run.folder, sample) | {"gold": gold_of(sample)}
        answers.append(row | {f"prompt_{key}": prompt[key] if prompt else None for key in ("sha256", "tail")})
    made = {"runs": [run_row(run.record, run.folder) for run in runs], "samples": answers}
    written = {to / f"{name}.parquet": parquet_bytes(rows) for name, rows in made.items()}
    for path, content in written.items():
        write_file(path, content)
    return list(written)


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


FORMATS: dict[str, Callable[[list[Stored], Path], list[Path]]] = {
    "lm_eval": write_lm_eval,
    "parquet": write_parquet,
    "leaderboard": leaderboard.write,
}


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench export`."""
    if cfg.format not in FORMATS:
        raise unknown_name("format", cfg.format, FORMATS)
    if not cfg.to:
        raise ValueError(f"export needs a folder to write into: python -m kvbench export format={cfg.format} to=DIR")
    root = results_root(cfg.results_dir)
    runs = list(_wanted(cfg, root))
    if not runs:
        raise ValueError(f"no complete run under results_dir={root} fits tasks, models and methods")
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
            samples, damaged = read_samples(folder / "samples.jsonl", record.hash)
        except (ValueError, OSError) as error:
            left_out[name] = str(error)
            continue
        if damaged or not samples:
            left_out[name] = f"samples.jsonl has {damaged} damaged lines and {len(samples)} samples"
            continue
        yield Stored(folder=folder, record=record, samples=list(samples.values()))
    for name, reason in left_out.items():
        note(f"{safe(name)} is left out: {safe(reason, 400)}")
