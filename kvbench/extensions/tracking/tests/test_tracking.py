"""Trackers get what the disk has, after the run; none is imported unasked, and none can lose a run."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fake_parts import make_parts, run_fake
from places import ROOT
from refusals import refused

from kvbench.extensions.tracking import tracking


@pytest.fixture
def wandb(monkeypatch):
    """A module that notes what it is told."""
    module = ModuleType("wandb")
    module.made = []

    def init(**said):
        made = SimpleNamespace(said=said, steps=[], summary={}, ended=[])
        made.log, made.finish = made.steps.append, lambda: made.ended.append(True)
        module.made.append(made)
        return made

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.smoke
def test_a_tracker_gets_settings_numbers_and_every_answer(tmp_path, wandb):
    """From the record and the journal, under an id that is the run's hash: handed on again, it is the same one."""
    done = run_fake(tmp_path, tracker="wandb")
    (logged,) = wandb.made
    assert logged.said["id"] == done.record.hash[:32] and logged.said["config"]["method.ratio"] == 0.5 and logged.ended
    assert [step["sample.score"] for step in logged.steps] == [item["scores"]["exact"] for item in done.samples]
    assert logged.summary["metrics.exact"] == done.record.metrics["exact"].value
    assert logged.summary["ledger.resident_ratio"] == pytest.approx(done.record.ledger["resident_ratio"])
    assert logged.summary["status"] == "complete"
    run_fake(tmp_path, tracker="wandb")
    assert wandb.made[1].said["id"] == logged.said["id"] and wandb.made[1].steps == logged.steps
    assert run_fake(tmp_path).folder == done.folder, "a tracker is no part of what a run is"


def test_a_tracker_that_fails_loses_nothing(tmp_path, wandb, monkeypatch):
    """The run is complete, and a note says what happened."""

    def broken(**said):
        raise ConnectionError("no route")

    monkeypatch.setattr(wandb, "init", broken)
    said = []
    done = run_fake(tmp_path, say=said.append, tracker="wandb")
    assert done.record.status == "complete"
    assert any("tracker=wandb failed (ConnectionError: no route); the run is kept" in line for line in said)


def test_mlflow_gets_the_same(tmp_path, monkeypatch):
    """Settings once, numbers and steps each time, into the run that has the hash as its tag."""
    calls, runs = [], []
    module = ModuleType("mlflow")
    for name in ("set_experiment", "log_params", "log_artifact"):
        setattr(module, name, lambda *words, name=name: calls.append((name, *words)))
    module.log_metrics = lambda values, step=None: calls.append(("log_metrics", values, step))
    module.search_runs = lambda filter_string, output_format: list(runs)

    class Context:
        def __init__(self, **said):
            calls.append(("start_run", said))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    module.start_run = Context
    monkeypatch.setitem(sys.modules, "mlflow", module)
    done = run_fake(tmp_path, tracker="mlflow")
    names = [call[0] for call in calls]
    assert names.count("log_metrics") == 1 + len(done.samples) and names.count("log_params") == 1
    assert dict(calls[names.index("start_run")][1])["tags"]["kvbench_hash"] == done.record.hash
    calls.clear()
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="r1")))
    run_fake(tmp_path, tracker="mlflow")
    assert dict(calls[1][1])["run_id"] == "r1" and "log_params" not in [call[0] for call in calls]


def test_tensorboard_can_be_read_back(tmp_path):
    """With the real library, where it is installed."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second time replaces the first
        done = run_fake(tmp_path, tracker="tensorboard")
    events = EventAccumulator(str(done.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scores = [event.value for event in events.Scalars("sample/score")]
    assert scores == [item["scores"]["exact"] for item in done.samples]
    (whole,) = events.Scalars("metrics/exact")
    assert whole.value == pytest.approx(done.record.metrics["exact"].value)


@pytest.mark.parametrize(
    ("tracker", "error"),
    [
        ("tensorbord", ("name-unknown", "tracker", "tracker=tensorbord", "mean tensorboard")),
        ("absent_one", ("package-missing", "tracker", "tracker=absent_one")),
    ],
)
def test_a_tracker_that_is_not_there_stops_before_the_run(tmp_path, tracker, error, monkeypatch):
    """An unknown name, or a library that is not installed: said before anything runs."""
    monkeypatch.setitem(tracking.TRACKERS, "absent_one", None)
    engines = []
    with refused(*error):
        run_fake(tmp_path, make_parts(engines=engines), tracker=tracker)
    assert not engines


def test_nothing_is_imported_unasked(tmp_path, monkeypatch):
    """A run without a tracker asks for none of the libraries, whether they are installed or not; nor does a module of
    kvbench's as it is imported."""

    class Unasked:
        def find_spec(self, name, path=None, target=None):
            assert name.partition(".")[0] not in tracking.TRACKERS, name

    for name in [*sys.modules]:
        if name.partition(".")[0] in tracking.TRACKERS:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Unasked(), *sys.meta_path])
    with pytest.raises(AssertionError, match="mlflow"):
        run_fake(tmp_path / "asked", tracker="mlflow")
    assert run_fake(tmp_path / "unasked").record.status == "complete"
    named = re.compile(rf"^(import|from) ({'|'.join(tracking.TRACKERS)})\b", re.MULTILINE)
    sources = (path for folder in ("kvbench", "kernels", "methods") for path in (ROOT / folder).rglob("*.py"))
    assert not [path for path in sources if named.search(path.read_text())]
