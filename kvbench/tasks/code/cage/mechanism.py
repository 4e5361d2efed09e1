"""The ways to build the cage, bubblewrap or the namespaces of `jail.py`, and what it shows of the file system.

It shows only what the interpreter in it needs, as that interpreter reports.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbench.tasks.code.cage.process import CageReport, Limits, Output, guard_s, run_process
from kvbench.tasks.code.cage.wire import encode

_HERE = Path(__file__).parent
_NOBODY = 65534
_MAX_PROGRAM_BYTES = 1 << 20
# Users that no distribution gives to anybody (systemd's table of ids), for the cages that root starts.
_FREE_USERS = range(0x70000000, 0x7FFE0000)
# kvbench ends a cage in time; where it hangs, the cage ends itself so much later.
_LAST_S = 5.0
# Runs outside, in the interpreter that will run inside, as what it is: the paths that it imports from, and the files
# that it has mapped once every extension module of the standard library is loaded. No display, hence no _tkinter.
_ASK = """
import ctypes, glob, json, os, sys
held, names = [], []
for folder in sys.path:
    for path in sorted(glob.glob(glob.escape(folder) + "/*.so")):
        if "_tkinter" not in os.path.basename(path):
            try:
                held.append(ctypes.CDLL(path))
            except OSError:
                pass
try:
    held.append(ctypes.CDLL("libgcc_s.so.1"))  # the C library loads it when a thread is cancelled
except OSError:
    pass

class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def note(info, size, data):
    names.append(os.fsdecode(info.contents.name or b""))
    return 0

ctypes.CDLL(None).dl_iterate_phdr(note, None)
print(json.dumps([[path for path in sys.path if os.path.exists(path)], names]))
"""
# The loader's list of libraries, and the time zones that `zoneinfo` reads.
_SYSTEM = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_THIRD_PARTY = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class VisibleFiles:
    """The files and folders that the cage shows: path in it -> path outside; of these folders `hidden` stay empty."""

    shown: dict[str, str]
    hidden: list[str]


@dataclass(frozen=True)
class Mechanism:
    """One way to build the cage.

    Args:
        settings: Limits, and the user that the program is to become or None -> what the first process, `jail.py`, is to
            start.
        by_root: True where root builds it and the program drops root inside; otherwise its builder has no privileges.
    """

    settings: Callable[[Limits, int | None], dict[str, object]]
    by_root: bool = False


def run_under(
    mechanism: Mechanism,
    program: str,
    entry_point: str,
    calls: Sequence[Sequence[object]],
    call_s: list[float],
    limits: Limits,
    on_output: Callable[[Output], bool] | None = None,
) -> CageReport:
    """Run a program under one mechanism, whether or not it isolates; see `run.run`. `call_s` has a time for each call.

    Raises:
        ValueError: The program is longer than 1 MiB.
    """
    size = len(program.encode("utf-8", "surrogatepass"))
    if size > _MAX_PROGRAM_BYTES:
        raise ValueError(f"The program has {size} bytes; at most {_MAX_PROGRAM_BYTES} are run. Cut the answer.")
    job = {
        "program": program,
        "entry_point": entry_point,
        "calls": [encode(list(arguments), max_bytes=1 << 30) for arguments in calls],
        "call_s": call_s,
        "load_s": limits.load_s,
        "guard_s": [guard_s(limit) for limit in (limits.load_s, *call_s)],
        "max_bytes": limits.value_bytes,
        "rlimits": limits.rlimits(),
    }
    user = _cage_user() if os.geteuid() == 0 else None
    settings = {
        "parent": os.getpid(),
        "wall_s": limits.wall_s + _LAST_S,
        **mechanism.settings(limits, user if mechanism.by_root else None),
    }
    # A root mapped into a user namespace still owns root's files, so a namespace for root starts as somebody else.
    run_as = {} if user is None or mechanism.by_root else {"user": user, "group": _NOBODY, "extra_groups": []}
    argv = [*bare_python(), (_HERE / "jail.py").read_text(), json.dumps(settings)]
    return run_process(argv, run_as, encode(job, max_bytes=1 << 31), call_s, limits, on_output)


def _cage_user() -> int:
    """A user for one cage: the kernel counts processes by user, and other cages and programs must not count."""
    with open("/proc/self/uid_map") as stream:
        mapped = [[int(field) for field in line.split()] for line in stream]
    for start, _, count in mapped:
        if start <= _FREE_USERS.start and _FREE_USERS.stop <= start + count:
            return random.SystemRandom().choice(_FREE_USERS)
    # A container with few users: one of the upper half, where hardly any has a name.
    start, _, count = max(mapped, key=lambda line: line[2])
    if count < 4:
        raise OSError(f"root has {count} users here (/proc/self/uid_map), and none for the cage")
    return random.SystemRandom().choice(range(start + count // 2, start + count - 1))


@cache
def _interpreter() -> list[str]:
    text = (_HERE / "wire.py").read_text() + "\n\n" + (_HERE / "child.py").read_text()
    return [*bare_python(), text]


def _program(user: int | None) -> list[str]:
    return [*_interpreter(), *([] if user is None else [str(user)])]


def bare_python() -> list[str]:
    """The command that runs a text in this interpreter, outside any virtual environment and without site-packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Isolated, without site, no .pyc files; UTF-8 whatever the (empty) environment says.
    return [executable, "-I", "-S", "-B", "-X", "utf8", "-c"]


@cache
def interpreter_files() -> VisibleFiles:
    """Find what the interpreter must see to start and to import its whole standard library; no other packages.

    Raises:
        OSError: The interpreter does not run.
    """
    ended = subprocess.run([*bare_python(), _ASK], capture_output=True, env={}, cwd="/", check=False)
    if ended.returncode:
        said = ended.stderr.decode("utf-8", "replace").strip()[-300:]
        raise OSError(f"{bare_python()[0]} does not say what it needs: {said}")
    imported, loaded = json.loads(ended.stdout)
    return trace([bare_python()[0], *imported, *loaded, *_SYSTEM])


def trace(paths: Iterable[str]) -> VisibleFiles:
    """Find the files behind paths, so that the same names lead to the same files in the cage.

    A relative path is no file (the kernel's own library has such a name) and is left out.
    """
    real = {path: os.path.realpath(path) for path in paths if path.startswith("/") and os.path.exists(path)}
    shown: dict[str, str] = {}
    for path, source in sorted((os.path.normpath(path), source) for path, source in real.items()):
        above = next((other for other in shown if path.startswith(other + "/")), None)
        if above is None:
            shown[path] = source
        elif source != shown[above] + path.removeprefix(above):
            shown[source] = source  # the folder above holds a link to it
    folders = [f"{path}/{name}" for path in shown for name in _THIRD_PARTY]
    return VisibleFiles(shown, [path for path in folders if os.path.isdir(path) and not os.path.islink(path)])


def _jail(limits: Limits, user: int | None) -> dict[str, object]:
    settings = vars(interpreter_files()) | {"scratch_bytes": limits.scratch_bytes, "user_namespace": user is None}
    return {"jail": settings | {"command": _program(user)}}


def _bubblewrap(limits: Limits, user: int | None) -> dict[str, object]:
    files = interpreter_files()
    argv = [shutil.which("bwrap") or "bwrap", *"--die-with-parent --clearenv --hostname cage --cap-drop ALL".split()]
    argv += "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try".split()
    if user is None:
        argv += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    else:  # for `child.py` to become somebody else with
        argv += "--cap-add CAP_SETUID --cap-add CAP_SETGID".split()
    # Before what is bound: the interpreter may be installed below a folder of that name.
    argv += ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    above = {str(parent) for path in (*files.shown, *devices) for parent in Path(path).parents}
    for path in sorted(above - {"/", "/tmp"}):
        argv += ["--perms", "755", "--dir", path]
    for path, source in files.shown.items():
        argv += ["--ro-bind", source, path]
    for path in files.hidden:
        argv += ["--perms", "555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
    for path in devices:
        argv += ["--dev-bind", path, path]
    return {"command": [*argv, "--chdir", "/tmp", "--remount-ro", "/", "--", *_program(user)]}


@cache
def mechanisms() -> dict[str, Mechanism]:
    """All mechanisms that could work for this user, the best kept first; whether one does, `probe` finds out."""
    known = {"user namespaces": Mechanism(_jail), "namespaces by root": Mechanism(_jail, by_root=True)}
    if shutil.which("bwrap"):
        bubblewrap = {"bubblewrap": Mechanism(_bubblewrap), "bubblewrap by root": Mechanism(_bubblewrap, by_root=True)}
        known = bubblewrap | known
    # A namespace built by an unprivileged user fails for root where the interpreter is in root's home.
    return {name: one for name, one in known.items() if os.geteuid() == 0 or not one.by_root}
