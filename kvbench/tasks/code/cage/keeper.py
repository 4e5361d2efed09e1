"""The first process of every cage: it ties the cage to kvbench's life, whichever way the rest is built.

Started as text behind that of `jail.py` by a fresh `python -I -S` with one JSON argument. kvbench holds the other end
of its standard input for as long as the cage may live, and the kernel tells it when kvbench dies. Then, and when the
time is over even if nobody asks, it kills its process group, with which the kernel ends the process namespace and all
that is in it. Needs the standard library only, and Linux 5.3 (`pidfd_open`).
"""

import ctypes
import json
import os
import select
import signal
import struct
import sys

TYPE_CHECKING = False  # a type checker takes it for True; here these names come from the text of jail.py
if TYPE_CHECKING:
    from kvbench.tasks.code.cage.jail import die_with_parent, enter_namespaces, first_process

_NOBODY_ID = 65534
_CAP_KILL = 5


def _end(signum: int = 0, frame: object = None) -> None:
    os.killpg(0, signal.SIGKILL)  # this process too


def _tie(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: a signal that `_end` handles
    if os.getppid() != parent:  # it died before that call
        _end()


def _drop_root(libc: ctypes.CDLL) -> None:
    """Become nobody, for good, and keep of root's rights only that to end the cage."""
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(_NOBODY_ID, _NOBODY_ID, _NOBODY_ID)
    os.setresuid(_NOBODY_ID, _NOBODY_ID, _NOBODY_ID)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    kept = struct.pack("IIIIII", 1 << _CAP_KILL, 1 << _CAP_KILL, 0, 0, 0, 0)
    if libc.capset(struct.pack("Ii", 0x20080522, 0), kept):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be dropped")


def _start(libc: ctypes.CDLL, settings: dict, tether: int) -> None:
    """Be the second process: once the first one is ready, the jail or bubblewrap."""
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(libc, tether)
    if os.read(tether, 1) != b"+":
        return
    die_with_parent(libc, tether)
    if "jail" in settings:
        first_process(libc, settings["jail"], tether)
    else:
        os.execve(settings["command"][0], settings["command"], {})


def _main() -> None:
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpgrp() != os.getpid():
        os.setsid()  # `_end` must never reach a group that others are in
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    _tie(libc, settings["parent"])
    signal.setitimer(signal.ITIMER_REAL, settings["wall_s"])
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError:
        pass  # only decides whom the kernel kills first when memory runs out
    if "jail" in settings:
        enter_namespaces(libc, settings["jail"])
    tether, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        try:
            _start(libc, settings, tether)
        except OSError as error:
            print(error, file=sys.stderr)
        os._exit(71)
    os.close(1)  # kvbench sees the end of the outputs when the program ends
    os.close(tether)
    if os.geteuid() == 0:
        _drop_root(libc)
    _tie(libc, settings["parent"])  # a change of user, or of its namespace, takes it away
    os.write(hold, b"+")
    ends = select.poll()
    ends.register(0, 0)  # nobody holds the other end any more: that is told unasked
    ends.register(os.pidfd_open(child), select.POLLIN)
    if any(number == 0 for number, _ in ends.poll()):
        _end()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)


if __name__ == "__main__":
    try:
        _main()
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(71)
