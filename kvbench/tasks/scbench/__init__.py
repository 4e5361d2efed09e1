"""`task=scbench`: many questions about one long context, from SCBench's files.

Five of its twelve subsets, whose scores are found texts. As a conversation (`form=turns`) each question is read into
the compressed cache after the answer before it. As requests of their own (`form=requests`) with
`protocol.query_aware=false`, all questions of a context share its compressed cache: SCBench's multi-request mode.

Source: Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods", 2024; scbench/eval_utils.py and
    scbench/compute_scores.py of microsoft/MInference at 0ff346d and 9987de6: templates, lengths, scores.
Differs: a conversation goes on after the model's own answer, where the original puts the right one by default. An
    answer that is one text is compared as a whole; `many_shot` and `qa_eng` of the original would compare its letters.
    Their shares are not rounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.rules import Choice
from kvbench.tasks.files import DataFile, find_rows, read_each
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Ask, DataDir, MaxPromptTokens, Task, at_hand_of, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.engine.requests import Request

REPO = "microsoft/SCBench"


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One subset."""

    begin: str = ""  # what stands before the context
    ask: str = "{}"  # form of a question
    answer_tokens: int
    folded: bool = True  # whatever case
    all_of: bool = False  # the share of the right texts counts; else any is enough


SUBSETS = {
    "kv": Subset(
        begin="Extract the value corresponding to the specified key in the JSON object below.\n\n",
        answer_tokens=150,
        folded=False,
    ),
    "prefix_suffix": Subset(answer_tokens=150, folded=False),
    "vt": Subset(answer_tokens=30, all_of=True),
    "many_shot": Subset(answer_tokens=10),
    "qa_eng": Subset(
        begin="Read the book and answer the question. Be very concise in your answer.\n\n",
        ask="Question: {}\nAnswer:",
        answer_tokens=40,
    ),
}
GROUPS = {"all": tuple(SUBSETS)}
TURNS, REQUESTS = "turns", "requests"


@dataclass(frozen=True, kw_only=True)
class ScBench(Task):
    """The task.

    Args:
        subsets: Subsets, `available` for those at hand, or `all` for these five.
        form: `turns`: one conversation for each context; `requests`: each question by itself.
        data_dir: Folder with their files; None for the local caches, then the hub.
        max_prompt_tokens: Longer prompts lose their middle; None for what the model takes, `fit:N` for N at most.
    """

    metrics: ClassVar = {
        "score": MetricInfo(True, "a right text stands in the answer; vt: the share of the right names that do")
    }

    subsets: Annotated[str | Sequence[str], names_of(tuple(SUBSETS), GROUPS, of_files=True)] = "all"
    form: Annotated[str, Choice((TURNS, REQUESTS))] = TURNS
    data_dir: DataDir = None
    max_prompt_tokens: MaxPromptTokens = None

    @cached_property
    def chosen(self) -> tuple[list[str], list[str]]:
        """The subsets, and those that are left out as they are not at hand."""
        return at_hand_of(self.subsets, GROUPS, "all", data_file, self.data_dir)

    def files(self) -> list[DataFile]:
        return [data_file(name) for name in self.chosen[0]]

    def data(self, seed: int, protocol: Protocol) -> dict[str, Rows]:
        return read_each(self.chosen[0], lambda name: find_rows(data_file(name), self.data_dir))

    def load(self, ask: Ask) -> TaskSet:
        rows_by_subset = self.data(ask.seed, ask.protocol)
        requests: list[Request] = []
        right: dict[str, tuple[str, list[list[str]]]] = {}
        for name, rows in rows_by_subset.items():
            subset = SUBSETS[name]
            rules = PromptRules(max_new_tokens=subset.answer_tokens, chat_template=True)
            builder = PromptBuilder(ask.model, ask.protocol, rules, self.max_prompt_tokens)
            for row in ask.drawn(rows, name):
                questions = [(subset.ask.format(turn["input"]), turn["answers"]) for turn in row["turns"]]
                parts = [questions] if self.form == TURNS else [[one] for one in questions]
                for number, ((question, answers), *later) in enumerate(parts):
                    sample_id = f"{name}/{row['index']}" + (f"/{number}" if self.form == REQUESTS else "")
                    requests.append(
                        builder.build(
                            sample_id=sample_id,
                            subset=name,
                            context=subset.begin + row["context"],
                            question=f"\n\n{question}",
                            **_right(subset, answers),
                            meta={"index": row["index"]},
                            turns=[builder.turn(said, **_right(subset, texts)) for said, texts in later],
                        )
                    )
                    right[sample_id] = name, [answers, *(texts for _, texts in later)]

        def score_turn(sample_id: str, turn: int, answer: str) -> dict[str, float]:
            name, answers = right[sample_id]
            return {"score": grade(SUBSETS[name], answers[turn], answer)}

        return self.task_set(
            ask,
            requests,
            builder.protocol_notes() | {"form": self.form, "split": "after the context"},
            right,
            lambda sample_id, answer: score_turn(sample_id, 0, answer),
            turn_scorer=score_turn,
            rows=rows_by_subset.values(),
            missing=self.chosen[1],
        )


def _right(subset: Subset, answers: list[str]) -> dict[str, Any]:
    """The right answers, and the text that is forced for them."""
    return {"answers": answers, "gold": ", ".join(answers) if subset.all_of else answers[0]}


def grade(subset: Subset, answers: Sequence[str], answer: str) -> float:
    """The share of the right texts that stand in an answer, or 1 where any does."""
    said = answer.lower() if subset.folded else answer
    there = [(text.lower() if subset.folded else text) in said for text in answers]
    return sum(there) / len(there) if subset.all_of else float(any(there))


def data_file(subset: str) -> DataFile:
    """The file of a subset."""
    return DataFile(
        task="scbench",
        stems=(f"scbench_{subset}", subset),
        rows=0,
        check=check_row,
        key="subsets",
        hub=((REPO, f"data/scbench_{subset}.jsonl"),),
        prepared=("SCBench", f"scbench_{subset}", "test"),
        by_hand=f"run `hf download {REPO} data/scbench_{subset}.jsonl --repo-type dataset --local-dir FOLDER`",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line: `context` (in some files `input`), and `multi_turns`.

    That is a list of objects with `input` and `answer` (a text, a number, or a list of these).
    """
    turns = row.get("multi_turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("field multi_turns must be a list of objects with input and answer")
    checked = []
    for turn in turns:
        value = turn.get("answer")
        texts = [str(one).strip() for one in (value if isinstance(value, list) else [value]) if one is not None]
        if not texts or not all(texts):
            raise ValueError(f"field multi_turns.answer must be a text or a list of texts, it is {value!r}")
        checked.append({"input": text_field(turn, "input").strip(), "answers": texts})
    return {"context": text_field(row, "context", "input"), "turns": checked}
