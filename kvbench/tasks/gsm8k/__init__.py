"""`task=gsm8k`: grade-school mathematics, in the three forms that papers use.

`cot8`: eight fixed worked examples, "Q: ... A:"; `fewshot5`: five examples of the train file, "Question: ... Answer:",
with its calculator annotations and `####`; `zeroshot`: the question alone, in the chat template where there is one.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from kvbench.rules import Choice
from kvbench.tasks.answers import to_number
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.gsm8k.shots import COT8
from kvbench.tasks.problems import Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.taskset import MetricInfo

FORMS = ("cot8", "fewshot5", "zeroshot")
HUB = "openai/gsm8k"
NUM_SHOTS = 5
# Rows, and the SHA-256 of the file of openai/grade-school-math at 3101c7d.
SPLITS = {"test": (1319, ""), "train": (7473, "6043ef64147b59871f4fd3adf669c306fe0a4c27e5a5c4bfb761f3f084895a13")}
_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, kw_only=True)
class Gsm8k(Problems):
    """The task.

    Args:
        form: How the problems are asked.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the final number is right"),
        "parsed": MetricInfo(True, "the answer holds a number to grade; a wrong answer is not a parse failure"),
    }

    form: Annotated[str, Choice(FORMS)] = FORMS[0]

    def files(self) -> list[DataFile]:
        return [data_file(split) for split in SPLITS]

    def yamls(self) -> list[str]:
        return [f"kvbench_gsm8k_{self.form}"]

    def metadata(self, seed: int) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "seed": seed}

    def told(self) -> dict[str, Any]:
        return {"form": self.form, "split": "after the examples"}


def data_file(split: str) -> DataFile:
    """The file of a split."""
    rows, official = SPLITS[split]
    return DataFile(
        task="gsm8k",
        stems=(split,),
        rows=rows,
        check=check_row,
        hub=((HUB, f"main/{split}-00000-of-00001.parquet"),),
        prepared=("gsm8k", "main", split),
        official=official,
        by_hand=f"put {split}.jsonl of the repository openai/grade-school-math (grade_school_math/data) into a folder",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `question`, and `answer`: the solution, with its number behind `####`.

    Returns:
        `question`, `solution` (as in the file, without the last line), `answer` (the number as text).
    """
    question = text_field(row, "question")
    solution, marker, answer = text_field(row, "answer").rpartition("####")
    if not marker or to_number(answer) is None:
        raise ValueError("field answer must end with '#### ' and a number")
    return {"question": question.strip(), "solution": solution.strip(), "answer": answer.strip()}


def plain(solution: str) -> str:
    """A solution without the calculator annotations (`<<48/2=24>>`)."""
    return _ANNOTATION.sub("", solution)


def load(form: str, data_dir: str | None = None, seed: int = 0, **_: object) -> dict[str, Rows]:
    """The test split in one form, for lm-eval, as the YAMLs' `custom_dataset`.

    The seed chooses the five examples of `fewshot5`, the same for every question.

    Returns:
        `test`: rows with `context` (the examples), `question`, `gold`, `answer`, `index`.
    """
    rows = find_rows(data_file("test"), data_dir)
    context, skipped = "", []
    if form == "cot8":
        context = "".join(f"Q: {question}\nA: {why} The answer is {answer}.\n\n" for question, why, answer in COT8)
    elif form == "fewshot5":
        train = find_rows(data_file("train"), data_dir)
        skipped = train.quarantined
        if len(train) < NUM_SHOTS:
            raise ValueError(
                f"task.form=fewshot5 draws {NUM_SHOTS} examples, and the train file has {len(train)}; copy it "
                "again or take task.form=cot8"
            )
        shots = random.Random(seed).sample(list(train), NUM_SHOTS)
        context = "".join(
            f"Question: {row['question']}\nAnswer: {row['solution']}\n#### {row['answer']}\n\n" for row in shots
        )
    documents = [row | {"context": context, "gold": _gold(form, row)} for row in rows]
    return {"test": rows.made_into(documents, skipped=skipped)}


def _gold(form: str, row: Mapping[str, Any]) -> str:
    """The reference solution as an answer in this form would read."""
    if form == "fewshot5":
        return f"{row['solution']}\n#### {row['answer']}"
    joint = " " if form == "cot8" else "\n"
    return f"{plain(row['solution']).replace(chr(10), joint)}{joint}The answer is {row['answer']}."
