"""Rows of MATH-500 and of the subjects of MATH."""

import ast
from collections.abc import Mapping
from typing import Any

from kvbench.tasks.answers import last_boxed
from kvbench.tasks.lmeval import lmeval_tasks_folder
from kvbench.tasks.problem_source import Place, find_rows, text_field
from kvbench.tasks.source import Rows

MATH500 = "math500"
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
HUB_500, HUB_MATH = "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"


def place(subset: str) -> Place:
    """Where the test file of MATH-500 or of a subject is."""
    if subset == MATH500:
        return Place(
            task="math500",
            what="its test file",
            stems=("test", "math500", "math_500"),
            hub=((HUB_500, "test.jsonl"),),
            prepared=(("MATH-500", "default", "test"),),
            fetch=f"To get it, run `hf download {HUB_500} test.jsonl --repo-type dataset --local-dir math500` where "
            "there is a network and set task.data_dir=math500.",
        )
    return Place(
        task="math",
        what=f"the subject {subset}",
        stems=(subset,),
        hub=((HUB_MATH, f"{subset}/test-00000-of-00001.parquet"),),
        prepared=(("hendrycks_math", subset, "test"),),
        fetch=f"To get it, run `hf download {HUB_MATH} --repo-type dataset` where there is a network, or put "
        f"{subset}.jsonl with the fields problem and solution into a folder and set task.data_dir to it.",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `problem`, `solution`, `answer` (when it is missing, the solution's last box), `subject` (or `type`),
            `level` (5 or `Level 5`).

    Returns:
        The same five fields; `level` is None when the file does not say.

    Raises:
        ValueError: What is wrong with the row.
    """
    problem, solution = text_field(row, "problem", "question"), text_field(row, "solution", required=False)
    answer = text_field(row, "answer", required=False).strip() or last_boxed(solution)
    if not answer:
        raise ValueError("field answer is missing, and the solution has no \\boxed{} either")
    digits = "".join(sign for sign in str(row.get("level") or "") if sign.isdigit())
    return {
        "problem": problem.strip(),
        "solution": solution.strip(),
        "answer": answer,
        "subject": text_field(row, "subject", "type", required=False) or None,
        "level": int(digits) if digits else None,
    }


def minerva_shots() -> list[dict[str, str]]:
    """The four public worked examples, read from the lm-eval package: `problem` and `solution` each.

    Its module is read and not imported, because it refuses the antlr4 that Hydra needs.

    Raises:
        ValueError: The installed lm-eval keeps them elsewhere.

    Source: Lewkowycz et al. 2022 (arXiv 2206.14858), appendix D; lm-eval tasks/minerva_math/utils.py.
    """
    path = lmeval_tasks_folder() / "minerva_math" / "utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (function,) = (node for node in tree.body if getattr(node, "name", "") == "list_fewshot_samples")
        (returned,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value)
        shots = ast.literal_eval(returned)
        return [{"problem": shot["problem"], "solution": shot["solution"]} for shot in shots[:4]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"task.form=minerva4 takes its examples from lm-eval, and {path} does not have them ({error}); install "
            "lm-eval 0.4.13, or take task.form=boxed"
        ) from error


def _question(problem: str) -> str:
    """A problem as it stands in the prompt of `minerva4`.

    Source: lm-eval tasks/minerva_math/utils.py, doc_to_text.
    """
    return f"Problem:\n{problem}\n\nSolution:"


def load(subset: str, data_dir: str | None = None, form: str = "boxed", **_: object) -> dict[str, Rows]:
    """The test split; the function that the YAMLs name as `custom_dataset`.

    Args:
        subset: `math500` or one of `SUBJECTS`.
        data_dir: Folder with `test.jsonl` (MATH-500) or `<subject>.jsonl`.
        form: `boxed` or `minerva4`.

    Returns:
        `test`: rows with `problem`, `gold`, `answer`, `subject`, `level`, `context` (the examples), `index`.

    Raises:
        MissingDataError: No source has it.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    rows = find_rows(place(subset), data_dir, check_row)
    context = ""
    if form == "minerva4":
        context = "".join(f"{_question(shot['problem'])} {shot['solution']}\n\n" for shot in minerva_shots())
    documents = [
        row
        | {
            "context": context,
            "gold": row["solution"] or f"\\boxed{{{row['answer']}}}",
            "subject": row["subject"] or subset,
        }
        for row in rows
    ]
    return {"test": rows.made_into(documents)}
