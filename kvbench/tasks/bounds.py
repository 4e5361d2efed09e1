"""Bounds around code that is not ours, such as graders and chat templates: how much time and memory it may take."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_REPEAT_S = 1.0  # what swallows the first alarm gets another


class OutOfTime(BaseException):
    """Time limit exceeded. No Exception, so that a library that catches all of these does not catch it."""


@contextmanager
def time_limit(limit_s: float | None) -> Iterator[None]:
    """Raise `OutOfTime` inside the block when it takes more seconds of wall time; None is no limit.

    The kernel's timer interrupts Python code and regular expressions, which look for signals while they match. Signals
    reach the main thread only; in another thread there is no limit. Code that sets alarms of its own (some graders of
    lm-eval do) puts its limits in the place of this one.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def stop(number: int, frame: FrameType | None) -> None:
        if inside:
            raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_S)
        try:
            yield
        finally:
            inside = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Let memory run out inside the block, as a MemoryError, when it adds more to the process' address space.

    So one huge request is refused before a page of it is there. Allocations of other threads count too; like
    `time_limit` it is for the main thread, and there is none in others, or without /proc (not on Linux).
    """
    sizes = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not sizes.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + more_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
