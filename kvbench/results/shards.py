"""`shard=i/n`: several processes work on one run, each on every n-th batch, each with a journal of its own.

results/<task>/<model>/<method>/<hash>/.shards/<i>-of-<n>/
    .lock           held while a process works on the shard; it stays, as every lock does
    samples.jsonl   what was finished, until the run's own journal has it
    run.json        the shard's sessions and counts (`RunRecord`), until the run is complete
results/<task>/<model>/<method>/<hash>/.shards/<name>.<8 hex digits>/
    samples.jsonl, run.json   the same of a worker that was given items of a manifest (`runs/worker.py`), without a lock

The shard of a sample is not part of a run's identity. The process that holds the run's lock takes over finished samples
of shards that no process works on: a sample is in the run's journal on disk before it leaves the shard's. A killed
process thus loses nothing, whether its command is repeated or not.

Worker names are unique, so each file has one writer. Whether a worker is alive cannot be determined: its files are read
and never changed, and removed when the run is complete.

Only lines of a part that the run's hash seals count. A `run.json` of it that cannot be read, as after a damage
of the disk, is moved to `run.unreadable.json`; lines that do not count stay in `samples.dropped.jsonl`.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvbench.config import durable
from kvbench.errors import SettingValue
from kvbench.results.journal import Journal, RunLocked, is_held, run_lock
from kvbench.results.lines import journal_lines
from kvbench.results.record import RunRecord, UnreadableRecord
from kvbench.results.refusals import OtherRun
from kvbench.results.sample import Key, SampleRecord, key_of
from kvbench.results.writing import write_error
from kvbench.rules.files import open_regular

FOLDER = ".shards"  # in the folder of a run
SAMPLES = "samples.jsonl"
RECORD = "run.json"
UNREADABLE = "run.unreadable.json"  # the name of a part's record that cannot be read, from then on
WORKER = re.compile(r".+\.[0-9a-f]{8}")  # the name of a worker
Item = TypeVar("Item")


@dataclass(frozen=True, order=True)
class Shard:
    """One of the parts that a run is split into."""

    of: int
    """Number of parts."""
    number: int
    """This one, from 1."""

    @classmethod
    def read(cls, value: object) -> "Shard | None":
        """Read the setting: text such as `2/4`, or None for a run that is not split."""
        if value is None:
            return None
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value) if isinstance(value, str) else None
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise SettingValue(
                f"shard={value} is no part of a run; write i/n, from 1/n to n/n, for example shard=2/4", setting="shard"
            )
        return cls(int(match[2]), int(match[1]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def folder(self, run: Path) -> Path:
        """The folder of this part of a run."""
        return run / FOLDER / f"{self.number}-of-{self.of}"

    def part(self, items: Sequence[Item], size: int) -> list[Item]:
        """The items of this shard: whole batches, so that each item has the neighbours that it has in a whole run."""
        starts = range(0, len(items), size)[self.number - 1 :: self.of]
        return [item for start in starts for item in items[start : start + size]]


def shards_in(run: Path) -> dict[Shard, Path]:
    """The shards of a run that were begun, and their folders."""
    result = {}
    for part in (run / FOLDER).glob("*-of-*"):
        with suppress(ValueError):
            shard = Shard.read(part.name.replace("-of-", "/"))
            if shard is not None:
                result[shard] = part
    return dict(sorted(result.items()))


def workers_in(run: Path) -> list[Path]:
    """The folders of workers that had items of a run."""
    return sorted(part for part in (run / FOLDER).glob("*") if WORKER.fullmatch(part.name))


def of_workers(results_dir: Path) -> Counter[str]:
    """Count the finished answers of each worker in runs that are not complete."""
    counts: Counter[str] = Counter()
    for run in results_dir.glob("*/*/*/*"):
        for part in workers_in(run):
            with suppress(OSError), open_regular(part / SAMPLES) as file:
                counts[part.name] += sum(1 for _ in file)
    return counts


def finished(run: Path, digest: str, keys: Container[Key]) -> dict[Key, SampleRecord]:
    """Read the finished answers of a run from all its journals, also while others write to them.

    Args:
        digest: Hash of the run, which seals the lines.
        keys: The answers that count.

    Raises:
        OSError: A journal is no regular file, or cannot be read.
    """
    samples: dict[Key, SampleRecord] = {}
    for path in (run / SAMPLES, *sorted((run / FOLDER).glob(f"*/{SAMPLES}"))):
        for line in journal_lines(path, digest):
            if line.record is not None and key_of(line.record) in keys:
                samples.setdefault(key_of(line.record), line.record)
    return samples


def at_work(run: Path) -> list[Shard]:
    """The shards of a run that processes work on."""
    return [shard for shard, part in shards_in(run).items() if is_held(part)]


@contextmanager
def whole_run_lock(run: Path, say: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Lock a run's folder once no process works on a shard of it; wait for that, or raise RunLocked."""
    said = False
    while True:
        with run_lock(run, wait=wait, say=say):
            busy = at_work(run)
            if not busy:
                yield
                return
        named = ", ".join(map(str, busy))
        if not wait:
            raise RunLocked(f"other processes are computing shards of {run}: {named}")
        if not said:
            say(f"waiting for the shard{'s' * (len(busy) > 1)} {named} of {run}, which other processes are computing")
            said = True
        time.sleep(0.5)  # without the lock: a shard that ends needs it


def check_parts(run: Path, digest: str) -> None:
    """Refuse a run whose parts are another run's, before anything is changed.

    Args:
        digest: Hash of the run.

    Raises:
        ValueError: The record of a part names another run.
    """
    for part in [*shards_in(run).values(), *workers_in(run)]:
        with suppress(UnreadableRecord):
            part_record = RunRecord.load(part)
            if part_record is not None and part_record.hash and part_record.hash != digest:
                raise OtherRun(f"{part} holds a part of another run; move it away, or use another results_dir")


def load_record(part: Path, say: Callable[[str], None]) -> RunRecord | None:
    """Load the record of a part whose lock is held; an unreadable one is moved aside and, as an absent one, None."""
    try:
        return RunRecord.load(part)
    except UnreadableRecord as error:
        say(f"{str(error).partition('; ')[0]}: it is moved to {UNREADABLE}, and the samples beside it count")
        _set_aside(part)
        return None


def _set_aside(part: Path) -> None:
    number, target = 1, part / UNREADABLE
    while os.path.lexists(target):
        number += 1
        target = part / UNREADABLE.replace(".json", f".{number}.json")
    try:
        os.rename(part / RECORD, target)
        durable.sync(part)
    except OSError as error:
        raise write_error(target, error) from error


def take_over(run: Path, journal: Journal, record: RunRecord, say: Callable[[str], None]) -> None:
    """Add to a run the finished samples of its shards that no process works on."""
    for part in shards_in(run).values():
        with suppress(RunLocked), run_lock(part):
            take(part, journal, record, say)
    for part in workers_in(run):
        _take_of_worker(part, journal, record, say)


def _take_of_worker(part: Path, journal: Journal, record: RunRecord, say: Callable[[str], None]) -> None:
    """Add to a run the finished samples of a worker, which may still be alive."""
    try:
        part_record = RunRecord.load(part)
    except UnreadableRecord as error:
        say(f"{str(error).partition('; ')[0]}: the samples beside it count")
        part_record = None
    if part_record is not None:
        others = [session for session in record.sessions if session.worker != part.name]
        record.sessions = sorted([*others, *part_record.sessions], key=lambda session: session.started)
        record.note_backend(part_record.backend_fallbacks, part_record.graphs, part_record.backend_decode)
    try:
        for line in journal_lines(part / SAMPLES, journal.run):
            if line.record is not None and (journal.keys is None or key_of(line.record) in journal.keys):
                journal.append(line.record)
    except OSError as error:
        raise write_error(part / SAMPLES, error) from error


def take(part: Path, journal: Journal, record: RunRecord, say: Callable[[str], None]) -> None:
    """Add to a run the finished samples of one shard. The caller holds the locks of the run and of the shard."""
    part_record = load_record(part, say)
    if part_record is not None:
        record.sessions += [session for session in part_record.sessions if session not in record.sessions]
        record.sessions.sort(key=lambda session: session.started)
        record.note_backend(part_record.backend_fallbacks, part_record.graphs, part_record.backend_decode)
    if not (part / SAMPLES).exists():
        return
    with closing(Journal(part / SAMPLES, run=journal.run, keys=journal.keys, warn=say)) as shard:
        taken = sum([journal.append(item) for item in shard.records.values()])
        record.counts.damaged += shard.damaged
        if part_record is not None and taken:
            part_record.counts.done += taken
            part_record.save(part)
        shard.clear()


def clear(run: Path, journal: Journal | None = None) -> None:
    """Remove the files of a run's shards. The caller holds the run's lock, and no shard is at work.

    Args:
        journal: The run's, which has what they finished: their lines that do not count, and records that cannot be
            read, are moved aside. None where the run starts again from nothing, and forgets all of it.
    """
    workers = workers_in(run)
    for part in [*shards_in(run).values(), *workers]:
        if journal is not None:
            load_record(part, lambda text: None)
            if os.path.lexists(part / SAMPLES):
                Journal(part / SAMPLES, run=journal.run, keys=journal.keys).close()
        for name in (SAMPLES, RECORD):
            (part / name).unlink(missing_ok=True)
    for part in workers:
        with suppress(OSError):  # a file of a writer that was killed, or what was moved aside
            part.rmdir()
