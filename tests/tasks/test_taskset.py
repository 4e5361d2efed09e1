"""Which samples a limit takes, putting scores together, and telling tasks apart."""

from pathlib import Path

import pytest
from refusals import refused

from kvbench.config.compose import compose
from kvbench.engine.requests import Request
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.task import Ask, Limit
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint


def record(subset: str, place: int, score: float, **more: object) -> dict:
    """A journal record with what aggregation reads."""
    return {"sample_id": f"{subset}/{place}", "subset": subset, "status": "ok", "scores": {"score": score}} | more


@pytest.fixture
def task() -> TaskSet:
    """Gives a task with one metric and no requests."""
    return TaskSet(
        name="t",
        protocol={},
        fingerprint="",
        requests=[],
        metrics={"score": MetricInfo(True, "")},
        primary="score",
        scorer=lambda key, text: {"score": 1, "other": 2},
    )


def test_subsets_count_the_same(task) -> None:
    """The overall score is the mean of the subsets' means, not of the samples."""
    result = task.aggregate([record("a", 0, 1.0), record("b", 0, 0.0), record("b", 1, 0.0), record("b", 2, 0.5)])
    assert result["subsets"]["b"] == {"num_samples": 3, "num_failed": 0, "score": pytest.approx(1 / 6)}
    assert result["overall"]["score"] == pytest.approx((1 + 1 / 6) / 2)
    assert "length_buckets" not in result


def test_failed_samples_are_counted_not_scored(task) -> None:
    """A sample that ran into NaN is no wrong answer; a subset of such samples has no score."""
    broken = {"status": "nan", "scores": {}}
    result = task.aggregate([record("a", 0, 1.0), record("a", 1, 0.0) | broken, record("b", 0, 0.0) | broken])
    assert result["subsets"]["a"] == {"num_samples": 1, "num_failed": 1, "score": 1.0}
    assert result["subsets"]["b"] == {"num_samples": 0, "num_failed": 1, "score": None}
    assert result["overall"]["score"] == 1.0
    assert task.aggregate([])["overall"]["score"] is None


def test_answers_to_one_sample_are_averaged_first(task) -> None:
    """Samples weigh the same however many answers they have."""
    records = [record("a", 0, 1.0, repeat=0), record("a", 0, 0.0, repeat=1), record("a", 1, 1.0, repeat=0)]
    assert task.aggregate(records)["subsets"]["a"] == {"num_samples": 2, "num_failed": 0, "score": 0.75}


def test_length_buckets(task) -> None:
    """LongBench-E's records are also averaged by length, inside each subset."""
    records = [
        record("a_e", 0, 1.0, meta={"length_bucket": "0-4k"}),
        record("a_e", 1, 0.0, meta={"length_bucket": "0-4k"}),
        record("a_e", 2, 0.25, meta={"length_bucket": "8k+"}),
        record("a", 0, 1.0, meta={"length": 3}),
    ]
    buckets = task.aggregate(records)["length_buckets"]
    assert set(buckets) == {"a_e"}
    assert {name: numbers["score"] for name, numbers in buckets["a_e"].items()} == {"0-4k": 0.5, "8k+": 0.25}


def test_scores_are_the_declared_metrics(task) -> None:
    """Only what the task declares reaches the journal."""
    assert task.score(Request(sample_id="a/0", subset="a", segments=((1,),)), "x") == {"score": 1.0}


def test_fingerprint_sees_prompts_references_and_code(tmp_path: Path) -> None:
    """Each of the three changes it, and nothing else does."""
    folder = tmp_path / "tasks" / "bench"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text("a: 1")
    requests = [Request(sample_id="a/0", subset="a", segments=((1, 2), (3,)), meta={"note": 1})]
    base = fingerprint(requests, {"a/0": "x"}, folder)
    assert len(base) == 64
    same = [Request(sample_id="a/0", subset="a", segments=((1, 2), (3,)), meta={"note": 2})]
    assert fingerprint(same, {"a/0": "x"}, folder) == base
    other = [Request(sample_id="a/0", subset="a", segments=((1, 2, 3),))]
    seen = {base, fingerprint(other, {"a/0": "x"}, folder), fingerprint(requests, {"a/0": "y"}, folder)}
    (folder / "x.yaml").write_text("a: 2")
    seen.add(fingerprint(requests, {"a/0": "x"}, folder))
    (folder.parent / "shared.py").write_text("x = 1")
    seen.add(fingerprint(requests, {"a/0": "x"}, folder))
    assert len(seen) == 4  # nothing of this task's imports it
    (folder / "metrics.py").write_text("from kvbench.tasks import shared")
    seen.add(fingerprint(requests, {"a/0": "x"}, folder))
    (folder.parent / "shared.py").write_text("x = 2")
    seen.add(fingerprint(requests, {"a/0": "x"}, folder))
    (folder.parent / "shared.py").write_text('"""Words."""\n\nx = 2  # a comment\n')
    seen.add(fingerprint(requests, {"a/0": "x"}, folder))
    assert len(seen) == 6


def test_a_limit_is_a_random_sample():
    """The same for every run, spread over the file, other samples in another subset, and part of a larger limit's."""
    few, many = Limit(30).of(1000, "trec"), Limit(200).of(1000, "trec")
    assert few == sorted(set(few)) and len(few) == 30 and set(few) < set(many)
    assert few == Limit(30).of(1000, "trec") != Limit(30).of(1000, "lcc")
    assert min(many) < 50 and max(many) > 950 and sum(at < 500 for at in many) in range(70, 131)


def test_the_first_ones_on_request():
    """`first:20` is the beginning of the file; a limit above the number of samples, and none, take all."""
    assert Limit.read("first:3").of(10, "x") == [0, 1, 2]
    assert Limit.read("first:30").of(4, "x") == Limit(4).of(4, "x") == [0, 1, 2, 3]
    assert compose(["limit=first:20"]).limit == "first:20"


def test_the_others_on_request():
    """`after:20` is what `first:20` leaves, in order; a task that makes its prompts has no first rows."""
    assert Limit.read("after:3").of(7, "x") == [3, 4, 5, 6] and Limit.read("after:9").of(4, "x") == []
    for value in ("after:3", "first:3", 3):
        assert Limit.read(Limit.read(value).setting) == Limit.read(value)
    ask = Ask(None, Limit.read("after:3"), 0, Protocol())
    with refused("unsupported", "limit", "limit=after:3"):
        ask.items(5)


@pytest.mark.parametrize(
    "value", ["after:0", "after", 0, -1, True, 1.5, "20 ", "first", "first:0", "last:3", "", [3], "first:-2"]
)
def test_what_is_no_number_of_samples_is_refused(value):
    """The message says how to write one."""
    with refused("setting-value", "limit", f"limit={value!r}", "first:20"):
        Limit.read(value)
    assert Limit.read(None) is None and Limit.read(7) == Limit.read("7") == Limit(7)
