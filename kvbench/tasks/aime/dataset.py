"""Rows of AIME 2024 and 2025."""

from collections.abc import Mapping
from typing import Any

from kvbench.tasks.aime.metrics import to_integer
from kvbench.tasks.answers import last_boxed
from kvbench.tasks.problem_source import Place, find_rows, text_field
from kvbench.tasks.source import Rows

HUB = {
    "aime24": (
        ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"),
        ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet"),
    ),
    "aime25": (("math-ai/aime25", "test.jsonl"),),
}
PREPARED = {"aime24": (("aime_2024", "default", "train"),), "aime25": (("aime25", "default", "test"),)}


def place(subset: str) -> Place:
    """Where the file of a year is."""
    repo, name = HUB[subset][0]
    return Place(
        task=subset,
        what="its problems",
        stems=("test", subset),
        hub=HUB[subset],
        prepared=PREPARED[subset],
        fetch=f"To get it, run `hf download {repo} {name} --repo-type dataset` where there is a network, or put "
        "test.jsonl with the fields problem and answer into a folder and set task.data_dir to it.",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `problem` (or `Problem`, `question`), `answer` (text or number; when it is missing, the solution's last
            box), `solution` where there is one.

    Returns:
        `problem`, `solution` (may be empty), `answer` (decimal digits without leading zeros).

    Raises:
        ValueError: What is wrong with the row.
    """
    problem = text_field(row, "problem", "Problem", "question")
    solution = text_field(row, "solution", "Solution", required=False).strip()
    answer = row.get("answer", row.get("Answer"))
    if answer is None:
        answer = last_boxed(solution) or ""
    value = None if isinstance(answer, bool) else to_integer(str(answer))
    if value is None or not 0 <= value <= 999:
        raise ValueError(f"field answer must be a whole number from 0 to 999, it is {answer!r}")
    return {"problem": problem.strip(), "solution": solution, "answer": str(value)}


def load(subset: str, data_dir: str | None = None, **_: object) -> dict[str, Rows]:
    """The problems; the function that the YAMLs name as `custom_dataset`.

    Args:
        subset: `aime24` or `aime25`.
        data_dir: Folder with `test.jsonl` or `<subset>.jsonl`.

    Returns:
        `test`: rows with `problem`, `gold`, `answer`, `context` (empty), `index`.

    Raises:
        MissingDataError: No source has it.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    rows = find_rows(place(subset), data_dir, check_row)
    documents = [row | {"context": "", "gold": _gold(row)} for row in rows]
    return {"test": rows.made_into(documents)}


def _gold(row: Mapping[str, Any]) -> str:
    """The solution, or where the file has none (or no more than the box), the boxed answer."""
    boxed = f"\\boxed{{{row['answer']}}}"
    return row["solution"] or boxed
