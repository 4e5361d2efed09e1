"""Concurrent grading in a bounded number of threads: scores are delivered in order, and no answer can stop a run."""

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvbench.engine.requests import FLAGS, OUT_OF_TIME, Outcome, Request
from kvbench.results.sample import check_scores
from kvbench.results.writing import JournalError
from kvbench.tasks.bounds import OutOfTime, time_limit

if TYPE_CHECKING:
    from kvbench.tasks.taskset import TaskSet

UNGRADED = "ungraded"
_MESSAGE_CHARS = 300

# Pending answers per worker; at more the caller waits, so that answers do not pile up in memory.
_PENDING_PER_WORKER = 4


class GraderPool:
    """Thread pool that delivers results in the caller's thread, in the order of submission.

    Without threads it works in the caller's.

    It is a context: at the end of the block it waits for everything; after an error it delivers finished results and
    waits for nothing. The threads do not keep a process alive.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._threads: list[threading.Thread] = []
        self._left = False

    def do(self, work: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Submit a piece of work; `take` gets its result in the caller's thread.

        Now, in a later call or at the end of the block. Raises errors of `take` or of earlier work.
        """
        if not self.workers:
            take(work())
            return
        future: Future[Any] = Future()
        self._pending.append((future, take))
        if len(self._threads) < self.workers:
            # A pool of the standard library is waited for when the interpreter ends, however the run was stopped.
            self._threads.append(threading.Thread(target=self._work, name="grader", daemon=True))
            self._threads[-1].start()
        self._todo.put((work, future))
        self.hand_out(len(self._pending) - self.workers * _PENDING_PER_WORKER)

    def hand_out(self, at_least: int = 0) -> None:
        """Deliver finished results in order, up to the first unfinished one; wait for `at_least` of them."""
        while self._pending and (at_least > 0 or self._pending[0][0].done()):
            future, take = self._pending[0]
            if not future.done():
                wait((future,))  # an interruption here leaves the piece where it is
            self._pending.popleft()
            at_least -= 1
            take(future.result())

    def _work(self) -> None:
        while (item := self._todo.get()) is not None and not self._left:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.hand_out(len(self._pending))
            else:
                with suppress(JournalError):  # the first error is the one to raise
                    self.hand_out()
        finally:
            self._left = True
            for _ in self._threads:
                self._todo.put(None)


def grade_outcome(task: "TaskSet", request: Request, outcome: Outcome) -> tuple[Outcome, dict[str, float]]:
    """Score one answer, by its text or by its choices' log-likelihoods.

    An answer that did not end well has no scores. One whose grader took longer than `task.grading_limit_s` is wrong,
    and flagged so, where the grader can judge the right answer in time. Where it cannot, or raised, the answer has no
    scores, its status is `ungraded`, and its message says why.
    """
    if outcome.status != "ok":
        return outcome, {}
    limit_s = task.grading_limit_s
    try:
        with time_limit(limit_s):
            asks = request.choices
            graded = task.score_choices(request, outcome.choices) if asks else task.score_outcome(request, outcome)
            flags = [flag for flag in FLAGS if flag in graded]
            scores = {name: value for name, value in graded.items() if name not in flags}
            check_scores(scores)
            return (dataclasses.replace(outcome, flags=flags) if flags else outcome), scores
    except OutOfTime:
        why = f"the grader of task {task.name} took longer than {limit_s:g} s"
        if not request.turns and request.answers and _ends(task, request, request.answers[0]):
            wrong = {name: float(not info.higher_is_better) for name, info in task.metrics.items()}
            return dataclasses.replace(outcome, flags=[OUT_OF_TIME]), wrong
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit()` is as much a failure as any other
        text = " ".join(str(error).split())
        why = f"the grader of task {task.name} failed ({type(error).__name__}: {text})"[:_MESSAGE_CHARS]
    return dataclasses.replace(outcome, status=UNGRADED, message=why), {}


def _ends(task: "TaskSet", request: Request, text: str) -> bool:
    """True where the grader of a request judges a text in time."""
    with suppress(OutOfTime, Exception, SystemExit), time_limit(task.grading_limit_s):
        task.score(request, text)
        return True
    return False
