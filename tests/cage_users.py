"""Runs the cage as root or as somebody who owns nothing, in a process of its own that may be killed.

The process is an interpreter below the temporary folder beside a copy of `kvbench/tasks/code/cage`, so that everybody
may start it, and it knows the standard library only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

USERS = ("root", "nobody")
_FOLDERS: list[str] = []
_NOBODY = 65534
_PACKAGES = ("kvbench", "kvbench.tasks", "kvbench.tasks.code")
# The packages above the cage import what an ordinary user's interpreter lacks: empty ones stand for them.
_BOOT = f"""
import json, sys, types
for name in {_PACKAGES}:
    module = types.ModuleType(name)
    module.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = module
from kvbench.tasks.code.cage import mechanism
from kvbench.tasks.code.cage.mechanism import mechanisms, run_under
from kvbench.tasks.code.cage.process import Limits
from kvbench.tasks.code.cage.probe import what_is_missing
given = json.loads(sys.stdin.readline())
command = mechanism._interpreter()
mechanism._interpreter = lambda: [*command[:-1], command[-1] + "\\n# " + given["mark"] + "\\n"]
print("started", flush=True)
"""


@dataclass(frozen=True)
class Somebody:
    """A user of USERS with an interpreter (`python`) and a copy of the cage (`folder`).

    `surroundings` is the command that starts the interpreter, when another than this machine as it is."""

    user: str
    python: str
    folder: str
    surroundings: tuple[str, ...] = ()

    def start(self, text: str, mark: str, **given: object) -> subprocess.Popen[str]:
        """Start a program that may use `given` and the cage's functions, and wait until it has loaded them.

        `mark` is on the command line of every process of its cages, for `processes_with`."""
        process = subprocess.Popen(
            [*self.surroundings, self.python, "-I", "-S", "-B", "-c", _BOOT + text, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            **({} if self.surroundings else _identity(self.user)),
        )
        assert process.stdin is not None and process.stdout is not None
        # Not on its command line, where the mark would be taken for a cage's.
        process.stdin.write(json.dumps({"mark": mark, **given}) + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "started\n":
            pytest.fail(process.communicate()[1])
        return process

    def run(self, text: str, mark: str, **given: object) -> object:
        """Run such a program to its end; what it prints is JSON."""
        return finish(self.start(text, mark, **given))


def finish(process: subprocess.Popen[str]) -> object:
    """What a started program printed last, once it has ended; the test fails where it did not end well."""
    out, errors = process.communicate()
    if process.returncode:
        pytest.fail(errors)
    return json.loads(out)


def _identity(user: str) -> dict:
    if user == "root" or os.geteuid() != 0:
        return {}
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}


def _succeeds(command: list[str], user: str) -> bool:
    try:
        done = subprocess.run(command, cwd="/", env={}, capture_output=True, check=False, **_identity(user))
    except OSError:
        return False
    return done.returncode == 0


@cache
def somebody(user: str) -> Somebody:
    """A user of USERS; `nobody` is whoever runs the tests, or the user 65534; skips the test where there is none."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    folder = tempfile.mkdtemp(prefix="kvbench-users-")
    _FOLDERS.append(folder)
    Path(folder).chmod(0o755)
    for name in _PACKAGES:
        package = Path(folder, *name.split("."))
        package.mkdir()
    shutil.copytree(ROOT / "kvbench" / "tasks" / "code" / "cage", package / "cage")
    shutil.copy(ROOT / "kvbench" / "errors.py", Path(folder, "kvbench"))
    # What root runs may have to start as somebody else: one that everybody may start comes first.
    places = list(enumerate(dict.fromkeys([sys._base_executable, "/usr/bin/python3"])))
    for starter in dict.fromkeys(["nobody", user]):
        for number, path in places:
            prefix = Path(folder, f"{starter}-{number}")
            if python := _interpreter(Path(path).resolve(), prefix, starter):
                return Somebody(user, python, folder)
    pytest.skip(f"no interpreter that {user} may start and that runs below the temporary folder")


def _interpreter(source: Path, prefix: Path, user: str) -> str | None:
    """An interpreter of another prefix with the standard library of an installed one; None where it does not run."""
    if not source.is_file():
        return None
    ask = "import os, sys; print(*sys.version_info[:2]); print(os.path.dirname(os.__file__))"
    said = subprocess.run(
        [source, "-I", "-S", "-c", ask], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    name = f"python{said[0].replace(' ', '.')}"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    (prefix / "lib" / name).symlink_to(said[1])
    python = str(shutil.copy(source, prefix / "bin" / name))
    check = f"import ctypes, socket, sys; sys.exit(sys.prefix != {str(prefix)!r} or sys.version_info < (3, 11))"
    return python if _succeeds([python, "-I", "-S", "-c", check], user) else None


_NEW_USER, _OTHERS = 0x10000000, 0x6C020000  # of user ids; of mounts, names, messages, processes and the network
CASES = [
    pytest.param(user, name, id=f"{user}-{name.replace(' ', '-')}")
    for user, names in (
        ("root", ("bubblewrap", "bubblewrap by root", "user namespaces", "namespaces by root")),
        ("nobody", ("bubblewrap", "user namespaces")),
    )
    for name in names
]


@cache
def require(user: str, name: str) -> Somebody:
    """A user for whom a mechanism must work; skips the test where Linux itself refuses what it is built of."""
    who = somebody(user)
    builder = "root" if name.endswith("by root") else "nobody"
    if name.startswith("bubblewrap"):
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        spaces = ["--unshare-pid", "--unshare-net", *(["--unshare-user"] if builder == "nobody" else [])]
        works = _succeeds([shutil.which("bwrap") or "", *spaces, "--ro-bind", "/", "/", "/bin/true"], builder)
    else:
        spaces = f"{_OTHERS if builder == 'root' else _NEW_USER | _OTHERS}"
        code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({spaces}))"
        works = _succeeds([who.python, "-I", "-S", "-c", code], builder)
    works = works and _succeeds([who.python, "-I", "-S", "-c", "import ctypes"], builder)
    if not works:
        pytest.skip(f"{name}: refused on this machine")
    return who


def clean() -> None:
    """Remove what `somebody` made; a worker of pytest may be killed before it could do that at its exit."""
    somebody.cache_clear()
    require.cache_clear()
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop(), ignore_errors=True)


def processes_with(mark: str) -> list[int]:
    """Ids of the living processes whose command line holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def wait_until(condition, seconds: float) -> bool:
    """Whether a condition came true within so long."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(met)
