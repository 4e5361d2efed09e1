"""How an error is told: a user's mistake in one message that names what exists, a fault of kvbench with its
traceback."""

import os
import traceback
from pathlib import Path

from kvbench.config import files
from kvbench.show.progress import log, note

EXIT_FAILED, EXIT_USAGE = 1, 2


def report(error: Exception) -> int:
    """Print an error the way its reader needs it."""
    from kvbench.results.writing import JournalError, is_full, write_error

    if isinstance(error, OSError) and is_full(error):  # raised where a library writes, or where the output is a file
        cause, error = error, write_error(error.filename or "a file or the output", error)
        error.__cause__ = cause
    is_fault = not isinstance(error, ValueError | OSError)
    if is_fault or os.environ.get("KVBENCH_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
        log("".join(traceback.format_exception(error)))
    if is_fault:
        note("this is a fault of kvbench; please report it with the lines above")
        return EXIT_FAILED
    note(f"error: {error}")
    if not _is_ours(error):
        kind = type(error).__name__
        note(f"({kind} from outside kvbench; KVBENCH_DEBUG=1 shows where)")
    return EXIT_FAILED if isinstance(error, JournalError) else EXIT_USAGE


def _is_ours(error: Exception) -> bool:
    """True when kvbench itself raised it, so that its message was written for the user."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    package = files.package_folder()
    roots = {package, (package / "methods").resolve(), (package / "kernels").resolve()}
    return not last or bool(roots & set(Path(last[0].filename).resolve().parents))
