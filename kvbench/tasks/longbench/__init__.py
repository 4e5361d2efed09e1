"""`task=longbench`: the 16 English subsets of LongBench and the 13 of LongBench-E, with their prompts and scores.

Prompts, answer lengths and scores are in the YAMLs of this folder (one lm-eval task per subset) and in `metrics.py`.
Kept from the official code: prompts without change (narrativeqa's "asconcisely" too), cutting from the middle, no chat
template around trec, triviaqa, samsum, lcc and repobench-p, scoring of the first line for trec, triviaqa and samsum,
the newline as an end token of samsum.

Source: LongBench config/dataset2prompt.json, config/dataset2maxlen.json, pred.py, eval.py, metrics.py at 2e00731.
Differs: the chat template is the tokenizer's own (the official code has hand-written ones for eight models of 2023);
    prompts are cut to what the model holds with answer and template unless `task.max_prompt_tokens` says otherwise;
    the ratio after the code scores is pinned (see `metrics.code_similarity`). With `protocol.query_aware=false` the
    prompt is divided after the document: nothing after the context, neither question nor closing instruction, is seen
    before compression.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeGuard

from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.longbench.metrics import REFERENCE
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows, kind_of, text_field
from kvbench.tasks.task import Ask, DataDir, MaxPromptTokens, Task, at_hand_of, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from lm_eval.api.task import Task as LmEvalTask

    from kvbench.engine.requests import Request

ENGLISH = tuple(
    "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa samsum "
    "passage_count passage_retrieval_en lcc repobench-p".split()
)
LONGBENCH_E = tuple(f"{name}_e" for name in ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))
# The headings of the paper's table 1; `kvbench report view=table by=category` has the same.
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
# Rows as the authors publish them (the hub's viewer of their repository); the others have 200, and 300 in LongBench-E.
ROWS = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
ROWS |= {"qasper_e": 224, "multifieldqa_en_e": 150, "multi_news_e": 294}
# The data set moved from the first id to the second; the hub and local caches may have it under either.
NEXT_LINE = "Next line of code:\n"  # at the end of the prompts about code
HUB_REPOS, HUB_ARCHIVE = ("THUDM/LongBench", "zai-org/LongBench"), "data.zip"


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """The task.

    Args:
        subsets: Subsets, `available` for those at hand, or groups of `GROUPS`.
        data_dir: Folder with their files; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes, `fit:N` for N at most.
        next_line: The prompts about code end with `NEXT_LINE`, as the official ones do. KV-Compress leaves it out for
            Llama-3.1-70B, section 5.5.
    """

    metrics: ClassVar = {
        "score": MetricInfo(
            True,
            "the subset's official score: F1 of words (question answering), ROUGE-L (summaries), class found (trec), "
            "share of numbers that are right (passage tasks), edit similarity (code)",
        )
    }

    subsets: Annotated[str | Sequence[str], names_of((*ENGLISH, *LONGBENCH_E), GROUPS, of_files=True)] = "en"
    data_dir: DataDir = None
    max_prompt_tokens: MaxPromptTokens = None
    next_line: bool = True

    @cached_property
    def chosen(self) -> tuple[list[str], list[str]]:
        """The subsets, and those that are left out as they are not at hand."""
        return at_hand_of(self.subsets, GROUPS, "en", data_file, self.data_dir)

    def files(self) -> list[DataFile]:
        return [data_file(subset) for subset in self.chosen[0]]

    def data(self, seed: int, protocol: Protocol) -> "dict[str, LmEvalTask]":
        names = [f"kvbench_longbench_{subset}" for subset in self.chosen[0]]
        return load_lmeval_tasks(self.folder(), names, {"data_dir": self.data_dir})

    def load(self, ask: Ask) -> TaskSet:
        tasks = {
            name.removeprefix("kvbench_longbench_"): task for name, task in self.data(ask.seed, ask.protocol).items()
        }
        requests: list[Request] = []
        scored: dict[str, tuple[LmEvalTask, dict]] = {}
        rules: dict[str, dict] = {}
        for subset, task in tasks.items():
            builder = PromptBuilder(ask.model, ask.protocol, PromptRules.from_yaml(task.config), self.max_prompt_tokens)
            rules[subset] = {
                "chat_template": builder.chat,
                "max_new_tokens": builder.max_new_tokens,
                "max_prompt_tokens": builder.max_prompt_tokens,
                "thinking": builder.thinking,
            }
            for doc in ask.drawn(task.eval_docs, subset):
                request = make_request(task, builder, doc, subset, self.next_line)
                requests.append(request)
                scored[request.sample_id] = (task, doc)
        return self.task_set(
            ask,
            requests,
            {"truncation": "middle", "split": "after the context", "thoughts": "not graded", "rules": rules},
            {key: [doc["answers"], doc["all_classes"], doc["length"]] for key, (_, doc) in scored.items()},
            scorer_of(scored),
            rows=[task.dataset["test"] for task in tasks.values()],
            by=("category",),
            missing=self.chosen[1],
        )


def make_request(
    task: "LmEvalTask", builder: PromptBuilder, doc: dict, subset: str, next_line: bool = True
) -> "Request":
    """The request of one document; its prompt is divided after the context."""
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
        question=prompt[border:] if next_line else prompt[border:].removesuffix(NEXT_LINE),
        gold=doc["answers"][0],
        answers=doc["answers"],
        meta=meta,
    )


def data_file(subset: str) -> DataFile:
    """The file of a subset; LongBench-E's are named `<subset>_e`."""
    return DataFile(
        task="longbench",
        stems=(subset,),
        rows=ROWS.get(subset, 300 if subset.endswith("_e") else 200),
        check=partial(check_row, subset=subset),
        key="subsets",
        hub=tuple(
            (repo, path) for path in (HUB_ARCHIVE, f"{subset}/test-00000-of-00001.parquet") for repo in HUB_REPOS
        ),
        prepared=("LongBench", subset, "test"),
        by_hand=f"unpack {HUB_ARCHIVE} of {HUB_REPOS[0]} into a folder",
    )


def load(subset: str, data_dir: str | None = None, **_: object) -> dict[str, Rows]:
    """The rows of a subset, for lm-eval, as the YAMLs' `custom_dataset`."""
    return {"test": find_rows(data_file(subset), data_dir)}


def check_row(row: Mapping[str, Any], subset: str) -> dict[str, Any]:
    """Check the object of a line and give it the official field names.

    The question is `input` officially and `question` in one copy on the hub. `all_classes` is None where the subset has
    none, and `length`, in words, where the file does not say.
    """
    name = row.get("dataset")
    if name is not None and name not in (subset, subset.removesuffix("_e")):
        raise ValueError(f"field dataset is {str(name)[:80]!r}: this row belongs to another subset than {subset}")
    question = row["input"] if "input" in row else row.get("question")
    context = text_field(row, "context")
    if not isinstance(question, str):
        raise ValueError(f"field input must be a text, it is {kind_of(question)}")
    answers = row.get("answers")
    if not _are_texts(answers):
        raise ValueError("field answers must be a list of at least one text")
    length = row.get("length")
    if isinstance(length, bool) or not isinstance(length, int | None):
        raise ValueError(f"field length must be a whole number, it is {length!r}")
    if length is None and subset.endswith("_e"):
        raise ValueError("field length is missing; LongBench-E reports its scores by length")
    base = subset.removesuffix("_e")
    classes = row.get("all_classes") if base == "trec" else None
    if base == "trec" and not _are_texts(classes):
        raise ValueError("field all_classes must be the list of class names")
    if base == "passage_retrieval_en" and not all(REFERENCE.search(answer) for answer in answers):
        raise ValueError(f"field answers must name a paragraph ('Paragraph 1'), it is {answers!r}")
    return {"context": context, "input": question, "answers": answers, "all_classes": classes, "length": length}


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def length_bucket(length: int) -> str:
    """LongBench-E's group of a document of that many words.

    Source: LongBench eval.py, scorer_e, at 2e00731.
    """
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
