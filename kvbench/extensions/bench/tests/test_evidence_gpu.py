"""The evidence of a GPU: what runs, what is run again, and a dry run of real stages on interpreted kernels."""

import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from kvbench.extensions.bench import decode, evidence_gpu
from kvbench.extensions.bench.evidence_gpu import STAGES, Stage, go_on, left_over, run_stage, words_of
from kvbench.kernels.bench import bench
from kvbench.kernels.bench.bench import read_words

GOOD, BAD = "platform", "kvbench.extensions.bench.no_such_module"  # a module of Python's own that prints and ends well


def test_stages_go_on_where_a_call_ended(tmp_path, capsys):
    """A stage that ended well is not run again, one that failed is tried twice; state and prints say so."""
    stages = (Stage("good", 60, GOOD, ""), Stage("bad", 60, BAD, ""), Stage("last", 60, GOOD, ""))
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


def test_the_end_of_a_call_is_no_failure(tmp_path):
    """A stage that is cut short because the call's time is over does not count as tried; one that runs past its own
    limit does, and none is begun with less than half of its limit left, or less than it took before."""
    sleeper = "timeit -n1 -r1 -s 'import time' 'time.sleep(60)'"
    assert go_on(tmp_path / "none", 10, (Stage("long", 400, sleeper, ""),))[0].name == "long"
    assert not (tmp_path / "none" / "state.json").exists()
    go_on(tmp_path / "own", 30, (Stage("short", 1, sleeper, ""),))
    assert json.loads((tmp_path / "own" / "state.json").read_text())["short"]["tries"] == 1
    left = go_on(tmp_path / "cut", 1.5, (Stage("long", 2, sleeper, ""), Stage("next", 1, GOOD, "")))
    assert [stage.name for stage in left] == ["long", "next"]
    state = json.loads((tmp_path / "cut" / "state.json").read_text())
    assert (state["long"]["rc"], state["long"]["tries"]) == (124, 0) and "next" not in state
    before = {"slow": {"rc": 1, "seconds": 20.0, "tries": 1}}
    (tmp_path / "cut" / "state.json").write_text(json.dumps(before))
    assert go_on(tmp_path / "cut", 15, (Stage("slow", 25, GOOD, ""),))
    assert json.loads((tmp_path / "cut" / "state.json").read_text()) == before


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> Stage:
    """A stage that runs some Python."""
    monkeypatch.setattr(evidence_gpu, "words_of", lambda *_: [sys.executable, "-c", code])
    return Stage("python", 60, GOOD, "")


def test_a_stage_with_refusals_is_complete(tmp_path, monkeypatch):
    """A stage that names variants which cannot be timed is complete: it would give the same again."""
    stage = runs(monkeypatch, f"raise SystemExit({bench.REFUSED})")
    assert go_on(tmp_path, 60, (stage,)) == []
    assert json.loads((tmp_path / "state.json").read_text())["python"]["rc"] == bench.REFUSED


def test_no_process_of_a_stage_is_left(tmp_path, monkeypatch):
    """A stage that runs past its limit ends with the processes that it has started."""
    inner = "import time; time.sleep(254.321)"
    stage = runs(monkeypatch, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])")
    assert run_stage(stage, tmp_path, 1.5, dry=False) == 124
    wait_for(lambda: not processes(inner))


def wait_for(happened) -> None:
    """Waits until something holds, but not as long as the processes here sleep; a loaded machine takes a while to begin
    processes, and to end what was killed."""
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def processes(words: str) -> list[Path]:
    """Those that have some words in their command line."""
    paths = Path("/proc").glob("[0-9]*/cmdline")
    return [path for path in paths if words.encode() in _read(path)]


def _read(path: Path) -> bytes:
    """The command line of a process, which may have ended meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextmanager
def running_stages(*arguments, **more) -> Iterator[BaseProcess]:
    """A call of the collector in a process group of its own, which is killed at the end."""

    def collect() -> None:
        os.setpgid(0, 0)
        go_on(*arguments, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside idle threads
        call = get_context("fork").Process(target=collect)
        call.start()
    try:
        yield call
    finally:
        with suppress(ProcessLookupError):
            os.killpg(call.pid, signal.SIGKILL)
        call.join()


def die() -> None:
    """Kills the process group of the one who calls."""
    os.killpg(0, signal.SIGKILL)


def test_a_killed_call_loses_the_stage_under_way(tmp_path, monkeypatch):
    """Killed behind each stage and as the state is written, a call leaves all that was done before on record; the next
    one does the others, each once."""
    names = [f"stage{n}" for n in range(4)]
    note = "import pathlib, sys; print(open(sys.argv[1], 'a').write(sys.argv[2]))"
    monkeypatch.setattr(
        evidence_gpu, "words_of", lambda stage, *_: [sys.executable, "-Sc", note, str(tmp_path / "log"), stage.name]
    )
    stages = tuple(Stage(name, 60, GOOD, "") for name in names)
    for _ in names[1:]:
        with running_stages(tmp_path, 300, stages, keep=die) as call:
            call.join(60)
        assert call.exitcode == -signal.SIGKILL
    assert list(evidence_gpu.read_state(tmp_path)) == names[:3]
    with monkeypatch.context() as patch:  # the new state is there, and takes the place of the old one next
        patch.setattr(Path, "replace", lambda *_: die())
        with running_stages(tmp_path, 300, stages) as call:
            call.join(60)
    assert call.exitcode == -signal.SIGKILL
    assert list(evidence_gpu.read_state(tmp_path)) == names[:3]
    assert go_on(tmp_path, 300, stages) == []
    assert (tmp_path / "log").read_text() == "".join([*names, names[3]])


def test_a_killed_call_leaves_no_process(tmp_path, monkeypatch):
    """The stage under way ends with the collector, and so does what the stage has started, in whatever order."""
    inner = "import time; time.sleep(254.322)"
    stage = runs(monkeypatch, f"import subprocess, sys; subprocess.run([sys.executable, '-Sc', {inner!r}])")
    with running_stages(tmp_path, 300, (stage,)):
        wait_for(lambda: len(processes(inner)) >= 2)
    wait_for(lambda: not processes(inner))
    assert not (tmp_path / "state.json").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["manager", "decode-4k"])
def test_a_killed_stage_goes_on_behind_its_last_cell(tmp_path, name):
    """A dry stage, killed with the collector as soon as its first cell is there: the next call keeps that cell to the
    digit, and measures the others."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    stages = tuple(stage for stage in STAGES if stage.name == name)
    document = tmp_path / f"{name}.json"
    with running_stages(tmp_path, 1200, stages, dry=True) as call:
        wait_for_cell = time.monotonic() + 600
        while not document.exists() and call.is_alive():
            assert time.monotonic() < wait_for_cell
            time.sleep(0.02)
    held = json.loads(document.read_text())
    wait_for(lambda: not processes(str(document)))
    assert go_on(tmp_path, 1200, stages, dry=True) == []
    finished = json.loads(document.read_text())
    bench.check_document(finished)
    assert finished["cells"][: len(held["cells"])] == held["cells"] and finished["started"] == held["started"]
    assert len(finished["cells"]) == len(held["cells"]) + held["left"] and not finished["left"]


@pytest.mark.parametrize("dry", [False, True])
def test_every_stage_names_settings_that_exist(tmp_path, dry):
    """The words of each stage are read by the module that it names, before a lent machine finds out."""
    for stage in left_over(STAGES, {}):
        python, flag, module, *words = words_of(stage, tmp_path, dry)
        assert (python, flag) == (sys.executable, "-m")
        loaded = importlib.import_module(module)
        if hasattr(loaded, "Settings"):
            settings = read_words(loaded.Settings, words)
            assert settings.rounds < 11 or module.endswith("manager")
            assert f"out={tmp_path / stage.name}.json" in words
        else:
            with pytest.raises(SystemExit) as ended:
                loaded.main([*words, "--help"])
            assert ended.value.code == 0
    assert sum(stage.limit_s for stage in STAGES) <= 65 * 60 and max(stage.limit_s for stage in STAGES) <= 540


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_dry_run_passes_every_stage(tmp_path, capsys):
    """All stages on interpreted kernels and tiny shapes: every document checks, decode and throughput have a row of
    each default method, eager and from captured steps; the archive carries them to a bare machine, where nothing is
    left to do."""
    pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")
    words = ["--dry", "--minutes", "60", "--archive", str(tmp_path / "a.tar.gz"), "--results"]
    assert evidence_gpu.main([*words, str(tmp_path / "r")]) == 0, capsys.readouterr().out
    folder = tmp_path / "r" / "interpreter"
    documents = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "state"}
    for document in documents.values():
        bench.check_document(document)
    methods = decode.Settings().methods
    for stage in ("decode-4k", "throughput"):
        rows = {row["name"] for cell in documents[stage]["cells"] for row in cell["variants"]}
        assert rows >= {"transformers", *methods, *(f"{method}{decode.GRAPH}" for method in methods)}
    state = json.loads((folder / "state.json").read_text())
    assert {name: entry["rc"] for name, entry in state.items()} == dict.fromkeys((s.name for s in STAGES), 0)
    assert evidence_gpu.main([*words, str(tmp_path / "bare")]) == 0
    assert f"{len(STAGES)} stages done, 0 left" in capsys.readouterr().out.splitlines()[-1]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    """One line and exit status 2, with what can be done here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evidence_gpu.main([]) == 2
    assert "no GPU: torch" in capsys.readouterr().err
