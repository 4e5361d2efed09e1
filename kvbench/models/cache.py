"""kvbench's cache folder: where it lies, and digests of whole files that it remembers."""

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from kvbench.config import durable
from kvbench.errors import FileContent, FileMissing, KvbenchError

# Reading a smaller file takes no longer than remembering it.
_SMALL_BYTES = 1 << 20
# Hashing more than this takes long enough to be told.
_LARGE_BYTES = 8 << 30
# A file that was changed this recently may be changed once more without its times moving on: clocks of file systems
# tick every few milliseconds, some every two seconds.
_SETTLED_NS = 2_000_000_000

State = list[str | int]


class NoRoom(KvbenchError, code="no-room"):
    """Memory or a disk is too small for the request."""


def cache_root() -> Path:
    """The folder of everything that kvbench keeps: KVBENCH_CACHE, XDG_CACHE_HOME/kvbench or ~/.cache/kvbench.

    Raises:
        ValueError: None of them is set, and there is no home folder.
    """
    try:
        if os.environ.get("KVBENCH_CACHE"):
            return Path(os.environ["KVBENCH_CACHE"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    except RuntimeError as error:
        raise FileMissing(
            f"there is no folder for kvbench's cache ({error}); set KVBENCH_CACHE to one", setting="KVBENCH_CACHE"
        ) from error


def file_state(file: Path) -> State:
    """State of a file, links followed, in JSON types: its real path, size, times of change and inode.

    The second time (ctime) moves even when a program restores the first one (mtime).
    """
    real = file.resolve()
    stat = real.stat()
    return [str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_digest(file: Path, remember: bool = True) -> str:
    """The SHA-256 of a whole file; a large one is read once and remembered in the cache folder under its `file_state`.

    Where the cache folder cannot be written nothing is remembered, and the file is read every time. A file that is
    being written is refused.

    Args:
        remember: False reads the file whatever is remembered, and leaves nothing; for files that are about to move.
    """
    state = file_state(file)
    size_bytes, changed_ns = int(state[1]), max(int(state[2]), int(state[3]))
    if size_bytes < _SMALL_BYTES or not remember:
        return _read_whole(file)
    record = cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(str(state[0]))).hexdigest()[:32]}.json"
    known: Any = None  # where the record is missing or damaged
    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads(record.read_bytes())
    known = known if isinstance(known, dict) else {}
    if known.get("state") == state and re.fullmatch(r"[0-9a-f]{64}", str(known.get("sha256"))):
        return str(known["sha256"])
    if size_bytes > _LARGE_BYTES:
        print(f"kvbench: hashing {file.name} once ({size_bytes / 1e9:.0f} GB) ...", file=sys.stderr)
    settled = time.time_ns() - changed_ns > _SETTLED_NS
    digest = _read_whole(file)
    if file_state(file) != state:
        raise FileContent(f"{file} changed while it was read; try again when nothing writes there")
    if settled:
        with contextlib.suppress(OSError):
            durable.make_folder(record.parent)
            _write_record(record, {"state": state, "sha256": digest})
    return digest


def _read_whole(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_record(record: Path, content: dict[str, Any]) -> None:
    """Replaces a record in one step. It need not survive a power cut: a damaged one is made again."""
    temporary = record.with_name(f".{record.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content))
        os.replace(temporary, record)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
