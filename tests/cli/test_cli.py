"""The command line: commands, help, sweeps, and what a user reads when something is wrong."""

import gc
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_parts import make_parts
from places import ROOT
from refusals import refused

from kvbench.cli import main as cli
from kvbench.config import files as listing
from kvbench.config.garbage import SELDOM
from kvbench.models.load import load_model
from kvbench.results.provenance import wait_policy
from kvbench.results.record import RunRecord


def runs(folder: Path) -> dict[str, RunRecord]:
    """The runs below a folder by method and seed."""
    found = [RunRecord.load(path.parent) for path in (folder / "results").rglob("run.json")]
    return {f"{record.method} {record.seed}": record for record in found}


def test_plain_run(pictures, fakes, capsys):
    """`run` takes the defaults beside the full cache, prints the table, draws the picture and litters nothing."""
    assert cli.main(["run"]) == 0
    assert sorted(runs(fakes)) == ["diffkv 0", "full 0"]
    assert [item.name for item in fakes.iterdir()] == ["results"]
    out = capsys.readouterr().out
    assert "Quality: fake with tiny" in out
    picture = next((fakes / "results" / "fake" / "tiny" / "diffkv").rglob("result.png"))
    assert str(picture.relative_to(fakes)) in out.replace("\n", "")


def test_run_command_with_settings(fakes, capsys):
    """`run` is the same command; group choices and single settings reach the run; an experiment file sets several."""
    assert cli.main(["run", "method=snapkv", "method.ratio=0.6", "limit=4", "reference=none"]) == 0
    assert list(runs(fakes)) == ["snapkv 0"]
    record = runs(fakes)["snapkv 0"]
    assert record.counts.total == 4
    assert record.identity["method"]["ratio"] == 0.6
    assert cli.main(["experiment=paper", "reference=none"]) == 0
    assert sorted(runs(fakes)) == ["kivi 7", "snapkv 0"]


def test_sweep(pictures, fakes, capsys):
    """-m with comma lists runs every combination once, shares references, and ends with one table and one picture."""
    assert cli.main(["-m", "method=snapkv,kivi,diffkv", "seed=0,1"]) == 0
    names = [f"{method} {seed}" for method in ("diffkv", "full", "kivi", "snapkv") for seed in (0, 1)]
    assert sorted(runs(fakes)) == names
    out = capsys.readouterr().out
    assert out.count("Quality: ") == 1
    # Two tables of two seeds, and behind them a sentence for each.
    said = [line for line in out.splitlines() if line.startswith("snapkv ")]
    assert [": " in line for line in said] == [False] * 4 + [True] * 2
    assert [item.name for item in fakes.iterdir()] == ["results"]
    assert (fakes / "results" / "fake" / "tiny" / "sweep.png").exists()


def test_a_glob_takes_every_method_there_is(fakes):
    """`method=glob(*)` is every YAML of methods."""
    assert cli.main(["-m", "method=glob(*)", "limit=2", "seed=5", "reference=none"]) == 0
    assert sorted(runs(fakes)) == ["diffkv 5", "full 5", "kivi 5", "snapkv 5"]


def test_sweep_sets_a_key_that_the_default_method_lacks(fakes, capsys):
    """A setting beside a sweep of methods goes to them, whatever the default method has."""
    assert cli.main(["-m", "method=choice(snapkv)", "method.budget=9", "reference=none"]) == 0, capsys.readouterr().err
    record = RunRecord.load(next((fakes / "results").rglob("run.json")).parent)
    assert record.identity["method"]["budget"] == 9


def test_a_sweep_takes_null_beside_groups(fakes, capsys):
    """Hydra's choice() does not: `null` beside a swept group ended with words that nobody had typed."""
    words = ["-m", "method=snapkv", "task=choice(longbench)", "task.data_dir=null", "reference=none"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert len(list((fakes / "results").rglob("run.json"))) == 1


def test_sweep_goes_on_after_a_bad_job(fakes, capsys):
    """One setting out of range does not keep the others from running; the exit code tells."""
    assert cli.main(["-m", "method=snapkv", "method.ratio=0.5,1.5,0.25", "reference=none"]) == 2
    assert len(list((fakes / "results").rglob("run.json"))) == 2
    error = capsys.readouterr().err
    assert "job 2 of 3: snapkv ratio=1.5" in error
    assert "3 jobs: 2 done, 1 failed; log: " in error and "job 2 (snapkv ratio=1.5) failed: method.ratio=1.5" in error
    assert "error[setting-value]: method.ratio=1.5 is outside (0, 1]" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=snapvk"], "method=snapvk does not exist. Did you mean snapkv? Known: diffkv, full, kivi, snapkv."),
        (["task=longbnch"], "task=longbnch does not exist. Did you mean longbench? Known: longbench, longctx."),
        (["model=llama"], "model=llama does not exist."),
        (["-m", "method=snapkv,kiwi"], "method=kiwi does not exist. Did you mean kivi?"),
        (["method.ration=0.5"], "there is no setting method.ration. Did you mean method.ratio? Known: method."),
        (
            ["method=snapkv", "method.budgte=1"],
            "Did you mean method.budget? Known: method.budget, method.calibration, method.ratio. (method=snapkv)",
        ),
        (["-m", "method=full,kivi", "method.budget=1"], "there is no setting method.budget."),
        (["method.levels.hihg=2"], "there is no setting method.levels.hihg. Did you mean method.levels.high?"),
        (["method.ratio.x=2"], "method.ratio has no keys of its own, so method.ratio.x cannot be set"),
        (["bacth_size=2"], "there is no setting bacth_size. Did you mean batch_size?"),
        (["metod=kivi"], "there is no setting metod. Did you mean method?"),
        (["store.page_byte=2"], "there is no setting store.page_byte. Did you mean store.page_bytes?"),
        (["+surprise=1"], "there is no setting surprise."),
        (["method.ratio=2"], "method.ratio=2 is outside (0, 1]; give the share of the cache to keep"),
        (["batch_size=0"], "batch_size=0 must be a whole number of samples from 1 to 65536"),
        (["limit=4", "kivi"], "kivi cannot be read as key=value"),
        (["kivi"], "kivi is no command. Did you mean method=kivi? Commands: run, list, lm_eval, help, "),
        (["lsit"], "lsit is no command. Did you mean list?"),
        (["list", "metods"], "metods is none of the lists. Did you mean methods? There are: method, task, model,"),
    ],
)
def test_user_errors(fakes, capsys, arguments, message):
    """A wrong word is answered with one message that names what exists, no traceback, exit code 2, and nothing is
    run."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert re.match(r"error\[[a-z-]+\]: |job 1 ", captured.err)
    assert "Traceback" not in captured.err
    assert not runs(fakes)


def test_faults_are_not_hidden(fakes, capsys, monkeypatch):
    """A fault of kvbench shows its traceback without being asked, a user's error with KVBENCH_DEBUG=1; a foreign
    ValueError says that it is one."""
    for error, code, *texts in (
        (KeyError("oops"), 1, "Traceback", "fault of kvbench"),
        (ValueError("shape mismatch"), 2, "error: shape mismatch", "(ValueError from outside kvbench; KVBENCH_DEBUG=1"),
    ):
        monkeypatch.setattr("kvbench.runs.parts.Loaders", Mock(side_effect=error))
        assert cli.main(["run"]) == code
        said = capsys.readouterr().err
        assert all(text in said for text in texts), said
    monkeypatch.setenv("KVBENCH_DEBUG", "1")
    assert cli.main(["method.ratio=2"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["-m", "method=snapkv,diffkv"]])
def test_failed_runs_exit_with_1(fakes, capsys, monkeypatch, words):
    """A run, or a sweep, whose results must not be used ends with exit code 1, says why, and is shown as failed."""
    statuses = {f"{'ab'[i % 2]}/{i}": "oom" for i in range(10)}
    monkeypatch.setattr("kvbench.runs.parts.Loaders", lambda: make_parts(statuses=statuses))
    assert cli.main([*words, "reference=none"]) == 1
    out, err = capsys.readouterr()
    assert "the run failed: no sample ended well" in err and "diffkv FAILED" in out
    assert not words or ("2 jobs: 2 failed" in err and "snapkv FAILED" in out)


def test_list(fakes, capsys):
    """`list` shows every group with the first sentence of each file's leading comment, or only the groups asked for."""
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert [line.split("=")[0] for line in out.splitlines() if line[:1].isalpha()] == [*listing.all_groups()]
    assert "  snapkv  Keeps half.\n" in out
    assert "  kivi    Keeps a quarter of it.\n" in out or "  kivi    Keeps a quarter of it\n" in out
    assert "  paper  A paper's.\n" in out
    assert cli.main(["list", "methods", "backend"]) == 0
    out = capsys.readouterr().out
    assert "longctx" not in out and "torch" in out and "snapkv" in out


def test_help(fakes, capsys):
    """Help, asked for in three ways, shows commands, examples, every group's choices and every setting."""
    texts = []
    for arguments in (["help"], ["--help"], ["limit=3", "-h"]):
        assert cli.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    for part in (
        "usage: kvbench [command] [key=value ...]      (or python -m kvbench)",
        "method=      diffkv full kivi snapkv",
        "batch_size: auto",
    ):
        assert part in texts[0], part
    assert "hydra:" not in texts[0] and "defaults:" not in texts[0]
    assert max(map(len, texts[0].splitlines())) <= 120


def test_flags_anywhere(fakes, capsys):
    """A flag between two settings works, with its value; a folder of one's own adds to the choices."""
    assert cli.main(["limit=4", "-m", "method=kivi,snapkv", "reference=none"]) == 0
    assert sorted(runs(fakes)) == ["kivi 0", "snapkv 0"]
    (fakes / "mine" / "method").mkdir(parents=True)
    (fakes / "mine" / "method" / "new.yaml").write_text("_target_: fake.New\nratio: 0.3\n")
    assert cli.main(["limit=4", "--config-dir", "mine", "method=new", "reference=none"]) == 0
    given = ["--config-dir", str(fakes / "mine"), "limit=4", "method=new", "reference=none"]
    assert runs(fakes)["new 0"].sessions[0].command == given


def test_config_can_be_shown(fakes, capsys):
    """Hydra's own flags work: --cfg job prints the configuration and runs nothing."""
    assert cli.main(["--cfg", "job", "method=kivi"]) == 0
    assert "ratio: 0.25" in capsys.readouterr().out
    assert not runs(fakes)


def test_shipped_files_are_described():
    """Every shipped configuration file says in a leading comment what it is."""
    for group in listing.GROUPS:
        for name, text in listing.options(group).items():
            assert len(text) > 15, f"conf/{group}/{name}.yaml"


@pytest.mark.parametrize("argument", ["list", "help", "--help", "--version"])
def test_light_commands_import_nothing_heavy(argument):
    """`list` and help answer at once: neither torch nor transformers nor hydra is imported for them."""
    code = f"import sys; from kvbench.cli.main import main; code = main([{argument!r}]); "
    code += "heavy = {'torch', 'transformers', 'lm_eval', 'hydra', 'scipy', 'datasets'} & set(sys.modules); "
    code += "sys.exit(f'{heavy}' if heavy else code)"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert time.monotonic() - started < 10  # well under one second on an idle machine


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("PASSIVE", "1000")),
        ({"GOMP_SPINCOUNT": "0"}, ("PASSIVE", "0")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
    ],
)
def test_how_threads_wait(monkeypatch, capsys, given, wanted):
    """Threads sleep after a few turns, unless the user says how they wait."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "")  # for the fixture to put back what was there
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--version"]) == 0
    assert wait_policy() == " ".join([wanted[0], *(f"GOMP_SPINCOUNT={turns}" for turns in wanted[1:] if turns)])
    assert tuple(os.environ.get(name) for name in names) == wanted


def test_a_process_ends_as_python_ends():
    """A library's workers finish and its exit functions run, in `threading` as in `atexit`; what was printed is there,
    the exit code is the command's, and no search for garbage takes a second."""
    code = """
        import atexit, gc, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from kvbench.__main__ import run
        def work():
            time.sleep(0.2)
            print("worked")
        threading._register_atexit(lambda: print("stopped"))  # as joblib's executor stops its workers
        ThreadPoolExecutor(1).submit(work)
        atexit.register(lambda: print("done", gc.get_freeze_count()))
        sys.argv = ["kvbench", *sys.argv[1:]]
        run()
    """
    for words, ends, said in (["--version"], 0, "kvbench 0"), (["bytes", "none"], 2, ""):
        command = [sys.executable, "-c", textwrap.dedent(code), *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        *lines, last = ended.stdout.splitlines()
        assert ended.returncode == ends and said in ended.stdout
        assert {"worked", "stopped"} <= set(lines)
        done, frozen = last.split()
        assert done == "done" and int(frozen) > 10_000


def test_garbage_is_looked_for_as_before_when_a_model_is_loaded(monkeypatch):
    """A command collects seldom until it loads a model; the caller's numbers are in force then, and at the end. What
    there was before the model is left alone until then."""
    before, seen, frozen = gc.get_threshold(), [], []

    def carry_out(words: list[str]) -> int:
        seen.append(gc.get_threshold()[0])
        if words:
            with refused("name-unknown", "model.kind", "model.kind=none"):
                load_model({"kind": "none"})
            seen.append(gc.get_threshold())
            frozen.append(gc.get_freeze_count())
        return 0

    monkeypatch.setattr(cli, "_carry_out", carry_out)
    gc.set_threshold(123, 4, 5)
    try:
        gc.freeze()
        kept = gc.get_freeze_count()
        assert kept and cli.main(["run"]) == 0 and gc.get_freeze_count() == kept  # a caller's own are left as they are
        seen.clear()
        frozen.clear()
        gc.unfreeze()
        assert cli.main([]) == 0 and gc.get_threshold() == (123, 4, 5)
        assert cli.main(["run"]) == 0 and gc.get_threshold() == (123, 4, 5)
        assert frozen[0] > 100_000 and not gc.get_freeze_count()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert seen == [SELDOM, SELDOM, (123, 4, 5)] and SELDOM > 1_500_000
