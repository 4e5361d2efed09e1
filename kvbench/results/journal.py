"""Per-sample journal of a run, and the lock that guards it.

Append-only JSON lines that survive a kill at any byte.

A record is written with one `write` and one `fsync` when its sample ends. Reading tolerates what a crash can leave
behind: a torn last line is cut off and its sample redone; a record that is there twice counts once. Each line is sealed
with the hash of its run: a line that was edited, or of another run, is dropped too. A dropped line is moved to a file
of its own, never erased. Nothing else ever changes a line that has been written.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

from kvbench.config import durable
from kvbench.errors import FileContent, KvbenchError
from kvbench.results.lines import copy_lines, journal_lines
from kvbench.results.sample import Key, SampleRecord, key_of, read_line, write_line
from kvbench.results.writing import remove_litter, write_atomic, write_error

MAX_NAMED = 5  # dropped lines that are named one by one
HOLDER = re.compile(rb"[\0\s]*([0-9]{0,20})[\0\s]*")  # what a lock file holds: a process's number, or nothing yet


class RunLocked(KvbenchError, code="run-locked"):
    """Another process is working on the same run."""


class Journal:
    """The finished samples of one run, on disk.

    Opening reads what is there and repairs it; `damaged` then counts the lines that were dropped (their samples are
    redone), which lie in `dropped` from then on. The caller has checked that the folder is the run's.

    Args:
        path: The `samples.jsonl` of the run; made when absent, from the packed one where that is there.
        run: Hash of the run, which seals the lines.
        keys: The answers of the run; a line of another one is dropped. None takes all.
        warn: Gets a sentence for each of the first few dropped lines, and one for the others.

    Raises:
        JournalError: It is no regular file, or cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        keys: Container[Key] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path, self.run, self.keys = path, run, keys
        self.damaged = 0
        self.dropped = path.with_name(f"{path.stem}.dropped{path.suffix}")
        self.records: dict[Key, SampleRecord] = {}  # the finished ones, in the order in which they were written
        try:
            self._read(warn)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            durable.sync(path.parent)
        except OSError as error:
            raise write_error(path, error) from error

    def _read(self, warn: Callable[[str], None]) -> None:
        is_packed, repairs = not os.path.lexists(self.path), False
        kept, dropped = f"(kept in {self.dropped.name}) dropped", set[int]()
        for number, line in enumerate(journal_lines(self.path, self.run), start=1):
            fault, then = line.fault, "; its sample is done again"
            key = None if line.record is None else key_of(line.record)
            if key is not None and self.keys is not None and key not in self.keys:
                fault, then = f"answer to {ascii(key[0])[:80]}, which the run does not ask,", ""
            elif key in self.records and self.records[key] != line.record:
                fault, then = f"another answer to {ascii(key[0])[:80]}, which is there already,", ""
            if fault:
                self.damaged += 1
                dropped.add(number)
                if self.damaged <= MAX_NAMED:
                    warn(f"{self.path}:{number}: {fault} {'dropped' if is_packed else kept}{then}")
            if fault or line.record is None or key is None or key in self.records:
                repairs = True
            else:
                self.records[key] = line.record
        if self.damaged > MAX_NAMED:
            warn(f"{self.path}: {self.damaged - MAX_NAMED} more lines dropped; their samples are done again")
        if dropped and not is_packed:  # the packed file stays unchanged
            self._move_aside(dropped)
        if repairs or (is_packed and self.records):
            write_atomic(self.path, b"".join(write_line(record, self.run) for record in self.records.values()))

    def _move_aside(self, numbers: Container[int]) -> None:
        """Add lines of the journal to the dropped ones, on the disk before the journal is written without them."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            # Unbuffered: what a full disk refuses must not be tried again when the file is closed.
            with open(os.open(self.dropped, flags, 0o644), "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    copy_lines(self.path, numbers, file)
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        os.ftruncate(file.fileno(), size)
                    raise
            durable.sync(self.dropped.parent)
        except OSError as error:
            raise write_error(self.dropped, error) from error

    def __contains__(self, key: object) -> bool:
        return key in self.records

    def append(self, record: SampleRecord) -> bool:
        """Add one finished sample and make it durable before returning; False when it is already there.

        Raises:
            JournalError: The disk is full or not writable; the file is cut back to its last whole record.
        """
        if key_of(record) in self.records:
            return False
        line = write_line(record, self.run)
        size = os.fstat(self._descriptor).st_size
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise write_error(self.path, error) from error
        written = read_line(line[:-1], self.run).record
        assert written is not None
        self.records[key_of(record)] = written
        return True

    def clear(self) -> None:
        """Remove every record, for a run that starts again from nothing."""
        os.ftruncate(self._descriptor, 0)
        os.fsync(self._descriptor)
        self.records = {}

    def finish(self, order: Iterable[Key]) -> None:
        """Rewrite the file in request order, so that a resumed run and an uninterrupted one leave the same file.

        Raises:
            ValueError: A key without a record, or a record without a key.
        """
        order = list(order)
        if len(order) != len(self.records) or set(order) != set(self.records):
            odd = set(order) ^ set(self.records)
            raise ValueError(f"{self.path}: {len(odd)} samples missing or unknown, for example {sorted(odd)[0]}")
        self.records = {key: self.records[key] for key in order}
        data = b"".join(write_line(record, self.run) for record in self.records.values())
        if data != self.path.read_bytes():
            write_atomic(self.path, data)
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the file; every record is already on disk."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def run_lock(folder: Path, *, wait: bool = False, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Lock a run's folder for this process, made when absent; the kernel releases the lock when the process dies.

    Partial files of killed processes in the folder are removed.

    Args:
        wait: Wait for the other process instead of refusing.
        say: Called once, with a sentence, when there is something to wait for.

    Raises:
        RunLocked: Another process holds it and `wait` is False.
        ValueError: Something that is no lock lies under its name.
    """
    path = folder / ".lock"
    try:
        durable.make_folder(folder)
        descriptor = _open_lock(path)
    except OSError as error:
        raise write_error(path, error) from error
    # Unbuffered: what a full disk refuses must not be tried again when the file is closed.
    with open(descriptor, "r+b", buffering=0) as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _holder(file.fileno()) or "unknown"
                if not wait:
                    rule = "wait for it or end it, then give the same command again"
                    raise RunLocked(f"{folder} is being worked on by process {holder}; {rule}") from None
                if not said:
                    say(f"waiting for process {holder}, which is computing {folder}")
                    said = True
                time.sleep(0.5)
        if _holder(descriptor) is None:
            raise FileContent(f"{path} is no lock of kvbench: it holds something else; remove it")
        try:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise write_error(path, error) from error
        remove_litter(folder)
        yield


def is_held(folder: Path) -> bool:
    """True where a process holds a run's folder with `run_lock`; the lock is not taken and nothing is changed."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open_lock(path: Path) -> int:
    """Open the lock file: a regular file, never through a link; it is not changed.

    Locks of this kind belong to the open file, so the file is never removed: a second process would lock another file
    of the same name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    refused = FileContent(f"{path} is no regular file, and a lock must be one; remove it")
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):  # to open a device may do something
        raise refused
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


def _holder(descriptor: int) -> str | None:
    """The process that a lock file names, empty where none does; None where the file is no lock."""
    match = HOLDER.fullmatch(os.pread(descriptor, 64, 0))
    return None if match is None else match[1].decode("ascii")
