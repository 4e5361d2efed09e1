"""Finds out whether a cage holds on this machine, by trying to break out: every attempt must fail."""

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from kvbench.tasks.code.cage.mechanism import Mechanism, mechanisms, run_under
from kvbench.tasks.code.cage.process import Limits
from kvbench.tasks.code.cage.wire import WireError, decode

# Times that a busy machine keeps: nothing here waits, unless an attempt gets through.
_LIMITS = Limits(
    load_s=30.0,
    wall_s=120.0,
    memory_bytes=256 << 20,
    processes=6,
    file_bytes=1 << 20,
    scratch_bytes=4 << 20,
    open_files=32,
)

_CALL_S = 60.0
_SCRATCH = "/tmp"
_NO_THREAD = "no thread can be started, because the kernel counts what other programs of this user run"

# Runs inside. Bounded in itself: 12 threads and 3 processes that end at once, 512 MiB asked for and not touched, 2 MiB
# written.
_ATTEMPTS = """
import ctypes, os, signal, socket, sys, threading

def tried(action):
    try:
        return action()
    except (OSError, MemoryError):
        return None

def connect(family, address):
    with socket.socket(family) as link:
        link.settimeout(1)
        link.connect(address)
    return True

def write(path, size):
    with open(path, "wb", buffering=0) as stream:
        return sum(stream.write(bytes(1 << 16)) for _ in range(size >> 16))

def many_files():
    held = []
    try:
        while len(held) < 64:
            held.append(os.dup(0))
    except OSError:
        pass
    for number in held:
        os.close(number)
    return len(held) == 64

def opens(family, kind):
    try:
        socket.socket(family, kind).close()
    except OSError:
        return False
    return True

def threads():
    go = threading.Event()
    made = []
    try:
        while len(made) < 12:
            made.append(threading.Thread(target=go.wait))
            made[-1].start()
    except RuntimeError:
        made.pop()
    go.set()
    for thread in made:
        thread.join()
    return len(made)

starts = {"fork": os.fork, "posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-V"], {})}

def process(start):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = start()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True

def probe(port, abstract, outside_paths, parent, outside, mark):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    facts = {"ids": os.getresuid() + os.getresgid(), "environment": dict(os.environ), "cwd": os.getcwd()}
    facts["connected"] = tried(lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
    facts["connected_local"] = tried(lambda: connect(socket.AF_UNIX, abstract))
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    families = [family for family in range(64) if family != socket.AF_UNIX]
    facts["families"] = [family for family in families if any(opens(family, kind) for kind in kinds)]
    facts["saw"] = [path for path in (*outside_paths, "/proc/self") if os.path.exists(path)]
    facts["wrote"] = [path for path in outside if tried(lambda: write(path + "/" + mark, 1 << 16)) is not None]
    # In its own namespace it is the second process. Where kvbench is one of a container's first two, it would find the
    # cage's own under that number.
    facts["number"] = os.getpid()
    facts["signalled"] = parent > 2 and tried(lambda: os.kill(parent, 0) or True)
    facts["became_root"] = tried(lambda: os.setuid(0) or True)
    facts["file"] = tried(lambda: write("/tmp/large", 2 << 20))
    stats = os.statvfs("/tmp")
    facts["devices"] = tried(lambda: open("/dev/null", "wb").close() or True)
    facts["scratch"] = stats.f_blocks * stats.f_frsize
    facts["memory"] = tried(lambda: len(bytearray(512 << 20)))
    facts["files"] = many_files()
    facts["threads"] = threads()
    facts["processes"] = [name for name in ("fork", "posix_spawn") if tried(lambda: process(starts[name]))]
    facts["unshared"] = ctypes.CDLL(None).unshare(0x10000000) == 0
    return facts
"""


@dataclass(frozen=True)
class Isolation:
    """The findings of a trial run in the cage.

    Args:
        mechanism: A key of `mechanisms`; None when none holds.
        missing: When None: for each mechanism, what it lacks here.
    """

    mechanism: str | None
    missing: tuple[str, ...] = ()


_checking = threading.Lock()


def check_isolation() -> Isolation:
    """Find a way to isolate code that works on this machine: the first under which no attempt got out.

    The answer is kept for the life of the process.
    """
    with _checking:
        return _first_that_holds()


@cache
def _first_that_holds() -> Isolation:
    missing = []
    for name, mechanism in mechanisms().items():
        lacks = what_is_missing(mechanism)
        if not lacks:
            return Isolation(name)
        missing.append(f"{name}: {', '.join(lacks)}")
    return Isolation(None, tuple(missing))


def what_is_missing(mechanism: Mechanism) -> list[str]:
    """Try to break out of one mechanism; says in words what got through, and nothing when the cage held."""
    with _targets() as (port, abstract, folder):
        outside = ["/", "/usr", "/etc", os.path.expanduser("~"), os.getcwd(), folder]
        mark = os.path.basename(folder) + "-file"
        arguments = [port, abstract, [folder, __file__], os.getpid(), outside, mark]
        try:
            report = run_under(mechanism, _ATTEMPTS, "probe", [arguments], [_CALL_S], _LIMITS)
        except OSError as error:
            return [f"it cannot be started ({error})"]
        finally:
            left_behind = _remove(f"{path}/{mark}" for path in [*outside, _SCRATCH])
    last = report.outputs[-1] if report.outputs else None
    if report.status != "done" or last is None or last.kind != "v":
        said = last.payload.decode("utf-8", "replace") if last is not None else ""
        return [f"it does not come up ({report.status} {report.message or said})".replace("\n", " ")]
    try:
        facts = decode(last.payload)
    except WireError as error:
        return [f"its report cannot be read ({error})"]
    if not isinstance(facts, dict):
        return [f"its report cannot be read (it is a {type(facts).__name__})"]
    return _judge(facts, left_behind)


def _remove(paths: Iterable[str]) -> list[str]:
    """Delete the files that got out; gives those there were."""
    existing = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]
    for path in existing:
        os.unlink(path)
    return existing


def _judge(facts: dict, left_behind: list[str]) -> list[str]:
    # The cage has a temporary directory of its own under the same name; whether a file written there appears outside is
    # seen outside.
    wrote = [path for path in facts["wrote"] if os.path.normpath(path) != _SCRATCH]
    checks = {
        "no user of its own": set(facts["ids"]) & {0} or facts["became_root"],
        "no network isolation": facts["connected"] or facts["connected_local"],
        "no file system of its own": facts["saw"] or wrote or left_behind,
        "sockets of other families than AF_UNIX can be opened": facts["families"],
        "no process isolation": facts["signalled"] or facts["number"] != 2,
        "new processes can be started": facts["processes"],
        "no limit on threads": facts["threads"] >= _LIMITS.processes,
        _NO_THREAD: not facts["threads"],
        "no limit on memory": facts["memory"],
        "no limit on file size": facts["file"],
        "no limit on its temporary directory": facts["scratch"] > 2 * _LIMITS.scratch_bytes,
        "no limit on open files": facts["files"],
        "new namespaces can be made inside": facts["unshared"],
        "the environment is visible": facts["environment"],
        "no /dev/null": not facts["devices"],
        "no temporary directory": facts["cwd"] != _SCRATCH,
    }
    return [name for name, value in checks.items() if value]


@contextmanager
def _targets() -> Iterator[tuple[int, str, str]]:
    """Things outside that the attempts aim at: a port, an abstract socket, and a directory that everyone may write."""
    folder = tempfile.mkdtemp(prefix="kvbench-probe-")
    os.chmod(folder, 0o777)
    abstract = f"\0kvbench-probe-{os.path.basename(folder)}"
    try:
        with socket.socket() as listener, socket.socket(socket.AF_UNIX) as local:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            local.bind(abstract)
            local.listen()
            yield listener.getsockname()[1], abstract, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
