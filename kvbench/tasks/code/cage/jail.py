"""The cage without bubblewrap: namespaces, a root of its own and another user, made with the calls Linux has for that.

Started as text by a fresh `python -I -S` with one JSON argument, so it needs the standard library only. It becomes
three processes: this one waits; the first of a new process namespace reaps, and the kernel kills the whole namespace
when it ends; its child is the interpreter that runs the solution. Needs Linux 5.12 (read-only mounts with everything
below them).
"""

import ctypes
import json
import os
import signal
import sys

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_READ_ONLY = 1
_MOUNT_SETATTR = 442
_NOBODY = 65534


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


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


def _bind(libc: ctypes.CDLL, source: str, root: str, *, writable: bool = False) -> None:
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
    _mount(libc, source, target, "", _BIND | _REC)
    if not writable:
        _read_only(libc, target, below=True)


def _build_root(libc: ctypes.CDLL, settings: dict) -> None:
    """Stand on a new, read-only root that holds what the interpreter needs and a small /tmp; the old root is gone."""
    root = settings["mount_point"]
    os.umask(0o022)
    _mount(libc, "none", "/", "", _REC | _PRIVATE)
    _mount(libc, "tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in settings["readable"]:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            _bind(libc, path, root)
    for name in ("null", "zero", "random", "urandom"):
        _bind(libc, f"/dev/{name}", root, writable=True)
    os.mkdir(root + "/tmp")
    _mount(
        libc,
        "tmpfs",
        root + "/tmp",
        "tmpfs",
        _NOSUID | _NODEV,
        f"size={settings['scratch_bytes']},nr_inodes=4096,mode=1777",
    )
    os.chdir(root)
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", 2), "leave the old root")
    _read_only(libc, "/", below=False)
    os.chdir("/tmp")


def _enter_namespaces(libc: ctypes.CDLL, settings: dict) -> None:
    spaces = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if not settings["user_namespace"]:
        return _check(libc.unshare(spaces), "unshare")
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(spaces | _NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {user} 1"), ("gid_map", f"{_NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)


def _die_with_parent(libc: ctypes.CDLL) -> None:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _first_process(libc: ctypes.CDLL, settings: dict) -> None:
    _die_with_parent(libc)
    _build_root(libc, settings)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        # For a user other than root, exec drops every capability that the namespace gave; root drops itself there.
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        os.execve(settings["command"][0], settings["command"], {})
    for number in (0, 1):
        os.close(number)
    if os.geteuid() == 0:
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _die_with_parent(libc)  # a change of user takes it away
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(min(os.waitstatus_to_exitcode(status) % 256, 255))


def _main() -> None:
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError:
        pass  # only decides whom the kernel kills first when memory runs out
    _enter_namespaces(libc, settings)
    child = os.fork()
    if child == 0:
        try:
            _first_process(libc, settings)
        except OSError as error:
            print(error, file=sys.stderr)
        os._exit(71)
    for number in (0, 1):
        os.close(number)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)


if __name__ == "__main__":
    try:
        _main()
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(71)
