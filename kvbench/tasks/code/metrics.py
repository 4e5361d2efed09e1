"""Grades HumanEval+ and MBPP+: the answer runs in the cage, on the original inputs and on the added ones."""

import json

from kvbench.tasks.answers import after_thinking
from kvbench.tasks.code.dataset import CodeRow

# How `grade` reports a program that does not even load.
_LOADING = "loading the program"


def grade(
    subset: str, row: CodeRow, text: str, *, allow_code_execution: bool, opened: bool = False
) -> dict[str, float]:
    """Score one answer.

    Args:
        subset: `humaneval_plus` or `mbpp_plus`.
        row: The row of the release file.
        text: The answer as generated.
        allow_code_execution: Consent to run it.
        opened: The prompt opened the thoughts.

    Returns:
        `plus`, `base` and `parsed`, each 0 or 1.

    Raises:
        CageRefused: There is no consent, or this machine cannot isolate the program.
    """
    from kvbench.tasks.code.cage.run import require_consent
    from kvbench.tasks.code.grade import grade_humaneval_plus, grade_mbpp_plus

    require_consent(allow_code_execution)
    answer = after_thinking(text, opened)
    if answer is None or not answer.strip():
        return {"plus": 0.0, "base": 0.0, "parsed": 0.0}
    run = grade_mbpp_plus if subset == "mbpp_plus" else grade_humaneval_plus
    result = run(row, answer, allow_code_execution=allow_code_execution)
    return {
        "plus": float(result.plus_passed),
        "base": float(result.base_passed),
        "parsed": float(not (result.status == "error" and result.message.startswith(_LOADING))),
    }


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """What lm-eval calls."""
    return grade(doc["subset"], json.loads(doc["row"]), results[0], allow_code_execution=doc["allow_code_execution"])
