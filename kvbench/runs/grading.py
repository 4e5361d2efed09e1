"""Scoring one answer so that no answer can stop a run: a grader that fails or hangs is that sample's outcome."""

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from kvbench.engine.requests import Outcome, Request

if TYPE_CHECKING:
    from kvbench.tasks.taskset import TaskSet

UNGRADED = "ungraded"
_AGAIN_S = 1.0  # what swallows the first alarm gets another
_MESSAGE_CHARS = 300


class GradingTimeout(BaseException):
    """A grader took too long. No Exception, so that a library that catches all of these lets it through."""


@contextmanager
def time_limit(limit_s: float | None) -> Iterator[None]:
    """Raise `GradingTimeout` inside the block when it takes longer.

    The kernel's timer interrupts Python code and regular expressions, which look for signals while they match. Signals
    reach the main thread only; in another thread there is no limit. Code that sets alarms of its own (some graders of
    lm-eval do) puts its limits in the place of this one.

    Args:
        limit_s: Seconds of wall time; None for no limit.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def stop(number: int, frame: FrameType | None) -> None:
        if inside:
            raise GradingTimeout

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
        try:
            yield
        finally:
            inside = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


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
    except GradingTimeout:
        why = f"the grader of task {task.name} took longer than {limit_s:g} s"
    except Exception as error:
        text = " ".join(str(error).split())
        why = f"the grader of task {task.name} failed ({type(error).__name__}: {text})"[:_MESSAGE_CHARS]
    return dataclasses.replace(outcome, status=UNGRADED, message=why), {}
