"""The first two processes of a cage: the keeper, and the jail's own first process where bubblewrap makes none.

The keeper ties the cage to kvbench's life, whichever way the rest is built. kvbench holds the other end of its standard
input for as long as the cage may live, and the kernel signals kvbench's death. Then, and when the time is over even
without a request, it kills its process group, with which the kernel ends the process namespace and all that is in it.

The jail is namespaces and a root of its own, made with the calls Linux has for that. Its first process reaps, and the
kernel kills the whole namespace when it ends; its child is the interpreter that runs the solution.

Started as text by a fresh `python -I -S` with one JSON argument. Needs the standard library only, and Linux 5.3
(`pidfd_open`); 5.12 without bubblewrap (read-only mounts with everything below them).
"""

import ctypes
import json
import os
import select
import signal
import struct
import sys

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
_NOBODY = 65534
_CAP_KILL = 5
_SIGNALS = (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGINT)
# Every machine has this folder. The new root is mounted over it, in a file system view that nobody else has.
_FOOTING = "/tmp"
_OLD = "/old"


def _check(result: int, what: str) -> None:
    """Raise the error of a call to the C library that gave anything but 0; the text says what was tried."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _die_with_parent(libc: ctypes.CDLL, tether: int) -> None:
    """Let the kernel end this process with its parent, which alone holds the other end of the pipe `tether`."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    # The parent may have ended before that call, and nothing would come any more.
    pipe = select.poll()
    pipe.register(tether, 0)
    if pipe.poll(0):
        os._exit(71)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount {target}")


def _read_only(libc: ctypes.CDLL, path: str, *, below: bool) -> None:
    # struct mount_attr: attributes to set, to clear, propagation, user namespace
    wanted = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID, 0, 0, 0)
    flags = 0x8000 if below else 0  # AT_RECURSIVE
    result = libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(wanted), ctypes.c_size_t(32))
    _check(result, f"make {path} read-only")


def _bind(libc: ctypes.CDLL, source: str, path: str, *, writable: bool = False) -> None:
    source = _OLD + source
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
    _mount(libc, source, path, "", _BIND | _REC)
    if not writable:
        _read_only(libc, path, below=True)


def _build_root(libc: ctypes.CDLL, settings: dict) -> None:
    """Stand on a new, read-only root that holds what the interpreter needs and a small /tmp; the old root is gone."""
    os.umask(0o022)
    _mount(libc, "none", "/", "", _REC | _PRIVATE)
    _mount(libc, "tmpfs", _FOOTING, "tmpfs", _NOSUID | _NODEV, "size=4m,mode=755")
    os.mkdir(_FOOTING + _OLD)
    os.chdir(_FOOTING)
    _check(libc.pivot_root(b".", _OLD[1:].encode()), "pivot_root")
    os.chdir("/")
    # Before what is bound: the interpreter may be installed below a folder of that name.
    os.mkdir("/tmp")
    options = f"size={settings['scratch_bytes']},nr_inodes=4096,mode=1777"
    _mount(libc, "tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, options)
    for path, source in settings["shown"].items():
        _bind(libc, source, path)
    for path in settings["hidden"]:
        _mount(libc, "tmpfs", path, "tmpfs", _NOSUID | _NODEV | _READ_ONLY, "size=4k,mode=555")
    for name in ("null", "zero", "random", "urandom"):
        _bind(libc, f"/dev/{name}", f"/dev/{name}", writable=True)
    _check(libc.umount2(_OLD.encode(), 2), "leave the old root")
    os.rmdir(_OLD)
    _read_only(libc, "/", below=False)
    os.chdir("/tmp")


def _enter_namespaces(libc: ctypes.CDLL, settings: dict) -> None:
    """Make the namespaces: this process is in all of them except that of processes, which begins with its next child.

    With `user_namespace` there is one of users too, in which this process is nobody. The host's name stays outside.
    """
    if settings["user_namespace"]:
        _enter_users(libc)
    _check(libc.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET), "unshare")
    for name_it in (libc.sethostname, libc.setdomainname):
        _check(name_it(b"cage", 4), "name the cage")


def _enter_users(libc: ctypes.CDLL) -> None:
    user, group = os.geteuid(), os.getegid()
    # Apart from the others, so that a refusal says which was refused.
    _check(libc.unshare(_NEWUSER), "unshare a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)


def _first_process(libc: ctypes.CDLL, settings: dict, tether: int) -> None:
    """Be the first process of the namespace: build the root, start the interpreter, reap until it ends."""
    _build_root(libc, settings)
    child = os.fork()
    if child == 0:
        # For a user other than root, exec drops every capability that the namespace gave; root drops itself there.
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        os.execve(settings["command"][0], settings["command"], {})
    for number in (0, 1):
        os.close(number)
    if os.geteuid() == 0:
        _become_nobody()
        _die_with_parent(libc, tether)  # a change of user takes it away
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(min(os.waitstatus_to_exitcode(status) % 256, 255))


def _end(signum: int = 0, frame: object = None) -> None:
    os.killpg(0, signal.SIGKILL)  # this process too


def _tie(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: a signal that `_end` handles
    if os.getppid() != parent:  # it died before that call
        _end()


def _drop_root(libc: ctypes.CDLL) -> None:
    """Become user nobody, for good, and keep of root's rights only that to end the cage."""
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    _become_nobody()
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    kept = struct.pack("IIIIII", 1 << _CAP_KILL, 1 << _CAP_KILL, 0, 0, 0, 0)
    if libc.capset(struct.pack("Ii", 0x20080522, 0), kept):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be dropped")


def _start(libc: ctypes.CDLL, settings: dict, tether: int) -> None:
    """Be the second process: once the first one is ready, the jail or bubblewrap."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _die_with_parent(libc, tether)
    if os.read(tether, 1) != b"+":
        return
    _die_with_parent(libc, tether)
    if "jail" in settings:
        _first_process(libc, settings["jail"], tether)
    else:
        os.execve(settings["command"][0], settings["command"], {})


def _main() -> None:
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpgrp() != os.getpid():
        os.setsid()  # `_end` must never reach a group that others are in
    for number in _SIGNALS:
        signal.signal(number, _end)
    _tie(libc, settings["parent"])
    signal.setitimer(signal.ITIMER_REAL, settings["wall_s"])
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError:
        pass  # only decides whom the kernel kills first when memory runs out
    if "jail" in settings:
        _enter_namespaces(libc, settings["jail"])
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
