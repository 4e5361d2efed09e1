"""One experiment: configuration -> model, task, policy, engine -> journal, record, table and picture.

The full cache on the same samples is an experiment like any other; it is looked up by its hash, or run first.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from kvbench.config.files import FULL
from kvbench.engine.requests import Outcome, Request
from kvbench.results import provenance, summary, tracking
from kvbench.results.journal import Journal, run_lock
from kvbench.results.record import RunRecord, Session, now
from kvbench.results.sample import TAIL_TOKENS, SampleRecord, journal_record
from kvbench.results.writing import JournalError, write_atomic
from kvbench.runs.beside import Beside
from kvbench.runs.experiment import OWN, Experiment, check_config, prepare, reference_config
from kvbench.runs.grading import grade_outcome
from kvbench.runs.parts import Parts, default_parts
from kvbench.show.progress import Progress, note

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.tasks.taskset import TaskSet

MAX_LISTED = 100  # rows of broken data that run.json names; all are counted


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What asked for a run; it changes no answer."""

    command: Sequence[str] = ()
    """The words after `python -m kvbench`."""
    experiment: str = ""
    """Name of the preset in conf/experiment/."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that ended, and the full-cache run it is compared with."""

    record: RunRecord
    """Content of `run.json`."""
    samples: list[SampleRecord]
    """Content of `samples.jsonl`, in request order."""
    folder: Path
    """Where it is."""
    reference: RunRecord | None = None
    """The full-cache run on the same samples; None when this is it, when none was wanted, or when it failed."""


def unfinished_groups(requests: Sequence[Request], batch_size: int, journal: Journal) -> list[Request]:
    """The requests to give to the engine: whole groups that hold an unfinished answer.

    The groups are fixed over the full list. A resumed run thus batches every sample with the same neighbours as an
    uninterrupted one, and computes the same numbers to the last bit, at the price of computing some samples twice.

    Args:
        requests: All requests of the task.
        batch_size: Requests per group.
        journal: The finished answers.
    """
    todo: list[Request] = []
    for start in range(0, len(requests), batch_size):
        group = requests[start : start + batch_size]
        if any((item.sample_id, repeat) not in journal for item in group for repeat in range(item.num_samples)):
            todo.extend(group)
    return todo


@contextmanager
def _session(record: RunRecord, folder: Path, origin: Origin) -> Iterator[Session]:
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
def _says_when_stopped(record: RunRecord, folder: Path) -> Iterator[None]:
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


def record_answers(
    engine: "Engine",
    task: "TaskSet",
    requests: Sequence[Request],
    journal: Journal,
    progress: Progress,
    *,
    with_timing: bool = True,
    own: bool = False,
) -> None:
    """Run an engine and write down every answer that is not in the journal yet.

    Args:
        engine: Answers the requests.
        task: Scores the answers; all its requests decide how large the page tables are.
        requests: Which of the task's to answer.
        journal: Where every finished answer goes.
        progress: Counts them.
        with_timing: False leaves the times out, which say nothing where prompts are replayed.
        own: Force each request's own answer in place of its gold answer.
    """
    by_id = {request.sample_id: request for request in requests}

    def write(request: Request, graded: tuple[Outcome, dict[str, float]]) -> None:
        tail = engine.text_of(request.prompt[-TAIL_TOKENS:])
        record = journal_record(request, *graded, task.protocol, tail)
        if not with_timing:
            del record["timing"]
        journal.append(record)
        progress.advance()

    with Beside(task.grading_workers) as graders:

        def on_outcome(outcome: Outcome) -> None:
            if (outcome.sample_id, outcome.repeat) not in journal:
                request = by_id[outcome.sample_id]
                graders.do(partial(grade_outcome, task, request, outcome), partial(write, request))

        def on_step(numbers: dict) -> None:
            progress.step(numbers)
            graders.hand_out()

        engine.run(requests, on_outcome=on_outcome, on_step=on_step, sizing=task.requests, own=own)


def compute_missing(experiment: Experiment, journal: Journal, session: Session) -> None:
    """Run the engine over what is not in the journal yet.

    Args:
        experiment: What to run.
        journal: Where every finished answer goes.
        session: Is told how many answers this stretch of work finished.
    """
    task, before = experiment.task, len(journal.records)
    own = experiment.forces_own and experiment.method == FULL
    todo = unfinished_groups(task.requests, experiment.cfg.batch_size, journal)
    with Progress(f"{experiment.method} on {task.name}", len(experiment.keys), before) as progress:
        try:
            record_answers(experiment.engine, task, todo, journal, progress, own=own)
        finally:
            session.num_done = len(journal.records) - before


def verdict(experiment: Experiment, records: Sequence[SampleRecord]) -> str:
    """Say why the run must not be used, or return an empty string.

    A method that did nothing, and a run in which no sample ended well, would otherwise pass as a result.
    """
    ok = [record for record in records if record["status"] == "ok"]
    if not ok:
        first = records[0]
        return f"no sample ended well; the first, {first['sample_id']}, ended as {first['status']}: {first['message']}"
    complaints = [
        (record["sample_id"], text) for record in ok if (text := experiment.policy.check_outcome(dict(record)))
    ]
    if complaints:
        sample_id, text = complaints[0]
        where = f"in {len(complaints)} of {len(ok)} samples: {text} (sample {sample_id})"
        return f"method {experiment.method} did not do its work {where}"
    return ""


def summarise(experiment: Experiment, record: RunRecord, journal: Journal) -> None:
    """Fill the numbers of `run.json` from the journal."""
    task, records = experiment.task, list(journal.records.values())
    record.weighting = task.weighting
    record.metrics = summary.metrics(records, task.metrics, task.primary, task.weighting)
    record.task_aggregate = task.aggregate(summary.for_task(records))
    record.fidelity, record.drift = summary.fidelity(records, task.weighting), summary.drift(records)
    record.ledger = summary.ledger(records)
    # A run that was stopped and goes on keeps what its earlier sessions named.
    record.backend_fallbacks = sorted({*record.backend_fallbacks, *experiment.engine.backend.fallbacks})
    record.kept = summary.means(item["kept"] for item in records if item["status"] == "ok")
    record.timing = summary.timing(records, sum(session.wall_s for session in record.sessions))
    _count(experiment, record, journal)


def _count(experiment: Experiment, record: RunRecord, journal: Journal) -> None:
    task = experiment.task
    damaged = max(record.counts.damaged, journal.damaged)
    records = list(journal.records.values())
    record.counts = summary.counts(records, task.requests, len(task.quarantined), damaged, len(task.copies))
    record.quarantined = list(task.quarantined[:MAX_LISTED])


def _describe(experiment: Experiment, record: RunRecord, origin: Origin) -> None:
    record.experiment = origin.experiment or record.experiment
    record.task, record.model, record.method = experiment.task.name, experiment.model.name, experiment.method
    record.prompt_only = experiment.policy.prompt_only
    record.hash, record.identity = experiment.hash, experiment.identity
    record.protocol, record.backend, record.seed = experiment.task.protocol, experiment.backend, experiment.cfg.seed
    record.versions, record.git = provenance.versions(), provenance.git_state()
    record.machine = provenance.machine(experiment.model.device)


def _other_machine(record: RunRecord) -> str:
    """How the machine or the libraries differ from those of the last session; empty where they do not."""
    before = record.sessions[-1] if record.sessions else Session()
    changed = [
        f"{was} then, {now_is} now"
        for was, now_is in (
            (before.machine and before.machine.device, record.machine and record.machine.device),
            (
                before.versions and f"Python {before.versions.python}",
                record.versions and f"Python {record.versions.python}",
            ),
        )
        if was and was != now_is
    ]
    return "; ".join(changed)


def execute(
    experiment: Experiment,
    *,
    resume: bool,
    say: Callable[[str], None],
    reference: Run | None,
    origin: Origin | None = None,
) -> Run:
    """Bring one run to its end, whatever state it is found in.

    It waits while another process has the run, and then takes what that process has finished. A process holds one run
    at a time, so however many of them work on the same runs, in whatever order, one of them can always go on.

    Args:
        experiment: What to run.
        resume: Keep the samples that are there; False starts again.
        say: Takes one-line notes.
        reference: The full cache on the same samples, for the comparison; None for none.
        origin: What asked for it.

    Raises:
        JournalError: The disk is full.
        KeyboardInterrupt: A signal stopped it; `run.json` says which.
    """
    folder, origin = experiment.folder, origin or Origin()
    with ExitStack() as stack:
        stack.enter_context(run_lock(folder, wait=True, say=say))
        journal = Journal(folder / "samples.jsonl", run=experiment.hash, warn=say)
        stack.enter_context(closing(journal))
        record = RunRecord.load(folder) or RunRecord()
        if record.hash and record.hash != experiment.hash:
            raise ValueError(f"{folder} holds another run whose hash begins alike; use another results_dir")
        if not resume:
            journal.clear()
            record = RunRecord()
        stack.enter_context(_says_when_stopped(record, folder))
        if any(key not in journal for key in experiment.keys):
            if journal.records:
                say(f"going on with {folder}: {len(journal.records)} of {len(experiment.keys)} samples are done")
            write_atomic(folder / "config.yaml", OmegaConf.to_yaml(experiment.cfg, resolve=True).encode())
            _describe(experiment, record, origin)
            if journal.records and (changed := _other_machine(record)):
                say(f"the samples that are done are another machine's: {changed}; run.json names both")
            with _session(record, folder, origin) as session:
                try:
                    compute_missing(experiment, journal, session)
                finally:
                    _count(experiment, record, journal)
        elif record.status == "complete":
            say(f"already there: {folder} (resume=false runs it again)")
        journal.finish(experiment.keys)
        records = list(journal.records.values())
        before = dataclasses.asdict(record)
        summarise(experiment, record, journal)
        if reference is not None and (primary := record.metrics.get(record.primary)):
            name = reference.folder.relative_to(Path(experiment.cfg.results_dir)).as_posix()
            record.comparison = summary.compare(
                records, reference.samples, record.primary, name, primary.higher_is_better, record.weighting
            )
        record.message = verdict(experiment, records)
        record.status = "failed" if record.message else "complete"
        if dataclasses.asdict(record) != before:
            record.save(folder)
        against = reference.record if reference else None
        return Run(record=record, samples=records, folder=folder, reference=against)


def run_experiment(
    cfg: DictConfig,
    *,
    method: str,
    parts: Parts | None = None,
    say: Callable[[str], None] = note,
    origin: Origin | None = None,
) -> Run:
    """Run one experiment, and the full cache on the same samples when it is not there yet.

    Args:
        cfg: The composed configuration (`conf/config.yaml`).
        method: Name of the method's configuration; names the folder and the row of the table.
        parts: The loaders; runs that get the same ones share what `default_parts` says. New ones by default.
        say: Takes one-line notes; stderr by default.
        origin: What asked for it, for `run.json`.

    Returns:
        The run. Its status is `failed` when its result must not be used.

    Raises:
        ValueError: A bad setting, or missing data or weights.
        KeyboardInterrupt: A signal stopped it.
    """
    check_config(cfg)
    parts = parts or default_parts()
    experiment = prepare(cfg, method, parts)
    for row in experiment.task.quarantined[:5]:
        say(f"set aside: {row['file']}:{row['line']}: {row['reason']}")
    for row in experiment.task.copies[:5]:
        say(f"counted again: {row['file']}:{row['line']}: {row['reason']}")
    full = None
    if cfg.reference == "auto" and method != FULL:
        full = execute(prepare(reference_config(cfg), FULL, parts), resume=True, say=say, reference=None, origin=origin)
        if full.record.status != "complete":
            say(f"no comparison with the full cache, whose run failed: {full.record.message}")
            full = None
    if experiment.forces_own and method != FULL:
        if full is None:
            raise ValueError(
                f"fidelity.on={OWN} forces the full cache's answers, and there are none: set reference=auto"
                + (", or see why the run of full failed" if cfg.reference == "auto" else "")
            )
        answers = {item["sample_id"]: item["token_ids"] for item in full.samples if item["repeat"] == 0}
        experiment = experiment.forcing(answers)
    done = execute(experiment, resume=cfg.resume, say=say, reference=full, origin=origin)
    tracking.track(cfg, done.record, done.samples, done.folder, say)
    return done
