"""The cage: what it refuses, what it lets through, and hostile programs that must find nothing to hold on to."""

import ast
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.tasks.code import grade as grader
from kvbench.tasks.code.cage import mechanism as cage_mechanism
from kvbench.tasks.code.cage import probe as cage_probe
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.mechanism import mechanisms, run_under
from kvbench.tasks.code.cage.wire import decode

HOSTILE = Path(__file__).parent / "hostile"
SHORT = cage.Limits(load_s=1.0, wall_s=5.0)
needs_cage = pytest.mark.skipif(
    cage.check_isolation().mechanism is None, reason=f"no isolation here: {'; '.join(cage.check_isolation().missing)}"
)
# The answer depends on what each call is given, so that no constant is right.
ROW = {
    "task_id": "Hostile/0",
    "prompt": "def attack(folder, port, abstract, pid):\n",
    "entry_point": "attack",
    "canonical_solution": "    return f'{len(folder)}:{port * 7919 % 10007}:{pid ^ 1234}'\n",
    "atol": 0,
}


def hostile_programs() -> list:
    """Every program of the folder: a file and the call of one of its functions."""
    programs = []
    for path in sorted(HOSTILE.glob("[a-z]*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            name = getattr(node, "name", "")
            if name.startswith("_attack_"):
                end = f"\ndef attack(*arguments):\n    return {name}(*arguments)\n"
                programs.append(pytest.param(text + end, id=f"{path.stem}-{name[8:]}"))
            elif name.startswith("_load_"):
                end = f"\n{name}()\ndef attack(*arguments):\n    pass\n"
                programs.append(pytest.param(text + end, id=f"{path.stem}-at-load-{name[6:]}"))
    return programs


class Target:
    """Things outside for hostile programs to aim at, and whether they were hit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "precious").write_text("kept")
        (folder / "precious").chmod(0o666)
        folder.chmod(0o777)
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.port = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", self.port))
        self.local = socket.socket(socket.AF_UNIX)
        self.abstract = f"kvbench-target-{os.getpid()}-{self.port}"
        self.local.bind("\0" + self.abstract)
        self.local.listen()
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        for link in (self.tcp, self.udp, self.local):
            link.setblocking(False)

    def row(self) -> dict:
        arguments = [[str(self.folder), self.port + extra, self.abstract, self.victim.pid] for extra in (0, 1, 2)]
        # Only the first call aims at the real port; the others keep a constant answer from being right.
        return {**ROW, "base_input": arguments[:2], "plus_input": arguments[2:]}

    def hits(self) -> list[str]:
        found = []
        if self.folder.stat().st_mode & 0o7777 != 0o777 or os.listdir(self.folder) != ["precious"]:
            found.append("folder changed")
        if (self.folder / "precious").read_text() != "kept":
            found.append("file changed")
        for name, link in (("tcp", self.tcp), ("local", self.local)):
            try:
                link.accept()
                found.append(f"{name} connected")
            except BlockingIOError:
                pass
        try:
            self.udp.recv(1)
            found.append("udp received")
        except BlockingIOError:
            pass
        if self.victim.poll() is not None:
            found.append("victim killed")
        return found

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for link in (self.tcp, self.udp, self.local):
            link.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """One target for all programs of this file."""
    made = Target(tmp_path_factory.mktemp("target"))
    yield made
    made.close()


@pytest.fixture
def token(monkeypatch):
    """A mark on the command line of every caged process of a test, inherited by all its forks."""
    mark = f"kvbench-test-{os.getpid()}-{time.monotonic_ns()}"
    real = cage_mechanism._interpreter()
    monkeypatch.setattr(cage_mechanism, "_interpreter", lambda: [*real[:-1], f"{real[-1]}\n# {mark}\n"])
    return mark


def processes_with(mark: str) -> list[str]:
    """Ids of the processes whose command line holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def wait_until_gone(mark: str, seconds: float) -> list[str]:
    """What is left of a test's processes after at most so long."""
    end = time.monotonic() + seconds
    while (left := processes_with(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


# What stopped some of the programs: shows that they came as far as trying.
EVIDENCE = {
    "outside-write_outside": "FileNotFoundError",
    "outside-connect": "ConnectionRefusedError|Network is unreachable",
    "outside-kill_parent": "ProcessLookupError",
    "outside-delete_system": "Read-only file system",
    "outside-chroot_out": "PermissionError",
    "outside-new_namespaces": "ZeroDivisionError",
    "outside-trace_parent": "refused",
    "outside-device": "PermissionError",
    "resources-loop": "call 1 of 2: the time limit",
    "resources-no_alarm": "timeout: the time limit",
    "resources-fork_bomb": "BlockingIOError|ended before",
    "resources-memory": "MemoryError",
    "resources-large_file": "File too large",
    "resources-many_files": "No space left|time limit",
    "resources-open_files": "Too many open files",
    "resources-daemon": "a wrong output",
    "resources-large_value": "too large|time limit",
    "resources-read_input": "EOFError",
    "resources-raise_limits": "not allowed to raise",
    "forging-exit_zero": "ended before its last call",
    "forging-equal_text": "a wrong output",
    "forging-equal_object": "unsupported type AlwaysEqual",
    "forging-forged_pickle": "forged|call 1 of 2: ",
    "forging-import_grader": "No module named 'kvbench'",
    "forging-climb_frames": "a wrong output",
}


@needs_cage
@pytest.mark.parametrize("program", hostile_programs())
def test_hostile_program_gets_nothing(program, target, token, request):
    """No hostile program reaches outside, is graded right, or is there 2 s after its limit."""
    start = time.monotonic()
    result = grader.grade_humaneval_plus(
        target.row(), program, allow_code_execution=True, limits=cage.Limits(load_s=1.0, wall_s=4.0)
    )
    # A program that takes too long is run once more.
    assert time.monotonic() - start < 2 * 4 + 3
    assert not wait_until_gone(token, 1.0)
    assert target.hits() == []
    assert result.status in ("fail", "timeout", "error", "unsupported")
    assert not result.base_passed and not result.plus_passed
    assert re.search(EVIDENCE.get(request.node.callspec.id, "."), result.message)


@needs_cage
def test_hostile_programs_are_many_and_the_target_can_be_answered(target):
    """There are at least 60 programs, and an honest one passes on the same row."""
    assert len(hostile_programs()) >= 60
    result = grader.grade_humaneval_plus(target.row(), ROW["canonical_solution"], allow_code_execution=True)
    assert result == grader.GradeResult("pass", True, True)


def test_target_notices_hits(tmp_path):
    """The checks for escapes see a written file, connections and a dead process."""
    target = Target(tmp_path)
    (tmp_path / "escaped").write_text("x")
    links = [socket.create_connection(("127.0.0.1", target.port)), socket.socket(socket.AF_UNIX)]
    links[1].connect("\0" + target.abstract)
    target.victim.kill()
    target.victim.wait()
    assert target.hits() == ["folder changed", "tcp connected", "local connected", "victim killed"]
    target.close()
    for link in links:
        link.close()


@needs_cage
@pytest.mark.parametrize("name", list(mechanisms()))
def test_each_mechanism_that_comes_up_holds(name, token):
    """Whatever mechanism can start here keeps every promise, not only the first."""
    # Where the kernel counts every process of `nobody`, those of other tests that it is still taking down count too.
    end = time.monotonic() + 20
    while (lacks := cage_probe.what_is_missing(mechanisms()[name])) == ["no limit on processes"]:
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    if lacks and "come up" in lacks[0] or lacks and "started" in lacks[0]:
        pytest.skip(lacks[0])
    assert lacks == []
    report = run_under(mechanisms()[name], "def f(x): return x, [1.5]", "f", [[2**80], ["\ud800"]], [1.0, 1.0], SHORT)
    assert [decode(output.payload) for output in report.outputs] == [None, (2**80, [1.5]), ("\ud800", [1.5])]
    stubborn = "import time\ndef f():\n    while True:\n        try:\n            time.sleep(9)\n"
    stubborn += "        except BaseException:\n            pass"
    start = time.monotonic()
    brief = replace(SHORT, wall_s=2.0)
    assert run_under(mechanisms()[name], stubborn, "f", [[]], [0.2], brief).status == "timeout"
    assert time.monotonic() - start < 4 and not wait_until_gone(token, 1.0)


@pytest.mark.parametrize("consent", [False, None, 1, "true"])
def test_nothing_runs_without_consent(consent, monkeypatch):
    """Anything but true is refused with the setting to change, before a process starts."""
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **settings: pytest.fail("a process was started"))
    with pytest.raises(cage.CageRefused, match=re.escape("Set task.allow_code_execution=true")):
        cage.run("def f(): pass", "f", [[]], allow_code_execution=consent)


@needs_cage
def test_outputs_arguments_and_exceptions():
    """Calls are reported in order, one's changes to its arguments do not reach the next, and exceptions are told."""
    program = "def f(x):\n    x.append(0)\n    if len(x) == 3: raise KeyError('three')\n"
    program += "    return object() if len(x) == 4 else x"
    shared = [1]
    report = cage.run(program, "f", [[shared], [shared], [[1, 2]], [[1, 2, 3]]], allow_code_execution=True)
    assert (report.status, shared) == ("done", [1])
    assert [output.kind for output in report.outputs] == ["v", "v", "v", "e", "u"]
    assert decode(report.outputs[2].payload) == [1, 0]
    assert report.outputs[3].payload == b"KeyError: 'three'" and b"object" in report.outputs[4].payload


@needs_cage
def test_a_slow_call_does_not_take_the_next_ones_time():
    """A call out of time is reported as such and the next one runs."""
    program = "def f(x):\n    while x:\n        pass\n    return x"
    report = cage.run(program, "f", [[5], [0]], call_s=0.3, allow_code_execution=True)
    assert [output.kind for output in report.outputs] == ["v", "t", "v"]


@needs_cage
def test_a_callback_ends_the_run():
    """A false answer stops the run before the remaining calls."""
    seen = []
    report = cage.run(
        "def f(x): return x",
        "f",
        [[number] for number in range(5)],
        allow_code_execution=True,
        on_output=lambda output: seen.append(output.index) or output.index < 1,
    )
    assert report.status == "stopped" and seen[:3] == [-1, 0, 1]


@needs_cage
def test_many_at_a_time_share_no_limit():
    """Programs that each use most of the processes they may run side by side."""
    program = "import threading, time\ndef f(x):\n"
    program += "    made = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(10)]\n"
    program += "    [one.start() for one in made]\n    [one.join() for one in made]\n    return x"
    answers = cage.map_bounded(
        lambda x: cage.run(program, "f", [[x]], call_s=5, allow_code_execution=True).outputs[-1], range(6), workers=3
    )
    assert [(output.kind, decode(output.payload)) for output in answers] == [("v", x) for x in range(6)]
    with pytest.raises(ValueError, match="workers=0: at least 1"):
        cage.map_bounded(str, [1], workers=0)


def test_a_program_too_long_is_refused():
    """More than a mebibyte of source is not sent."""
    with pytest.raises(ValueError, match="at most 1048576"):
        run_under(next(iter(mechanisms().values())), "#" * (1 << 20) + "##", "f", [], [], SHORT)


def test_time_is_counted_in_cpu_seconds():
    """Waiting, as on a machine that is busy, uses up no limit; a loop does; both have a wall guard."""
    program = """
import time
def f(x):
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        time.sleep(0.6) if x else None
    return x
"""
    report = cage.run(program, "f", [[1], [0], [1]], call_s=0.2, allow_code_execution=True)
    assert [output.kind for output in report.outputs] == ["v", "v", "t", "v"]
    assert report.outputs[1].elapsed_s < 0.2 <= report.wall_s
    assert cage.Limits(cpu_s=7.0, wall_s=1000.0).rlimits()["RLIMIT_CPU"] == 8
    waiting = "import time\ndef f(x):\n    time.sleep(60)\n"
    report = cage.run(waiting, "f", [[1]], allow_code_execution=True, limits=cage.Limits(wall_s=1.0))
    assert report.status == "timeout" and report.wall_s < 5
