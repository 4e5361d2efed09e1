"""Attempts to use more time, memory, processes, files or output than allowed."""

# Programs give up in the plainest way, and expressions need imports too.
# ruff: noqa: SIM105, F401

import atexit
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

MAX_S = 20
SLEEPER = [sys.executable, "-c", f"import time; time.sleep({MAX_S})"]


# Programs of one expression, and below those that are more.
ATTACKS = {
    "sleep": "time.sleep(MAX_S)",
    "stop_itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    # one call into C that no signal handler interrupts; about ten seconds
    "slow_builtin": "str(pow(3, 4_000_000, 10**2_000_000))[:10]",
    "slow_regex": "re.match(r'(a+)+$', 'a' * 29 + 'b')",
    "threads": "[threading.Thread(target=time.sleep, args=(MAX_S,)).start() for _ in range(12)]",
    "subprocess": "subprocess.Popen(SLEEPER, start_new_session=True).pid",
    "memory": "len(bytearray(2 << 30))",
    "memory_in_steps": "len([bytearray(1 << 20) for _ in range(2000)])",
    "replace_itself": "os.execv(sys.executable, SLEEPER)",
    "memory_file": "os.write(os.memfd_create('x'), bytes(1 << 20))",
    "open_files": "len([open('/dev/null') for _ in range(200)])",
    "large_value": "'x' * (20 << 20)",
    "recursion": "attack(folder, port, abstract, pid)",
    "recursion_without_limit": "sys.setrecursionlimit(10**9) or attack(folder, port, abstract, pid)",
    "crash": "ctypes.string_at(0)",
    "read_input": "sys.stdin.read() + input()",
    "exit_bomb": "atexit.register(time.sleep, MAX_S) and 'armed'",
    "raise_limits": "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)) or len(bytearray(2 << 30))",
}


def _attack_loop(folder, port, abstract, pid):
    end = time.time() + MAX_S
    while time.time() < end:
        pass


def _attack_loop_that_catches_everything(folder, port, abstract, pid):
    end = time.time() + MAX_S
    while time.time() < end:
        try:
            time.sleep(0.01)
        except BaseException:
            pass


def _attack_no_alarm(folder, port, abstract, pid):
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    time.sleep(MAX_S)


def _attack_fork_bomb(folder, port, abstract, pid):
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
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(MAX_S)
            os._exit(0)
        os._exit(0)
    return "daemon started"


def _attack_daemon_that_ends_the_parent(folder, port, abstract, pid):
    if os.fork() == 0:
        os.setsid()
        time.sleep(MAX_S)
    os._exit(0)


def _attack_processes_full_of_memory(folder, port, abstract, pid):
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (512 << 20)
            time.sleep(MAX_S)
            os._exit(len(held) & 1)
    time.sleep(MAX_S)


def _attack_memory_in_threads(folder, port, abstract, pid):
    held = []

    def eat():
        for _ in range(400):
            held.append(bytearray(b"x") * (4 << 20))

    made = [threading.Thread(target=eat) for _ in range(4)]
    [one.start() for one in made]
    [one.join() for one in made]
    return len(held)


def _attack_clone_past_the_library(folder, port, abstract, pid):
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
    threading.stack_size(65536)
    for _ in range(5000):
        threading.Thread(target=time.sleep, args=(MAX_S,), daemon=True).start()
    return "threads started"


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


def _attack_output_flood(folder, port, abstract, pid):
    for _ in range(200):
        sys.stdout.write("x" * (1 << 20))
        sys.stderr.write("x" * (1 << 20))
    return "printed"


def _attack_pipe_flood(folder, port, abstract, pid):
    for _ in range(200):
        for number in range(3, 10):
            try:
                os.write(number, bytes(1 << 20))
            except OSError:
                pass


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


def _load_forever():
    time.sleep(MAX_S)


def _load_large():
    return len(bytearray(2 << 30))
