"""Exit handling of a command: error messages by kind of error, and signals.

Ctrl-C, a closed terminal and a scheduler's SIGTERM are handled alike.
"""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvbench.config import files
from kvbench.errors import ExitRequested, KvbenchError, raised_by, what_happened
from kvbench.show.progress import log, note

EXIT_FAILED, EXIT_USAGE = 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = "\x1b[?25h"


class Stopped(KeyboardInterrupt):
    """A signal that ends this process. Its text is the signal's name."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first signal that ends a process into `Stopped`, so that files and bars are closed; end at the second.

    A signal that is ignored (`nohup`, a shell's background) or that has another handler is left
    alone. After a signal the handlers stay installed, because the interpreter's shutdown takes a moment too.
    """
    seen: list[int] = []
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child has nothing to close
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif seen:
            _leave(number)
        else:
            seen.append(number)
            raise Stopped(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number, handler in before.items() if handler in usual}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        if not seen:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_code(stop: KeyboardInterrupt) -> int:
    """Exit code of a process that a signal ended, as a shell reports it: 128 + the signal's number."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def say(text: str) -> None:
    """Print a line on stderr, if it still exists: after SIGHUP the terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        note(text)


def _leave(number: int) -> NoReturn:
    """Exit without closing anything; the next start recovers, as after a kill."""
    with contextlib.suppress(OSError):
        shown = _SHOW_CURSOR if os.isatty(2) else ""
        os.write(2, f"{shown}\nended at once by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def report(error: Exception) -> int:
    """Print an error: a message for the user, or a traceback for a fault."""
    from kvbench.results.writing import JournalError, is_full, write_error

    if isinstance(error, OSError) and is_full(error):  # raised where a library writes, or where the output is a file
        cause, error = error, write_error(error.filename or "a file or the output", error)
        error.__cause__ = cause
    is_fault, theirs = not isinstance(error, ValueError | OSError), raised_by(error)
    if is_fault or os.environ.get("KVBENCH_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
        log("".join(traceback.format_exception(error)))
    if is_fault and (theirs or isinstance(error, ExitRequested)):
        note(f"error: {what_happened(error)}")
        return EXIT_FAILED
    if is_fault:
        note("this is a fault of kvbench; please report it with the lines above")
        return EXIT_FAILED
    note(f"error[{error.code}]: {error}" if isinstance(error, KvbenchError) else f"error: {error}")
    if not _is_ours(error):
        kind, where = type(error).__name__, f" in {' of '.join(theirs)}" if theirs else ""
        note(f"({kind} from outside kvbench{where}; KVBENCH_DEBUG=1 shows where)")
    return EXIT_FAILED if isinstance(error, JournalError) else EXIT_USAGE


def _is_ours(error: Exception) -> bool:
    """True when kvbench itself raised it, so that its message was written for the user."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    package = files.package_folder()
    roots = {package, (package / "methods").resolve(), (package / "kernels").resolve()}
    return not last or bool(roots & set(Path(last[0].filename).resolve().parents))
