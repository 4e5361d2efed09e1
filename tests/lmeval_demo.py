"""Task YAMLs of our own for lm-eval, one of each kind, with made-up data, and a tiny model that answers them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvbench.lm import KvbenchLM
from kvbench.runs.graders import grade_outcome
from kvbench.tasks import load_task

TINY = {
    "model": "random",
    "model.preset": "tiny",
    "model.num_layers": 2,
    "model.dtype": "float32",
    "model.device": "cpu",
    "backend": "torch",
}
DATA = (
    "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.json\n    train: {folder}/shots.json\n"
)
PICK = """task: demo_pick
tag: demo_tag
test_split: test
fewshot_split: train
fewshot_config: {sampler: first_n}
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITE = """task: demo_write
tag: [demo_tag, other]
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
filter_list:
  - name: raw
    filter: [{function: take_first}]
  - name: letters
    filter: [{function: regex, regex_pattern: "([A-Za-z]+)"}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
LAST = """task: demo_last
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[label]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GROUP = "group: demo_group\ntask: [demo_pick, demo_inner]\n"
INNER = "group: demo_inner\ntask: [demo_last]\n"
CHOICES = (["red", "a light green", "blue"], ["one", "twenty"], ["A", "B", "C", "D"], ["x", "y"])


def write_folder(root: Path) -> Path:
    """Fill a folder with the YAMLs and their data; one group's member lies in a folder below."""
    rows = [
        {"question": f"Which is number {n}? " * (4 + n), "choices": choices, "label": n % len(choices)}
        for n, choices in enumerate(CHOICES)
    ]
    for name, part in (("rows", rows), ("shots", rows[::-1])):
        (root / f"{name}.json").write_text("\n".join(map(json.dumps, part)))
    (root / "deep").mkdir()
    for path, text in {"pick": PICK, "write": WRITE, "deep/last": LAST}.items():
        (root / f"{path}.yaml").write_text(text + DATA.format(folder=root))
    (root / "group.yaml").write_text(GROUP)
    (root / "deep" / "inner.yaml").write_text(INNER)
    return root


@cache
def lm_of(method: str = "full", **more) -> KvbenchLM:
    """A tiny random model under a method."""
    return KvbenchLM(method=method, batch_size=2, **TINY, **more)


def task_of(folder: Path, lm: KvbenchLM, name: str, protocol: dict | None = None, **settings):
    """The task as `task=lm_eval` loads it."""
    cfg = {"harness": "lm_eval", "name": name, "include_path": str(folder)} | settings
    return load_task(cfg, lm.model, limit=None, seed=0, protocol=dict(lm.config.protocol) | (protocol or {}))


def outcomes_of(lm: KvbenchLM, requests: list, forced: int = 0) -> dict:
    """What the model answers, and so many tokens of the right answers forced."""
    config = lm.config
    lm.config = replace(config, fidelity=replace(config.fidelity, max_tokens=forced))
    try:
        return lm._run(requests)
    finally:
        lm.config = config


def answered(lm: KvbenchLM, task) -> list[dict]:
    """Journal-like records of every request, scored."""
    outcomes = outcomes_of(lm, task.requests, forced=4)
    return [
        {
            "sample_id": request.sample_id,
            "subset": request.subset,
            "text": outcomes[request.sample_id].text,
            "choices": outcomes[request.sample_id].choices,
            "scores": grade_outcome(task, request, outcomes[request.sample_id])[1],
        }
        for request in task.requests
    ]
