"""How commands end: by a signal, by a second one, when their terminal goes, and when another process has their run."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fake_parts import FakeTask
from places import ROOT, TESTS
from refusals import ERROR

from kvbench.cli import endings
from kvbench.cli import main as cli
from kvbench.results.record import RunRecord

NUMBERS = {"SIGINT": 2, "SIGTERM": 15, "SIGHUP": 1}


@pytest.fixture(autouse=True)
def usual_signals():
    """The tests, and the children that they start, meet signals as a program in a terminal does, even if this process
    runs behind `nohup` or in a shell's background, where some are ignored."""
    before = {number: signal.getsignal(number) for number in NUMBERS.values()}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(work):
    """Gives a function that starts a command on fakes in a process of its own; what still runs at the end is killed."""
    children = []

    def command(*words, count=500, pause_s=0.01, before=(), hang=False, **named):
        paths = [ROOT, TESTS, TESTS / "cli"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HANG": "1" if hang else ""}
        program = [*before, sys.executable, TESTS / "fake_command.py", work.parent / "conf", count, pause_s]
        named = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True} | named
        child = subprocess.Popen([*map(str, program), *words], env=environment, cwd=work, **named)
        children.append(child)
        return child

    yield command
    for child in children:
        child.kill()
        child.wait()
        if child.stderr:
            child.stderr.close()


def wait_for(child, text):
    """Read a child's stderr up to a line that holds the text; the lines."""
    lines = []
    while text not in (lines or [""])[-1]:
        line = child.stderr.readline()
        assert line, f"ended without {text!r}: {lines}"
        lines.append(line)
    return lines


def records(folder):
    """The runs below a folder by method."""
    found = [RunRecord.load(path.parent) for path in (folder / "work" / "results").rglob("run.json")]
    return {record.method: record for record in found}


def wait_for_samples(folder, method, count=5):
    """Wait until a run has so many finished samples."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for path in (folder / "work" / "results").rglob(f"{method}/*/samples.jsonl"):
            if path.read_bytes().count(b"\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError(f"{method} has no {count} samples after a minute")


@pytest.fixture
def signal_at(monkeypatch):
    """Gives a function that lets a signal arrive in this process while the n-th answer is scored."""
    score = FakeTask.score

    def arrange(number, count):
        calls = []

        def scored(self, request, text):
            calls.append(text)
            if len(calls) == count:
                os.kill(os.getpid(), number)
            return score(self, request, text)

        monkeypatch.setattr(FakeTask, "score", scored)

    return arrange


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_ending_is_one(tmp_path, fakes, signal_at, capsys, name):
    """The three signals stop a run alike: status, message, one line that says how to go on, and 128 + the signal."""
    signal_at(NUMBERS[name], 6)
    assert cli.main(["reference=none", "task.kind=a b"]) == 128 + NUMBERS[name]
    said = capsys.readouterr().err
    again = "python -m kvbench reference=none 'task.kind=a b'"
    assert said.endswith(f"\nstopped by {name}; every finished sample is kept. To go on: {again}\n")
    assert "Traceback" not in said
    assert "5/10 samples, prompt 6/10, 10.0 tokens/s" in said, "the progress was not closed"
    record = records(tmp_path)["diffkv"]
    assert (record.status, record.message, record.counts.done) == ("stopped", f"stopped by {name}", 5)
    assert record.sessions[0].ended
    assert cli.main(["reference=none", "task.kind=a b"]) == 0
    record = records(tmp_path)["diffkv"]
    assert (record.status, record.message, record.counts.done) == ("complete", "", 10)


def test_sweep_stops_with_its_job(tmp_path, fakes, signal_at):
    """A signal ends a whole sweep: the jobs at work, which go together, are marked, and no other is begun."""
    signal_at(signal.SIGTERM, 3)
    assert cli.main(["-m", "seed=0,1", "method=kivi,snapkv", "reference=none"]) == 128 + signal.SIGTERM
    found = [RunRecord.load(path.parent) for path in (tmp_path / "work" / "results").rglob("run.json")]
    ends = sorted((record.method, record.identity["seed"], record.status) for record in found)
    assert ends == [("kivi", 0, "stopped"), ("snapkv", 0, "stopped")]


def test_ignored_signal_stays_ignored(tmp_path, fakes, signal_at):
    """Under nohup a closed terminal ends nothing."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal_at(signal.SIGHUP, 3)
    assert cli.main(["reference=none"]) == 0
    assert records(tmp_path)["diffkv"].status == "complete"


@pytest.mark.exhaustive
def test_second_signal_ends_at_once(tmp_path, start):
    """A second signal ends a command that is busy with ending, here on Python's way out, without words of Python's."""
    child = start("reference=none", hang=True)
    wait_for_samples(tmp_path, "diffkv")
    child.send_signal(signal.SIGINT)
    lines = wait_for(child, "hangs")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM
    said = "".join(lines) + child.stderr.read()
    assert said.endswith("\nended at once by SIGTERM\n") and "Traceback" not in said


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs util-linux's setsid")
@pytest.mark.exhaustive
def test_closed_terminal(tmp_path, start):
    """When the terminal goes, the bar that stood on it cannot be taken away, and the run still says what ended it."""
    terminal, inner = pty.openpty()
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    child = start("reference=none", before=["setsid", "--ctty"], **streams)
    os.close(inner)
    wait_for_samples(tmp_path, "diffkv")
    os.close(terminal)
    assert child.wait(30) == 128 + signal.SIGHUP
    record = records(tmp_path)["diffkv"]
    assert (record.status, record.message) == ("stopped", "stopped by SIGHUP")


def test_full_terminal_redirection():
    """Output that goes to a full disk is an error that says so, not a traceback."""
    code = "from kvbench.cli.main import main; raise SystemExit(main(['list', 'method']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-uc", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.match(f"{ERROR}cannot write a file or the output: the disk is full; free some space", done.stderr)


def test_handlers_are_given_back():
    """A command that ends by itself leaves the process's handlers as they were, its own handlers included."""

    def own(number, frame):
        """Somebody's handler."""

    before = {number: signal.getsignal(number) for number in endings.SIGNALS}
    try:
        signal.signal(signal.SIGTERM, own)
        with endings.stoppable():
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGHUP) is not before[signal.SIGHUP]
        assert {**before, signal.SIGTERM: own} == {number: signal.getsignal(number) for number in endings.SIGNALS}
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


@pytest.mark.parametrize(
    "words, kept", [(["calibrate", "x=1"], True), (["compare"], False), (["lm_eval"], False), ([], True)]
)
def test_only_what_is_kept_is_promised(monkeypatch, capsys, words, kept):
    """A command that starts again from nothing does not say that samples are kept; Ctrl-C from Python is SIGINT."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_carry_out", interrupted)
    assert cli.main(words) == 130
    said = capsys.readouterr().err
    assert ("every finished sample is kept" in said) == kept
    assert said.startswith("\nstopped by SIGINT; ") and said.endswith(" ".join(["python -m kvbench", *words]) + "\n")


@pytest.mark.exhaustive
def test_sweeps_in_opposite_order(tmp_path, start):
    """Three sweeps over the same runs in different orders never wait in a circle; one that is killed lets the others
    go on, and every run is whole."""
    orders = ["full,kivi", "kivi,full", "full,kivi"]
    sweeps = [start("-m", f"method={order}", count=30, pause_s=0.02) for order in orders]
    wait_for_samples(tmp_path, "full")
    holder = int(next((tmp_path / "work" / "results").rglob("full/*/.lock")).read_text())
    victim = next(child for child in sweeps if child.pid == holder)
    victim.kill()
    for child in sweeps:
        said = child.communicate(timeout=120)[1]
        assert child.returncode == (-signal.SIGKILL if child is victim else 0), said
    found = records(tmp_path)
    assert {name: record.status for name, record in found.items()} == {"full": "complete", "kivi": "complete"}
    assert all(path.read_bytes().count(b"\n") == 30 for path in tmp_path.rglob("samples.jsonl"))
