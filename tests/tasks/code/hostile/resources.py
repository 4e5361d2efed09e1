"""Attempts to use more time, memory, processes, files or output than allowed."""

# Hostile programs give up in the plainest way.
# ruff: noqa: SIM105

MAX_S = 20


def _attack_loop(folder, port, abstract, pid):
    import time

    end = time.time() + MAX_S
    while time.time() < end:
        pass


def _attack_loop_that_catches_everything(folder, port, abstract, pid):
    import time

    end = time.time() + MAX_S
    while time.time() < end:
        try:
            time.sleep(0.01)
        except BaseException:
            pass


def _attack_sleep(folder, port, abstract, pid):
    import time

    time.sleep(MAX_S)


def _attack_no_alarm(folder, port, abstract, pid):
    import signal
    import time

    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    time.sleep(MAX_S)


def _attack_stop_itself(folder, port, abstract, pid):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


def _attack_slow_builtin(folder, port, abstract, pid):
    # One call into C that no signal handler interrupts; about ten seconds.
    return str(pow(3, 4_000_000, 10**2_000_000))[:10]


def _attack_slow_regex(folder, port, abstract, pid):
    import re

    return re.match(r"(a+)+$", "a" * 29 + "b")


def _attack_fork_bomb(folder, port, abstract, pid):
    import os
    import time

    for _ in range(12):
        if os.fork() == 0:
            for _ in range(2):
                try:
                    os.fork()
                except OSError:
                    pass
            time.sleep(MAX_S)
            os._exit(0)
    time.sleep(MAX_S)


def _attack_daemon(folder, port, abstract, pid):
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(MAX_S)
            os._exit(0)
        os._exit(0)
    return "daemon started"


def _attack_daemon_that_ends_the_parent(folder, port, abstract, pid):
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        time.sleep(MAX_S)
    os._exit(0)


def _attack_threads(folder, port, abstract, pid):
    import threading
    import time

    for _ in range(12):
        threading.Thread(target=time.sleep, args=(MAX_S,)).start()
    return "threads started"


def _attack_subprocess(folder, port, abstract, pid):
    import subprocess
    import sys

    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({MAX_S})"], start_new_session=True)
    return "process started"


def _attack_memory(folder, port, abstract, pid):
    return len(bytearray(2 << 30))


def _attack_memory_in_steps(folder, port, abstract, pid):
    held = []
    for _ in range(2000):
        held.append(bytearray(1 << 20))
    return len(held)


def _attack_processes_full_of_memory(folder, port, abstract, pid):
    import os
    import time

    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (512 << 20)
            time.sleep(MAX_S)
            os._exit(len(held) & 1)
    time.sleep(MAX_S)


def _attack_memory_in_threads(folder, port, abstract, pid):
    import threading

    held = []

    def eat():
        for _ in range(400):
            held.append(bytearray(b"x") * (4 << 20))

    made = [threading.Thread(target=eat) for _ in range(4)]
    [one.start() for one in made]
    [one.join() for one in made]
    return len(held)


def _attack_clone_past_the_library(folder, port, abstract, pid):
    import ctypes
    import os
    import time

    libc = ctypes.CDLL(None, use_errno=True)
    calls = (56, 57, 58) if os.uname().machine == "x86_64" else (220,)
    started = [libc.syscall(call, 17, 0, 0, 0, 0) for call in calls for _ in range(20)]
    if 0 in started:
        time.sleep(MAX_S)
        os._exit(0)
    if max(started) < 0:
        raise OSError("refused")
    return started


def _attack_thread_bomb(folder, port, abstract, pid):
    import threading
    import time

    threading.stack_size(65536)
    for _ in range(5000):
        threading.Thread(target=time.sleep, args=(MAX_S,), daemon=True).start()
    return "threads started"


def _attack_replace_itself(folder, port, abstract, pid):
    import os
    import sys

    os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({MAX_S})"])


def _attack_memory_file(folder, port, abstract, pid):
    import os

    number = os.memfd_create("x")
    return os.write(number, bytes(1 << 20))


def _attack_large_file(folder, port, abstract, pid):
    with open("/tmp/large", "wb") as stream:
        for _ in range(200):
            stream.write(bytes(1 << 20))
    return "written"


def _attack_many_files(folder, port, abstract, pid):
    for number in range(40):
        with open(f"/tmp/{number}", "wb") as stream:
            stream.write(bytes(8 << 20))
    return "written"


def _attack_open_files(folder, port, abstract, pid):
    held = [open("/dev/null") for _ in range(200)]  # noqa: SIM115
    return len(held)


def _attack_output_flood(folder, port, abstract, pid):
    import sys

    for _ in range(200):
        sys.stdout.write("x" * (1 << 20))
        sys.stderr.write("x" * (1 << 20))
    return "printed"


def _attack_pipe_flood(folder, port, abstract, pid):
    import os

    for _ in range(200):
        for number in range(3, 10):
            try:
                os.write(number, bytes(1 << 20))
            except OSError:
                pass


def _attack_large_value(folder, port, abstract, pid):
    return "x" * (20 << 20)


def _attack_deep_value(folder, port, abstract, pid):
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def _attack_value_in_itself(folder, port, abstract, pid):
    value = []
    value += [value, value]
    return value


def _attack_colliding_keys(folder, port, abstract, pid):
    # Making the set is slow here as well; the list of its keys is not.
    return [{number * (2**61 - 1) for number in range(1, 3000)}]


def _attack_recursion(folder, port, abstract, pid):
    return _attack_recursion(folder, port, abstract, pid)


def _attack_recursion_without_limit(folder, port, abstract, pid):
    import sys

    sys.setrecursionlimit(10**9)
    return _attack_recursion(folder, port, abstract, pid)


def _attack_crash(folder, port, abstract, pid):
    import ctypes

    ctypes.string_at(0)


def _attack_read_input(folder, port, abstract, pid):
    import sys

    return sys.stdin.read() + input()


def _attack_exit_bomb(folder, port, abstract, pid):
    import atexit
    import time

    atexit.register(time.sleep, MAX_S)
    return "armed"


def _attack_raise_limits(folder, port, abstract, pid):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return len(bytearray(2 << 30))


def _load_forever():
    import time

    time.sleep(MAX_S)


def _load_large():
    return len(bytearray(2 << 30))
