"""Runs that were made under a fault are known by their records, and named where they are read."""

import dataclasses
import json
from pathlib import Path

import pytest
from fake_parts import make_cfg, make_parts
from places import ROOT
from stored import VERSIONS, store

from kvbench.cli.main import main
from kvbench.results.faults import FAULTS, REVISION, Fault, Read, notes
from kvbench.results.record import Counts, RunRecord, Session
from kvbench.runs.run import run_experiment
from kvbench.show import table

SCORES = {"a": [1, 0, 1, 1, 0, 1]}


def made(**changes):
    """A record of before, of a run of ten answers on nothing special that a command asked for."""
    plain = {
        "identity": {"method": {"_target_": "kvbench.methods.full.Full"}},
        "counts": Counts(total=10, done=10, ok=10),
    }
    return RunRecord(**plain | {"task": "longctx", "sessions": [Session(command=["method=full"])]} | changes)


def said(*records, samples=None):
    """The names of the faults that some records may have."""
    return [note.split(",")[0] for note in notes([Read(label="run", record=one, samples=samples) for one in records])]


def session(*words, python="3.11.7"):
    """A stretch of work by a command."""
    return Session(command=list(words), versions=dataclasses.replace(VERSIONS, python=python))


def code(*sessions):
    """A run of programs."""
    return made(task="humaneval_plus", sessions=list(sessions))


CUSTOM = {"task": "custom", "protocol": {"metric": "f1"}}
AFFECTED = {
    "rope-neighbours": [
        made(model="Phi-3.5-mini-instruct"),
        made(sessions=[session("model.overrides={rope_type:longrope}")]),
    ],
    "hadamard-batch": [made(identity=made().identity | {"store": {"rotation": "hadamard"}})],
    "lm-eval-helpers": [
        made(task="lm_eval_x", sessions=[session("task.include_path=here")]),
        made(task="lm_eval_x", sessions=[Session()]),
        made(task="lm_eval_x", experiment="mine"),
    ],
    "torch-modes": [
        made(identity={"method": {"_target_": "mine.Method"}}),
        made(sessions=[session("--config-dir", "x")]),
    ],
    "custom-gold": [made(**CUSTOM)],
    "custom-unicode": [made(**CUSTOM), made(task="custom", protocol={"metric": "absent"})],
    "math-display": [made(task=name) for name in ("math500", "math", "aime24", "aime25", "aime26")],
    "late-program": [code(session())],
    "data-dir": [made(task="ruler", protocol={"essays": "kvbench"}, sessions=[session("task.data_dir=x")])],
    "byte-budget": [
        made(identity={"method": {"_target_": "kvbench.methods.h2o.H2O", "budget": budget}})
        for budget in ("8MiB", {"unit": "bytes", "value": 100.0})
    ],
    "row-bytes": [made(ledger={"table_bytes": 10.0, "fp16_bytes": 1000.0})],
    "python-minor": [code(session(), session(python="3.13.1"))],
}
UNAFFECTED = [
    made(),
    made(model="phi-2"),
    made(identity=made().identity | {"store": {"rotation": "hadamard"}, "batch_size": 1}),
    made(identity=made().identity | {"store": {"rotation": "hadamard"}}, sessions=[session("batch_size=1")]),
    made(task="lm_eval_x", sessions=[session("task.name=x")]),
    made(task="custom", protocol={"metric": "choice"}),
    made(task="ruler", protocol={"essays": "kvbench"}),
    made(task="ruler", protocol={"essays": "PaulGraham"}, sessions=[session("task.data_dir=x")]),
    made(identity={"method": {"_target_": "kvbench.methods.h2o.H2O", "budget": 0.5}}),
    made(ledger={"table_bytes": 0.1, "fp16_bytes": 1000.0}),
    made(ledger={"table_bytes": 10.0, "fp16_bytes": 1000.0}, counts=Counts(total=1, done=1, ok=1)),
]


def test_every_fault_has_a_name_of_its_own_and_is_documented():
    """With a line in the documentation, and mended in a revision that there is."""
    page = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    assert set(AFFECTED) == {fault.name for fault in FAULTS} and len(AFFECTED) == len(FAULTS)
    assert all(f"`{fault.name}`" in page and 0 < fault.mended <= REVISION for fault in FAULTS)


@pytest.mark.parametrize("name", AFFECTED)
def test_a_record_of_before_is_known_by_what_it_has(name):
    """And one of today is not affected."""
    for record in AFFECTED[name]:
        assert name in said(record), record
        assert name not in said(dataclasses.replace(record, revision=REVISION))


@pytest.mark.parametrize("record", UNAFFECTED)
def test_what_a_fault_cannot_touch_is_not_named(record):
    """A mark on everything says nothing."""
    assert said(record) == []


def test_python_matters_where_it_differs():
    """Between runs that are read together."""
    plain = [{"text": "return 1", "gold": []}]
    assert said(code(session()), code(session(python="3.12.1")), samples=plain) == ["python-minor"]
    assert said(code(session()), code(session(python="3.11.1")), samples=plain) == []
    assert said(code(session(), session(python="3.11.9")), samples=plain) == []


@pytest.mark.parametrize(
    ("text", "gold", "names"),
    [
        ("A", "A", ["custom-gold"]),
        ("", "?!", ["custom-gold"]),
        ("Zu\u0308rich", "Z\u00fcrich", ["custom-unicode"]),
        ("forty two", "42", []),
    ],
)
def test_samples_tell_more_than_a_record(text, gold, names):
    """Where the answers are at hand, a fault of grading is named only if one of them shows it."""
    assert said(made(**CUSTOM), samples=[{"text": text, "gold": [gold]}]) == names


def test_a_program_that_catches_all_may_be_late():
    """By a bare `except`, or by naming the base of all exceptions."""
    for text, is_hit in (("except:\n pass", True), ("except BaseException as e:", True), ("except ValueError:", False)):
        assert bool(said(code(session()), samples=[{"text": text, "gold": []}])) == is_hit


def test_the_answers_of_mathematics_tell():
    """Display mathematics and large powers."""
    for text, is_hit in (("it is:\n\\[ 4 \\]", True), ("1/2^{99}", True), ("$4$", False)):
        assert bool(said(made(task="math"), samples=[{"text": text, "gold": ["4"]}])) == is_hit


def test_one_line_names_all_runs_of_a_fault():
    """However many there are."""
    fault = Fault(name="x", summary="wrong", mended=1, affects=lambda record: record.method != "c")
    runs = [Read(label=name, record=made(method=name)) for name in "abcdefg"]
    assert notes(runs, [fault]) == ["x, mended since, may affect a, b, d and 3 more: wrong"]
    assert notes(runs[:2], [fault]) == ["x, mended since, may affect every run here: wrong"]


@pytest.mark.parametrize("command", ["compare", "report", "table"])
@pytest.mark.parametrize("revision", [0, REVISION])
def test_readers_mark_them(tmp_path, capsys, command, revision):
    """With the name of the fault; runs of today have no mark."""
    for method in ("full", "half"):
        store(tmp_path, method, SCORES, model="Phi-3-mini", revision=revision)
    more = [f"out={tmp_path / 'page.html'}", "axes=resident"] if command == "report" else []
    assert main([command, f"results_dir={tmp_path}", "resamples=100", *more]) == 0
    text = capsys.readouterr().out + (Path(more[0][4:]).read_text() if more else "")
    assert ("rope-neighbours" in text) == (revision == 0)


def test_a_run_has_the_revision_of_the_code_that_began_it(tmp_path):
    """A run that goes on keeps it: some of its answers are of the code before. Its own table marks it too."""
    cfg = make_cfg(tmp_path)
    first = run_experiment(cfg, method="half", parts=make_parts(), say=lambda text: None)
    assert first.record.revision == REVISION
    path, lines = first.folder / "run.json", first.folder / "samples.jsonl"
    record = json.loads(path.read_text()) | {"revision": 0, "status": "stopped", "model": "tiny"}
    path.write_text(json.dumps(record))
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:4]))
    again = run_experiment(cfg, method="half", parts=make_parts(), say=lambda text: None).record
    assert (again.status, again.revision, again.counts.done) == ("complete", 0, 10)
    again.ledger |= {"table_bytes": 10.0, "fp16_bytes": 1000.0}
    assert any("row-bytes" in note for note in table._notes([again]))
