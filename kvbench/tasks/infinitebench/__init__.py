"""`task=infinitebench`: the three retrieval subsets of InfiniteBench, each in texts of 100,000 tokens and more.

A pass key, a string of repeated digits, and a value of a JSON object of UUIDs. Prompts that the model does not hold
lose their middle, as with the authors, and with it often the answer: `max_prompt_tokens` and `counts.truncated` say so.

Source: Zhang et al., "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens", 2024; src/prompt.py
    (yarn_mistral_templates), src/eval_utils.py, src/compute_scores.py of OpenBMB/InfiniteBench at 220fd2e and 0ce4c97.
Differs: in a chat, what their templates end with begins the model's answer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.tasks.files import DataFile, find_rows, read_each
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Ask, DataDir, MaxPromptTokens, Task, at_hand_of, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.engine.requests import Request

REPO = "xinrongzhang2022/InfiniteBench"
_HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it{and_more}. I will quiz you about the "
)
_HIDDEN += "important information there.\n\n"


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One subset."""

    begin: str  # what stands before the text
    prefix: str  # how the answer begins; empty where it just begins
    answer_tokens: int  # longest answer after the prefix
    rows: int


# Source: InfiniteBench src/prompt.py (yarn_mistral_templates) and src/eval_utils.py at 220fd2e.
SUBSETS = {
    "passkey": Subset(
        begin=_HIDDEN.format(and_more=" and memorize them"), prefix="The pass key is", answer_tokens=6, rows=590
    ),
    "number_string": Subset(
        begin=_HIDDEN.format(and_more=""), prefix="The sequence of digits is", answer_tokens=12, rows=590
    ),
    "kv_retrieval": Subset(
        begin="Extract the value corresponding to the specified key in the JSON object below.\n\n",
        prefix="",
        answer_tokens=50,
        rows=500,
    ),
}
GROUPS = {"retrieval": tuple(SUBSETS)}
# A chat model that begins its answer itself needs more than the few tokens after the prefix.
WHOLE_ANSWER_TOKENS = 50


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(Task):
    """The task.

    Args:
        subsets: Subsets, `available` for those at hand, or `retrieval` for all three.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with their files; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes, `fit:N` for N at most.
    """

    metrics: ClassVar = {
        "score": MetricInfo(True, "the first number is the right one; kv_retrieval: the value stands in the answer")
    }

    subsets: Annotated[str | Sequence[str], names_of(tuple(SUBSETS), GROUPS, of_files=True)] = "retrieval"
    answer_prefix: bool = True
    data_dir: DataDir = None
    max_prompt_tokens: MaxPromptTokens = None

    @cached_property
    def chosen(self) -> tuple[list[str], list[str]]:
        """The subsets, and those that are left out as they are not at hand."""
        return at_hand_of(self.subsets, GROUPS, "retrieval", data_file, self.data_dir)

    def files(self) -> list[DataFile]:
        return [data_file(name) for name in self.chosen[0]]

    def data(self, seed: int, protocol: Protocol) -> dict[str, Rows]:
        return read_each(self.chosen[0], lambda name: find_rows(data_file(name), self.data_dir))

    def load(self, ask: Ask) -> TaskSet:
        rows_by_subset = self.data(ask.seed, ask.protocol)
        requests: list[Request] = []
        right: dict[str, tuple[str, str]] = {}
        for name, rows in rows_by_subset.items():
            subset = SUBSETS[name]
            prefix = f"\n\n{subset.prefix}" if self.answer_prefix and subset.prefix else ""
            tokens = subset.answer_tokens if prefix else WHOLE_ANSWER_TOKENS
            rules = PromptRules(max_new_tokens=tokens, chat_template=True)
            builder = PromptBuilder(ask.model, ask.protocol, rules, self.max_prompt_tokens)
            if prefix:
                builder.check_prefix()
            for row in ask.drawn(rows, name):
                request = builder.build(
                    sample_id=f"{name}/{row['index']}",
                    subset=name,
                    context=subset.begin + row["context"],
                    question=f"\n\n{row['input']}",
                    gold=row["answer"],
                    prefix=prefix,
                    meta={"index": row["index"]},
                )
                requests.append(request)
                right[request.sample_id] = name, row["answer"]
        return self.task_set(
            ask,
            requests,
            builder.protocol_notes() | {"answer_prefix": self.answer_prefix, "split": "after the text"},
            right,
            lambda sample_id, answer: {"score": float(is_right(*right[sample_id], answer))},
            rows=rows_by_subset.values(),
            missing=self.chosen[1],
        )


def is_right(subset: str, wanted: str, answer: str) -> bool:
    """The official scores of a subset: the first run of digits is right, or for kv_retrieval any of the words."""
    if subset == "kv_retrieval":
        return wanted in re.split(r"[\s:\"'.,?!{}]+", answer)
    digits = re.search(r"[0-9]+", answer)
    return digits is not None and digits[0] == wanted


def data_file(subset: str) -> DataFile:
    """The file of a subset."""
    return DataFile(
        task="infinitebench",
        stems=(subset,),
        rows=SUBSETS[subset].rows,
        check=check_row,
        key="subsets",
        hub=((REPO, f"{subset}.jsonl"),),
        prepared=("InfiniteBench", "default", subset),
        by_hand=f"run `hf download {REPO} {subset}.jsonl --repo-type dataset --local-dir FOLDER`",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    `context` (in some copies `content`), `input`, `answer` (a text, or the first of a list).
    """
    value = row.get("answer")
    answer = value[0] if isinstance(value, list) and value else value
    texts = {"context": text_field(row, "context", "content"), "input": text_field(row, "input")}
    return texts | {"answer": text_field({"answer": answer}, "answer").strip()}
