"""Stored runs one by one: listed by name, date, size and state; tagged, moved and deleted."""

import fnmatch
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvbench.errors import SettingMissing, SettingValue
from kvbench.evidence.load import find_runs
from kvbench.results import shards
from kvbench.results.journal import RunLocked, is_held
from kvbench.results.record import RunRecord
from kvbench.results.writing import write_atomic
from kvbench.rules import Text as TextRule
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.text import NAME_LENGTH, safe
from kvbench.sizing.stored import changed_settings

TAGS = "tags.txt"  # in a run's folder: one a line
HASH_DIGITS = 8  # of a run's hash that the list shows
FEWEST_DIGITS = 4  # that name a run


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored run.

    Args:
        folder: Its folder.
        name: Its folder below the results.
        record: Content of its run.json.
    """

    folder: Path
    name: str
    record: RunRecord

    @property
    def state(self) -> str:
        """`running`, `done`, `failed`, or `unfinished`: stopped or killed, with no process at work on it."""
        if is_held(self.folder) or shards.at_work(self.folder):
            return "running"
        return {"complete": "done", "failed": "failed"}.get(self.record.status, "unfinished")

    @property
    def label(self) -> str:
        """Method, and settings that differ from its configuration."""
        method = self.record.method
        changed = changed_settings(method, self.record.identity.get("method") or {})
        return safe(" ".join([method, *(f"{key}={value}" for key, value in changed.items())]), NAME_LENGTH)

    @property
    def tags(self) -> list[str]:
        """Tags set by the user."""
        with suppress(OSError, UnicodeDecodeError):
            return [safe(line, NAME_LENGTH) for line in (self.folder / TAGS).read_text(encoding="utf-8").split()]
        return []

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        total = 0
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_size
        return total

    def is_meant(self, pattern: str) -> bool:
        """True where a pattern matches its folder, its method, the first digits of its hash, or one of its tags."""
        digits = len(pattern) >= FEWEST_DIGITS and self.record.hash.startswith(pattern)
        return digits or any(fnmatch.fnmatchcase(text, pattern) for text in (self.name, self.record.method, *self.tags))


def entries(root: Path, wanted: Sequence[str] | None) -> list[Entry]:
    """The runs that patterns name, or all of them, the newest first."""
    candidates = [
        Entry(folder=folder, name=folder.relative_to(root).as_posix(), record=record)
        for folder, record in find_runs(root, {})
    ]
    chosen = [one for one in candidates if wanted is None or any(map(one.is_meant, wanted))]
    return sorted(chosen, key=lambda one: one.record.started, reverse=True)


def show(chosen: Sequence[Entry], most: int | None, console: Console) -> None:
    """Print the list, at most so many rows of it."""
    table = terminal.plain_table(None)
    for heading in ("run", "task", "model"):
        table.add_column(heading, overflow="fold")
    table.add_column("method", overflow="fold", min_width=16)
    for heading in ("begun", "size", "state"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in chosen[:most]:
        record, tags = one.record, one.tags
        table.add_row(
            record.hash[:HASH_DIGITS],
            safe(record.task, NAME_LENGTH),
            safe(record.model, NAME_LENGTH),
            one.label + (f" [{', '.join(tags)}]" if tags else ""),
            record.started[:16].replace("T", " "),
            format_bytes(one.size_bytes),
            one.state,
        )
    console.print(table)
    if most is not None and len(chosen) > most:
        console.print(Text(f"and {len(chosen) - most} more; rows=null shows all", style="dim"))


def tag(chosen: Sequence[Entry], word: str) -> str:
    """Tag runs; returns a line with their number."""
    TextRule().check("tag", word)
    if len(word.split()) != 1:
        raise SettingValue(f"tag={word!r} must be one word", setting="tag")
    for one in chosen:
        write_atomic(one.folder / TAGS, "".join(f"{each}\n" for each in dict.fromkeys([*one.tags, word])).encode())
    return f"{len(chosen)} runs have the tag {word}"


def delete(chosen: Sequence[Entry], sure: bool) -> str:
    """Delete runs for good; returns a line that names them. More than one needs `sure`.

    Raises:
        ValueError: A process is at work on one, or there are several and the user is not sure.
    """
    _refuse_held(chosen)
    if len(chosen) > 1 and not sure:
        raise SettingMissing(
            f"delete= names {len(chosen)} runs; add sure=true to delete them for good: {_named(chosen)}", setting="sure"
        )
    for one in chosen:
        shutil.rmtree(one.folder)
        _drop_empty(one.folder)
    return f"deleted {_named(chosen)}"


def move(chosen: Sequence[Entry], target: Path) -> str:
    """Move runs to another folder of results; returns a line that names it.

    Raises:
        ValueError: A process is at work on one, or it is there already.
    """
    _refuse_held(chosen)
    if there := [one for one in chosen if (target / one.name).exists()]:
        raise SettingValue(f"move={target} has {_named(there)} already", setting="move")
    for one in chosen:
        destination = target / one.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(one.folder, destination)
        _drop_empty(one.folder)
    return f"moved {_named(chosen)} to {target}"


def _refuse_held(chosen: Sequence[Entry]) -> None:
    if held := [one for one in chosen if one.state == "running"]:
        raise RunLocked(f"{_named(held)}: a process is at work there; stop it first")


def _named(chosen: Sequence[Entry]) -> str:
    more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
    return ", ".join(one.name for one in chosen[:5]) + more


def _drop_empty(folder: Path) -> None:
    """Remove the folders of method, model and task above a run where they are empty now."""
    for above in folder.parents[:3]:
        with suppress(OSError):
            os.rmdir(above)
