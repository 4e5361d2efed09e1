"""Records of a sweep, stored next to its runs: its jobs, the outcome of each, and a log with time stamps.

results/.multirun/<start>-<process>/
    sweep.json      `SweepRecord` below
    sweep.log       every line that the sweep and its jobs said, with the time
    <number>/       one folder for each job that was begun: job.json (`JobRecord`), and a lock while it works

Jobs may run in other processes and on other machines that see the same folder; each writes only its own file.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvbench.config import durable
from kvbench.errors import FileContent
from kvbench.results.journal import is_held, run_lock
from kvbench.results.record import now
from kvbench.results.typed import MAX_BYTES, Misfit, parse, read_json
from kvbench.results.writing import remove_litter, write_record
from kvbench.rules.files import read_regular

FOLDER = ".multirun"  # in results_dir; hydra.sweep.dir in conf/config.yaml
State = Literal["done", "failed", "running", "lost", "left"]
Kind = TypeVar("Kind")


@dataclass(kw_only=True)
class JobRecord:
    """The content of `job.json`."""

    number: int = 0
    """From 1."""
    started: str = ""
    """ISO 8601 in UTC."""
    ended: str = ""
    """ISO 8601 in UTC; empty while it works and after a kill."""
    wall_s: float = 0.0
    """Seconds from start to end."""
    work_s: float = 0.0
    """Seconds in which it computed answers: without loading, its reference, and other jobs' turns."""
    num_done: int = 0
    """Answers that it computed; 0 where all were there already."""
    code: int | None = None
    """Exit code: 0 done, 1 the run failed, 2 it cannot be carried out, 128 + n stopped by signal n; None before the
    end."""
    message: str = ""
    """Error that ended it."""
    run: str = ""
    """Folder of its run, relative to the results folder; empty where there is none."""
    reference: str = ""
    """Folder of the full-cache run that it is compared with."""
    host: str = ""
    """The machine."""
    process: int = 0
    """The process."""


@dataclass(kw_only=True)
class SweepRecord:
    """The content of `sweep.json`."""

    command: str = ""
    """As it was given."""
    started: str = ""
    """ISO 8601 in UTC."""
    launcher: str = ""
    """Hydra's launcher: `basic` works on one job after the other."""
    jobs: list[str] = field(default_factory=list)
    """A name for each job, such as `snapkv budget=0.25`."""
    host: str = ""
    """The machine that it was started on."""
    process: int = 0
    """The process that started it."""


class Sweep:
    """One sweep's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def start(cls, results_dir: Path, command: str, launcher: str, jobs: Sequence[str]) -> "Sweep":
        """Make the folder of a new sweep."""
        folder = results_dir / FOLDER / f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}-{os.getpid()}"
        for old in (results_dir / FOLDER).glob("*"):  # sweeps that were killed; this one has another folder
            for directory in (old, *old.glob("*")):
                remove_litter(directory)
        durable.make_folder(folder)
        record = SweepRecord(command=command, started=now(), launcher=launcher, jobs=list(jobs), **_here())
        write_record(folder / "sweep.json", record)
        return cls(folder)

    @property
    def results_dir(self) -> Path:
        """The results folder that it was started with."""
        return self.folder.parent.parent

    @property
    def log(self) -> Path:
        """Every line with the time."""
        return self.folder / "sweep.log"

    def record(self) -> SweepRecord:
        """Read `sweep.json`."""
        return _load(self.folder / "sweep.json", SweepRecord)

    @contextmanager
    def job(self, number: int, host: str = "", process: int = 0) -> Iterator[JobRecord]:
        """Lock a job's folder while it works.

        Changes of the record in the block are saved at its end, also after an error.

        Args:
            host, process: Where it works; here, where nothing is said.
        """
        folder = self.folder / f"{number:04d}"
        with run_lock(folder):
            worker = {"host": host, "process": process} if process else _here()
            record = JobRecord(number=number, started=now(), **worker)
            write_record(folder / "job.json", record)
            start = datetime.now()
            try:
                yield record
            finally:
                record.ended, record.wall_s = now(), (datetime.now() - start).total_seconds()
                write_record(folder / "job.json", record)

    def jobs(self) -> dict[int, JobRecord]:
        """The jobs that were begun, by number; a file that cannot be read counts as not begun."""
        records = {}
        for path in sorted(self.folder.glob("*/job[.]json")):
            try:
                record = _load(path, JobRecord)
            except (ValueError, OSError):
                continue
            records[record.number] = record
        return records

    def states(self) -> dict[int, State]:
        """State of every job.

        `lost`: it was begun and its process is gone without an ending, as after a kill.
        """
        begun = self.jobs()
        numbers = sorted({*range(1, len(self.record().jobs) + 1), *begun})
        return {number: self._state(begun.get(number)) for number in numbers}

    def _state(self, job: JobRecord | None) -> State:
        if job is None:
            return "left"
        if job.code is not None:
            return "failed" if job.code else "done"
        return "running" if is_held(self.folder / f"{job.number:04d}") else "lost"

    def left_s(self) -> float | None:
        """Seconds until the last job ends, at the mean time of the jobs that computed something.

        None where none of these has ended.
        """
        ended = [job for job in self.jobs().values() if job.ended and job.num_done]
        open_jobs = sum(state in ("left", "running") for state in self.states().values())
        if not ended:
            return None
        times = [datetime.fromisoformat(stamp) for job in ended for stamp in (job.started, job.ended)]
        total = sum(job.work_s for job in ended)
        # Several at once: their times together exceed the time that passed.
        at_once = max(1.0, total / max(1.0, (max(times) - min(times)).total_seconds()))
        return total / len(ended) * open_jobs / at_once


def sweeps(results_dir: Path) -> list[Sweep]:
    """Every sweep of a results folder, the oldest first."""
    return [Sweep(path.parent) for path in sorted((results_dir / FOLDER).glob("*/sweep[.]json"))]


def process_sweep(results_dir: Path) -> Sweep:
    """Last sweep that this process started below a folder.

    Sweeps of other processes and damaged records are skipped.
    """
    matching, here = [], _here()
    for one in sweeps(results_dir):
        with suppress(ValueError, OSError):
            record = one.record()
            matching += [one] if {"host": record.host, "process": record.process} == here else []
    return matching[-1]


def _here() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def _load(path: Path, kind: type[Kind]) -> Kind:
    try:
        return parse(read_json(read_regular(path, MAX_BYTES)), kind)
    except Misfit as error:
        raise FileContent(f"{path} is no record of a sweep ({error}); remove its folder") from error
