"""One experiment: configuration -> model, task, policy, engine -> journal, record, table and picture.

The full cache on the same samples is an experiment like any other; it is looked up by its hash, or run first.
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from kvbench.config import extensions
from kvbench.config.files import FULL
from kvbench.errors import FileMissing, SettingsConflict, SettingValue, no_sys_exit
from kvbench.results import shards, summary
from kvbench.results.journal import Journal, run_lock
from kvbench.results.record import Counts, RunRecord, now
from kvbench.results.sample import SampleRecord
from kvbench.results.shards import Shard
from kvbench.results.writing import write_atomic
from kvbench.runs.answers import Shown, compute_missing, finish
from kvbench.runs.config import AUTO, FULL_ANSWER, NONE, RunConfig
from kvbench.runs.experiment import Experiment, keys_of, prepare
from kvbench.runs.parts import Loaders
from kvbench.runs.portions import compute_portion
from kvbench.runs.sessions import Origin, describe, other_machine, recording_end, session_of
from kvbench.show.progress import Progress, note

if TYPE_CHECKING:
    from kvbench.engine.cross_run_batch import Step
    from kvbench.engine.requests import Request

MAX_LISTED = 100  # rows of broken data that run.json names; all are counted


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A requested run, prepared."""

    method: str
    experiment: Experiment
    say: Callable[[str], None]
    origin: Origin

    @property
    def config(self) -> RunConfig:
        """Its settings."""
        return self.experiment.config

    @property
    def with_full(self) -> bool:
        """True if it is compared with the full cache."""
        return self.config.reference == AUTO and self.method != FULL

    @property
    def forces_full(self) -> bool:
        """True if it is forced to give the full cache's answers."""
        return self.config.forces_full_answer and self.method != FULL


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that ended, and the full-cache run it is compared with."""

    record: RunRecord
    """Content of `run.json`."""
    samples: list[SampleRecord]
    """Content of `samples.jsonl`, in request order; of a run whose shards have not all ended, what is there."""
    folder: Path
    """Its folder."""
    reference: RunRecord | None = None
    """The full-cache run on the same samples; None when this is it, when none was wanted, or when it failed."""

    @property
    def records(self) -> list[RunRecord]:
        """The full-cache run, where there is one, and the run."""
        return [record for record in (self.reference, self.record) if record is not None]

    @property
    def ended(self) -> bool:
        """Every sample is there; False after one of several shards."""
        return self.record.status in ("complete", "failed")


# Steps of work on a run: each yields the request whose prompt is read next, a decode step that is due, or None while it
# waits for another run. Send True to flush graded answers instead of advancing; not right after a decode step.
Steps = Generator["Request | Step | None", bool | None, Run]
Waits = Generator[None, None, Run | None]


def verdict(experiment: Experiment, records: Sequence[SampleRecord]) -> str:
    """Reason why the run must not be used; empty where there is none.

    A method that did nothing, and a run in which no sample ended well, would otherwise pass as a result.
    """
    from kvbench.runs.verdict import complaint

    ok = [record for record in records if record["status"] == "ok"]
    if not ok:
        first = records[0]
        return f"no sample ended well; the first, {first['sample_id']}, ended as {first['status']}: {first['message']}"
    complaints = [(record["sample_id"], text) for record in ok if (text := complaint(experiment.policy, record))]
    if complaints:
        sample_id, text = complaints[0]
        where = f"in {len(complaints)} of {len(ok)} samples: {text} (sample {sample_id})"
        return f"method {experiment.method} did not do its work {where}"
    return ""


def summarise(experiment: Experiment, record: RunRecord, journal: Journal) -> None:
    """Fill the numbers of `run.json` from the journal."""
    from kvbench.runs.verdict import remark

    task, records = experiment.task, list(journal.records.values())
    record.weighting = task.weighting
    record.metrics = summary.metrics(records, task.metrics, task.primary, task.weighting)
    record.task_aggregate = task.aggregate(summary.for_task(records))
    record.fidelity, record.drift = summary.fidelity(records, task.weighting), summary.drift(records)
    record.ledger = summary.ledger(records)
    backend = experiment.engine.backend
    record.note_backend(backend.fallbacks, experiment.engine.graphs, backend.decodes)
    ok = [item for item in records if item["status"] == "ok"]
    record.kept = summary.means(item["kept"] for item in ok)
    record.timing = summary.timing(records, sum(session.wall_s for session in record.sessions))
    record.remark = remark(experiment.policy, ok)
    _count(experiment, record, journal)


def _count(experiment: Experiment, record: RunRecord, journal: Journal) -> None:
    task, statuses = experiment.task, [item["status"] for item in journal.records.values()]
    record.counts = Counts(
        total=len(experiment.keys),
        samples=len(task.requests),
        done=len(statuses),
        **{status: statuses.count(status) for status in ("ok", "nan", "oom", "ungraded")},
        truncated=sum(request.truncated for request in task.requests),
        quarantined=len(task.quarantined),
        copies=len(task.copies),
        damaged=max(record.counts.damaged, journal.damaged),
    )
    record.quarantined = list(task.quarantined[:MAX_LISTED])
    record.unused_fields, record.missing_subsets = list(task.unused), list(task.missing)


def _opened(experiment: Experiment, stack: ExitStack, say: Callable[[str], None]) -> tuple[Journal, RunRecord]:
    """The journal and the record of a run whose lock is held; `stack` closes the journal."""
    folder = experiment.folder
    record = RunRecord.load(folder) or RunRecord()
    # Before the journals are opened: that repairs them.
    if record.hash and record.hash != experiment.hash:
        raise SettingValue(
            f"{folder} holds another run whose hash begins alike; use another results_dir", setting="results_dir"
        )
    shards.check_parts(folder, experiment.hash)
    keys = frozenset(experiment.keys)
    journal = stack.enter_context(closing(Journal(folder / "samples.jsonl", run=experiment.hash, keys=keys, warn=say)))
    return journal, record


def _write_config(experiment: Experiment) -> None:
    settings = OmegaConf.create(experiment.config.settings())
    write_atomic(experiment.folder / "config.yaml", OmegaConf.to_yaml(settings).encode())


def compute_shard(experiment: Experiment, shard: Shard, *, say: Callable[[str], None], origin: Origin) -> None:
    """Finish one shard of a run in a separate journal. The run's lock is held at the start only, for a moment."""
    folder, part = experiment.folder, shard.folder(experiment.folder)
    size = experiment.engine.group or 1
    requests = shard.part(experiment.task.requests, size)
    keys = keys_of(requests)
    if not keys:
        say(f"shard={shard} has nothing to do: the run has fewer batches of {size}")
        return
    with run_lock(part, wait=True, say=say):
        with ExitStack() as stack:
            stack.enter_context(run_lock(folder, wait=True, say=say))
            journal, record = _opened(experiment, stack, say)
            shards.take_over(folder, journal, record, say)
            shards.take(part, journal, record, say)
            done = set(journal.records)
            if done.issuperset(keys):
                return
            _write_config(experiment)
            describe(experiment, record, origin)
            _leave_open(experiment, record, journal)
        finish(compute_portion(experiment, part, requests, done=done, say=say, origin=origin))


def _leave_open(experiment: Experiment, record: RunRecord, journal: Journal) -> None:
    """Save the record of a run that has shards to come."""
    record.status, record.message = "running", ""
    record.started = record.started or now()
    _count(experiment, record, journal)
    record.save(experiment.folder)


def execute(
    experiment: Experiment,
    *,
    resume: bool,
    say: Callable[[str], None],
    reference: Waits | None = None,
    origin: Origin | None = None,
    wait: bool = True,
    shown: Shown = Progress,
) -> Steps:
    """Finish one run from any state, in steps: it yields before each prompt that it reads.

    It waits while other processes have the run or parts of it, and then takes what they have finished. A process that
    waits holds one run at a time, so however many of them work on the same runs, in whatever order, one of them can
    always go on.

    Args:
        resume: Keep the samples that are there; False starts again.
        reference: Gives the full cache on the same samples, for the comparison, once that is there; None for none.
        wait: False raises RunLocked where there is something to wait for.
        shown: Shows the progress.
    """
    folder, origin = experiment.folder, origin or Origin()
    shard = experiment.config.shard
    with ExitStack() as stack:
        lock = run_lock(folder, wait=wait, say=say) if shard else shards.whole_run_lock(folder, say, wait=wait)
        stack.enter_context(lock)
        journal, record = _opened(experiment, stack, say)
        if not resume:
            journal.clear()
            shards.clear(folder)
            record = RunRecord()
        stack.enter_context(recording_end(record, folder))
        before = dataclasses.asdict(record)
        shards.take_over(folder, journal, record, say)
        if any(key not in journal for key in experiment.keys):
            if shard:
                _leave_open(experiment, record, journal)
                samples = [journal.records[key] for key in experiment.keys if key in journal]
                return Run(record=record, samples=samples, folder=folder)
            if journal.records:
                say(f"going on with {folder}: {len(journal.records)} of {len(experiment.keys)} samples are done")
            _write_config(experiment)
            describe(experiment, record, origin)
            if journal.records and (changed := other_machine(record)):
                say(f"the samples that are done are another machine's: {changed}; run.json names both")
            with session_of(record, folder, origin) as session:
                try:
                    yield from compute_missing(experiment, journal, session, shown=shown)
                finally:
                    _count(experiment, record, journal)
        elif not record.hash:  # workers have done it all
            _write_config(experiment)
            describe(experiment, record, origin)
            for last in record.sessions[-1:]:
                record.versions, record.git, record.machine = last.versions, last.git, last.machine
                record.started, record.ended = record.sessions[0].started, max(one.ended for one in record.sessions)
        elif record.status == "complete":
            say(f"already there: {folder} (resume=false runs it again)")
        journal.finish(experiment.keys)
        records = list(journal.records.values())
        summarise(experiment, record, journal)
        full = (yield from reference) if reference is not None else None
        if full is not None and (primary := record.metrics.get(record.primary)):
            name = full.folder.relative_to(Path(experiment.config.results_dir)).as_posix()
            record.comparison = summary.compare(
                records, full.samples, record.primary, name, primary.higher_is_better, record.weighting
            )
        record.message = verdict(experiment, records)
        record.status = "failed" if record.message else "complete"
        if dataclasses.asdict(record) != before:
            record.save(folder)
        shards.clear(folder, journal)
        against = full.record if full else None
        return Run(record=record, samples=records, folder=folder, reference=against)


@no_sys_exit()
def run_experiment(
    cfg: Mapping[str, Any] | RunConfig,
    *,
    method: str,
    parts: "Loaders | None" = None,
    say: Callable[[str], None] = note,
    origin: Origin | None = None,
) -> Run:
    """Run one experiment, and the full cache on the same samples when it is not there yet.

    Args:
        cfg: The composed configuration (`conf/config.yaml`).
        method: Name of the method's configuration; names the folder and the row of the table.
        parts: The loaders; runs that get the same ones share the last model, the last task and the prompts that were
            read. New ones by default.
        say: Takes one-line notes; stderr by default.
        origin: Command or caller, for `run.json`.

    Returns:
        The run. Its status is `failed` when its result must not be used.

    Raises:
        ValueError: A setting is unknown or out of range, or data or weights are missing.
        JournalError: The disk is full.
        KeyboardInterrupt: A signal stopped it; everything finished is on disk.
    """
    parts = parts or Loaders()
    wanted = plan(cfg, method, parts, say, origin or Origin())
    config, experiment, shard = wanted.config, wanted.experiment, wanted.config.shard

    def full_cache() -> Experiment:
        return prepare(config.of_full(), FULL, parts)

    # All shards first, as far as they need nothing of other processes: these may end the full cache meanwhile.
    if shard and wanted.with_full:
        compute_shard(full_cache(), shard, say=say, origin=wanted.origin)
    if shard and not wanted.forces_full:
        compute_shard(experiment, shard, say=say, origin=wanted.origin)
    full = finish(execute(full_cache(), resume=True, say=say, origin=wanted.origin)) if wanted.with_full else None
    if wanted.forces_full:
        experiment = experiment.forcing(answers_to_force(config, full))
        if shard:
            compute_shard(experiment, shard, say=say, origin=wanted.origin)
    against = None if full is None else _at_hand(comparable(full, say))
    return conclude(
        wanted, finish(execute(experiment, resume=config.resume, say=say, reference=against, origin=wanted.origin))
    )


def _at_hand(full: Run | None) -> Waits:
    return full
    yield


def comparable(full: Run, say: Callable[[str], None]) -> Run | None:
    """The full cache's run, if it can be compared with; prints the reason where it failed."""
    if full.record.status == "failed":
        say(f"no comparison with the full cache, whose run failed: {full.record.message}")
    return full if full.record.status == "complete" else None


def plan(
    cfg: Mapping[str, Any] | RunConfig, method: str, parts: Loaders, say: Callable[[str], None], origin: Origin
) -> Wanted:
    """Prepare a run, and print which rows of its data were set aside."""
    config = RunConfig.read(cfg)
    if config.forces_full_answer and method != FULL and config.reference != AUTO:
        raise SettingsConflict(
            f"fidelity.on={FULL_ANSWER} forces the full cache's answers, and reference={config.reference} makes none: "
            "set reference=auto, or fidelity.max_tokens=0",
            setting="reference",
        )
    experiment = prepare(config, method, parts)
    asks_nothing = any(not (one.max_new_tokens or one.choices) for one in experiment.task.requests)
    if asks_nothing and (config.forces_full_answer or config.fidelity.max_tokens == 0):
        forced = f"fidelity.on={FULL_ANSWER}" if config.forces_full_answer else "fidelity.max_tokens=0"
        raise SettingsConflict(
            f"task={experiment.task.name} asks for no answer, and {forced} leaves nothing to force either; set "
            "fidelity.on=gold fidelity.max_tokens=null",
            setting="fidelity.on",
        )
    parts.try_out(experiment, say)
    for what, rows in (("set aside", experiment.task.quarantined), ("counted again", experiment.task.copies)):
        for row in rows[:5]:
            say(f"{what}: {row['file']}:{row['line']}: {row['reason']}")
    for names in experiment.task.unused:
        say(f"fields that nothing reads: {names}")
    if experiment.task.missing:
        say(f"left out, as their data is not at hand: {', '.join(experiment.task.missing)}")
    return Wanted(method=method, experiment=experiment, say=say, origin=origin)


def conclude(wanted: Wanted, done: Run) -> Run:
    """Pass a finished run to the tracker; print what a shard still lacks."""
    config, counts = wanted.config, done.record.counts
    if done.ended:
        for track in extensions.hooks("tracker.track") if config.tracker != NONE else ():
            track(config.tracker, config.settings(), done.record, done.samples, done.folder, wanted.say)
    else:
        wanted.say(
            f"shard {config.shard} is done; {done.folder} has {counts.done} of {counts.total} samples, and needs the "
            "others"
        )
    return done


def answers_to_force(config: RunConfig, full: Run | None) -> list[SampleRecord]:
    """The answers of the full cache, unless it has not run, has failed, or has shards to come."""
    if full is not None and not full.ended:
        raise SettingsConflict(
            f"shard={config.shard}: fidelity.on={FULL_ANSWER} forces the full cache's answers, and only "
            f"{len(full.samples)} of {full.record.counts.total} are there; "
            "give this command again when every shard of full has ended",
            setting="shard",
        )
    if full is None or full.record.status != "complete":
        raise FileMissing(
            f"fidelity.on={FULL_ANSWER} forces the full cache's answers, and there are none: see why the run "
            "of full failed",
            setting="fidelity.on",
        )
    return full.samples
