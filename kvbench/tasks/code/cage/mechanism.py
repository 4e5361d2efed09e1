"""The ways to build the cage (bubblewrap, or namespaces made by `jail.py`) and the limits that hold in each."""

import atexit
import json
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from kvbench.tasks.code.cage.process import CageReport, Output, RunAs, guard_s, run_process
from kvbench.tasks.code.cage.wire import encode

_HERE = Path(__file__).parent
_NOBODY = 65534
_MAX_PROGRAM_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a caged program may use.

    Args:
        load_s: CPU time to load the program (its top level), in seconds.
        cpu_s: CPU time of each process for everything, in seconds.
        wall_s: Time on the clock for everything, in seconds. What a program can do in it depends on what else the
            machine does, so it only guards against one that waits.
        memory_bytes: Address space of each process.
        processes: Processes and threads together.
        file_bytes: Size of a file.
        scratch_bytes: Size of its temporary directory, all files together.
        open_files: Open files of each process.
        value_bytes: Size of one output, as sent.
        output_bytes: Size of all outputs, as sent.
    """

    load_s: float = 5.0
    cpu_s: float = 60.0
    wall_s: float = 300.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    open_files: int = 64
    value_bytes: int = 8 << 20
    output_bytes: int = 64 << 20

    def rlimits(self) -> dict[str, int]:
        """The limits that the kernel keeps for each process: name in `resource` -> value."""
        return {
            "RLIMIT_CPU": math.ceil(self.cpu_s) + 1,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


@dataclass(frozen=True)
class Mechanism:
    """One way to build the cage.

    Args:
        argv: Limits -> command line that runs the caged interpreter.
        run_as: Who starts the command line.
        lock: Held during a run where cages would share a limit.
    """

    argv: Callable[[Limits], list[str]]
    run_as: RunAs
    lock: AbstractContextManager | None = None


def run_under(
    mechanism: Mechanism,
    program: str,
    entry_point: str,
    calls: Sequence[Sequence[object]],
    call_s: list[float],
    limits: Limits,
    on_output: Callable[[Output], bool] | None = None,
) -> CageReport:
    """Run a program under one mechanism, whether or not it isolates: for `cage.run`, and for the probe that finds out.

    Args:
        mechanism: One of `mechanisms`.
        program: See `cage.run`, as the other arguments.
        entry_point: See there.
        calls: See there.
        call_s: CPU time of each call, in seconds.
        limits: See there.
        on_output: See there.

    Returns:
        The report.

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
        "own_count": mechanism.lock is None,
    }
    with mechanism.lock or nullcontext():
        return run_process(
            mechanism.argv(limits),
            mechanism.run_as,
            encode(job, max_bytes=1 << 31),
            call_s=call_s,
            load_s=limits.load_s,
            wall_s=limits.wall_s,
            value_bytes=limits.value_bytes,
            output_bytes=limits.output_bytes,
            on_output=on_output,
        )


@cache
def _interpreter() -> list[str]:
    text = (_HERE / "wire.py").read_text() + "\n\n" + (_HERE / "child.py").read_text()
    return [*_bare_python(), text]


def _bare_python() -> list[str]:
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Isolated, without site, no .pyc files; UTF-8 whatever the (empty) environment says.
    return [executable, "-I", "-S", "-B", "-X", "utf8", "-c"]


@cache
def _readable() -> list[str]:
    """What the interpreter needs to start; nothing else of the file system is in the cage."""
    paths = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache"]
    for path in (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(_bare_python()[0])):
        path = os.path.realpath(path)
        if not any(path == known or path.startswith(known + "/") for known in paths):
            paths.append(path)
    return [path for path in paths if os.path.exists(path)]


@cache
def _mount_point() -> str:
    path = tempfile.mkdtemp(prefix="kvbench-cage-")
    os.chmod(path, 0o755)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _jail_argv(limits: Limits, *, user_namespace: bool) -> list[str]:
    settings = {
        "mount_point": _mount_point(),
        "readable": _readable(),
        "scratch_bytes": limits.scratch_bytes,
        "user_namespace": user_namespace,
        "command": _interpreter(),
    }
    return [*_bare_python(), (_HERE / "jail.py").read_text(), json.dumps(settings)]


def _bubblewrap_argv(limits: Limits, *, user_namespace: bool) -> list[str]:
    argv = [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent",
        "--clearenv",
        "--hostname",
        "cage",
        "--cap-drop",
        "ALL",
    ]
    argv += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if user_namespace:
        argv += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    else:  # for `child.py` to become nobody with
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in _readable():
        for above in list(Path(path).parents)[-2::-1]:
            argv += ["--perms", "755", "--dir", str(above)]
        argv += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    argv += ["--perms", "755", "--dir", "/dev"]
    for name in ("null", "zero", "random", "urandom"):
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    argv += ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return [*argv, "--remount-ro", "/", "--", *_interpreter()]


@cache
def mechanisms() -> dict[str, Mechanism]:
    """All mechanisms that could work for this user, the best kept first; whether one does, `probe` finds out."""
    root = os.geteuid() == 0
    # A root mapped into a user namespace still owns root's files. So a namespace for root starts as somebody else,
    # which fails where the interpreter is in root's home, or is built by root, who becomes somebody else inside.
    nobody = RunAs(user=_NOBODY, group=_NOBODY, extra_groups=[]) if root else RunAs()
    jail = {"user namespaces": Mechanism(partial(_jail_argv, user_namespace=True), nobody)}
    alone = threading.Lock()
    if root:
        by_root = partial(_jail_argv, user_namespace=False)
        jail["namespaces by root"] = Mechanism(by_root, {})
        jail["namespaces by root, one run at a time"] = Mechanism(by_root, {}, alone)
    if shutil.which("bwrap") is None:
        return jail
    bubblewrap = {"bubblewrap": Mechanism(partial(_bubblewrap_argv, user_namespace=True), nobody)}
    if root:
        bubblewrap["bubblewrap by root"] = Mechanism(partial(_bubblewrap_argv, user_namespace=False), {})
    return bubblewrap | jail
