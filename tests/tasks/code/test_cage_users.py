"""Every mechanism of the cage, for root and for somebody who owns nothing: what it holds, and that nothing outlives it.

By default a few hostile programs and kills; `make test-code` takes all, which lasts minutes.
"""

import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
from cage_target import Target, hostile_programs
from cage_users import CASES, finish, processes_with, require, wait_until
from selection import FULL, few

KILLS = 50 if FULL else 1
PAIRS = [case.values for case in CASES]
# Root has the mechanisms of ordinary users, and some of its own: the default run takes each mechanism once.
ONCE = [(user, name) for user, name in PAIRS if user == "nobody" or ("nobody", name) not in PAIRS]
each = pytest.mark.parametrize(("user", "name"), few(PAIRS, *ONCE))
# What no mechanism does by itself is shown for those of one user.
as_nobody, as_root = (
    pytest.mark.parametrize(("user", "name"), few(PAIRS, *(pair for pair in ONCE if pair[0] == user)))
    for user in ("nobody", "root")
)


@pytest.fixture
def mark(request):
    """Text on the command lines of a test's cages; whatever still has it in the end is ended."""
    text = f"kvbench-users-{os.getpid()}-{time.monotonic_ns()}"
    yield text
    for number in processes_with(text):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


HOLDS = """
report = run_under(mechanisms()[given["name"]], given["program"], "f", [[]], [20.0], Limits(load_s=10, wall_s=60))
output = report.outputs[-1] if report.outputs else None
from kvbench.tasks.code.cage.wire import decode
value = decode(output.payload) if output and output.kind == "v" else repr(output)
print(json.dumps([what_is_missing(mechanisms()[given["name"]]), report.status, report.message, value]))
"""
IMPORTS = """
import sys, zoneinfo
def imports():
    failed = []
    for name in sorted(sys.stdlib_module_names - {"antigravity", "this", "_tkinter", "tkinter", "turtle", "idlelib"}):
        try:
            __import__(name)
        except ImportError as error:
            failed.append(name)
    return {"unimportable": failed, "zones": len(zoneinfo.available_timezones() - {"localtime"})}
"""
# What is there, and what can be started.
LOOK = """
import os, socket, subprocess, sys, threading
def tried(action):
    try:
        return action()
    except Exception as error:
        return getattr(error, "errno", None) or type(error).__name__
def f():
    seen = {}
    seen["unix"] = [tried(lambda: socket.socket(1, kind).close() or "worked") for kind in (1, 2, 5)]
    seen["pairs"] = [tried(lambda: socket.socketpair(family) and "worked") for family in (1, 2, 16, 30, 40)]
    seen["started"] = [tried(os.fork), tried(lambda: subprocess.run([sys.executable, "-V"]).returncode),
                       tried(lambda: os.posix_spawn(sys.executable, [sys.executable], {})), os.system("true") != 0,
                       tried(lambda: os.execv(sys.executable, [sys.executable, "-V"]))]
    made = [threading.Thread(target=lambda: None) for _ in range(10)]
    [one.start() for one in made], [one.join() for one in made]
    seen["threads"] = len(made)
    stdlib = os.path.dirname(os.__file__)
    seen["packages"] = [os.listdir(f"{stdlib}/{name}") for name in ("site-packages", "dist-packages")
                        if os.path.exists(f"{stdlib}/{name}")]
    strange = []
    for top, folders, names in os.walk("/"):
        inside = os.path.realpath(top).startswith((os.path.realpath(stdlib), "/usr/share/zoneinfo"))
        strange += [f"{top}/{name}" for name in names if not inside and ".so" not in name]
    seen["strange"] = strange
    seen |= imports()
    return seen
"""


@each
def test_the_cage_holds_and_shows_the_standard_library_only(user, name, mark):
    """The probe finds nothing (so the filter of system calls is on, which `test_cage_rules` goes through); sockets of
    AF_UNIX and threads work, no process starts; all the library is there and no other file. The interpreter is one
    below the temporary folder."""
    who = require(user, name)
    assert Path(who.python).is_relative_to(tempfile.gettempdir())
    missing, status, message, seen = who.run(HOLDS, mark, name=name, program=IMPORTS + LOOK)
    assert (missing, status, message) == ([], "done", "")
    assert seen["unix"] == ["worked"] * 3 and seen["pairs"] == ["worked", 97, 97, 97, 97]
    assert seen["started"] == [1, 1, 1, True, 1] and seen["threads"] == 10
    assert seen["packages"] in ([], [[]], [[], []])
    devices = {f"/dev/{device}" for device in ("null", "zero", "random", "urandom")}
    assert set(seen["strange"]) <= devices | {"/etc/ld.so.cache", who.python}
    outside = who.run(IMPORTS + "print(json.dumps(imports()))\n", mark)
    assert {name: seen[name] for name in outside} == outside


STUBBORN = """
import signal, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
def f():
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(600,)).start()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""
TWO_FOR_EVER = """
import threading
def one():
    while True:
        run_under(mechanisms()[given["name"]], given["program"], "f", [[]], [600.0], Limits(wall_s=600))
for _ in range(2):
    threading.Thread(target=one).start()
"""


def running_programs(mark: str) -> int:
    """How many of a test's stubborn programs have come as far as starting their threads."""
    found = 0
    for number in processes_with(mark):
        with contextlib.suppress(OSError):
            found += len(os.listdir(f"/proc/{number}/task")) == 4
    return found


@each
def test_nothing_outlives_kvbench(user, name, mark):
    """2 s after a SIGKILL at any moment, from the start of the first process on, no process is left."""
    who = require(user, name)
    for number in range(KILLS + 1):
        process = who.start(TWO_FOR_EVER, mark, name=name, program=STUBBORN)
        if number == 0:  # in the midst of the programs
            assert wait_until(lambda: running_programs(mark) == 2, 20)
        else:
            time.sleep(random.Random(number).uniform(0, 0.4))
        process.kill()
        process.communicate()
        assert wait_until(lambda: not processes_with(mark), 2), f"after kill {number}"


ONE_THAT_HANGS = """
mechanism._LAST_S = 0.0
run_under(mechanisms()[given["name"]], given["program"], "f", [[]], [600.0], Limits(wall_s=1.5))
"""


@each
def test_a_cage_ends_itself_when_kvbench_hangs(user, name, mark):
    """A kvbench that is stopped, and so cannot end a cage in time, finds it ended; nobody in it ever was root but
    bubblewrap's own processes, without any right of root, and all are the first to go when memory runs out."""
    process = require(user, name).start(ONE_THAT_HANGS, mark, name=name, program=STUBBORN)
    assert wait_until(lambda: running_programs(mark) == 1, 20)
    process.send_signal(signal.SIGSTOP)
    try:
        for number in processes_with(mark):
            fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
            if name != "user namespaces":  # there, rights over the cage's own namespace alone
                assert int(fields["CapEff"], 16) & ~(1 << 5) == 0  # CAP_KILL
            assert fields["Uid"].split()[0] != "0" or fields["Name"] == "bwrap"
            assert Path(f"/proc/{number}/oom_score_adj").read_text() == "1000\n"
        assert wait_until(lambda: not processes_with(mark), 8)
    finally:
        process.send_signal(signal.SIGCONT)
    process.communicate()


# As many processes as a cage has ever been allowed, each with all the memory it can get, in every way to start one. The
# kernel may end them all as soon as they have it; so they start with what they may have, and keep it for a second.
GREEDY = """
import ctypes, os, signal, threading, time
def eat():
    held = []
    try:
        while len(held) < 60:
            held.append(bytearray(b"x") * (4 << 20))
    except MemoryError:
        pass
    time.sleep(0.5)
    return held
def f():
    first = bytearray(b"x") * (40 << 20)
    time.sleep(1)
    del first
    libc = ctypes.CDLL(None)
    starts = [os.fork, lambda: libc.syscall(56 if os.uname().machine == "x86_64" else 220, 17, 0, 0, 0, 0)]
    for _ in range(3):
        for start in starts:
            try:
                if start() == 0:
                    eat()
                    os._exit(0)
            except OSError:
                pass
    for _ in range(3):
        threading.Thread(target=eat).start()
    eat()
"""
PEAK = """
import os, threading, time
from pathlib import Path
def resident():
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if given["mark"].encode() in (path / "cmdline").read_bytes():
                found += int((path / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass
    return found
limits = Limits(memory_bytes=192 << 20, wall_s=20)
call = lambda: run_under(mechanisms()[given["name"]], given["program"], "f", [[]], [3.0], limits)
thread = threading.Thread(target=call)
thread.start()
peak = 0
while thread.is_alive():
    peak = max(peak, resident())
    time.sleep(0.02)
print(json.dumps(peak))
"""


@as_nobody
def test_memory_is_bounded_for_the_cage(user, name, mark):
    """Programs that try to eat their share many times over get it once: with the cage's own processes, 192 MiB stay
    below 256."""
    peak = require(user, name).run(PEAK, mark, name=name, program=GREEDY)
    assert 32 << 20 < peak < 256 << 20


SIDE_BY_SIDE = """
from concurrent.futures import ThreadPoolExecutor
def verdict(number):
    program = given["programs"][number % len(given["programs"])]
    limits = Limits(load_s=10, wall_s=60)
    outputs = run_under(mechanisms()[given["name"]], program, "f", [[number]], [20.0], limits).outputs
    return [[output.index, output.kind, output.payload.decode()[:60]] for output in outputs]
with ThreadPoolExecutor(4) as pool:
    probed = pool.submit(what_is_missing, mechanisms()[given["name"]])
    verdicts = list(pool.map(verdict, range(given["count"])))
print(json.dumps([probed.result(), verdicts]))
"""
# Honest ones that use most of what they may, among those that take all they can get.
NEIGHBOURS = [
    """
import threading, time
def f(x):
    made = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(10)]
    [one.start() for one in made]
    [one.join() for one in made]
    return x
""",
    # All of its threads live until the last one was refused, however long that takes beside a load.
    """
import threading, time
def f(x):
    count, over = 0, threading.Event()
    try:
        while count < 100:
            threading.Thread(target=over.wait, daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    time.sleep(0.2)
    over.set()
    return 5 < count < 16
""",
    """
import os, time
def f(x):
    for _ in range(40):
        try:
            if os.fork() == 0:
                time.sleep(0.3)
                os._exit(0)
        except OSError:
            pass
    time.sleep(0.2)
    return x
""",
]


@as_root
def test_two_runs_side_by_side_give_the_verdicts_of_one(user, name, mark):
    """Two runs of four cages each, with greedy programs among them, and a probe beside: as when alone."""
    who, count = require(user, name), 30 if FULL else 4
    settings = {"name": name, "programs": NEIGHBOURS, "count": count}
    runs = [who.start(SIDE_BY_SIDE, mark, **settings) for _ in range(2)]
    for missing, verdicts in map(finish, runs):
        assert missing == []
        for number, outputs in enumerate(verdicts):
            size = f"{number:x}"
            right = "T" if number % 3 == 1 else f"i{len(size)}:{size}"
            assert outputs == [[-1, "v", "N"], [0, "v", right]]


# A few for every day that are over at once.
FEW = (
    "outside-virtual_machine_host",
    "outside-family_in_disguise",
    "outside-write_everywhere",
    "outside-kill_all",
    "outside-become_root",
    "resources-clone_past_the_library",
    "resources-daemon_that_ends_the_parent",
    "resources-raise_limits",
    "forging-forged_reports",
)
ATTACKS = """
from concurrent.futures import ThreadPoolExecutor
def attack(program):
    limits = Limits(load_s=2, wall_s=30)
    report = run_under(mechanisms()[given["name"]], program, "attack", given["calls"], [1.0] * 2, limits)
    return [report.status, [output.payload.decode("utf-8", "replace") for output in report.outputs]]
with ThreadPoolExecutor(2) as pool:
    print(json.dumps(list(pool.map(attack, given["programs"]))))
"""


@each
def test_hostile_programs_get_nothing(user, name, mark, tmp_path):
    """Nothing outside is hit, none finds the answer, no cage fails to come up, and nothing is left 2 s later."""
    who, programs, target = require(user, name), hostile_programs(), Target(tmp_path)
    tmp_path.parent.chmod(0o755)
    chosen = {key: text for key, text in programs.items() if FULL or key in FEW}
    assert len(chosen) == (len(programs) if FULL else len(FEW))
    row = target.row()
    scope: dict = {}
    exec(row["prompt"] + row["canonical_solution"], scope)
    expected = [f"s{len(text)}:{text}" for text in (scope["attack"](*call) for call in row["base_input"])]
    try:
        honest = row["prompt"] + row["canonical_solution"]
        found = who.run(ATTACKS, mark, name=name, programs=[*chosen.values(), honest], calls=row["base_input"])
        assert wait_until(lambda: not processes_with(mark), 2)
        assert target.hits() == []
    finally:
        target.close()
    *attacks, honest = found
    assert honest == ["done", ["N", *expected]]
    for (status, outputs), key in zip(attacks, chosen, strict=True):
        assert status != "jail", key
        assert outputs[1:] != expected, key
