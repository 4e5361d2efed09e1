"""Records of ordinary runs from answers that were computed elsewhere."""

import dataclasses
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from kvbench.extensions.offline import requests_file
from kvbench.extensions.offline.requests_file import Head, OfflineRun, folder_of
from kvbench.results import identity, shards
from kvbench.results.journal import Journal
from kvbench.results.lines import journal_lines
from kvbench.results.record import Counts, RunRecord
from kvbench.results.refusals import NoResults, OtherRun
from kvbench.results.sample import Key, SampleRecord, journal_record, key_of, prompt_digest
from kvbench.results.writing import write_atomic
from kvbench.runs.answers import finish
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import Experiment, keys_of, load_task
from kvbench.runs.graders import GraderPool, grade_outcome
from kvbench.runs.parts import Loaders
from kvbench.runs.run import Run, comparable, execute
from kvbench.show.progress import note

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.requests import Outcome, Request
    from kvbench.tasks.taskset import TaskSet


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Answers of one run from like machines."""

    record: RunRecord
    """Record of their computation: identity, device, libraries, sessions of all portions."""
    samples: dict[Key, SampleRecord]
    """Without scores."""


def grade(file: Path, answers: Path, results_dir: Path) -> int:
    """Grade all runs of a file that were answered whole; returns 1 where some were not, or failed.

    Raises:
        ValueError: The task's requests are others here, or there is no answer.
    """
    head, _ = requests_file.read(file)
    parts, done = Loaders(), dict[tuple[str, str], Run]()
    failed = 0
    for run in head.runs:
        config = RunConfig.read(run.settings | {"results_dir": str(results_dir)})
        task, model = _task(head, config, parts)
        keys, whole = keys_of(task.requests), 0
        for answered in _answered(answers, run, head.requests, frozenset(keys)):
            if len(answered.samples) < len(keys):
                there = f"{len(answered.samples)} of {len(keys)} answers on {_where(answered)}"
                note(f"left out: {run.label}: {there}; `offline what=answer` goes on with it")
                continue
            whole += 1
            experiment = _experiment(run, config, answered, task, model, parts)
            _store(experiment, answered)
            full = done.get((str(run.reference), _machine(answered)))
            ended = finish(execute(experiment, resume=True, say=note, reference=_at_hand(full) if full else None))
            done[run.key, _machine(answered)] = ended
            note(f"{run.label}: {ended.record.status}: {ended.folder}")
            failed += ended.record.status != "complete"
        failed += not whole
    if not done:
        raise NoResults(
            f"{answers} has no run of {file} with all its answers; `offline what=answer file={file}` makes them"
        )
    return int(failed > 0)


def _task(head: Head, config: RunConfig, parts: Loaders) -> "tuple[TaskSet, Any]":
    """Local task, with the requests of the file."""
    from kvbench.models.load import load_outline

    parts.check_task(config)
    model = load_outline(config.model)
    task = load_task(config, model, parts, config.limit)
    if requests_file.digest_of(requests_file.request_lines(task.requests)) != head.requests:
        raise OtherRun(
            f"task {task.name} has other requests here than the file: its data, its code or the tokenizer has changed "
            "since; grade with what asked, or ask again"
        )
    return task, model


def _answered(answers: Path, run: OfflineRun, requests: str, keys: frozenset[Key]) -> list[Answered]:
    """Answers to a run, with portions of one identity merged."""
    by_hash: dict[str, Answered] = {}
    for part in sorted(path.parent for path in folder_of(answers, run).glob("*/*-of-*/run.json")):
        part_record = RunRecord.load(part)
        if part_record is None or not part_record.hash:
            continue
        if part_record.identity["task"].get("fingerprint") != requests:
            note(f"left out: {part}: its answers are to other requests than those of the file")
            continue
        lines = [line.record for line in journal_lines(part / shards.SAMPLES, part_record.hash)]
        samples = {key_of(record): record for record in lines if record is not None and key_of(record) in keys}
        if part_record.hash not in by_hash:
            by_hash[part_record.hash] = Answered(record=part_record, samples=samples)
            continue
        first = by_hash[part_record.hash]
        first.record.sessions += part_record.sessions
        first.record.note_backend(part_record.backend_fallbacks, part_record.graphs, part_record.backend_decode)
        first.record.ended = max(first.record.ended, part_record.ended)
        for key, record in samples.items():
            first.samples.setdefault(key, record)
    return list(by_hash.values())


def _where(answered: Answered) -> str:
    return answered.record.machine.device if answered.record.machine else "an unknown device"


def _machine(answered: Answered) -> str:
    """Common machine of the answers of two compared runs."""
    same = {name: answered.record.identity[name] for name in ("model", "backend", "task")}
    return identity.hash_identity(same | {"harness": answered.record.identity["code"]["harness"]})


def _experiment(
    run: OfflineRun, config: RunConfig, answered: Answered, task: "TaskSet", model: Any, parts: Loaders
) -> Experiment:
    """The run as it would be where it was answered; there is no engine to run."""
    from kvbench.tasks.counted import code_of

    record = answered.record
    changed = record.identity | {
        "task": record.identity["task"] | {"fingerprint": task.fingerprint},
        "code": record.identity["code"] | code_of(config.task, task),
    }
    ingredients = {name: identity.canonical(value) for name, value in changed.items()}
    digest = identity.hash_identity(ingredients)
    engine = SimpleNamespace(
        backend=SimpleNamespace(name=record.backend, fallbacks=(), decodes=()), graphs={}, group=None
    )
    return Experiment(
        config=config,
        method=run.method,
        policy=parts.make_policy(config.method),
        engine=cast("Engine", engine),
        task=task,
        model=model,
        identity=ingredients,
        hash=digest,
        folder=identity.run_folder(Path(config.results_dir), task.name, record.model, run.method, digest),
    )


def _store(experiment: Experiment, answered: Answered) -> None:
    """Grade the answers into the journal of the run, and write the parts of its record that follow from the answers."""
    folder, answer_record, task = experiment.folder, answered.record, experiment.task
    with shards.whole_run_lock(folder, note):
        shards.check_parts(folder, experiment.hash)
        record = RunRecord.load(folder)
        if record is not None and record.hash and record.status == "complete":
            return
        keys = frozenset(experiment.keys)
        with closing(Journal(folder / shards.SAMPLES, run=experiment.hash, keys=keys, warn=note)) as journal:
            _grade_into(journal, task, answered.samples)
        if record is None or not record.hash:
            record = dataclasses.replace(
                answer_record,
                hash=experiment.hash,
                identity=experiment.identity,
                protocol=task.protocol,
                status="running",
                counts=Counts(),
                sessions=[],
            )
        record.sessions += [session for session in answer_record.sessions if session not in record.sessions]
        write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(experiment.config.settings())).encode())
        record.save(folder)


def _grade_into(journal: Journal, task: "TaskSet", samples: dict[Key, SampleRecord]) -> None:
    """Grade what the journal lacks."""
    by_id = {request.sample_id: request for request in task.requests}

    def write(request: "Request", tail: str, graded: "tuple[Outcome, dict[str, float]]") -> None:
        journal.append(journal_record(request, *graded, task.protocol, tail))

    with GraderPool(task.grading_workers) as graders:
        for key, sample in samples.items():
            if key in journal:
                continue
            request = by_id[key[0]]
            prompt = sample["prompt"]
            if prompt["sha256"] != prompt_digest(request.prompt):
                raise OtherRun(f"the answer to {key[0]} is to another prompt; answer the file of requests again")
            outcome = outcome_of(sample)
            graders.do(partial(grade_outcome, task, request, outcome), partial(write, request, prompt["tail"]))


def outcome_of(sample: SampleRecord) -> "Outcome":
    """The engine's outcome that a sample without scores is of."""
    from kvbench.engine.requests import Outcome

    names = [item.name for item in dataclasses.fields(Outcome)]
    return Outcome(**{name: sample[name] for name in names if name in sample})  # type: ignore[literal-required]


def _at_hand(full: Run) -> Generator[None, None, Run | None]:
    return comparable(full, note)
    yield
