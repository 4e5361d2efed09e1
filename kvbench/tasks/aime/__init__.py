"""`task=aime24` and `task=aime25`: competition problems with answers from 0 to 999, asked for a boxed answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.tasks.aime import metrics
from kvbench.tasks.answers import last_boxed
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.problems import Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Draws
from kvbench.tasks.taskset import MetricInfo

HUB = {
    "aime24": (
        ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"),
        ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet"),
    ),
    "aime25": (("math-ai/aime25", "test.jsonl"),),
}
PREPARED = {"aime24": ("aime_2024", "default", "train"), "aime25": ("aime25", "default", "test")}


@dataclass(frozen=True, kw_only=True)
class Aime(Problems):
    """The task; a model's context must hold answers of 32,768 tokens unless `protocol.max_new_tokens` says otherwise.

    Args:
        k: Of how many answers pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the whole number in the last box (or behind 'the answer is') is right"),
        "parsed": MetricInfo(True, "the answer ends in a number to grade; a wrong one is not a parse failure"),
    }
    votes: ClassVar = True

    k: Draws = None

    def files(self) -> list[DataFile]:
        return [data_file(self.name)]

    def told(self) -> dict[str, Any]:
        return {"form": "boxed"}

    def vote(self, text: str, opened: bool) -> str | None:
        return metrics.vote(text, opened)


def data_file(subset: str) -> DataFile:
    """The file of a year."""
    repo, name = HUB[subset][0]
    return DataFile(
        task=subset,
        stems=("test", subset),
        rows=30,
        check=check_row,
        hub=HUB[subset],
        prepared=PREPARED[subset],
        by_hand=f"run `hf download {repo} {name} --repo-type dataset`, or put test.jsonl with the fields problem and "
        "answer into a folder",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `problem` (or `Problem`, `question`), `answer` (text or number; when it is missing, the solution's last
            box), `solution` where there is one.

    Returns:
        `problem`, `solution` (may be empty), `answer` (decimal digits without leading zeros).
    """
    problem = text_field(row, "problem", "Problem", "question")
    solution = text_field(row, "solution", "Solution", required=False).strip()
    answer = row.get("answer", row.get("Answer"))
    if answer is None:
        answer = last_boxed(solution) or ""
    value = None if isinstance(answer, bool) else metrics.to_integer(str(answer))
    if value is None or not 0 <= value <= 999:
        raise ValueError(f"field answer must be a whole number from 0 to 999, it is {answer!r}")
    return {"problem": problem.strip(), "solution": solution, "answer": str(value)}


def load(subset: str, data_dir: str | None = None, **_: object) -> dict[str, Rows]:
    """The problems of a year, for lm-eval, as the YAMLs' `custom_dataset`.

    Returns:
        `test`: rows with `problem`, `gold`, `answer`, `context` (empty), `index`.
    """
    rows = find_rows(data_file(subset), data_dir)
    # Where the file has no solution, the boxed answer stands for it.
    gold = [row["solution"] or f"\\boxed{{{row['answer']}}}" for row in rows]
    return {"test": rows.made_into(row | {"context": "", "gold": text} for row, text in zip(rows, gold, strict=True))}
