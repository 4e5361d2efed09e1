"""`shard=i/n`: several processes work on one run, each on every n-th batch, each with a journal of its own.

results/<task>/<model>/<method>/<hash>/.shards/<i>-of-<n>/
    .lock           held while a process works on the shard; it stays, as every lock does
    samples.jsonl   what was finished, until the run's own journal has it
    run.json        the shard's sessions and counts (`RunRecord`), until the run is complete

Which shard a sample was in is no part of what the run is. Whoever holds the run's lock takes over what the shards
finished that nobody works on: a sample is on the disk in the run's journal before it goes from the shard's. A process
that was killed thus loses nothing, whether its command is given again or not.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvbench.results.journal import Journal, RunLocked, is_held, run_lock
from kvbench.results.record import RunRecord

FOLDER = ".shards"  # in the folder of a run
SAMPLES = "samples.jsonl"
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
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value) if isinstance(value, str) else None
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"shard={value} is no part of a run; write i/n, from 1/n to n/n, for example shard=2/4")
        return cls(int(found[2]), int(found[1]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def folder(self, run: Path) -> Path:
        """The folder of this part of a run."""
        return run / FOLDER / f"{self.number}-of-{self.of}"

    def part(self, items: Sequence[Item], size: int) -> list[Item]:
        """The items of this shard: whole batches, so that each item has the neighbours that it has in a whole run."""
        starts = range(0, len(items), size)[self.number - 1 :: self.of]
        return [item for start in starts for item in items[start : start + size]]


def found_in(run: Path) -> dict[Shard, Path]:
    """The shards of a run that were begun, and their folders."""
    result = {}
    for place in (run / FOLDER).glob("*-of-*"):
        with suppress(ValueError):
            shard = Shard.read(place.name.replace("-of-", "/"))
            if shard is not None:
                result[shard] = place
    return dict(sorted(result.items()))


def at_work(run: Path) -> list[Shard]:
    """The shards of a run that processes work on."""
    return [shard for shard, place in found_in(run).items() if is_held(place)]


@contextmanager
def whole_run_lock(run: Path, say: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Hold a run's folder when nobody works on a shard of it; wait for that, or raise RunLocked."""
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


def take_over(run: Path, journal: Journal, record: RunRecord, say: Callable[[str], None]) -> None:
    """Add to a run what its shards finished that nobody works on."""
    for place in found_in(run).values():
        with suppress(RunLocked), run_lock(place):
            take(place, journal, record, say)


def take(place: Path, journal: Journal, record: RunRecord, say: Callable[[str], None]) -> None:
    """Add to a run what one shard finished. The caller holds the locks of the run and of the shard."""
    own = RunRecord.load(place)
    if own is not None:
        record.sessions += [session for session in own.sessions if session not in record.sessions]
        record.sessions.sort(key=lambda session: session.started)
        record.note_backend(own.backend_fallbacks, own.graphs)
    if not (place / SAMPLES).exists():
        return
    with closing(Journal(place / SAMPLES, run=journal.run, keys=journal.keys, warn=say)) as shard:
        taken = sum([journal.append(item) for item in shard.records.values()])
        record.counts.damaged += shard.damaged
        if own is not None and taken:
            own.counts.done += taken
            own.save(place)
        shard.clear()


def clear(run: Path) -> None:
    """Forget what the shards of a run finished. The caller holds the run's lock, and no shard is at work."""
    for place in found_in(run).values():
        for name in (SAMPLES, "run.json"):
            (place / name).unlink(missing_ok=True)
