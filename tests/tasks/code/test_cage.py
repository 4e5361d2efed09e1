"""The cage: what it refuses, what it lets through, and hostile programs that must find nothing to hold on to."""

import contextlib
import os
import re
import socket
import subprocess
import time

import pytest
from cage_target import Target, hostile_programs, needs_cage
from cage_users import processes_with, wait_until
from refusals import refused

from kvbench.tasks.code import grade as grader
from kvbench.tasks.code.cage import mechanism as cage_mechanism
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.mechanism import mechanisms, run_under
from kvbench.tasks.code.cage.wire import decode

SHORT = cage.Limits(load_s=1.0, wall_s=5.0)


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


EXHAUSTIVE = pytest.mark.exhaustive
# What stopped some of the programs: shows that they came as far as trying. There is one for each protection; the other
# programs are variations, which run in the exhaustive suite.
EVIDENCE = {
    "outside-write_outside": "FileNotFoundError",
    "outside-connect": "Address family not supported",
    "outside-virtual_machine_host": "Address family not supported",
    "outside-every_family": "Address family not supported",
    "outside-ring": "refused",
    "outside-kill_parent": "ProcessLookupError",
    "outside-delete_system": "Read-only file system",
    "outside-chroot_out": "PermissionError",
    "outside-new_namespaces": "ZeroDivisionError",
    "outside-trace_parent": "refused",
    "outside-device": "PermissionError",
    "resources-loop": "the time limit",  # of the call, or beside a load of the 4 s on the clock
    "resources-no_alarm": "timeout: the time limit",
    "resources-fork_bomb": "PermissionError",
    "resources-processes_full_of_memory": "PermissionError",
    "resources-clone_past_the_library": "refused",
    "resources-thread_bomb": "can't start new thread",
    "outside-read_packages": "nothing to be found",
    "outside-read_programs": "nothing to be found",
    "resources-memory": "MemoryError",
    "resources-large_file": "File too large",
    "resources-many_files": "No space left|time limit",
    "resources-open_files": "Too many open files",
    "resources-daemon": "PermissionError",
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
# These two use up 8 s each. By default `test_status_of_small_answers` has a loop, and `test_cage_users` a program that
# no signal ends.
SLOW = ("resources-loop", "resources-no_alarm")


@pytest.mark.every(3)
@needs_cage
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(text, id=name, marks=() if name in EVIDENCE and name not in SLOW else EXHAUSTIVE)
        for name, text in hostile_programs().items()
    ],
)
def test_hostile_program_gets_nothing(program, target, token, request):
    """No hostile program reaches outside, is graded right, or is there 2 s after its limit."""
    start = time.monotonic()
    result = grader.grade(
        "humaneval_plus", target.row(), program, allow_code_execution=True, limits=cage.Limits(load_s=1.0, wall_s=4.0)
    )
    # A program that takes too long is run once more.
    assert time.monotonic() - start < 2 * 4 + 3
    assert wait_until(lambda: not processes_with(token), 1.0)
    assert target.hits() == []
    assert result.status in ("fail", "timeout", "error", "unsupported")
    assert not result.base_passed and not result.plus_passed
    assert re.search(EVIDENCE.get(request.node.callspec.id, "."), result.message)
    assert "NameError" not in result.message, "a program that is none"


@needs_cage
def test_hostile_programs_are_many_and_the_target_can_be_answered(target):
    """There are at least 100 programs, and an honest one passes on the same row."""
    assert len(hostile_programs()) >= 100
    result = grader.grade("humaneval_plus", target.row(), target.row()["canonical_solution"], allow_code_execution=True)
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


@pytest.mark.parametrize("consent", [False, None, 1, "true"])
def test_nothing_runs_without_consent(consent, monkeypatch):
    """Anything but true is refused with the setting to change, before a process starts."""
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **settings: pytest.fail("a process was started"))
    with refused("code-not-run", "task.allow_code_execution", f"task.allow_code_execution={consent}"):
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


def test_a_program_too_long_is_refused():
    """More than a mebibyte of source is not sent."""
    with pytest.raises(ValueError, match="at most 1048576"):
        run_under(next(iter(mechanisms().values())), "#" * (1 << 20) + "##", "f", [], [], SHORT)


def test_time_is_counted_in_cpu_seconds():
    """Waiting, as on a machine that is busy, uses up no limit; a loop does; both have a wall guard."""
    program = """
import time
def f(x):
    time.sleep(0.6)
    while not x:
        pass
    return x
"""
    report = cage.run(program, "f", [[1], [0], [1]], call_s=0.2, allow_code_execution=True)
    assert [output.kind for output in report.outputs] == ["v", "v", "t", "v"]
    assert report.outputs[1].elapsed_s < 0.2 <= report.wall_s
    assert cage.Limits(cpu_s=7.0, wall_s=1000.0).rlimits()["RLIMIT_CPU"] == 8
    waiting = "import time\ndef f(x):\n    time.sleep(60)\n"
    report = cage.run(waiting, "f", [[1]], allow_code_execution=True, limits=cage.Limits(wall_s=1.0))
    assert report.status == "timeout" and report.wall_s < 5


@needs_cage
@pytest.mark.parametrize("ends", ["return 'late but right'", "raise ValueError('late')"])
def test_an_alarm_that_is_swallowed_makes_no_time(ends):
    """A program that catches everything, and puts another clock in the place of Python's, is out of time."""
    program = f"""
import time
clock = time.process_time
time.process_time = lambda: 0.0
def f(seconds):
    end = clock() + seconds
    while clock() < end:
        try:
            while clock() < end:
                pass
        except:
            pass
    {ends}
"""
    report = cage.run(program, "f", [[0.5], [0.0], [0.5]], call_s=0.2, allow_code_execution=True)
    soon = "v" if ends.startswith("return") else "e"
    assert [output.kind for output in report.outputs] == ["v", "t", soon, "t"]


@needs_cage
def test_an_alarm_comes_again():
    """A program that swallows one alarm and goes on is stopped by the next."""
    program = "def f():\n    try:\n        while True: sum([1])\n    except: pass\n    while True: sum([1])\n"
    report = cage.run(program, "f", [[]], call_s=0.1, allow_code_execution=True, limits=SHORT)
    assert [output.kind for output in report.outputs] == ["v", "t"] and report.status == "done"


@needs_cage
def test_the_machine_is_neither_named_nor_used_up():
    """The host's name stays outside, and no context of asynchronous reads, of which all programs share a number, is
    had."""
    program = """
import ctypes, os, platform, socket
def f():
    number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    context = ctypes.c_ulong(0)
    had = libc.syscall(ctypes.c_long(number), ctypes.c_long(1000), ctypes.byref(context))
    return [os.uname().nodename, socket.gethostname(), had, ctypes.get_errno()]
"""
    seen = [cage.run(program, "f", [[]], allow_code_execution=True)]
    for mechanism in mechanisms().values():
        with contextlib.suppress(PermissionError):  # a user who cannot reach this interpreter
            seen.append(run_under(mechanism, program, "f", [[]], [1.0], cage.Limits()))
    told = [decode(report.outputs[1].payload) for report in seen if report.status != "jail"]
    assert told and told == [["cage", "cage", -1, 1]] * len(told)
