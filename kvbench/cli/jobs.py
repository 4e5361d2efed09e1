"""The experiments of one command, wherever Hydra's launcher runs them: in this process, in others, on other machines.

In this process, jobs that can share prefill run as one cross-run batch (`runs/cross_run_batch.py`) once Hydra has named
all of them. Hydra cannot hand back the outcomes of a sweep's jobs: each job writes its outcome into the sweep's folder
(`results/sweep.py`), and the process that started the sweep reads it there.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli import endings, gpus
from kvbench.cli.endings import EXIT_FAILED, report
from kvbench.cli.words import config_dir_flags
from kvbench.config import calibrated, files
from kvbench.errors import NotForModel, no_sys_exit, what_happened
from kvbench.results.record import RunRecord
from kvbench.results.sweep import JobRecord, Sweep
from kvbench.show.progress import format_seconds, logged, note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.runs.parts import Loaders
    from kvbench.runs.run import Run
    from kvbench.runs.sessions import Origin

# States of jobs that have not ended, in words.
OPEN = {"running": "still running", "lost": "ended without a word, as after a kill", "left": "not begun"}
MAX_NAMED = 10  # failures that the end of a sweep repeats
# Of this process, by `Jobs.key`: a worker loads a model once for all jobs that it gets, and says some notes once.
_shared: "dict[str, tuple[Loaders, set[str]]]" = {}


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


@contextmanager
def at_home(directory: Path, config_dirs: Sequence[Path]) -> Iterator[None]:
    """Give a worker the working directory, imports and configuration folders of the process that started it."""
    os.chdir(directory)
    sys.path += [folder for folder in files.import_folders(config_dirs) if folder not in sys.path]
    with files.with_config_dirs(config_dirs):
        yield


@dataclass(frozen=True)
class _Job:
    """One experiment of a sweep, as Hydra names it."""

    number: int
    cfg: "DictConfig"
    label: str
    method: str
    origin: "Origin"


@dataclass
class Jobs:
    """Hydra calls `run` for each experiment. It is pickled for workers, so it holds words and paths only."""

    sweep: Path | None = None
    """Folder of the sweep; None for a single experiment."""
    labels: list[str] = field(default_factory=list)
    """A name for each job of the sweep; empty where they are not known before."""
    skip: bool = False
    """A method that is not for the model is left out, because a pattern selected it, not a name."""
    directory: Path = field(default_factory=Path.cwd)
    """Folder that relative paths are meant from."""
    config_dirs: tuple[Path, ...] = field(default_factory=files.config_dirs)
    """The user's own folders of configuration."""
    home: tuple[str, int] = field(default_factory=_process)
    """The process that started it."""
    waits: bool = False
    """Jobs wait until `carry_out`, so that some may go together."""
    pending: "list[_Job]" = field(default_factory=list)
    """Those that do."""
    codes: list[int] = field(default_factory=list)
    """Exit code of a single experiment."""

    @property
    def key(self) -> str:
        """Names the command, for what its jobs in one process share."""
        return f"{self.sweep or self.home}"

    def run(self, cfg: "DictConfig") -> None:
        """One experiment; called by Hydra."""
        from hydra.core.hydra_config import HydraConfig

        settings = HydraConfig.get()
        words = list(settings.overrides.task)
        calibrated.resolve(cfg, words)
        if self.sweep is None:
            self.codes.append(self._single(cfg))
            return
        number = settings.job.num + 1
        job = _Job(number, cfg, self.labels[number - 1] if self.labels else " ".join(words), *self._origin())
        if self.waits:
            self.pending.append(job)
            return
        with ExitStack() as stack:
            if _process() != self.home:
                stack.enter_context(endings.stoppable())
                stack.enter_context(at_home(self.directory, self.config_dirs))
                if str(cfg.model.get("device", "")) in ("auto", "cuda"):
                    gpus.claim()
            self._carry_out([job])

    def carry_out(self) -> None:
        """Run the pending jobs."""
        if self.pending:
            from kvbench.runs import cross_run_batch

            for numbers in cross_run_batch.groups([job.cfg for job in self.pending]):
                self._carry_out([self.pending[number] for number in numbers])

    def _single(self, cfg: "DictConfig") -> int:
        """Run a single experiment with its tables and picture; returns the exit code."""
        from kvbench.runs import known

        try:
            method, origin = self._origin()
            digest = known.digest_of(cfg, method)
            if (there := known.find(digest, cfg)) is not None:
                for folder in filter(None, (there.reference_folder, there.folder)):
                    note(f"already there: {folder} (resume=false runs it again)")
                records = [record for record in (there.reference, there.record) if record is not None]
                _show_one(records, there.folder, str(cfg.results_dir))
                return 0
            with no_sys_exit():
                self.loaders.check_values(cfg)
                if isinstance(cfg.get("method"), Mapping):  # refused before the seconds of importing transformers
                    self.loaders.make_policy(cfg.method)
            from kvbench.runs.cross_run_batch import RunRequest, run_one

            finished = run_one(RunRequest(cfg=cfg, method=method, say=note, origin=origin), self.loaders)
            if finished.ended:  # else the last shard shows the whole run
                _draw(finished)
                _show_one(finished.records, finished.folder, str(cfg.results_dir))
                known.keep(digest, cfg, finished.folder, finished.record)
        except Exception as error:
            return report(error)
        return _code(finished)

    def _carry_out(self, jobs: "Sequence[_Job]") -> None:
        """Run one cross-run batch of a sweep, or one job, and record each outcome.

        Only a signal is raised, because other experiments do not depend on these.
        """
        from kvbench.runs.cross_run_batch import RunRequest, run_cross_batch

        assert self.sweep is not None, "one experiment alone is no sweep"
        sweep = Sweep(self.sweep)
        with ExitStack() as stack:
            stack.enter_context(logged(sweep.log, f"[{jobs[0].number}] " if len(jobs) == 1 else ""))
            left = sweep.left_s()
            held = [stack.enter_context(ExitStack()) for _ in jobs]  # each job's folder
            records = [one.enter_context(sweep.job(job.number)) for one, job in zip(held, jobs, strict=True)]
            for index, job in enumerate(jobs):
                time_left = f", {format_seconds(left)} left" if left and not index else ""
                self._note(job, f"{self._name(job)}: {job.label}{time_left}")
            run_requests = [
                RunRequest(cfg=job.cfg, method=job.method, say=partial(self._say_once, job), origin=job.origin)
                for job in jobs
            ]
            reported: list[tuple[Exception, int]] = []  # with exit codes
            try:
                for index, ended in run_cross_batch(run_requests, self.loaders):
                    with logged(sweep.log, f"[{jobs[index].number}] "):
                        self._write_down(jobs[index], sweep, records[index], ended, reported)
                    held[index].close()
            except KeyboardInterrupt as stop:
                for record in records:
                    if record.code is None:
                        record.message, record.code = f"stopped by {str(stop) or 'SIGINT'}", endings.exit_code(stop)
                raise

    def _name(self, job: "_Job") -> str:
        return f"job {job.number}" + (f" of {len(self.labels)}" if self.labels else "")

    def _write_down(
        self,
        job: "_Job",
        sweep: Sweep,
        record: JobRecord,
        ended: "Run | Exception",
        reported: list[tuple[Exception, int]],
    ) -> None:
        """Print and record the end of a job; an error is reported once."""
        try:
            if isinstance(ended, Exception):
                raise ended
            record.run = os.path.relpath(ended.folder, sweep.results_dir)
            if ended.reference is not None and ended.record.comparison is not None:
                reference = Path(job.cfg.results_dir) / ended.record.comparison.reference
                record.reference = os.path.relpath(reference, sweep.results_dir)
            sessions = [session for session in ended.record.sessions if session.started >= record.started]
            record.num_done = sum(session.num_done for session in sessions)
            record.work_s = sum(session.wall_s for session in sessions)
            if ended.ended:
                _draw(ended)
            status = ended.record.status if ended.ended else f"shard {job.cfg.shard} is done"
            note(f"{self._name(job)}: {status}, {ended.folder}")
            record.message, record.code = ended.record.message, _code(ended)
        except Exception as error:
            if self.skip and isinstance(error, NotForModel):
                record.message, record.code = f"left out: {error}", 0
                note(f"{self._name(job)}: {record.message}")
            else:
                code = next((code for other, code in reported if other is error), None)
                if code is None:
                    reported.append((error, code := report(error)))
                else:
                    note(f"{self._name(job)}: failed with the full cache's run, which it is compared with")
                text = isinstance(error, ValueError | OSError) and f"{error}"
                record.message, record.code = text or what_happened(error), code

    @property
    def loaders(self) -> "Loaders":
        """The loaders of this command's jobs in this process."""
        return self._of_process()[0]

    def _of_process(self) -> "tuple[Loaders, set[str]]":
        """Loaders and printed notes that this command's jobs in one process share."""
        from kvbench.runs import parts

        if self.key not in _shared:
            _shared.clear()  # let go of another sweep's model
            _shared[self.key] = parts.Loaders(), set()
        return _shared[self.key]

    def _origin(self) -> "tuple[str, Origin]":
        """Method of Hydra's current job, and its words."""
        from hydra.core.hydra_config import HydraConfig

        from kvbench.runs.sessions import Origin

        settings = HydraConfig.get()
        choices = settings.runtime.choices
        overrides = [*config_dir_flags(self.config_dirs), *settings.overrides.task]  # of a sweep, this job's own values
        return choices["method"], Origin(command=overrides, experiment=choices.get("experiment") or "")

    def _note(self, job: "_Job", text: str) -> None:
        assert self.sweep is not None, "one experiment alone is no sweep"
        with logged(Sweep(self.sweep).log, f"[{job.number}] "):
            note(text)

    def _say_once(self, job: "_Job", text: str) -> None:
        """Print a note of a sweep's job; one on existing results is shorter, and printed once in each process."""
        if text.startswith("already there: "):
            text, (_, said) = text.removesuffix(" (resume=false runs it again)"), self._of_process()
            if text in said:
                return
            said.add(text)
        self._note(job, text)

    def finish(self) -> int:
        """Release what jobs of this process shared; print the outcome of a sweep. Returns the worst exit code."""
        _shared.pop(self.key, None)
        if self.sweep is None:
            return max(self.codes, default=0)
        sweep = Sweep(self.sweep)
        with logged(sweep.log):
            return show_sweep(sweep)


def show_sweep(sweep: Sweep) -> int:
    """Print the outcome of every job, the table of all runs and one picture for each task and model.

    Returns the worst exit code, 1 for a job that ended without one, as after a kill.
    """
    from kvbench.show import closing, figure, table

    jobs, states, root = sweep.jobs(), sweep.states(), sweep.results_dir
    labels = dict(enumerate(sweep.record().jobs, 1))
    groups: dict[Path, list[RunRecord]] = {}  # folder of a task and model -> its runs and their references
    for job in jobs.values():
        for name in (job.reference, job.run):
            record = RunRecord.load(root / name) if name else None
            if record is not None and record.status in ("complete", "failed"):
                groups.setdefault((root / name).parent.parent, []).append(record)
    pictures = [
        figure.draw(sorted(records, key=lambda record: record.method != files.FULL), folder / "sweep.png")
        for folder, records in groups.items()
    ]
    if groups:
        table.show([record for records in groups.values() for record in records], pictures)
    for records in groups.values():
        once = list({record.hash: record for record in records}.values())
        for line in closing.lines(once, str(root))[: None if len(groups) == 1 else -1]:
            print(line)
    tally: Counter[str] = Counter(states.values())
    counted = ", ".join(f"{tally[state]} {state}" for state in ("done", "failed", *OPEN) if tally[state])
    note(f"{len(states)} jobs: {counted}; log: {sweep.log}")
    named: dict[str, list[str]] = {}
    for number, state in states.items():
        if state != "done":
            resume_hint = f"{OPEN.get(state)}; give the same command again to go on"
            why = f"failed: {jobs[number].message}" if state == "failed" else resume_hint
            named.setdefault(why, []).append(f"{number} ({labels[number]})" if number in labels else f"{number}")
    for why, which in list(named.items())[:MAX_NAMED]:
        more = f" and {len(which) - MAX_NAMED} more" if len(which) > MAX_NAMED else ""
        note(f"job{'s' * (len(which) > 1)} {', '.join(which[:MAX_NAMED])}{more} {why}")
    codes = [jobs[number].code if state in ("done", "failed") else EXIT_FAILED for number, state in states.items()]
    return max((code or 0 for code in codes), default=0)


def check_files(jobs: Sequence[Sequence[str]]) -> Path | None:
    """Refuse a sweep with a task or model whose files are missing, before any job begins.

    Returns the results folder of the first job, if there is one.
    """
    from kvbench.config.compose import compose
    from kvbench.runs import parts

    loaders, composed = parts.Loaders(), cache(lambda *job: compose([*job]))
    tasks, models = dict[frozenset[str], Sequence[str]](), dict[frozenset[str], Sequence[str]]()
    for job in jobs:
        rest = (word for word in job if not word.startswith(("method", "hydra", "model", "batch_size")))
        tasks.setdefault(frozenset(rest), job)
        model_words = (word for word in job if word.lstrip("+").startswith(("model", "experiment")))
        models.setdefault(frozenset(model_words), job)
    for job in tasks.values():
        loaders.check_values(composed(*job))
        loaders.check_task(composed(*job))
    for job in models.values():
        loaders.check_model(composed(*job).model)
    return Path(composed(*jobs[0]).results_dir) if jobs else None


def _show_one(records: "Sequence[RunRecord]", folder: Path, results_dir: str) -> None:
    """Print the table of one experiment, its files, and its summary."""
    from kvbench.show import closing, figure, table

    picture = folder / "result.png"
    if not picture.is_file():
        figure.draw(records, picture)
    table.show(records, [folder / "run.json", folder / "samples.jsonl", picture])
    for line in closing.lines(records, results_dir):
        print(line)


def _code(finished: "Run") -> int:
    """The exit code of an experiment; says why one failed."""
    if finished.record.status != "failed":
        return 0
    note(f"error: the run failed: {finished.record.message}")
    return EXIT_FAILED


def _draw(finished: "Run") -> Path:
    from kvbench.show import figure

    return figure.draw(finished.records, finished.folder / "result.png")
