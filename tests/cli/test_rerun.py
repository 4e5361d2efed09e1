"""`rerun`: a stored run once more; and the form of Hydra's that looks like it."""

from dataclasses import replace

import pytest
from fake_parts import make_parts

from kvbench.cli import main as cli
from kvbench.results import provenance
from kvbench.results.record import RunRecord


@pytest.fixture
def stored(fakes):
    """A run of the command line on fakes, with settings that are not the defaults; its folder."""
    assert cli.main(["experiment=paper", "limit=6", "batch_size=2", "reference=none"]) == 0
    (path,) = (fakes / "results").rglob("run.json")
    return path.parent


def test_a_run_says_how_it_came_about(stored):
    """run.json has the words of the command, the names of method and preset, and each session its own machine."""
    record = RunRecord.load(stored)
    assert (record.method, record.experiment, record.seed) == ("kivi", "paper", 7)
    (session,) = record.sessions
    assert session.command == ["experiment=paper", "limit=6", "batch_size=2", "reference=none"]
    assert session.machine == record.machine and session.versions == record.versions and session.machine.device


def test_a_resumed_run_keeps_the_machine_of_each_session(stored, monkeypatch, capsys):
    """What another machine did stays on record beside what this one adds, and the user is told."""
    lines = (stored / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (stored / "samples.jsonl").write_bytes(b"".join(lines[:2]))
    real = provenance.machine
    monkeypatch.setattr(
        provenance, "machine", lambda *given, **more: replace(real(*given, **more), device="cpu (Other)")
    )
    assert cli.main(["experiment=paper", "limit=6", "batch_size=2", "reference=none"]) == 0
    first, second = RunRecord.load(stored).sessions
    assert second.machine.device == "cpu (Other)" != first.machine.device
    assert "another machine's" in capsys.readouterr().err


def test_a_stored_run_runs_again_from_its_folder_alone(stored, capsys):
    """The same hash and the same records come out in another place; the stored run is not touched."""
    before = {path.name: path.read_bytes() for path in stored.iterdir()}
    assert cli.main(["rerun", str(stored), "trust=true"]) == 0
    out = capsys.readouterr().out
    assert "the same hash" in out and "6 of 6 records are the same" in out
    (again,) = stored.parents[4].joinpath("results-rerun").rglob("run.json")
    assert again.parent.relative_to(stored.parents[4] / "results-rerun") == stored.relative_to(stored.parents[3])
    assert RunRecord.load(again.parent).experiment == "paper"
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before


def test_what_differs_is_named(stored, monkeypatch, capsys):
    """Under other code the hash is another one, and the answers that changed are shown."""
    monkeypatch.setattr(provenance, "harness_hash", lambda *backends: "f" * 64)
    monkeypatch.setattr("kvbench.runs.run.Loaders", lambda: make_parts(statuses={"b/3": "oom"}))
    assert cli.main(["rerun", str(stored), "trust=true", "results_dir=again"]) == 1
    out = capsys.readouterr().out
    assert "another hash" in out and "code.harness" in out
    assert "5 of 6 records are the same" in out and "b/3 (answer 0)" in out


def test_another_machine_is_named_as_the_likely_cause(stored, monkeypatch, capsys):
    """Where records differ: threads, torch's instructions and modes of libraries, each with both values."""
    real = provenance.machine
    changes = {"num_threads": 64, "torch_isa": "DEFAULT", "modes": {"MKL_CBWR": "COMPATIBLE"}}
    monkeypatch.setattr(provenance, "machine", lambda *given, **more: replace(real(*given, **more), **changes))
    monkeypatch.setattr("kvbench.runs.run.Loaders", lambda: make_parts(statuses={"b/3": "oom"}))
    assert cli.main(["rerun", str(stored), "trust=true", "results_dir=again"]) == 1
    was = RunRecord.load(stored).machine
    out = " ".join(capsys.readouterr().out.split())
    assert (
        f"likely because of the machine: threads {was.num_threads} then, 64 now; torch's instructions {was.torch_isa} "
        "then, DEFAULT now; modes of libraries none then, MKL_CBWR=COMPATIBLE now"
    ) in out


def test_a_folder_of_somebody_else_names_no_code(stored, capsys):
    """A class outside kvbench, and code that a model writes, run only when the user says so."""
    assert cli.main(["rerun", str(stored)]) == 2
    assert "method._target_=fake.Q, which runs code; if the folder is yours, add trust=true" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["rerun"], ["rerun", "nowhere"], ["rerun", "run=nowhere"]])
def test_a_folder_without_a_run_is_refused(stored, words, capsys):
    """The message says what is needed."""
    assert cli.main(words) == 2
    assert "stored run" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config-dir", "-cd", "--config-path"])
def test_hydras_own_form_does_not_run_something_else(stored, flag, capsys):
    """`--config-dir RUN --config-name config` ran the default experiment without a word; now it names `rerun`."""
    assert cli.main([flag, str(stored), "--config-name", "config"]) == 2
    assert f"kvbench rerun {stored}" in capsys.readouterr().err
    assert len(list((stored.parents[3]).rglob("run.json"))) == 1
