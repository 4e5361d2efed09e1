"""One stretch of work on a run, as its `run.json` tells it: what asked for it, where it ran, and how it ended."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvbench.results import provenance
from kvbench.results.record import RunRecord, Session, now
from kvbench.results.writing import JournalError
from kvbench.runs.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What asked for a run; it changes no answer."""

    command: Sequence[str] = ()
    """The words after `python -m kvbench`."""
    experiment: str = ""
    """Name of the preset in conf/experiment/."""


@contextmanager
def session_of(record: RunRecord, folder: Path, origin: Origin) -> Iterator[Session]:
    """Keep `run.json` true whatever happens inside: failed after an error, else (a full disk) still running."""
    session = Session(started=now(), command=list(origin.command))
    session.versions, session.git, session.machine = record.versions, record.git, record.machine
    record.started = record.started or session.started
    record.sessions.append(session)
    record.status, record.message = "running", ""
    record.save(folder)
    clock = time.perf_counter()

    def end() -> None:
        session.wall_s = time.perf_counter() - clock
        session.ended = record.ended = now()
        record.save(folder)

    try:
        yield session
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, JournalError):
            record.status, record.message = "failed", f"{type(error).__name__}: {error}"
        with suppress(JournalError):  # a full disk must not hide the error that came first
            end()
        raise
    end()


@contextmanager
def says_when_stopped(record: RunRecord, folder: Path) -> Iterator[None]:
    """Write the signal that stopped a run into its `run.json`. A run that had ended stays what it was."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if record.status == "running":
            record.status, record.message = "stopped", f"stopped by {str(stop) or 'SIGINT'}"
        if record.hash:  # else it has not begun
            with suppress(JournalError):
                record.save(folder)
        raise


def describe(experiment: Experiment, record: RunRecord, origin: Origin) -> None:
    """Write into a record what runs where, from now on."""
    record.experiment = origin.experiment or record.experiment
    record.task, record.model, record.method = experiment.task.name, experiment.model.name, experiment.method
    record.prompt_only, record.model_remark = experiment.policy.prompt_only, experiment.model.remark
    record.hash, record.identity = experiment.hash, experiment.identity
    record.protocol, record.backend, record.seed = experiment.task.protocol, experiment.backend, experiment.config.seed
    record.versions, record.git = provenance.versions(), provenance.git_state()
    model = experiment.model
    spread = (device for device, _ in model.places)
    record.machine = provenance.machine(model.device, *spread, processes=model.tensor_parallel)


def other_machine(record: RunRecord) -> str:
    """Name what differs from the machine or the libraries of the last session; empty where nothing does."""

    def facts(one: Session | RunRecord) -> list[str]:
        return [one.machine.device if one.machine else "", f"Python {one.versions.python}" if one.versions else ""]

    before = record.sessions[-1] if record.sessions else Session()
    pairs = zip(facts(before), facts(record), strict=True)
    return "; ".join(f"{was} then, {is_now} now" for was, is_now in pairs if was and was != is_now)
