"""Rows of GSM8K, and the worked examples in front of them."""

import random
import re
from collections.abc import Mapping
from typing import Any

from kvbench.tasks.answers import to_number
from kvbench.tasks.gsm8k.shots import COT8
from kvbench.tasks.problem_source import Place, find_rows, text_field
from kvbench.tasks.source import Rows

HUB = "openai/gsm8k"
NUM_SHOTS = 5
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def place(split: str) -> Place:
    """Where the file of a split is."""
    return Place(
        task="gsm8k",
        what=f"the split {split}",
        stems=(split,),
        hub=((HUB, f"main/{split}-00000-of-00001.parquet"),),
        prepared=(("gsm8k", "main", split),),
        fetch=f"To get it, put {split}.jsonl of the repository openai/grade-school-math (grade_school_math/data) into "
        f"a folder and set task.data_dir to it, or run `hf download {HUB} --repo-type dataset` where "
        "there is a network.",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `question`, and `answer`: the solution, with its number behind `####`.

    Returns:
        `question`, `solution` (as in the file, without the last line), `answer` (the number as text).

    Raises:
        ValueError: What is wrong with the row.
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
    """The test split; the function that the YAMLs name as `custom_dataset`.

    Args:
        form: `cot8`, `fewshot5` or `zeroshot`.
        data_dir: Folder with `test.jsonl`, and `train.jsonl` for `fewshot5`.
        seed: Chooses the five examples of `fewshot5`, the same for every question.

    Returns:
        `test`: rows with `context` (the examples), `question`, `gold`, `answer`, `index`.

    Raises:
        MissingDataError: No source has a file.
        ValueError: data_dir is no folder, or all rows of a file are broken.
    """
    rows = find_rows(place("test"), data_dir, check_row)
    context, skipped = "", []
    if form == "cot8":
        context = "".join(f"Q: {question}\nA: {why} The answer is {answer}.\n\n" for question, why, answer in COT8)
    elif form == "fewshot5":
        train = find_rows(place("train"), data_dir, check_row)
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
