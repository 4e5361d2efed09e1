"""Scoring one answer so that no answer can stop a run: a grader that fails or hangs is that sample's outcome."""

import dataclasses
from typing import TYPE_CHECKING

from kvbench.engine.requests import Outcome, Request
from kvbench.tasks.bounds import OutOfTime, time_limit

if TYPE_CHECKING:
    from kvbench.tasks.taskset import TaskSet

UNGRADED = "ungraded"
_MESSAGE_CHARS = 300


def grade_outcome(task: "TaskSet", request: Request, outcome: Outcome) -> tuple[Outcome, dict[str, float]]:
    """The scores of one answer, by its text or by its choices' log-likelihoods.

    Args:
        task: Whose grader is asked.
        request: One of its requests.
        outcome: What the engine answered.

    Returns:
        The outcome and its scores. An answer that did not end well has none; one whose grader raised or took longer
        than `task.grading_limit_s` has none either, its status is `ungraded`, and its message says why.
    """
    if outcome.status != "ok":
        return outcome, {}
    limit_s = task.grading_limit_s
    try:
        with time_limit(limit_s):
            if request.choices:
                return outcome, task.score_choices(request, outcome.choices)
            return outcome, task.score_outcome(request, outcome)
    except OutOfTime:
        why = f"the grader of task {task.name} took longer than {limit_s:g} s"
    except Exception as error:
        text = " ".join(str(error).split())
        why = f"the grader of task {task.name} failed ({type(error).__name__}: {text})"[:_MESSAGE_CHARS]
    return dataclasses.replace(outcome, status=UNGRADED, message=why), {}
