"""What becomes of a sweep whose jobs run in other processes: the table, the picture, the exit code, the log."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_parts import FakeEngine, FakePolicy, altered, make_parts
from places import ROOT, TESTS
from refusals import ERROR

from kvbench.cli.main import main
from kvbench.config import files
from kvbench.results.record import RunRecord
from kvbench.results.sweep import sweeps
from kvbench.results.writing import JournalError
from kvbench.runs.parts import Loaders


def forked(work, *words, **environment):
    """A sweep on fakes, each job in a process of its own; its code, stdout and stderr."""
    paths = [ROOT, TESTS, TESTS / "cli", TESTS / "cli" / "plugin"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | environment
    program = [sys.executable, TESTS / "fake_command.py", work.parent / "conf", 10, 0.1]
    launch = ["-m", "hydra/launcher=forking", "reference=none"]
    done = subprocess.run(
        [*map(str, program), *launch, *words],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.exhaustive
def test_jobs_in_other_processes(work):
    """One job ends well, one has a bad setting, one is killed: the end names each, shows the run that is there, and the
    code is the worst; the same command goes on, and loses nothing."""
    sweep = ["method=snapkv,kivi", "method.ratio=0.5,1.5"]
    code, out, said = forked(work, *sweep, KILL="2")
    assert code == 2, said
    assert "Quality: fake with tiny" in out and "\nsnapkv" in out
    assert (work / "results" / "fake" / "tiny" / "sweep.png").exists()
    assert "4 jobs: 1 done, 2 failed, 1 lost; log: results/.multirun/" in said
    assert "jobs 2 (snapkv ratio=1.5), 4 (kivi ratio=1.5) failed: method.ratio=1.5 is outside (0, 1]" in said
    assert "job 3 (kivi ratio=0.5) ended without a word, as after a kill; give the same command again to go on" in said
    assert "hydra/launcher=forking gave up: jobs [2] were killed" in said and "Traceback" not in said
    code, out, said = forked(work, *sweep)
    assert code == 2 and "4 jobs: 2 done, 2 failed; log" in said
    assert "\nsnapkv" in out and "\nkivi" in out
    lines = [path.read_bytes().count(b"\n") for path in work.rglob("samples.jsonl")]
    assert lines == [10, 10]
    assert not list(work.parent.rglob("kvbench-forking*"))


def test_log_of_a_sweep(fakes, capsys):
    """Each job says its number, what is special about it, and how long the rest takes; the log has the times. Those of
    one seed go together, with one reference."""
    assert main(["-m", "method=snapkv,kivi", "seed=0,1", "limit=4"]) == 0
    said = capsys.readouterr().err
    found = re.findall(r"^job (\d) of 4: (\w+ seed=\d)(, [^,]+ left)?$", said, re.MULTILINE)
    assert [(number, what) for number, what, _ in found] == [
        ("1", "snapkv seed=0"),
        ("3", "kivi seed=0"),
        ("2", "snapkv seed=1"),
        ("4", "kivi seed=1"),
    ]
    assert [bool(left) for _, _, left in found] == [False, False, True, False], "once for each group"
    assert said.count("3 runs: 12 samples\n") == 2 and "already there: " not in said
    assert main(["-m", "method=snapkv,kivi", "limit=4"]) == 0
    again = capsys.readouterr().err
    assert again.count("already there: ") == 3 and "resume=false" not in again, "once for each run and reference"
    sweep = sweeps(Path("results"))[0]
    lines = sweep.log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\[[1-4]\] )?\S", line) for line in lines), lines
    assert {line for line in said.splitlines() if line.startswith("job ")} <= {
        re.sub(r"^.{20}(\[\d\] )?", "", line) for line in lines
    }
    assert set(sweep.states().values()) == {"done"}


def test_a_setting_goes_to_the_methods_that_have_it(fakes, capsys):
    """One line says for which it is left out; jobs that are then alike are one; what no method has is an error, and so
    is a setting of one run."""
    assert main(["-m", "method=full,snapkv,kivi", "method.budget=3,5", "limit=2"]) == 0
    said = capsys.readouterr().err
    assert said.count("method.budget=3 is not for full, kivi: no such setting\n") == 1
    labels = re.findall(r"^job \d of 4: ([^,\n]+)$", said, re.MULTILINE)
    assert labels[:4] == ["full", "snapkv budget=3", "snapkv budget=5", "kivi"]
    assert "4 jobs: 4 done" in said
    runs = sorted(path.parent.parent.name for path in fakes.rglob("run.json"))
    assert runs == ["full", "kivi", "snapkv", "snapkv"]
    for words in (["-m", "method=full,kivi"], ["method=full"]):
        assert main([*words, "method.budget=3", "limit=2"]) == 2
        assert "there is no setting method.budget." in capsys.readouterr().err


def test_missing_data_ends_a_sweep_before_it_begins(fakes, monkeypatch, capsys):
    """Data is looked for once, before a model is loaded, and every part that is missing is named."""
    loaded = []

    def parts():
        fake = make_parts()
        fake = altered(fake, load_model=lambda cfg: loaded.append(cfg))
        return altered(fake, check_task=Loaders().check_task)

    monkeypatch.setattr("kvbench.runs.parts.Loaders", parts)
    monkeypatch.setattr("kvbench.models.files.hub_reachable", lambda: False)
    (fakes / "data").mkdir()
    for task, subsets in (("longbench", "[trec,lcc,qasper]"), ("math", "[algebra,geometry]")):
        (fakes.parent / "conf" / "task" / f"{task}.yaml").write_text(
            (ROOT / "conf" / "task" / f"{task}.yaml").read_text()
        )
        key = {"longbench": "subsets", "math": "subjects"}[task]
        words = [f"task={task}", f"task.{key}={subsets}", "task.data_dir=data"]
        for line in (["-m", "method=snapkv,kivi,diffkv", *words], ["method=kivi", *words]):
            assert main(line) == 2
            said = capsys.readouterr().err
            assert len(re.findall(ERROR, said)) == 1 and said.count(f"task={task} has no data for") == 1, said
            for name in subsets.strip("[]").split(","):
                assert name in said.split("Looked in")[0]
    assert not loaded
    assert not list(fakes.rglob("sweep.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=hf", "model.path=/nowhere/x"], "model.path=/nowhere/x: there is no such folder"),
        (["model=hf,random", "model.path=/nowhere/x.gguf"], "model.path=/nowhere/x.gguf: there is no such file"),
    ],
)
def test_a_missing_model_ends_a_sweep_before_it_begins(tmp_path, capsys, words, said):
    """A model that is not there is found once, before the sweep has a folder, and not once for each job."""
    line = ["-m", "method=snapkv,kivi,diffkv", "task=longctx", *words, f"results_dir={tmp_path}"]
    assert main(line) == 2
    errors = capsys.readouterr().err
    assert errors.count(said) == 1 and len(re.findall(ERROR, errors)) == 1 and "loading model" not in errors, errors
    assert not list(tmp_path.rglob("*.json"))


def test_method_that_a_pattern_named_may_not_fit(fakes, monkeypatch, capsys):
    """`glob(*)` leaves out a method that is not for this model, and says so; a method that was named is an error."""

    from kvbench.errors import NotForModel

    def parts():
        def make_policy(cfg):
            if cfg["ratio"] == 0.25:
                raise NotForModel("kivi needs a table of this model")
            return make_parts().make_policy(cfg)

        return altered(make_parts(), make_policy=make_policy)

    monkeypatch.setattr("kvbench.runs.parts.Loaders", parts)
    assert main(["-m", "method=glob(*)", "limit=2", "reference=none"]) == 0
    assert "job 3 of 4: left out: kivi needs a table of this model" in capsys.readouterr().err
    assert main(["-m", "method=kivi,snapkv", "limit=2", "reference=none"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=kivi", "hydra/launcher=joblib"], "is not installed; pip install hydra-joblib-launcher"),
        (["method=kivi", "hydra/launcher=basic"], "launches the jobs of a sweep, and this is one run; add -m"),
    ],
)
def test_launchers_that_cannot_be_used(fakes, monkeypatch, capsys, words, message):
    """A launcher whose package is missing, or that has nothing to launch, is refused with the remedy."""
    monkeypatch.setattr("kvbench.cli.sweeping.find_spec", lambda name: None)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_presets_leave_the_users_own_words():
    """A launcher's preset fills in what the command line does not say."""
    from kvbench.cli.sweeping import PLUGINS, with_preset

    words = with_preset(["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=9"])
    assert words[:3] == ["-m", "hydra/launcher=submitit_slurm", "++hydra.launcher.timeout_min=9"]
    assert "++hydra.launcher.gpus_per_node=1" in words, "one GPU for each job"
    assert sum("hydra.launcher.timeout_min" in word for word in words) == 1
    assert "++hydra.launcher.ray.remote.num_cpus=1" in with_preset(["-m", "hydra/launcher=ray"])
    assert with_preset(["-m"]) == ["-m"]
    assert set(files.options("launcher")) == set(PLUGINS)


def test_status(fakes, capsys):
    """`status` counts runs and jobs by how they stand, and names those that are not done."""
    assert main(["-m", "method=snapkv,kivi", "method.ratio=0.5,1.5", "limit=4", "reference=none"]) == 2
    capsys.readouterr()
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "\nresults: 2 runs: 2 done\n" in out
    assert "4 jobs: 2 done, 2 failed" in out
    assert "failed   job 2 snapkv ratio=1.5: method.ratio=1.5 is outside (0, 1]" in " ".join(out.split()).replace(
        "failed job", "failed   job"
    )
    (sweep,) = sweeps(Path("results"))
    (sweep.folder / "0003" / "job.json").unlink()
    text = (sweep.folder / "0004" / "job.json").read_text()
    (sweep.folder / "0004" / "job.json").write_text(re.sub(r'"code": \d', '"code": null', text))
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "4 jobs: 1 done, 1 failed, 1 lost, 1 left" in out and "lost     job 4 kivi ratio=1.5: since" in out
    with sweep.job(4):  # as in the process that works on it
        assert main(["status"]) == 0
    assert "running  job 4 kivi ratio=1.5" in capsys.readouterr().out
    assert main(["status", "sweeps=none"]) == 2
    assert main(["status", "results_dir=nowhere"]) == 2


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(0),
        pytest.param(KeyError("x"), marks=pytest.mark.exhaustive),
        pytest.param(type("Odd", (BaseException,), {})("y"), marks=pytest.mark.exhaustive),
    ],
    ids=repr,
)
def test_what_a_method_raises_ends_its_job_alone(fakes, monkeypatch, capsys, error):
    """Also a request to leave Python: the job and its record name the method, the next one runs, and the code says it.
    A single run ends as its job does."""

    class Rude(FakePolicy):
        """Raises when its bounds are asked for, behind its last sample."""

        def bounds(self, extent):
            if self.ratio == 0.25:  # kivi's
                raise error
            return super().bounds(extent)

    def make_policy(cfg):
        return Rude(**{key: value for key, value in cfg.items() if key in ("ratio", "hidden")})

    monkeypatch.setattr("kvbench.runs.parts.Loaders", lambda: altered(make_parts(), make_policy=make_policy))
    said = (
        f"Rude.bounds raised {type(error).__name__}: {error} (test_jobs.py:{Rude.bounds.__code__.co_firstlineno + 2})"
    )
    for words in (["-m", "method=kivi,snapkv"], ["method=kivi"]):
        assert main([*words, "limit=2", "reference=none"]) == 1
        out, err = capsys.readouterr()
        assert f"error: {said}\n" in err and "fault of kvbench" not in err
        assert words[0] != "-m" or (f"job 1 (kivi) failed: {said}" in err and "\nsnapkv" in out)
        found = [RunRecord.load(path.parent) for path in fakes.rglob("run.json")]
        assert {run.method: (run.status, run.message) for run in found} == {
            "kivi": ("failed", said),
            "snapkv": ("complete", ""),
        }


def test_what_ends_the_reference_is_told_once(fakes, monkeypatch, capsys):
    """Runs that wait for the full cache's run end with its error: one message, and the end names all jobs."""
    real = FakeEngine.answer

    def answer(self, request, repeat, neighbours):
        if self.policy.ratio == 1:
            raise JournalError("cannot write it: the disk is full")
        return real(self, request, repeat, neighbours)

    monkeypatch.setattr(FakeEngine, "answer", answer)
    assert main(["-m", "method=full,snapkv,kivi", "limit=2"]) == 1
    err = capsys.readouterr().err
    assert re.findall(f"{ERROR}(.*)\n", err) == ["cannot write it: the disk is full"]
    assert err.count("failed with the full cache's run, which it is compared with\n") == 2
    assert "jobs 1 (full), 2 (snapkv), 3 (kivi) failed: cannot write it: the disk is full" in err


def test_no_command_is_left_without_a_word(fakes, monkeypatch, capsys):
    """What asks Python to leave in any other command is an error too."""

    def leaves(name, *rest):
        sys.exit(0)

    monkeypatch.setattr("kvbench.cli.commands.run", leaves)
    assert main(["compare"]) == 1
    assert "error: " in (said := capsys.readouterr().err) and "SystemExit: 0" in said
