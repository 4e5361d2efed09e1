"""A grader that fails or hangs: the sample says so, and the run goes on."""

import io
import re
import signal
import threading
import time

import pytest
from fake_parts import FakeTask, altered, make_parts, make_requests
from rich.console import Console
from test_run import QUIET, make_cfg, samples

from kvbench.engine.requests import Outcome
from kvbench.runs.graders import grade_outcome
from kvbench.runs.run import run_experiment
from kvbench.show.table import render
from kvbench.tasks.bounds import OutOfTime, time_limit
from kvbench.tasks.verifier import Verifier


def backtrack() -> None:
    """A regular expression that needs hours, in C."""
    re.match(r"(a|aa)+$", "a" * 60 + "b")


def swallow() -> None:
    """Hangs in code that catches every Exception, as libraries do."""
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


@pytest.mark.parametrize("hang", [backtrack, swallow, lambda: time.sleep(60)])
def test_the_limit_interrupts_whatever_hangs(hang) -> None:
    """Regular expressions, loops that catch everything, and waiting; handler and timer are put back."""
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(OutOfTime), time_limit(0.2):
        hang()
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_another_thread_has_no_limit_and_breaks_nothing() -> None:
    """Signals reach the main thread only."""
    done = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_failing_grader_is_the_samples_outcome() -> None:
    """The answer is kept, its status and message say what happened, and it has no scores."""
    task = FakeTask(make_requests(1))
    answer = Outcome(sample_id="a/0", text="x", finish="eos", ledger={"resident_bytes": 1})
    for error, words in ((MemoryError("too\nlarge"), "MemoryError: too large"), (ValueError("x" * 999), "ValueError")):
        task.score = lambda request, text, error=error: (_ for _ in ()).throw(error)
        outcome, scores = grade_outcome(task, task.requests[0], answer)
        assert (outcome.status, outcome.text, outcome.ledger, scores) == ("ungraded", "x", answer.ledger, {})
        assert words in outcome.message and len(outcome.message) <= 300
    task.score, task.grading_limit_s = lambda request, text: backtrack(), 0.1
    outcome, scores = grade_outcome(task, task.requests[0], answer)
    assert (outcome.status, scores) == ("ungraded", {})
    assert outcome.message == "the grader of task fake took longer than 0.1 s"
    task.score = lambda request, text: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        grade_outcome(task, task.requests[0], answer)


def test_no_answer_stops_a_run(tmp_path) -> None:
    """Two answers of ten cannot be graded: the run completes, counts them, says so, and asks none again."""

    def load(*args, **kwargs):
        task = make_parts().load_task(*args, **kwargs)
        bad, scorer = [request.sample_id for request in task.requests[:2]], task.score
        task.grading_limit_s = 0.1

        def score(request, text):
            if request.sample_id == bad[0]:
                raise ValueError("the reference does not run")
            return backtrack() if request.sample_id == bad[1] else scorer(request, text)

        task.score = score
        return task

    engines: list = []
    parts = altered(make_parts(engines=engines), load_task=load)
    first = run_experiment(make_cfg(tmp_path), method="half", parts=parts, **QUIET)
    again = run_experiment(make_cfg(tmp_path), method="half", parts=parts, **QUIET)
    counts = first.record.counts
    assert (first.record.status, counts.ungraded, counts.ok, counts.done) == ("complete", 2, 8, 10)
    assert first.record.metrics["exact"].num_samples == 8
    rows = samples(first.folder)
    assert [row["status"] for row in rows[:2]] == ["ungraded"] * 2 and rows[0]["text"]
    assert "the reference does not run" in rows[0]["message"] and "longer than 0.1 s" in rows[1]["message"]
    assert first.record == again.record
    assert not any(engine.seen for engine in engines[2:])
    shown = io.StringIO()
    Console(width=100, file=shown).print(render([first.record]))
    assert "of 10 answers 2 could not be graded; not in the score" in " ".join(shown.getvalue().split())


def test_math_verify_is_ended_and_goes_on() -> None:
    """A comparison without end raises, whatever thread asks; the next one is answered by another process."""
    verifier = Verifier(cpu_s=0.5)
    assert verifier.equal("\\frac{1}{2}", "0.5")
    found: list = []

    def work() -> None:
        try:
            found.append(verifier.equal("5", "9^{9^{9^{9}}}"))
        except TimeoutError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], TimeoutError) and "0.5 s of processor time" in str(found[0])
    assert not verifier.equal("2", "3")
    process = verifier._process
    verifier.close()
    assert process.poll() is not None
