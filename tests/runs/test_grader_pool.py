"""Work beside the caller: in order, bounded, its errors told, and nothing waited for when the caller fails."""

import threading
import time

import pytest
from fake_parts import altered, make_parts
from test_run import QUIET, make_cfg, samples

from kvbench.runs.graders import GraderPool
from kvbench.runs.run import run_experiment


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

    with GraderPool(workers) as beside:
        for number in range(40):
            beside.do(lambda number=number: work(number), take)
            # At most four results wait for each worker.
            assert number + 1 - len(taken) <= 4 * workers
    assert taken == list(range(40)) and threads == {threading.current_thread()}
    assert most[0] <= max(workers, 1) and (workers < 2 or most[0] > 1)


def test_a_result_is_handed_out_when_it_is_there():
    """Not before, and not only at the end; one that is late holds back those behind it."""
    gates = [threading.Event() for _ in range(3)]
    taken = []
    with GraderPool(3) as beside:
        for number, gate in enumerate(gates):
            beside.do(lambda number=number, gate=gate: gate.wait(20) and number, taken.append)
        gates[1].set()
        beside.hand_out()
        assert taken == []
        gates[0].set()
        end = time.monotonic() + 10
        while len(taken) < 2 and time.monotonic() < end:
            beside.hand_out()
        assert taken == [0, 1]
        gates[2].set()
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_are_the_callers(workers):
    """Of the work and of what takes its result; what was done before is handed out."""

    def fail() -> None:
        raise LookupError("in the work")

    taken = []
    with pytest.raises(LookupError, match="in the work"), GraderPool(workers) as beside:
        beside.do(lambda: 1, taken.append)
        beside.do(fail, taken.append)
    assert taken == [1]
    with pytest.raises(OSError, match="full"), GraderPool(workers) as beside:
        beside.do(lambda: 1, lambda result: (_ for _ in ()).throw(OSError("full")))


def test_a_caller_that_fails_waits_for_nothing():
    """What is done is handed out, what runs is left behind, what waits is never begun."""
    gate, begun, taken = threading.Event(), [], []
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), GraderPool(1) as beside:
        beside.do(lambda: 1, taken.append)
        while not beside._waiting[0][0].done():
            time.sleep(0.001)
        for number in range(3):
            beside.do(lambda number=number: begun.append(number) or gate.wait(20), taken.append)
        raise KeyboardInterrupt
    assert time.monotonic() - start < 10 and taken == [1]
    gate.set()
    for thread in beside._threads:
        thread.join(10)
    assert begun in ([], [0])


def graded_by(workers: int, events: list, fail_at: str = ""):
    """Loaders of a task whose grader takes a while and may be called in that many threads."""

    def load(*args, **kwargs):
        task = make_parts().load_task(*args, **kwargs)
        task.grading_workers, scorer = workers, task.score

        def score(request, text):
            events.append(("begun", request.sample_id))
            time.sleep(0.05)
            if request.sample_id == fail_at:
                raise ValueError("no reference")
            return scorer(request, text)

        task.score = score
        return task

    return altered(make_parts(), load_task=load)


def test_answers_graded_beside_the_model_make_the_same_journal(tmp_path):
    """Same lines in the same order, whether one grader fails or not, and nothing left to do for another session."""
    journals = {}
    for workers in (0, 3):
        for fail_at in ("", "b/3"):
            events: list = []
            cfg = make_cfg(tmp_path / f"{workers}{len(fail_at)}")
            parts = graded_by(workers, events, fail_at)
            run = run_experiment(cfg, method="half", parts=parts, **QUIET)
            rows = [{k: v for k, v in row.items() if k not in ("timing", "seal")} for row in samples(run.folder)]
            journals[workers, fail_at] = rows
            done = len(events)
            assert run_experiment(cfg, method="half", parts=parts, **QUIET).record.status == run.record.status
            assert len(events) == done == len(rows) == 10
    assert journals[3, ""] == journals[0, ""] and len(journals[3, ""]) == 10
    assert journals[3, "b/3"] == journals[0, "b/3"]


def test_a_run_that_is_stopped_keeps_what_is_graded(tmp_path):
    """Its lines are written in order, and the next session does the rest and no more."""
    events: list = []
    stopped = graded_by(2, events)

    def stop(*args, **kwargs):
        task = stopped.load_task(*args, **kwargs)
        score = task.score
        requests = [request.sample_id for request in task.requests]

        def late(request, text):
            # The engine is interrupted while this one is graded.
            return time.sleep(30) if request.sample_id == requests[6] else score(request, text)

        task.score = late
        return task

    def interrupt(*args, **kwargs):
        engine = make_parts().make_engine(*args, **kwargs)
        run = engine.run

        def until(requests, *, on_step=None, **more):
            run(requests, on_step=on_step, **more)
            time.sleep(0.3)
            on_step({"decode_tokens_per_s": 1.0, "cache_bytes": 1.0, "live_rows": 1})
            raise KeyboardInterrupt

        engine.run = until
        return engine

    cfg = make_cfg(tmp_path)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        parts = altered(stopped, load_task=stop, make_engine=interrupt)
        run_experiment(cfg, method="half", parts=parts, **QUIET)
    assert time.monotonic() - start < 20
    run = run_experiment(cfg, method="half", parts=graded_by(2, events), **QUIET)
    assert run.record.status == "complete"
    ids = [row["sample_id"] for row in samples(run.folder)]
    assert len(ids) == len(set(ids)) == 10
    # Of the first session those that were graded and stood behind the late one are done again.
    assert len(events) <= 10 + 4
