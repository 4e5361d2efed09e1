"""The program that runs inside the cage: tighten the limits, load the solution, call it, report what came out.

It is started as text after that of `wire.py` (so `encode` and `decode` are in scope) by a fresh `python -I -S`, once
the namespaces are made; where root made them, its argument is the user to become. Nothing here is trusted by the
parent: a solution shares this process and may change or bypass all of it. That way it can reach the list of inputs and
    a pipe for outputs; the expected outputs are not on this side.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import time
import types

TYPE_CHECKING = False  # a type checker takes it for True; here these names come from the text of wire.py
if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbench.tasks.code.cage.wire import WireError, decode, encode

# Syscall numbers that may fail without harm to an honest solution. Namespaces and mounts would be new ground to stand
# on; shared memory, message queues and memory files would be memory that the address-space limit does not see. A new
# process would have an address space of its own: without any, the limits of one process are the limits of the cage.
# Contexts of asynchronous reads come out of a number that the whole machine shares.
_DENIED = {
    # unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv process_vm_writev bpf perf_event_open
    # add_key request_key keyctl userfaultfd shmget semget msgget memfd_create init_module finit_module kexec_load
    # open_by_handle_at execve execveat io_setup, and on x86 fork vfork
    "x86_64": (272, 308, 165, 166, 155, 161, 101, 310, 311, 321, 298, 248)
    + (249, 250, 323, 29, 64, 68, 319, 175, 313, 246, 304, 59, 322, 206, 57, 58),
    "aarch64": (97, 268, 40, 39, 41, 51, 117, 270, 271, 280, 241, 217)
    + (218, 219, 282, 194, 190, 186, 279, 105, 273, 104, 265, 221, 281, 0),
}
# Numbers in the filter: the architecture, clone, socket, socketpair.
_JUDGED = {"x86_64": (0xC000003E, 56, 41, 53), "aarch64": (0xC00000B7, 220, 198, 199)}
# io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsmount mount_setattr memfd_secret: one
# number on every architecture.
_DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
_A_THREAD = 0x00010000
_AF_UNIX = 1
# A program that catches everything swallows an alarm: the next comes after so much more CPU time. Kernels count it in
# ticks, and an alarm may be a tick late.
_REPEAT_S, _TICK_S = 0.1, 0.01
_cpu_s = time.process_time  # before a program can put another there
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


class _CallTimeout(BaseException):
    """The time for one call is over."""


def filter_of(machine: str) -> "list[tuple[int, int, int, int]]":
    """The rules for system calls on a machine, as a program of the kernel's packet filter.

    Returns:
        Its instructions: code, jump if true, jump if not, value.

    Raises:
        OSError: No rules are written for this machine.
    """
    if machine not in _JUDGED:
        raise OSError(f"no filter of system calls is written for {machine}, only for {' and '.join(_JUDGED)}")
    arch, clone, *sockets = _JUDGED[machine]
    load, equal, greater, both, give = 0x20, 0x15, 0x35, 0x45, 0x06
    fail, allow = 0x00050000, 0x7FFF0000
    number, first_argument = 0, 16
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, fail | _EPERM)]
    # Numbers from 2**30 are another way into the same calls on x86.
    code += [(load, 0, 0, number), (greater, 0, 1, 0x40000000), (give, 0, 0, fail | _EPERM)]
    for denied in _DENIED[machine] + _DENIED_EVERYWHERE:
        code += [(equal, 0, 1, denied), (give, 0, 0, fail | _EPERM)]
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, fail | _ENOSYS)]  # the C library falls back to clone
    # Some families of sockets belong to no network namespace: a virtual machine's host answers on one of them.
    for call in sockets:
        code += [
            (equal, 0, 4, call),
            (load, 0, 0, first_argument),
            (equal, 0, 1, _AF_UNIX),
            (give, 0, 0, allow),
            (give, 0, 0, fail | _EAFNOSUPPORT),
        ]
    code += [
        (equal, 0, 4, clone),
        (load, 0, 0, first_argument),
        (both, 1, 0, _NEW_NAMESPACES),
        (both, 1, 0, _A_THREAD),
        (give, 0, 0, fail | _EPERM),
        (give, 0, 0, allow),
    ]
    return code


def _filter_syscalls() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = filter_of(platform.machine())
    text = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(text, len(text))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    if libc.prctl(22, 2, ctypes.create_string_buffer(program, len(program)), 0, 0):  # PR_SET_SECCOMP, by filter
        raise OSError(ctypes.get_errno(), "the syscall filter was refused")


def _become(user: int) -> None:
    """Give up root, where root built the cage, for good, for a user that no other cage has."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(user, user, user)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be dropped")


def _limit(rlimits: dict) -> None:
    for name, value in rlimits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    _filter_syscalls()


def _alarm(signum: int, frame: object) -> None:
    raise _CallTimeout


def _disarm() -> None:
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _send(pipe: int, index: int, kind: str, elapsed_s: float, payload: bytes = b"") -> None:
    data = b"%d %s %d %d\n" % (index, kind.encode(), int(elapsed_s * 1e6), len(payload)) + payload
    while data:
        data = data[os.write(pipe, data) :]


def _guarded(
    pipe: int, index: int, limit_s: float, job: dict, work: "Callable[..., object]", *arguments: object
) -> bool:
    """Run one piece of untrusted work under its own limits, in CPU time and on the clock, and report how it ended.

    Work that took longer is out of time, whatever it made of the alarms.
    """
    start = _cpu_s()
    kind, payload = "v", b""
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s, _REPEAT_S)
        signal.setitimer(signal.ITIMER_REAL, job["guard_s"][index + 1])
        value = work(*arguments)
        try:
            payload = encode(value, max_bytes=job["max_bytes"])
        except WireError as error:
            kind, payload = "u", str(error).encode("utf-8", "replace")
        _disarm()
        elapsed_s = _cpu_s() - start
    except _CallTimeout:
        _disarm()
        kind, payload, elapsed_s = "t", b"", limit_s
    except BaseException as error:  # SystemExit and KeyboardInterrupt are as much a failure as any other
        _disarm()
        kind, elapsed_s = "e", _cpu_s() - start
        try:
            payload = f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace")
        except BaseException:
            payload = b"an exception that cannot be shown"
    if elapsed_s > limit_s + _TICK_S:
        kind, payload, elapsed_s = "t", b"", limit_s
    _send(pipe, index, kind, elapsed_s, payload)
    return kind == "v"


def _main() -> None:
    if len(sys.argv) > 1:
        _become(int(sys.argv[1]))
    # A count and so many bytes, not all there are: the pipe stays open for as long as the cage may live.
    with open(0, "rb", closefd=False) as stream:
        job = decode(stream.read(int(stream.readline())))
    assert isinstance(job, dict)  # `mechanism.run_under` wrote it
    pipe = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.environ.clear()
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, _alarm)
    _limit(job["rlimits"])  # what goes wrong in there is still told on standard error
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load() -> None:
        exec(compile(job["program"], "solution.py", "exec"), module.__dict__)
        if job["entry_point"] not in module.__dict__:
            raise NameError(f"the program does not define {job['entry_point']}")

    if _guarded(pipe, -1, job["load_s"], job, load):
        function = module.__dict__[job["entry_point"]]
        for index, (arguments, limit_s) in enumerate(zip(job["calls"], job["call_s"])):  # noqa: B905
            # Decoded for each call: what one call does to its arguments must not reach the next.
            call = decode(arguments)
            assert isinstance(call, list)
            _guarded(pipe, index, limit_s, job, function, *call)
    # Threads and exit handlers of the solution get no time: everything in the namespace dies with this process.
    os._exit(0)


if __name__ == "__main__":
    _main()
