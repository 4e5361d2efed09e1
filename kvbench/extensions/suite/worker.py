"""Workers that take items of a manifest: prompts through all methods of a line of work.

A line is the runs of one cross-run batch (`runs/cross_run_batch.py`). A worker writes finished answers into a separate
journal in each run's folder (`results/shards.py`) and needs no lock. The next process that resumes a run merges them.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from kvbench.errors import FileContent, SettingsConflict
from kvbench.results.refusals import NotMeasured, OtherRun
from kvbench.runs import parts
from kvbench.runs.cross_run_batch import RunRequest, groups, run_cross_batch
from kvbench.runs.experiment import prepared
from kvbench.runs.portions import Share
from kvbench.runs.sessions import Origin
from kvbench.show.progress import note


@dataclass(frozen=True, order=True)
class Item:
    """Some prompts of a line; a line of a manifest, such as `2/gsm8k/3fa9c0d1/0-15`."""

    line: int
    """Number of the line of work, from 1."""
    task: str
    """Its task, for readers."""
    runs: str
    """Digits of a hash over its runs: a worker that would make other runs refuses the item."""
    first: int
    """Place of the first prompt, from 0."""
    last: int
    """Place of the last one."""

    @classmethod
    def read(cls, text: str) -> "Item":
        """Read a line of a manifest.

        Raises:
            ValueError: It is none.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([^/\s]+)/([0-9a-f]{8})/([0-9]{1,9})-([0-9]{1,9})", text)
        if match is None or int(match[4]) > int(match[5]):
            raise FileContent(f"{text[:80]!r} is no item of a manifest, such as 2/gsm8k/3fa9c0d1/0-15; write it anew")
        return cls(int(match[1]), match[2], match[3], int(match[4]), int(match[5]))

    def __str__(self) -> str:
        return f"{self.line}/{self.task}/{self.runs}/{self.first}-{self.last}"


@dataclass(kw_only=True)
class Done:
    """Outcome of some items."""

    answers: int = 0
    """Answers that were computed."""
    work_s: float = 0.0
    """Seconds that it took."""
    errors: list[Exception] = field(default_factory=list)
    """Errors that ended single runs; the others are finished."""


@dataclass
class _Line:
    """A line of work as a worker finds it: the runs that can be prepared."""

    run_requests: list[RunRequest] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    task: str = ""
    prompts: int = 0
    group: int = 1

    @property
    def runs(self) -> str:
        """Digits of the hash over its runs."""
        return digest(self.hashes) if self.hashes else "none"


class Worker:
    """One process that takes items, and keeps the model loaded meanwhile.

    Args:
        jobs: The words of each run.
        name: Prefix of the names of its journals.
        flags: Words that stand before those of a run in its record.

    Raises:
        ValueError: A word cannot be read, or is not for workers.
    """

    def __init__(self, jobs: Iterable[Sequence[str]], *, name: str = "worker", flags: Sequence[str] = ()) -> None:
        self.name = f"{re.sub('[^A-Za-z0-9_.-]', '-', name)[:60]}.{secrets.token_hex(4)}"
        run_requests = [self._ask(list(words), list(flags)) for words in jobs]
        self._lines = [
            [run_requests[number] for number in numbers] for numbers in groups([one.cfg for one in run_requests])
        ]
        self._parts = parts.Loaders()
        self._known: dict[int, _Line] = {}
        self._there: dict[Path, dict] = {}

    def _ask(self, words: list[str], flags: list[str]) -> RunRequest:
        from omegaconf import open_dict

        from kvbench.config import calibrated
        from kvbench.config.compose import compose

        cfg = compose(words, with_choices=True)
        calibrated.resolve(cfg, words)
        with open_dict(cfg):
            chosen = cfg.pop("_choices_")
        if not cfg.resume or cfg.shard:
            raise SettingsConflict(
                "resume=false and shard= are not for workers: the one throws away what others finished, the other is "
                "another way to share a run; leave them out"
            )
        origin = Origin(command=[*flags, *words], experiment=chosen.get("experiment") or "", worker=self.name)
        return RunRequest(cfg=cfg, method=chosen["method"], say=note, origin=origin)

    def items(self, prompts: int) -> list[Item]:
        """List all work.

        Args:
            prompts: Number of prompts per item, at least 1; more where a batch of the run has more.
        """
        items = []
        for number in range(1, len(self._lines) + 1):
            line = self._line(number)
            size = -(-prompts // line.group) * line.group
            for start in range(0, line.prompts, size):
                items.append(Item(number, line.task, line.runs, start, min(start + size, line.prompts) - 1))
        if not items:
            raise NotMeasured("there are no items: no run can be prepared, as is said above; mend one")
        return items

    def work(self, items: Iterable[Item]) -> Done:
        """Finish items, those of a line together.

        Raises:
            ValueError: An item is of other runs than this worker would make.
            KeyboardInterrupt: A signal stopped it; everything finished is on disk.
        """
        done, begin = Done(), time.perf_counter()
        for line, mine in groupby(sorted(set(items)), key=lambda item: item.line):
            places = set[int]()
            for item in mine:
                self._check(item)
                places.update(range(item.first, item.last + 1))
            share = Share(places=sorted(places), there=self._there)
            for _, ended in run_cross_batch(self._line(line).run_requests, self._parts, share):
                done.errors += [ended] if isinstance(ended, Exception) else []
            done.answers += share.answers
        done.work_s = time.perf_counter() - begin
        return done

    def _check(self, item: Item) -> None:
        """Refuse an item of other runs than this worker's."""
        here = self._line(item.line) if item.line <= len(self._lines) else _Line()
        if item.runs != here.runs or item.last >= here.prompts:
            raise OtherRun(
                f"item {item}: line {item.line} has the runs {here.runs} here and {here.prompts} prompts; settings, "
                "code, libraries or the device differ from where the manifest was written; make them alike, or write "
                "it here"
            )

    def _line(self, number: int) -> _Line:
        """Prepare a line of work, once; a run that cannot be prepared is left out, with a note."""
        if number not in self._known:
            known = self._known[number] = _Line()
            for run_request in self._lines[number - 1]:
                for experiment in prepared([(run_request.cfg, run_request.method)], self._parts, note):
                    known.run_requests.append(run_request)
                    known.hashes.append(experiment.hash)
                    known.task, known.prompts = experiment.task.name, len(experiment.task.requests)
                    known.group = experiment.engine.group or 1
        return self._known[number]


def digest(hashes: Iterable[str]) -> str:
    """Digits of a hash over the hashes of a line's runs."""
    return hashlib.sha256(" ".join(sorted(set(hashes))).encode()).hexdigest()[:8]
