"""`rerun`: a stored run once more; and the form of Hydra's that looks like it."""

import shutil
from dataclasses import replace

import pytest
from fake_parts import make_parts

from kvbench.cli import main as cli
from kvbench.cli import rerun
from kvbench.results import provenance
from kvbench.results.record import RunRecord


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the results of the one run lie that the tests of this file take a copy of."""
    return tmp_path_factory.mktemp("kept") / "results"


@pytest.fixture
def stored(fakes, kept):
    """A run of the command line on fakes, with settings that are not the defaults; its folder."""
    if not kept.exists():
        assert cli.main(["experiment=paper", "limit=6", "batch_size=2", "reference=none"]) == 0
        shutil.copytree(fakes / "results", kept)
    else:
        shutil.copytree(kept, fakes / "results")
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
    monkeypatch.setattr("kvbench.runs.parts.Loaders", lambda: make_parts(statuses={"b/3": "oom"}))
    assert cli.main(["rerun", str(stored), "trust=true", "results_dir=again"]) == 1
    out = capsys.readouterr().out
    assert "another hash" in out and "code.harness" in out
    assert "5 of 6 records are the same" in out and "b/3 (answer 0)" in out


def test_another_machine_is_named_as_the_likely_cause(stored, monkeypatch, capsys):
    """Where records differ: threads, torch's instructions and modes of libraries, each with both values."""
    real = provenance.machine
    changes = {"num_threads": 64, "torch_isa": "DEFAULT", "modes": {"MKL_CBWR": "COMPATIBLE"}}
    monkeypatch.setattr(provenance, "machine", lambda *given, **more: replace(real(*given, **more), **changes))
    monkeypatch.setattr("kvbench.runs.parts.Loaders", lambda: make_parts(statuses={"b/3": "oom"}))
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: tiny", "name: ${oc.env:SECRET}", "has an interpolation"),
        ("", "more: &x [*x]\n", "has an alias"),
        ("", "seed: 1\n", "found duplicate key seed"),
        ("", "a: [1\n", "cannot be read as YAML"),
        ("fidelity:", "fidelity: 5\nother:", "fidelity=5 is no group of settings"),
        ("task:", "task: null\nother:", "task=None is no group of settings"),
        ("method:", "other:", "method={} is no group of settings"),
    ],
    ids=["variable", "alias", "twice", "no YAML", "number", "null", "missing"],
)
def test_a_config_that_is_no_experiment_is_named(stored, monkeypatch, capsys, old, new, said):
    """Of an environment variable, aliases, a missing group and a wrong kind nothing runs, and the file is named."""
    path = stored / "config.yaml"
    good = path.read_text()
    monkeypatch.setenv("SECRET", "hunter2")
    text = good.replace(old, new) if old else good + new
    assert text != good
    path.write_text(text)
    for words in (["rerun", str(stored), "trust=true"], ["show", str(stored), "a/0"]):
        main_rc, shown = cli.main(words), "".join(capsys.readouterr())
        assert main_rc == (2 if words[0] == "rerun" else 0)  # a sample is shown without its prompt's beginning
        assert "config.yaml" in shown and said in " ".join(shown.split()), shown
        assert "fault of kvbench" not in shown and "hunter2" not in shown
    assert not list(stored.parents[4].rglob("results-rerun"))


def test_a_config_with_a_setting_that_is_none_is_named(stored, capsys):
    """A group that a run of before lacks takes its default, and one that no run has is an error."""
    path = stored / "config.yaml"
    path.write_text(path.read_text().replace("fidelity:", "other:"))
    assert cli.main(["rerun", str(stored), "trust=true"]) == 2 and "no setting other" in capsys.readouterr().err


def test_a_folder_that_lies_alone_needs_a_place(stored, monkeypatch, capsys):
    """A run that was copied to the top of a file system has no results folder to write beside."""
    monkeypatch.setattr(rerun.Path, "absolute", lambda self: rerun.Path("/z"))
    assert cli.main(["rerun", str(stored), "trust=true"]) == 2
    assert "say where the new run goes with results_dir=DIR" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config-dir", "-cd", "--config-path"])
def test_hydras_own_form_does_not_run_something_else(stored, flag, capsys):
    """`--config-dir RUN --config-name config` ran the default experiment without a word; now it names `rerun`."""
    assert cli.main([flag, str(stored), "--config-name", "config"]) == 2
    assert f"kvbench rerun {stored}" in capsys.readouterr().err
    assert len(list((stored.parents[3]).rglob("run.json"))) == 1
