"""`task=longbench`: the 16 English subsets of LongBench and the 13 of LongBench-E, as their authors ask and score.

Prompts, answer lengths and scores are in the YAMLs of this folder (one lm-eval task per subset) and in `metrics.py`.
Kept from the official code: prompts without change (narrativeqa's "asconcisely" too), cutting from the middle, no chat
template around trec, triviaqa, samsum, lcc and repobench-p, scoring of the first line for trec, triviaqa and samsum,
the newline as an end token of samsum.

Source: LongBench config/dataset2prompt.json, config/dataset2maxlen.json, pred.py, eval.py, metrics.py at 2e00731.
Differs: the chat template is the tokenizer's own (the official code has hand-written ones for eight models of 2023);
    prompts are cut to what the model holds beside answer and template unless `task.max_prompt_tokens` says otherwise;
    the ratio behind the code scores is pinned (see `metrics.code_similarity`). With `protocol.query_aware=false` the
    prompt is divided after the document: nothing behind the context, neither question nor closing instruction, is seen
    before compression.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvbench.rules import Whole
from kvbench.tasks.draw import Limit, drawn
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.longbench.dataset import length_bucket
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, TaskSettings, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

ENGLISH = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)
LONGBENCH_E = tuple(f"{name}_e" for name in ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))
# The headings of the paper's table 1; `kvbench table by=category` has the same.
CATEGORIES = {
    "Single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot learning": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}
CATEGORY = {subset: name for name, subsets in CATEGORIES.items() for subset in subsets}
GROUPS = {"en": ENGLISH, "e": LONGBENCH_E}
METRICS = {
    "score": MetricInfo(
        True,
        "the subset's official score: F1 of words (question answering), ROUGE-L (summaries), class found (trec), "
        "share of numbers that are right (passage tasks), edit similarity (code)",
    )
}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        subsets: Subsets, or groups of `GROUPS`.
        data_dir: Folder with their files; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes.
    """

    subsets: Annotated[str | Sequence[str], names_of((*ENGLISH, *LONGBENCH_E), GROUPS)] = "en"
    data_dir: DataDir = None
    max_prompt_tokens: Annotated[int | None, Whole(2, unit="tokens")] = None


SETTINGS = {"longbench": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the subsets that the configuration names.

    Args:
        cfg: The settings.
        model: Tokenizes the prompts; its context length limits them.
        limit: Which samples of each subset; None for all.
        seed: Not used: nothing here is random.
        protocol: How the samples are asked.

    Raises:
        ValueError: Missing data, or a subset whose rows are all broken.
    """
    subsets = name_list(cfg.subsets, GROUPS)
    names = {subset: f"kvbench_longbench_{subset}" for subset in subsets}
    tasks = load_lmeval_tasks(_FOLDER, list(names.values()), {"data_dir": cfg.data_dir})
    requests: list[Request] = []
    scored: dict[str, tuple[Task, dict]] = {}
    quarantined: list[dict] = []
    copies: list[dict] = []
    rules: dict[str, dict] = {}
    for subset, name in names.items():
        task = tasks[name]
        quarantined += task.dataset["test"].quarantined
        copies += task.dataset["test"].copies
        builder = PromptBuilder(model, protocol, PromptRules.from_yaml(task.config), cfg.max_prompt_tokens)
        rules[subset] = {
            "chat_template": builder.chat,
            "max_new_tokens": builder.max_new_tokens,
            "max_prompt_tokens": builder.max_prompt_tokens,
            "thinking": builder.thinking,
        }
        docs = task.eval_docs
        for doc in (docs[at] for at in drawn(len(docs), limit, subset)):
            request = make_request(task, builder, doc, subset)
            requests.append(request)
            scored[request.sample_id] = (task, doc)
    if protocol.chat_setting is not None and not any(rule["chat_template"] for rule in rules.values()):
        raise ValueError(
            f"{protocol.chat_setting} needs a chat, and LongBench asks none of "
            f"{', '.join(subsets)} as one; take other subsets, or set protocol.chat_template=always"
        )
    references = {key: [doc["answers"], doc["all_classes"], doc["length"]] for key, (_, doc) in scored.items()}
    return TaskSet(
        name="longbench",
        protocol=protocol.to_dict()
        | {"truncation": "middle", "split": "after the context", "thoughts": "not graded", "rules": rules},
        fingerprint=fingerprint(requests, references, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=scorer_of(scored),
        quarantined=quarantined,
        copies=copies,
        by=("category",),
    )


def make_request(task: "Task", builder: PromptBuilder, doc: dict, subset: str) -> "Request":
    """The request of one document; its prompt is divided behind the context."""
    prompt = task.doc_to_text(doc)
    head, _, _ = task.config.doc_to_text.partition("{{context}}")
    border = len(head) + len(doc["context"])
    meta = {"index": doc["index"], "length": doc["length"], "category": CATEGORY[subset.removesuffix("_e")]}
    if subset.endswith("_e"):
        meta["length_bucket"] = length_bucket(doc["length"])
    return builder.build(
        sample_id=f"{subset}/{doc['index']}",
        subset=subset,
        context=prompt[:border],
        question=prompt[border:],
        gold=doc["answers"][0],
        answers=doc["answers"],
        meta=meta,
    )
