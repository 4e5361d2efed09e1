"""A portion of a run's answers in a separate journal with one writer."""

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config import durable
from kvbench.results import shards
from kvbench.results.journal import Journal
from kvbench.results.record import Counts, RunRecord, Session
from kvbench.results.sample import Key, SampleRecord
from kvbench.runs.answers import Shown, compute_missing
from kvbench.runs.experiment import Experiment, keys_of
from kvbench.runs.sessions import Origin, describe, recording_end, session_of
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.engine.cross_run_batch import Step
    from kvbench.engine.requests import Request

Samples = dict[Key, SampleRecord]


@dataclass(kw_only=True)
class Share:
    """The prompts of some runs that a worker takes.

    Args:
        places: Their indices among the prompts of the run: whole groups.
        there: Answers of each run, by its folder, that were finished when the worker first reached it.
    """

    places: Sequence[int]
    there: dict[Path, Samples] = field(default_factory=dict)
    answers: int = 0
    """Answers that were computed."""

    def compute(
        self, experiment: Experiment, *, say: Callable[[str], None], origin: Origin, shown: Shown
    ) -> "Generator[Request | Step, bool | None, tuple[RunRecord, Samples]]":
        """Finish this share of a run in the worker's journal; returns its record and all finished answers."""
        folder, requests = experiment.folder, [experiment.task.requests[index] for index in self.places]
        if folder not in self.there:
            self.there[folder] = shards.finished(folder, experiment.hash, frozenset(experiment.keys))
        there, part = self.there[folder], folder / shards.FOLDER / origin.worker
        left = sum(key not in there for key in keys_of(requests))
        if not left:
            return RunRecord(status="complete"), there
        computing = compute_portion(experiment, part, requests, done=there, say=say, origin=origin, shown=shown)
        record, samples = yield from computing
        self.answers += left
        return record, samples | there


def compute_portion(
    experiment: Experiment,
    part: Path,
    requests: "Sequence[Request]",
    *,
    done: Container[Key],
    say: Callable[[str], None],
    origin: Origin,
    shown: Shown = Progress,
) -> "Generator[Request | Step, bool | None, tuple[RunRecord, Samples]]":
    """Finish the remaining answers to some requests of a run; yields each request before its prompt is read.

    Args:
        part: Folder of the portion; no other process writes to it.
        requests: Whole groups of the run.
        done: Answers that another journal has.

    Returns:
        The record of the portion, and all that its journal holds.
    """
    keys = keys_of(requests)
    durable.make_folder(part)
    part_record = shards.load_record(part, say) or RunRecord()
    describe(experiment, part_record, origin)
    part_record.counts = Counts(total=len(keys), samples=len(requests), done=sum(key in done for key in keys))
    with ExitStack() as stack:
        journal = Journal(part / shards.SAMPLES, run=experiment.hash, keys=frozenset(experiment.keys), warn=say)
        stack.enter_context(closing(journal))
        stack.enter_context(recording_end(part_record, part))
        with session_of(part_record, part, origin) as session:
            try:
                yield from compute_missing(experiment, journal, session, requests=requests, done=done, shown=shown)
            finally:
                backend = experiment.engine.backend
                part_record.note_backend(backend.fallbacks, experiment.engine.graphs, backend.decodes)
        if origin.worker:
            part_record.sessions = [_as_one(part_record.sessions)]
        part_record.status = "complete"
        part_record.save(part)
        return part_record, journal.records


def _as_one(sessions: Sequence[Session]) -> Session:
    """Merge the sessions of one process, of which a worker has one for every item."""
    return replace(
        sessions[-1],
        started=sessions[0].started,
        wall_s=sum(session.wall_s for session in sessions),
        num_done=sum(session.num_done for session in sessions),
        asked_again=sum(session.asked_again for session in sessions),
        differing=sum(session.differing for session in sessions),
    )
