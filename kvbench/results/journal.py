"""The per-sample journal of a run: append-only JSON lines that survive a kill at any byte, and the lock that guards
them.

A record is written with one `write` and one `fsync` when its sample ends. Reading tolerates what a crash can leave
behind: a torn last line is cut off and its sample redone; a record that is there twice counts once. Nothing else ever
changes a line that has been written.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvbench.results.sample import Key, SampleRecord, key_of, read_lines
from kvbench.results.writing import dump_line, fsync_folder, write_atomic, write_error


class RunLocked(ValueError):
    """Another process is working on the same run."""


class Journal:
    """The finished samples of one run, on disk.

    Opening reads what is there and repairs it; `damaged` then tells how many lines had to be dropped (their samples
    are redone).

    Args:
        path: The `samples.jsonl` of the run; made when absent.
        warn: Called with one sentence for every line that had to be dropped.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.damaged = 0
        self._records: dict[Key, SampleRecord] = {}
        self._read(warn)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            fsync_folder(path.parent)
        except OSError as error:
            raise write_error(path, error) from error

    def _read(self, warn: Callable[[str], None]) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        last = content.count(b"\n")
        whole = bytearray()
        for number, (line, record) in enumerate(read_lines(content), start=1):
            if record is None:
                self.damaged += 1
                what = "torn" if number >= last else "unreadable"
                warn(f"{self.path}:{number}: {what} line dropped; its sample is done again")
            elif key_of(record) not in self._records:
                self._records[key_of(record)] = record
                whole += line + b"\n"
        if bytes(whole) != content:
            write_atomic(self.path, bytes(whole))

    @property
    def records(self) -> dict[Key, SampleRecord]:
        """Finished records by (sample id, repeat), in the order in which they were written."""
        return self._records

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def append(self, record: SampleRecord) -> bool:
        """Add one finished sample and make it durable before returning.

        Args:
            record: The sample's record, in JSON types.

        Returns:
            False when this sample is already there; the file is then left as it is.

        Raises:
            JournalError: The disk is full or not writable; the file is cut back to its last whole record.
        """
        if key_of(record) in self._records:
            return False
        line = dump_line(record)
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
        self._records[key_of(record)] = json.loads(line)
        return True

    def clear(self) -> None:
        """Forget every record, for a run that is to start again from nothing."""
        os.ftruncate(self._descriptor, 0)
        os.fsync(self._descriptor)
        self._records = {}

    def finish(self, order: Iterable[Key]) -> None:
        """Rewrite the file in canonical order, so that a resumed run and an uninterrupted one leave the same file.

        Args:
            order: Every key of the run, in request order; must name exactly the records that are there.

        Raises:
            ValueError: A key without a record, or a record without a key.
        """
        order = list(order)
        if len(order) != len(self._records) or set(order) != set(self._records):
            odd = set(order) ^ set(self._records)
            raise ValueError(f"{self.path}: {len(odd)} samples missing or unknown, for example {sorted(odd)[0]}")
        self._records = {key: self._records[key] for key in order}
        data = b"".join(dump_line(record) for record in self._records.values())
        if data != self.path.read_bytes():
            write_atomic(self.path, data)
            os.close(self._descriptor)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        """Release the file; every record is already on disk."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def run_lock(folder: Path, *, wait: bool = False, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold a run's folder for this process; the kernel lets go when the process dies, however it dies.

    Args:
        folder: The run's folder; made when absent.
        wait: Wait for the other process instead of refusing; for the full-cache reference, which several runs share.
        say: Called once, with a sentence, when there is something to wait for.

    Raises:
        RunLocked: Another process holds it and `wait` is False.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Locks of this kind belong to the open file, so the file is never removed: a second process would lock
        # another file of the same name.
        # Unbuffered: what a full disk refuses must not be tried again when the file is closed.
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise write_error(path, error) from error
    with file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().decode().strip() or "unknown"
                if not wait:
                    rule = "wait for it or end it, then give the same command again"
                    raise RunLocked(f"{folder} is being worked on by process {holder}; {rule}") from None
                if not said:
                    say(f"waiting for process {holder}, which is computing {folder}")
                    said = True
                time.sleep(0.5)
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        except OSError as error:
            raise write_error(path, error) from error
        yield
