"""The cage without bubblewrap: namespaces and a root of its own, made with the calls Linux has for that.

Its text stands before that of `keeper.py`, which calls `enter_namespaces` in the first process of the cage and
`first_process` in the second: the first of a new process namespace. That one reaps, and the kernel kills the whole
namespace when it ends; its child is the interpreter that runs the solution. Needs the standard library only, and Linux
5.12 (read-only mounts with everything below them).
"""

import ctypes
import os
import select
import signal

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
_NOBODY = 65534
# Every machine has this folder. The new root is mounted over it, in a file system view that nobody else has.
_FOOTING = "/tmp"
_OLD = "/old"


def check(result: int, what: str) -> None:
    """Raise the error of a call to the C library that failed.

    Args:
        result: What it gave: 0 where it worked.
        what: What was tried, in words.

    Raises:
        OSError: It gave something else.
    """
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent(libc: ctypes.CDLL, tether: int) -> None:
    """Let the kernel end this process with its parent; ends it at once where the parent is no more.

    Args:
        libc: The C library.
        tether: Reading end of a pipe whose other end the parent alone holds, for as long as it lives.
    """
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    # The parent may have ended before that call, and nothing would come any more.
    pipe = select.poll()
    pipe.register(tether, 0)
    if pipe.poll(0):
        os._exit(71)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    check(result, f"mount {target}")


def _read_only(libc: ctypes.CDLL, path: str, *, below: bool) -> None:
    # struct mount_attr: attributes to set, to clear, propagation, user namespace
    wanted = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID, 0, 0, 0)
    flags = 0x8000 if below else 0  # AT_RECURSIVE
    result = libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(wanted), ctypes.c_size_t(32))
    check(result, f"make {path} read-only")


def _bind(libc: ctypes.CDLL, path: str, *, writable: bool = False) -> None:
    source = _OLD + path
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
    check(libc.pivot_root(b".", _OLD[1:].encode()), "pivot_root")
    os.chdir("/")
    # Before what is bound: the interpreter may be installed below a folder of that name.
    os.mkdir("/tmp")
    options = f"size={settings['scratch_bytes']},nr_inodes=4096,mode=1777"
    _mount(libc, "tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, options)
    for path, target in settings["links"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in settings["readable"]:
        _bind(libc, path)
    for path in settings["hidden"]:
        _mount(libc, "tmpfs", path, "tmpfs", _NOSUID | _NODEV | _READ_ONLY, "size=4k,mode=555")
    for name in ("null", "zero", "random", "urandom"):
        _bind(libc, f"/dev/{name}", writable=True)
    check(libc.umount2(_OLD.encode(), 2), "leave the old root")
    os.rmdir(_OLD)
    _read_only(libc, "/", below=False)
    os.chdir("/tmp")


def enter_namespaces(libc: ctypes.CDLL, settings: dict) -> None:
    """Make the namespaces: this process is in all of them but that of processes, which begins with its next child.

    Args:
        libc: The C library.
        settings: `user_namespace`: whether one of users too, where this process is nobody.

    Raises:
        OSError: The kernel refuses.
    """
    spaces = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if not settings["user_namespace"]:
        return check(libc.unshare(spaces), "unshare")
    user, group = os.geteuid(), os.getegid()
    # Apart from the others, so that a refusal says which was refused.
    check(libc.unshare(_NEWUSER), "unshare a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)
    return check(libc.unshare(spaces), "unshare")


def first_process(libc: ctypes.CDLL, settings: dict, tether: int) -> None:
    """Be the first process of the namespace: build the root, start the interpreter, reap until it ends.

    Args:
        libc: The C library.
        settings: `readable`, `links` and `hidden` of `needs.Needs`, `scratch_bytes` of the limits, and `command`, the
            interpreter's command line.
        tether: See `die_with_parent`.

    Raises:
        OSError: The root cannot be built.
    """
    _build_root(libc, settings)
    child = os.fork()
    if child == 0:
        # For a user other than root, exec drops every capability that the namespace gave; root drops itself there.
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        os.execve(settings["command"][0], settings["command"], {})
    for number in (0, 1):
        os.close(number)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        die_with_parent(libc, tether)  # a change of user takes it away
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(min(os.waitstatus_to_exitcode(status) % 256, 255))
