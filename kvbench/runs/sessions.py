"""Sessions of work on a run, in its `run.json`: command, machine and end of each."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import what_happened
from kvbench.results import provenance, summary
from kvbench.results.faults import REVISION
from kvbench.results.record import RunRecord, Session, now
from kvbench.results.writing import JournalError

if TYPE_CHECKING:
    from kvbench.runs.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The command of a run; it changes no answer."""

    command: Sequence[str] = ()
    """The words after `python -m kvbench`."""
    experiment: str = ""
    """Name of the file that `experiment=` named."""
    worker: str = ""
    """Name of the worker that has items of a manifest."""


@contextmanager
def session_of(record: RunRecord, folder: Path, origin: Origin) -> Iterator[Session]:
    """Add a session to `run.json`, which names its end whatever happens inside."""
    session = Session(started=now(), command=list(origin.command), worker=origin.worker)
    session.versions, session.git, session.machine = record.versions, record.git, record.machine
    record.started = record.started or session.started
    record.sessions.append(session)
    record.status, record.message = "running", ""
    record.save(folder)
    clock = time.perf_counter()

    def end() -> None:
        session.wall_s += time.perf_counter() - clock  # it has what passed while other runs had their turn, as less
        session.ended = record.ended = now()
        record.save(folder)

    try:
        yield session
    except BaseException:
        with suppress(JournalError):  # a full disk must not hide the error that came first
            end()
        raise
    end()


@contextmanager
def recording_end(record: RunRecord, folder: Path) -> Iterator[None]:
    """Record in a run's `run.json` the signal or error that ended it.

    A run that had ended is unchanged, and one that a full disk ended stays `running`.
    """
    try:
        yield
    except BaseException as error:
        is_full = isinstance(error, JournalError)
        if record.status == "running" and not is_full:
            is_stop = isinstance(error, KeyboardInterrupt)
            record.status = "stopped" if is_stop else "failed"
            record.message = f"stopped by {str(error) or 'SIGINT'}" if is_stop else what_happened(error)
        if record.hash and not is_full:  # else it has not begun
            with suppress(JournalError):
                record.save(folder)
        raise


def describe(experiment: "Experiment", record: RunRecord, origin: Origin) -> None:
    """Update a record with the software and machine that run it now."""
    record.experiment = origin.experiment or record.experiment
    record.task, record.model, record.method = experiment.task.name, experiment.model.name, experiment.method
    record.prompt_only, record.model_remark = experiment.policy.prompt_only, experiment.model.remark
    record.weights_bytes = experiment.model.weights_bytes
    record.revision = record.revision if record.hash else REVISION  # a run that goes on has answers of the code before
    record.hash, record.identity, record.sealed = experiment.hash, experiment.identity, True
    # Their names and directions: a run that is stopped has no values, and its answers are compared all the same.
    record.metrics = record.metrics or summary.metrics((), experiment.task.metrics, experiment.task.primary)
    record.protocol, record.backend, record.seed = experiment.task.protocol, experiment.backend, experiment.config.seed
    record.versions, record.git = provenance.versions(), provenance.git_state()
    devices = [experiment.model.device, *(device for device, _ in experiment.model.device_spans)]
    record.machine = provenance.machine(*devices, processes=experiment.model.tensor_parallel)


def other_machine(record: RunRecord) -> str:
    """Differences to the machine or the libraries of the last session; empty without any."""
    before = record.sessions[-1] if record.sessions else Session()
    changes = record.machine.differences(before.machine) if record.machine else []
    was, now = (one.versions.python if one.versions else "" for one in (before, record))
    return "; ".join(changes + [f"Python {was} then, {now} now"] * (bool(was) and was != now))
