"""The evidence of a GPU: what runs, what is run again, and a dry run of real stages on interpreted kernels."""

import importlib
import json
import sys
import tarfile

import pytest
import torch

from kvbench.bench import evidence_gpu
from kvbench.bench.evidence_gpu import STAGES, Stage, go_on, left_over, words_of
from kvbench.kernels.bench import bench
from kvbench.kernels.bench.bench import read_words

GOOD, BAD = "platform", "kvbench.bench.no_such_module"  # a module of Python's own that prints and ends well


def test_stages_go_on_where_a_call_ended(tmp_path, capsys):
    """A stage that ended well is not run again, one that failed is tried twice; state and prints say so."""
    stages = (Stage("good", 60, GOOD), Stage("bad", 60, BAD), Stage("last", 60, GOOD))
    assert [stage.name for stage in go_on(tmp_path, 300, stages)] == ["bad"]
    state = json.loads((tmp_path / "state.json").read_text())
    done = {name: (entry["rc"], entry["tries"]) for name, entry in state.items()}
    assert done == {"good": (0, 1), "bad": (1, 1), "last": (0, 1)}
    before = (tmp_path / "good.txt").stat().st_mtime_ns
    assert go_on(tmp_path, 300, stages) == []  # given up
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["bad"]["tries"] == 2 and "No module named" in (tmp_path / "bad.txt").read_text()
    assert (tmp_path / "good.txt").stat().st_mtime_ns == before
    assert capsys.readouterr().out.count("good ") == 1


def test_the_end_of_a_call_is_no_failure(tmp_path, monkeypatch):
    """A stage that is cut short because the call's time is over does not count as tried; one that runs past its own
    limit does, and what has too little time left is not begun."""
    sleeper = "timeit -n1 -r1 -s 'import time' 'time.sleep(60)'"
    assert go_on(tmp_path / "none", 10, (Stage("long", 400, sleeper),))[0].name == "long"
    assert not (tmp_path / "none" / "state.json").exists()
    short = Stage("short", 1, sleeper)
    go_on(tmp_path / "own", 30, (short,))
    assert json.loads((tmp_path / "own" / "state.json").read_text())["short"]["tries"] == 1
    monkeypatch.setattr(evidence_gpu, "LEAST_S", 0.5)
    left = go_on(tmp_path / "cut", 2, (Stage("long", 400, sleeper), Stage("next", 1, GOOD)))
    assert [stage.name for stage in left] == ["long", "next"]
    state = json.loads((tmp_path / "cut" / "state.json").read_text())
    assert (state["long"]["rc"], state["long"]["tries"]) == (124, 0) and "next" not in state


@pytest.mark.parametrize("dry", [False, True])
def test_every_stage_names_settings_that_exist(tmp_path, dry):
    """The words of each stage are read by the module that it names, before a lent machine finds out."""
    for stage in left_over(STAGES, {}, dry):
        python, flag, module, *words = words_of(stage, tmp_path, dry)
        assert (python, flag) == (sys.executable, "-m")
        found = importlib.import_module(module)
        if hasattr(found, "Settings"):
            settings = read_words(found.Settings, words)
            assert settings.rounds < 11 or module.endswith("manager")
            assert f"out={tmp_path / stage.name}.json" in words
        else:
            with pytest.raises(SystemExit) as ended:
                found.main([*words, "--help"])
            assert ended.value.code == 0
    assert sum(stage.limit_s for stage in STAGES) <= 65 * 60 and max(stage.limit_s for stage in STAGES) <= 540


@pytest.mark.exhaustive
def test_a_dry_run_leaves_one_folder_and_one_archive(tmp_path, monkeypatch, capsys):
    """Real stages on interpreted kernels: the machine, one bench; documents that check, and the archive holds all."""
    pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")
    few = tuple(stage for stage in STAGES if stage.name in ("probe", "attention"))
    monkeypatch.setattr(evidence_gpu.go_on, "__defaults__", (few, False))
    words = ["--dry", "--minutes", "4", "--results", str(tmp_path / "r"), "--archive", str(tmp_path / "a.tar.gz")]
    assert evidence_gpu.main(words) == 0, capsys.readouterr().out
    folder = tmp_path / "r" / "interpreter"
    bench.check_document(json.loads((folder / "attention.json").read_text()))
    said = (folder / "probe.txt").read_text()
    assert json.loads(said[said.index("{") :])["backend"] == "triton"
    with tarfile.open(tmp_path / "a.tar.gz") as pack:
        assert {name.partition("/")[2] for name in pack.getnames()} >= {"state.json", "probe.txt", "attention.json"}
    assert evidence_gpu.main(words) == 0
    assert "2 stages done, 0 left" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    """One line and exit status 2, with what can be done here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evidence_gpu.main([]) == 2
    assert "no GPU: torch" in capsys.readouterr().err
