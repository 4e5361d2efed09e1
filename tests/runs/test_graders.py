"""Graders: beside the caller, in order and bounded; one that fails or hangs is its sample's outcome, and nobody waits
for it."""

import dataclasses
import io
import re
import signal
import threading
import time

import pytest
from fake_parts import FakeTask, altered, make_parts, make_requests, run_fake
from rich.console import Console
from test_run import samples

from kvbench.engine.requests import Outcome
from kvbench.runs.graders import GraderPool, grade_outcome
from kvbench.show.table import render
from kvbench.tasks.bounds import OutOfTime, time_limit
from kvbench.tasks.verifier import Verifier

RIGHT = FakeTask.scorer


def raising(error):
    """A function that raises."""

    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order_in_the_callers_thread(workers):
    """However long each piece takes; with workers they overlap."""
    taken, threads, most, now = [], set(), [0], [0]
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02 if number % 3 == 0 else 0.001)
        with lock:
            now[0] -= 1
        return number

    def take(number: int) -> None:
        taken.append(number)
        threads.add(threading.current_thread())

    with GraderPool(workers) as pool:
        for number in range(40):
            pool.do(lambda number=number: work(number), take)
            assert number + 1 - len(taken) <= 4 * workers, "at most four results wait for each worker"
    assert taken == list(range(40)) and threads == {threading.current_thread()}
    assert most[0] <= max(workers, 1) and (workers < 2 or most[0] > 1)


def test_a_result_is_handed_out_when_it_is_there():
    """Not before, and not only at the end; one that is late holds back those behind it."""
    gates = [threading.Event() for _ in range(3)]
    taken = []
    with GraderPool(3) as pool:
        for number, gate in enumerate(gates):
            pool.do(lambda number=number, gate=gate: gate.wait(20) and number, taken.append)
        gates[1].set()
        pool.hand_out()
        assert taken == []
        gates[0].set()
        end = time.monotonic() + 10
        while len(taken) < 2 and time.monotonic() < end:
            pool.hand_out()
        assert taken == [0, 1]
        gates[2].set()
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_are_the_callers(workers):
    """Of the work and of what takes its result; what was done before is handed out."""
    taken = []
    with pytest.raises(LookupError, match="in the work"), GraderPool(workers) as pool:
        pool.do(lambda: 1, taken.append)
        pool.do(raising(LookupError("in the work")), taken.append)
    assert taken == [1]
    with pytest.raises(OSError, match="full"), GraderPool(workers) as pool:
        pool.do(lambda: 1, raising(OSError("full")))


def test_a_caller_that_fails_waits_for_nothing():
    """What is done is handed out, what runs is left behind, what waits is never begun."""
    gate, begun, taken = threading.Event(), [], []
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), GraderPool(1) as pool:
        pool.do(lambda: 1, taken.append)
        while not pool._pending[0][0].done():
            time.sleep(0.001)
        for number in range(3):
            pool.do(lambda number=number: begun.append(number) or gate.wait(20), taken.append)
        raise KeyboardInterrupt
    assert time.monotonic() - start < 10 and taken == [1]
    gate.set()
    for thread in pool._threads:
        thread.join(10)
    assert begun in ([], [0])


def graded_by(workers: int, events: list, fail_at: str = ""):
    """Loaders of a task whose grader takes a while and may be called in that many threads."""

    def score(request, text):
        events.append(("begun", request.sample_id))
        time.sleep(0.05)
        if request.sample_id == fail_at:
            raise ValueError("no reference")
        return RIGHT(request, text)

    return make_parts(task={"grading_workers": workers, "scorer": score})


def test_answers_graded_beside_the_model_make_the_same_journal(tmp_path):
    """Same lines in the same order, whether one grader fails or not, and nothing left to do for another session."""
    journals = {}
    for workers in (0, 3):
        for fail_at in ("", "b/3"):
            events: list = []
            folder, parts = tmp_path / f"{workers}{len(fail_at)}", graded_by(workers, events, fail_at)
            done = run_fake(folder, parts)
            journals[workers, fail_at] = samples(done.folder)
            assert len(events) == len(journals[workers, fail_at]) == 10
            assert run_fake(folder, parts).record.status == done.record.status and len(events) == 10
    assert journals[3, ""] == journals[0, ""] and journals[3, "b/3"] == journals[0, "b/3"]


def test_a_run_that_is_stopped_keeps_what_is_graded(tmp_path):
    """Its lines are written in order, and the next session does the rest and no more."""
    events: list = []
    late_one = make_requests(10)[6].sample_id

    def late(request, text):
        # The engine is interrupted while this one is graded.
        events.append(request.sample_id)
        return time.sleep(30) if request.sample_id == late_one else RIGHT(request, text)

    def interrupt(*args, **kwargs):
        engine = make_parts().make_engine(*args, **kwargs)
        running = engine.running

        def until(requests, *, on_step=None, **more):
            yield from running(requests, on_step=on_step, **more)
            time.sleep(0.3)
            on_step({"decode_tokens_per_s": 1.0, "cache_bytes": 1.0, "live_rows": 1})
            raise KeyboardInterrupt

        engine.running = until
        return engine

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_fake(tmp_path, altered(make_parts(task={"grading_workers": 2, "scorer": late}), make_engine=interrupt))
    assert time.monotonic() - start < 20
    done = run_fake(tmp_path, graded_by(2, events))
    assert done.record.status == "complete"
    ids = [row["sample_id"] for row in samples(done.folder)]
    assert len(ids) == len(set(ids)) == 10
    # Of the first session those that were graded and stood behind the late one are done again.
    assert len(events) <= 10 + 4


def backtrack(*_) -> None:
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
def test_the_limit_interrupts_whatever_hangs(hang):
    """Regular expressions, loops that catch everything, and waiting; handler and timer are put back."""
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(OutOfTime), time_limit(0.2):
        hang()
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def in_a_thread(work):
    """The value of a function, or what it raised, from another thread than the main one."""
    found: list = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_has_no_limit_and_breaks_nothing():
    """Signals reach the main thread only."""

    def work():
        with time_limit(0.01):
            time.sleep(0.05)
        return True

    assert in_a_thread(work) is True


def test_a_failing_grader_is_the_samples_outcome():
    """The answer is kept, its status and message say what happened, and it has no scores."""
    task = FakeTask(make_requests(1))
    answer = Outcome(sample_id="a/0", text="x", finish="eos", ledger={"resident_bytes": 1})
    errors = {"MemoryError: too large": MemoryError("too\nlarge"), "ValueError": ValueError("x" * 999)}
    for words, error in {**errors, "SystemExit: 0": SystemExit(0)}.items():
        task.scorer = raising(error)
        outcome, scores = grade_outcome(task, task.requests[0], answer)
        assert (outcome.status, outcome.text, outcome.ledger, scores) == ("ungraded", "x", answer.ledger, {})
        assert words in outcome.message and len(outcome.message) <= 300
    task.scorer = lambda request, text: 5.0
    outcome, scores = grade_outcome(task, task.requests[0], answer)
    assert (outcome.status, scores) == ("ungraded", {}) and "scores.exact is 5, more than 1" in outcome.message
    task.scorer, task.grading_limit_s = backtrack, 0.1
    outcome, scores = grade_outcome(task, task.requests[0], answer)
    assert (outcome.status, scores) == ("ungraded", {})
    assert outcome.message == "the grader of task fake took longer than 0.1 s"
    # The right answer is judged in time, so the other one is wrong; where that takes too long too, it has no scores.
    slow = lambda request, text: backtrack(request, text) if text == "x" else 1.0  # noqa: E731
    for task.scorer, expected in ((slow, (["out_of_time"], {"exact": 0.0})), (backtrack, ([], {}))):
        outcome, scores = grade_outcome(task, dataclasses.replace(task.requests[0], answers=("y",)), answer)
        assert (outcome.flags, scores) == expected
    task.scorer = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        grade_outcome(task, task.requests[0], answer)


def test_no_answer_stops_a_run(tmp_path):
    """Two answers of ten cannot be graded: the run completes, counts them, says so, and asks none again."""
    bad = {"a/0": raising(ValueError("the reference does not run")), "b/1": backtrack}

    def score(request, text):
        return bad.get(request.sample_id, RIGHT)(request, text)

    engines: list = []
    parts = make_parts(engines=engines, task={"scorer": score, "grading_limit_s": 0.1})
    first, again = run_fake(tmp_path, parts), run_fake(tmp_path, parts)
    counts = first.record.counts
    assert (first.record.status, counts.ungraded, counts.ok, counts.done) == ("complete", 2, 8, 10)
    assert first.record.metrics["exact"].num_samples == 8
    rows = samples(first.folder)
    assert [row["status"] for row in rows[:2]] == ["ungraded"] * 2 and rows[0]["text"]
    assert "the reference does not run" in rows[0]["message"] and "longer than 0.1 s" in rows[1]["message"]
    assert first.record == again.record
    assert not any(engine.seen for engine in engines[1:])
    shown = io.StringIO()
    Console(width=100, file=shown).print(render([first.record]))
    assert "of 10 answers 2 could not be graded; not in the score" in " ".join(shown.getvalue().split())


def test_a_flag_reaches_the_record_and_the_table(tmp_path, monkeypatch):
    """How an answer was graded stands beside its scores, and the table counts it where there is any."""
    monkeypatch.setattr(FakeTask, "score_outcome", lambda self, request, outcome: {"exact": 0.0, "fallback": 1.0})
    run = run_fake(tmp_path, make_parts())
    assert all((row["flags"], row["scores"]) == (["fallback"], {"exact": 0.0}) for row in samples(run.folder))
    for count in (7, 0):
        answers = {"num_answers": 10, "mean_tokens": 2.0, "cut_share": 0.0, "num_fallback": count}
        shown = io.StringIO()
        run.record.task_aggregate = {"answers": answers | {"num_out_of_time": 0}}
        Console(width=100, file=shown).print(render([run.record]))
        assert ("graded by last number" in shown.getvalue()) is bool(count)
        assert "no verdict in time" not in shown.getvalue()


def test_math_verify_is_ended_and_goes_on():
    """A comparison without end raises, whatever thread asks; the next one is answered by another process."""
    verifier = Verifier(cpu_s=0.5)
    assert verifier.equal("\\frac{1}{2}", "0.5")
    found = in_a_thread(lambda: verifier.equal("5", "9^{9^{9^{9}}}"))
    assert isinstance(found, TimeoutError) and "0.5 s of processor time" in str(found)
    assert not verifier.equal("2", "3")
    process = verifier._process
    verifier.close()
    assert process.poll() is not None
