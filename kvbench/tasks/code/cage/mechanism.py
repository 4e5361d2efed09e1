"""The ways to build the cage: bubblewrap, or namespaces made by `jail.py`."""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from kvbench.tasks.code.cage.needs import bare_python, interpreter_needs
from kvbench.tasks.code.cage.process import CageReport, Limits, Output, RunAs, guard_s, run_process
from kvbench.tasks.code.cage.wire import encode

_HERE = Path(__file__).parent
_NOBODY = 65534
_MAX_PROGRAM_BYTES = 1 << 20
# Users that no distribution gives to anybody (systemd's table of ids), for the cages that root starts.
_FREE_USERS = range(0x70000000, 0x7FFE0000)
# kvbench ends a cage in time; where it hangs, the cage ends itself so much later.
_LAST_S = 5.0


@dataclass(frozen=True)
class Mechanism:
    """One way to build the cage.

    Args:
        settings: Limits, and the user that the program is to become or None -> what the first process, `keeper.py`,
            is to start.
        by_root: Whether root builds it and the program gives root up inside; otherwise who builds it owns nothing.
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
    """Run a program under one mechanism, whether or not it isolates: for `cage.run`, and for the probe that finds out.

    Args:
        mechanism: One of `mechanisms`.
        program: See `run.run`, as the others; `call_s` has a time for each call.

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
    user = _own_user() if os.geteuid() == 0 else None
    return run_process(
        command_line(mechanism, limits, user),
        # A root mapped into a user namespace still owns root's files, so a namespace for root starts as somebody else.
        RunAs() if user is None or mechanism.by_root else RunAs(user=user, group=_NOBODY, extra_groups=[]),
        encode(job, max_bytes=1 << 31),
        call_s,
        limits,
        on_output,
    )


def command_line(mechanism: Mechanism, limits: Limits, user: int | None) -> list[str]:
    """The command that starts a cage, tied to the life of this process: that of `keeper.py`.

    Args:
        mechanism: One of `mechanisms`.
        limits: What the program may use.
        user: For root, the user that the program is to be.
    """
    settings = {
        "parent": os.getpid(),
        "wall_s": limits.wall_s + _LAST_S,
        **mechanism.settings(limits, user if mechanism.by_root else None),
    }
    return [*bare_python(), _keeper(), json.dumps(settings)]


def _own_user() -> int:
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
def _keeper() -> str:
    return (_HERE / "jail.py").read_text() + "\n\n" + (_HERE / "keeper.py").read_text()


@cache
def _interpreter() -> list[str]:
    text = (_HERE / "wire.py").read_text() + "\n\n" + (_HERE / "child.py").read_text()
    return [*bare_python(), text]


def _program(user: int | None) -> list[str]:
    return [*_interpreter(), *([] if user is None else [str(user)])]


def _jail(limits: Limits, user: int | None, *, user_namespace: bool) -> dict[str, object]:
    settings = vars(interpreter_needs()) | {"scratch_bytes": limits.scratch_bytes, "user_namespace": user_namespace}
    return {"jail": settings | {"command": _program(user)}}


def _bubblewrap(limits: Limits, user: int | None, *, user_namespace: bool) -> dict[str, object]:
    needs = interpreter_needs()
    argv = [shutil.which("bwrap") or "bwrap", *"--die-with-parent --clearenv --hostname cage --cap-drop ALL".split()]
    argv += "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try".split()
    if user_namespace:
        argv += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    else:  # for `child.py` to become somebody else with
        argv += "--cap-add CAP_SETUID --cap-add CAP_SETGID".split()
    # Before what is bound: the interpreter may be installed below a folder of that name.
    argv += ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    above = {str(parent) for path in (*needs.readable, *needs.links, *devices) for parent in Path(path).parents}
    for path in sorted(above - {"/", "/tmp"}):
        argv += ["--perms", "755", "--dir", path]
    for path, target in needs.links.items():
        argv += ["--symlink", target, path]
    for path in needs.readable:
        argv += ["--ro-bind", path, path]
    for path in needs.hidden:
        argv += ["--perms", "555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
    for path in devices:
        argv += ["--dev-bind", path, path]
    return {"command": [*argv, "--chdir", "/tmp", "--remount-ro", "/", "--", *_program(user)]}


@cache
def mechanisms() -> dict[str, Mechanism]:
    """All mechanisms that could work for this user, the best kept first; whether one does, `probe` finds out."""
    # A namespace built by somebody who owns nothing fails for root where the interpreter is in root's home.
    jail = {"user namespaces": Mechanism(partial(_jail, user_namespace=True))}
    bubblewrap = {"bubblewrap": Mechanism(partial(_bubblewrap, user_namespace=True))}
    if os.geteuid() == 0:
        jail["namespaces by root"] = Mechanism(partial(_jail, user_namespace=False), by_root=True)
        bubblewrap["bubblewrap by root"] = Mechanism(partial(_bubblewrap, user_namespace=False), by_root=True)
    return (bubblewrap if shutil.which("bwrap") else {}) | jail
