"""The cage's rules that need no cage to check: the filter of system calls on both machines, paths, users and advice."""

import os

import pytest

from kvbench.tasks.code.cage import child, mechanism
from kvbench.tasks.code.cage import probe as cage_probe
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.mechanism import trace
from kvbench.tasks.code.cage.run import advice

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
# From the kernel's tables (asm/unistd_64.h, asm-generic/unistd.h): what must not work, by name.
NUMBERS = {
    "x86_64": {
        "arch": 0xC000003E, "read": 0, "write": 1, "mmap": 9, "futex": 202, "exit_group": 231, "clone": 56, "fork": 57,
        "vfork": 58, "execve": 59, "execveat": 322, "socket": 41, "socketpair": 53, "unshare": 272, "setns": 308,
        "mount": 165, "ptrace": 101, "memfd_create": 319, "bpf": 321, "shmget": 29, "io_setup": 206,
    },
    "aarch64": {
        "arch": 0xC00000B7, "read": 63, "write": 64, "mmap": 222, "futex": 98, "exit_group": 94, "clone": 220,
        "execve": 221, "execveat": 281, "socket": 198, "socketpair": 199, "unshare": 97, "setns": 268, "mount": 40,
        "ptrace": 117, "memfd_create": 279, "bpf": 280, "shmget": 194, "io_setup": 0,
    },
}  # fmt: skip
# How the C library makes a thread: CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS and two more.
A_THREAD = 0x3D0F00


def answer(machine, arch, number, first=0):
    """What the kernel does with a call: None when it is let through, otherwise its error number."""
    data = {0: number, 4: arch, 16: first & 0xFFFFFFFF}
    code, at, loaded = child.filter_of(machine), 0, 0
    while True:
        kind, yes, no, value = code[at]
        at += 1
        if kind == 0x20:
            loaded = data[value]
        elif kind == 0x06:
            return None if value == 0x7FFF0000 else value - 0x50000
        else:
            met = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += yes if met else no


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter_of_system_calls(machine):
    """Sockets of AF_UNIX and threads pass; other sockets, processes, programs and namespaces do not."""
    numbers = dict(NUMBERS[machine])
    arch = numbers.pop("arch")
    for name in ("read", "write", "mmap", "futex", "exit_group"):
        assert answer(machine, arch, numbers.pop(name)) is None
    clone, sockets = numbers.pop("clone"), [numbers.pop("socket"), numbers.pop("socketpair")]
    for call in sockets:
        assert [answer(machine, arch, call, family) for family in (1, 1 + (7 << 32))] == [None, None]
        refused = {
            answer(machine, arch, call, family) for family in (*range(64), 40 + (1 << 32), 0xFFFFFFFF) if family != 1
        }
        assert refused == {EAFNOSUPPORT}
    assert answer(machine, arch, clone, A_THREAD) is None
    for flags in (17, 0x4111, 0x01200011, A_THREAD | 0x10000000, A_THREAD | 0x20000, A_THREAD & ~0x10000):
        assert answer(machine, arch, clone, flags) == EPERM
    assert {answer(machine, arch, number) for number in numbers.values()} == {EPERM}
    assert [answer(machine, arch, number) for number in (425, 426, 427, 435)] == [EPERM, EPERM, EPERM, ENOSYS]
    # Other ways into the same kernel: 32-bit calls, and x86's numbers from 2**30.
    assert {answer(machine, 0x40000003, number, 1) for number in (1, *sockets)} == {EPERM}
    assert answer(machine, arch, sockets[0] + (1 << 30), 1) == EPERM


def test_a_machine_without_a_filter_is_refused(monkeypatch):
    """Without numbers for its system calls nothing runs, and the message names the machines that have some."""
    with pytest.raises(OSError, match="no filter of system calls is written for riscv64, only for x86_64 and aarch64"):
        child.filter_of("riscv64")
    assert "x86-64 or 64-bit ARM" in advice(["user namespaces: it does not come up (jail no filter of system calls)"])


def test_paths_lead_to_the_same_files_and_packages_are_hidden(tmp_path):
    """Each path shows what it leads to, unless a folder above does; a link out of such a folder finds its file, and
    third-party packages are hidden."""
    top = tmp_path.resolve()
    library = top / "real" / "python3"
    (library / "site-packages").mkdir(parents=True)
    for path in (library / "os.py", top / "real" / "libx.so.1.2", top / "far.so"):
        path.write_text("")
    (top / "real" / "libx.so.1").symlink_to("libx.so.1.2")
    (library / "far.so").symlink_to(top / "far.so")
    (top / "lib").symlink_to("real")
    (top / "round").symlink_to("round")
    paths = ["lib/python3", "lib/python3/os.py", "lib/python3/far.so", "real/python3/../libx.so.1", "round", "absent"]
    found = trace([*(f"{top}/{path}" for path in paths), "linux-vdso.so.1", ""])
    assert found.shown == {
        f"{top}/lib/python3": f"{top}/real/python3",
        f"{top}/far.so": f"{top}/far.so",
        f"{top}/real/libx.so.1": f"{top}/real/libx.so.1.2",
    }
    assert found.hidden == [f"{top}/lib/python3/site-packages"]


@pytest.mark.parametrize(
    ("mapped", "users"),
    [
        ("0 0 4294967295", range(0x70000000, 0x7FFE0000)),
        ("0 100000 65536", range(32768, 65535)),
        ("0 1000 1\n1 100000 65536", range(32769, 65536)),
    ],
)
def test_root_gives_every_cage_a_user_of_its_own(mapped, users, tmp_path, monkeypatch):
    """From the ids that nobody has, or the upper half of those that a container has; never the same for two."""
    (tmp_path / "map").write_text(mapped + "\n")
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *rest: real(tmp_path / "map" if "uid_map" in str(path) else path))
    drawn = [mechanism._cage_user() for _ in range(40)]
    assert all(user in users for user in drawn) and len(set(drawn)) > 35
    (tmp_path / "map").write_text("0 1000 1\n")
    with pytest.raises(OSError, match="root has 1 users here"):
        mechanism._cage_user()


@pytest.mark.parametrize(
    ("said", "settings", "right", "wrong"),
    [
        ("unshare a user namespace: No space left on device", {"user.max_user_namespaces": "0"},
         "allows no user namespaces, which bubblewrap needs as well", "[Ii]nstall bubblewrap"),
        ("[Errno 28] unshare: No space left on device", {"user.max_user_namespaces": "100"},
         "As many user namespaces exist as the kernel allows", "[Ii]nstall bubblewrap"),
        ("Operation not permitted", {"kernel.unprivileged_userns_clone": "0"}, "unprivileged_userns_clone=1", "Docker"),
        ("Operation not permitted", {"kernel.apparmor_restrict_unprivileged_userns": "1"},
         "AppArmor.*install bubblewrap with its profile", "Docker"),
        ("[Errno 1] unshare: Operation not permitted", {}, "Docker: .*seccomp=unconfined", "[Ii]nstall bubblewrap"),
        ("it cannot be started ([Errno 13] Permission denied: '/srv/python3.11')", {}, "may not start this Python",
         "Docker"),
        ("it does not come up (died)", {}, "Install bubblewrap", "Docker"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_cause(said, settings, right, wrong, monkeypatch):
    """Bubblewrap is not recommended where what it needs itself is missing."""
    monkeypatch.setattr(cage, "advice", lambda missing: advice(missing, settings.get))
    monkeypatch.setattr(cage, "check_isolation", lambda: cage_probe.Isolation(None, (f"user namespaces: {said}",)))
    with pytest.raises(cage.CageRefused, match=right) as raised:
        cage.run("def f(): pass", "f", [[]], allow_code_execution=True)
    assert not __import__("re").search(wrong, str(raised.value))


def test_settings_of_the_kernel_are_read():
    """The real reader finds a setting that Linux has, and none for one that it has not."""
    from kvbench.tasks.code.cage.run import _setting

    assert _setting("kernel.ostype") == "Linux" and _setting("kernel.no_such_setting") is None
    assert advice([f"bubblewrap: {os.strerror(2)}"]).endswith(".")
