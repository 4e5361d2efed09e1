"""lm-eval's own files: results_DATE.json and samples_TASK_DATE.jsonl, which its table, its hub upload and other tools
read.

Source: lm-eval 0.4.13, loggers/evaluation_tracker.py and evaluator.py.
Differs: `arguments` holds the end of the prompt, which is what a journal keeps; `prompt_hash` is over token ids;
    `results` has `kvbench` beside lm-eval's keys: method, bytes, and the difference to the full cache.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.api.load import settings_of
from kvbench.export.stored import Stored, file_name, gold_of
from kvbench.results.sample import SampleRecord, answers_of
from kvbench.results.summary import values_by_sample
from kvbench.results.writing import plain, write_file
from kvbench.stats.strata import standard_error, weighed

NONE = "none"  # lm-eval's name of the filter that does nothing


def write(runs: Sequence[Stored], to: Path) -> list[Path]:
    """Write one folder for each run: `<model>__<method>__<hash>`.

    Args:
        runs: What to write.
        to: Folder.

    Returns:
        The files.
    """
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
