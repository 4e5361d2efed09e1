"""The experiments of one command, wherever Hydra's launcher runs them: in this process, in others, on other machines.

Hydra has no way to hand back what became of a sweep's jobs. Each job therefore writes it down in the sweep's folder
(`results/sweep.py`), and the process that started the sweep reads it there.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.cli import endings, gpus
from kvbench.cli.endings import EXIT_FAILED, report
from kvbench.cli.words import config_dir_flags
from kvbench.config import files
from kvbench.errors import NotForModel, what_happened
from kvbench.results.record import RunRecord
from kvbench.results.sweep import JobRecord, Sweep
from kvbench.show.progress import format_seconds, logged, note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.runs.parts import Loaders
    from kvbench.runs.run import Run

# States of jobs that have not ended, in words.
OPEN = {"running": "still running", "lost": "ended without a word, as after a kill", "left": "not begun"}
MAX_NAMED = 10  # failures that the end of a sweep repeats
# Of this process, by `Jobs.key`: a worker loads a model once for all jobs that it gets, and says some notes once.
_shared: "dict[str, tuple[Loaders, set[str]]]" = {}


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


@dataclass
class Jobs:
    """Hydra calls `run` for each experiment. It is pickled for workers, so it holds words and paths only."""

    sweep: Path | None = None
    """Folder of the sweep; None for a single experiment."""
    labels: list[str] = field(default_factory=list)
    """A name for each job of the sweep; empty where they are not known before."""
    skip: bool = False
    """A method that is not for the model is left out: nobody named it, a pattern did."""
    place: Path = field(default_factory=Path.cwd)
    """Folder that relative paths are meant from."""
    own: tuple[Path, ...] = field(default_factory=files.own_folders)
    """The user's own folders of configuration."""
    home: tuple[str, int] = field(default_factory=_process)
    """The process that started it."""
    codes: list[int] = field(default_factory=list)
    """Exit code of a single experiment."""

    @property
    def key(self) -> str:
        """Names the command, for what its jobs in one process share."""
        return f"{self.sweep or self.home}"

    def run(self, cfg: "DictConfig") -> None:
        """One experiment; called by Hydra."""
        from hydra.core.hydra_config import HydraConfig

        if self.sweep is None:
            self.codes.append(self._single(cfg))
            return
        settings = HydraConfig.get()
        number = settings.job.num + 1
        with ExitStack() as stack:
            if _process() != self.home:
                stack.enter_context(endings.stoppable())
                os.chdir(self.place)  # launchers may start workers anywhere
                sys.path += [str(folder) for folder in self.own if str(folder) not in sys.path]
                stack.enter_context(files.with_own_folders(self.own))
                if str(cfg.model.get("device", "")) in ("auto", "cuda"):
                    gpus.claim()
            sweep = Sweep(self.sweep)
            stack.enter_context(logged(sweep.log, f"[{number}] "))
            job = stack.enter_context(sweep.job(number))
            self._job(cfg, sweep, job, " ".join(settings.overrides.task))

    def _single(self, cfg: "DictConfig") -> int:
        """An experiment by itself: its tables and its picture; gives the exit code."""
        from kvbench.show import table

        try:
            finished = self._experiment(cfg, note)
            if finished.ended:  # else the last shard shows the whole run
                folder, picture = finished.folder, _draw(finished)
                table.show(finished.records, [folder / "run.json", folder / "samples.jsonl", picture])
        except Exception as error:
            return report(error)
        return _code(finished)

    def _job(self, cfg: "DictConfig", sweep: Sweep, job: JobRecord, words: str) -> None:
        """One experiment of a sweep. Whatever becomes of it is written down; only a signal gets out of here, because
        the other experiments do not depend on this one."""
        name = f"job {job.number}" + (f" of {len(self.labels)}" if self.labels else "")
        left = sweep.left_s()
        what = self.labels[job.number - 1] if self.labels else words
        note(f"{name}: {what}{f', {format_seconds(left)} left' if left else ''}")
        try:
            finished = self._experiment(cfg, self._say_once)
            job.run = os.path.relpath(finished.folder, sweep.results_dir)
            if finished.reference is not None and finished.record.comparison is not None:
                reference = Path(cfg.results_dir) / finished.record.comparison.reference
                job.reference = os.path.relpath(reference, sweep.results_dir)
            sessions = [session for record in finished.records for session in record.sessions]
            job.num_done = sum(session.num_done for session in sessions if session.started >= job.started)
            if finished.ended:
                _draw(finished)
            status = finished.record.status if finished.ended else f"shard {cfg.shard} is done"
            note(f"{name}: {status}, {finished.folder}")
            job.message, job.code = finished.record.message, _code(finished)
        except KeyboardInterrupt as stop:
            job.message, job.code = f"stopped by {str(stop) or 'SIGINT'}", endings.exit_code(stop)
            raise
        except Exception as error:
            if self.skip and isinstance(error, NotForModel):
                job.message, job.code = f"left out: {error}", 0
                note(f"{name}: {job.message}")
            else:
                is_told = isinstance(error, ValueError | OSError) and f"{error}"
                job.message, job.code = is_told or what_happened(error), report(error)

    def _of_process(self) -> "tuple[Loaders, set[str]]":
        """The loaders and the notes that were said, which this command's jobs in one process share."""
        from kvbench.runs import parts

        if self.key not in _shared:
            _shared.clear()  # let go of another sweep's model
            _shared[self.key] = parts.Loaders(), set()
        return _shared[self.key]

    def _experiment(self, cfg: "DictConfig", say: Callable[[str], None]) -> "Run":
        from hydra.core.hydra_config import HydraConfig

        from kvbench.runs.run import Origin, run_experiment

        settings = HydraConfig.get()
        choices = settings.runtime.choices
        own = [*config_dir_flags(self.own), *settings.overrides.task]  # of a sweep, this job's own values
        origin = Origin(command=own, experiment=choices.get("experiment") or "")
        return run_experiment(cfg, method=choices["method"], parts=self._of_process()[0], say=say, origin=origin)

    def _say_once(self, text: str) -> None:
        """A note of a sweep's job: one on what is there already is shorter, and said once in each process."""
        if text.startswith("already there: "):
            text, (_, said) = text.removesuffix(" (resume=false runs it again)"), self._of_process()
            if text in said:
                return
            said.add(text)
        note(text)

    def finish(self) -> int:
        """Let go of what jobs of this process shared; show what became of a sweep. Gives the worst exit code."""
        _shared.pop(self.key, None)
        if self.sweep is None:
            return max(self.codes, default=0)
        sweep = Sweep(self.sweep)
        with logged(sweep.log):
            return show_sweep(sweep)


def show_sweep(sweep: Sweep) -> int:
    """Say what became of every job, show the table of all runs and one picture for each task and model; the worst exit
    code, 1 for a job that ended without one, as after a kill."""
    from kvbench.show import figure, table

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
    tally: Counter[str] = Counter(states.values())
    counted = ", ".join(f"{tally[state]} {state}" for state in ("done", "failed", *OPEN) if tally[state])
    note(f"{len(states)} jobs: {counted}; log: {sweep.log}")
    named: dict[str, list[str]] = {}
    for number, state in states.items():
        if state != "done":
            again = f"{OPEN.get(state)}; give the same command again to go on"
            why = f"failed: {jobs[number].message}" if state == "failed" else again
            named.setdefault(why, []).append(f"{number} ({labels[number]})" if number in labels else f"{number}")
    for why, which in list(named.items())[:MAX_NAMED]:
        more = f" and {len(which) - MAX_NAMED} more" if len(which) > MAX_NAMED else ""
        note(f"job{'s' * (len(which) > 1)} {', '.join(which[:MAX_NAMED])}{more} {why}")
    codes = [jobs[number].code if state in ("done", "failed") else EXIT_FAILED for number, state in states.items()]
    return max((code or 0 for code in codes), default=0)


def check_files(jobs: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep one of whose tasks or models has no files, before any job begins."""
    from kvbench.config.compose import compose
    from kvbench.runs import parts

    loaders = parts.Loaders()
    tasks, models = dict[frozenset[str], Sequence[str]](), dict[frozenset[str], Sequence[str]]()
    for job in jobs:
        rest = (word for word in job if not word.startswith(("method", "hydra", "model", "batch_size")))
        tasks.setdefault(frozenset(rest), job)
        own = (word for word in job if word.lstrip("+").startswith(("model", "experiment")))
        models.setdefault(frozenset(own), job)
    for job in tasks.values():
        loaders.check_task(compose(list(job)))
    for job in models.values():
        loaders.check_model(compose(list(job)).model)


def _code(finished: "Run") -> int:
    """The exit code of an experiment; says why one failed."""
    if finished.record.status != "failed":
        return 0
    note(f"error: the run failed: {finished.record.message}")
    return EXIT_FAILED


def _draw(finished: "Run") -> Path:
    from kvbench.show import figure

    return figure.draw(finished.records, finished.folder / "result.png")
