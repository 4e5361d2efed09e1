"""`task=aime24`, `aime25` and `aime26`: competition problems with answers from 0 to 999, asked for a boxed answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.tasks.answers import TERM, final_answer, graded, last_boxed, to_number
from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.latex import judge, plain_symbols
from kvbench.tasks.problems import LAST, Instruction, Problems
from kvbench.tasks.rows import Rows, text_field
from kvbench.tasks.task import Draws
from kvbench.tasks.taskset import MetricInfo

HUB = {
    "aime24": (
        ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"),
        ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet"),
    ),
    "aime25": (("math-ai/aime25", "test.jsonl"),),
    "aime26": (("MathArena/aime_2026", "data/train-00000-of-00001.parquet"),),
}
PREPARED = {
    "aime24": ("aime_2024", "default", "train"),
    "aime25": ("aime25", "default", "test"),
    "aime26": ("aime_2026", "default", "train"),
}
MAX_ANSWER_CHARS = 200
_MODULUS = re.compile(r"\\p?mod\s*\{?\s*\d+\s*\}?|\(\s*\\?(?:p|b)?mod(?:ulo)?\s*\d+\s*\)")
_WORDS = re.compile(r"\\(?:text(?:bf|rm|it)?|mathbf|mathrm|mbox)\s*\{[^{}\d]*\}(?:\s*\^\s*\{?\d\}?)?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])|\u00b0|\b(?:degrees?|units?|dollars?)\b")
_WRAPPERS = re.compile(r"\\(?:text(?:bf|rm|it)?|mathbf|mathrm|mbox)\s*|\\[!,;: $]|[{}()\s$*]")
_WHOLE = re.compile(r"-?(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.0*+)?")
_SEVERAL = re.compile(r",|\d\s++\d|\bor\b")
_PHRASE = re.compile(rf"\banswer\s*+(?:is|:)[\s:*$]*+(?:\\\(\s*+)?({TERM})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Aime(Problems):
    """The task; a model's context must hold answers of 32,768 tokens unless `protocol.max_new_tokens` says otherwise.

    Args:
        k: Numbers of answers for which pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    metrics: ClassVar = {
        "correct": MetricInfo(True, "the whole number in the last box (or behind 'the answer is') is right"),
        "parsed": MetricInfo(True, "the answer ends in a number to grade; a wrong one is not a parse failure"),
    }
    votes: ClassVar = True
    instructions: ClassVar = {"boxed": Instruction(LAST)}

    k: Draws = None

    def files(self) -> list[DataFile]:
        return [data_file(self.name)]

    def protocol_notes(self) -> dict[str, Any]:
        return {"form": "boxed"}

    def vote(self, text: str, opened: bool) -> str | None:
        answer = final_answer(text, find_gradable, opened)
        value = None if answer is None else to_integer(answer)
        return str(value) if value is not None else answer and bare_answer(answer)


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
    """Check a line: gives `problem`, `solution` (maybe empty) and `answer` (else the solution's last box)."""
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
    """The problems of a year, for lm-eval, as the YAMLs' `custom_dataset`."""
    rows = find_rows(data_file(subset), data_dir)
    # Where the file has no solution, the boxed answer stands for it.
    gold = [row["solution"] or f"\\boxed{{{row['answer']}}}" for row in rows]
    return {"test": rows.made_into(row | {"context": "", "gold": text} for row, text in zip(rows, gold, strict=True))}


def bare_answer(latex: str) -> str:
    """The content of a box without degrees, units, dollars, a modulus, and what is said to be equal."""
    text = _MODULUS.sub(" ", plain_symbols(latex).replace("{,}", ","))
    text = _DEGREES.sub(" ", _WORDS.sub(" ", text)).replace("\\equiv", "=")
    return text.rpartition("=")[2].strip().rstrip(".")


def to_integer(text: str) -> int | None:
    r"""A whole number as it may stand in a box, also as `042`, `m+n = 113`, `70.0` or `336^\circ`; None for others."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    bare = _WRAPPERS.sub(" ", bare_answer(text)).strip()
    value = to_number(bare) if _WHOLE.fullmatch(bare) else None
    return None if value is None else int(value)


def find_answer(text: str) -> str | None:
    """The last box; without a box, the number after the last "answer is"; else None, as for an absurdly long one."""
    answer = last_boxed(text)
    if answer is None:
        answer = next(reversed(_PHRASE.findall(text)), None)
    return None if answer is None or len(answer) > MAX_ANSWER_CHARS else answer


def is_right(reference: str, answer: str) -> bool | None:
    r"""Tell whether an answer is the right number, literally or by value (`\frac{140}{2}`).

    None where that cannot be judged in time.

    Source: lm-eval 0.4.13 aime compares texts, after Hendrycks' normal form.
    Differs: takes what equals the number, as math-verify reads it; `70_{8}` is 56, and wrong for 70, as in lm-eval.
    """
    value = to_integer(answer)
    if value is not None:
        return value == int(reference)
    bare = bare_answer(answer)
    # Two numbers are no answer, and without a digit there is none.
    if _SEVERAL.search(bare) or not any(map(str.isdigit, bare)):
        return False
    return judge(reference, bare)


def find_gradable(text: str) -> str | None:
    """See `find_answer`; None also for one without a digit."""
    answer = find_answer(text)
    return answer if answer is not None and any(map(str.isdigit, answer)) else None


def grade(reference: str, text: str) -> dict[str, float]:
    """Score one answer."""
    return graded(final_answer(text, find_gradable), lambda answer: is_right(reference, answer))


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval."""
    return grade(doc["answer"], results[0])
