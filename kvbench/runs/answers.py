"""Compute the missing samples of a run: every answer is graded and written to a journal."""

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from kvbench.config.files import FULL
from kvbench.engine.requests import Outcome, Request
from kvbench.results.journal import Journal
from kvbench.results.record import Session
from kvbench.results.sample import TAIL_TOKENS, Key, SampleRecord, journal_record
from kvbench.runs.experiment import Experiment, keys_of
from kvbench.runs.graders import GraderPool, grade_outcome
from kvbench.show.pace import Pace
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.engine.cross_run_batch import Step
    from kvbench.engine.engine import Engine
    from kvbench.tasks.taskset import TaskSet

ORDER_CHECK_REQUESTS = 32  # requests of a session whose answers are compared with those in another order
Result = TypeVar("Result")
Shown = Callable[[str, int, int], AbstractContextManager[Progress]]  # label, answers of the run, those that are there


def finish(steps: Generator[Any, None, Result]) -> Result:
    """Run a generator of steps to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def unfinished_groups(requests: Sequence[Request], size: int | None, journal: Container[Key]) -> list[Request]:
    """Whole groups of requests that hold an unfinished answer.

    Groups of so many requests, the engine's `group`, are fixed over the full list. A resumed run thus batches every
    sample with the same neighbours as an uninterrupted one, and computes the same numbers to the last bit, at the price
    of computing some samples twice. Without groups no sample is computed twice.
    """
    size, todo = size or 1, list[Request]()
    for start in range(0, len(requests), size):
        group = requests[start : start + size]
        if any((item.sample_id, repeat) not in journal for item in group for repeat in range(item.num_samples)):
            todo.extend(group)
    return todo


def record_answers(
    engine: "Engine",
    task: "TaskSet",
    requests: Sequence[Request],
    journal: Journal,
    progress: Progress,
    *,
    done: Container[Key] = (),
    with_timing: bool = True,
    force_generated: bool = False,
    pace: Pace | None = None,
) -> "Generator[Request | Step, bool | None]":
    """Run an engine on requests of a task and journal every answer that is not there yet; yields as `Engine.running`.

    Send True to a yielded request to flush graded answers; the request is yielded once more.

    Args:
        done: Answers that another journal has; they are computed only where their batch needs them.
        with_timing: False leaves the times out, which say nothing where prompts are replayed.
        force_generated: Force each request's generated answer instead of its gold answer.
        pace: Updated with what is read and decoded.
    """
    pace = pace or Pace(prompts=0, prompt_tokens=0, answers=0, most_steps=0.0)
    by_id = {request.sample_id: request for request in requests}

    def write(request: Request, graded: tuple[Outcome, dict[str, float]]) -> None:
        tail = engine.text_of(request.prompt[-TAIL_TOKENS:])
        record = journal_record(request, *graded, task.protocol, tail)
        if not with_timing:
            del record["timing"]
        journal.append(record)
        progress.advance()

    with GraderPool(task.grading_workers) as graders:

        def on_outcome(outcome: Outcome) -> None:
            pace.end()
            key = outcome.sample_id, outcome.repeat
            if key not in journal and key not in done:
                request = by_id[outcome.sample_id]
                graders.do(partial(grade_outcome, task, request, outcome), partial(write, request))

        def on_step(numbers: dict) -> None:
            pace.step(numbers["decode_tokens_per_s"], numbers["live_rows"])
            progress.step(numbers)
            graders.hand_out()

        steps = engine.running(
            requests, on_outcome=on_outcome, on_step=on_step, sizing=task.requests, force_generated=force_generated
        )
        with closing(steps):  # closes its rows where others end this run
            for due in steps:
                pace.pause()
                if not isinstance(due, Request):
                    yield due
                    pace.go_on(due.taken_s)
                    continue
                progress.show()
                while (yield due):
                    graders.hand_out()
                pace.read(due.num_prompt_tokens, due.num_samples)


def _check_order(
    experiment: Experiment, requests: Sequence[Request], records: Mapping[Key, SampleRecord], session: Session
) -> "Generator[Request | Step, bool | None]":
    """Answer some of the requests once more, in another order, and count in the session which answers differ."""
    repeated = list(requests[:: -max(1, len(requests) // ORDER_CHECK_REQUESTS)])[:ORDER_CHECK_REQUESTS]

    def compare(outcome: Outcome) -> None:
        first = records.get((outcome.sample_id, outcome.repeat))
        if first is not None:
            session.asked_again += 1
            same = first["status"] == outcome.status and list(first["token_ids"]) == list(outcome.token_ids)
            session.differing += not same

    steps = experiment.engine.running(repeated, on_outcome=compare, sizing=experiment.task.requests)
    with closing(steps):
        for due in steps:
            while (yield due) and isinstance(due, Request):  # True flushes graded answers; yielded once more
                pass


def compute_missing(
    experiment: Experiment,
    journal: Journal,
    session: Session,
    *,
    requests: Sequence[Request] | None = None,
    done: Container[Key] = (),
    shown: Shown = Progress,
) -> "Generator[Request | Step, bool | None]":
    """Run the engine on answers that no journal has yet, as `record_answers` does.

    `requests` are whole groups of the run, all by default. Time spent waiting for its turn does not count as the
    session's.
    """
    task, before = experiment.task, len(journal.records)
    requests = task.requests if requests is None else requests
    force_generated = experiment.config.forces_full_answer and experiment.method == FULL
    keys = keys_of(requests)
    there = {key for key in keys if key in journal or key in done}
    todo = unfinished_groups(requests, experiment.engine.group, there)
    pace = Pace(
        prompts=len(todo),
        prompt_tokens=sum(request.num_prompt_tokens for request in todo),
        answers=len(keys_of(todo)),
        most_steps=fmean(request.most_steps for request in todo) if todo else 0.0,
    )
    with shown(f"{experiment.method} on {task.name}", len(keys), len(there)) as progress:
        progress.follow(pace)
        try:
            yield from record_answers(
                experiment.engine, task, todo, journal, progress, done=done, force_generated=force_generated, pace=pace
            )
            if todo and experiment.engine.is_free:
                yield from _check_order(experiment, todo, journal.records, session)
        finally:
            session.wall_s -= pace.paused_s
            session.num_done = len(journal.records) - before
