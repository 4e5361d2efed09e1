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
from kvbench.errors import NotForModel
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
_parts: "dict[str, Loaders]" = {}  # of this process: a worker loads a model once for all jobs that it gets


@dataclass
class Jobs:
    """What Hydra calls for each experiment. It is pickled for workers, so it holds words and paths only."""

    sweep: Path | None = None
    """Folder of the sweep; None for a single experiment."""
    labels: list[str] = field(default_factory=list)
    """What is special about each job of the sweep; empty where that is not known before."""
    skip: bool = False
    """A method that is not for the model is left out: nobody named it, a pattern did."""
    place: Path = field(default_factory=Path.cwd)
    """Folder that relative paths are meant from."""
    own: tuple[Path, ...] = field(default_factory=files.own_folders)
    """The user's own folders of configuration."""
    home: tuple[str, int] = field(default_factory=lambda: _process())
    """The process that started it."""
    codes: list[int] = field(default_factory=list)
    """Exit code of a single experiment, and of jobs that ran in this process."""

    @property
    def key(self) -> str:
        """Names the command, for what its jobs in one process share."""
        return f"{self.sweep or self.home}"

    def run(self, cfg: "DictConfig") -> None:
        """One experiment; called by Hydra."""
        from hydra.core.hydra_config import HydraConfig

        settings = HydraConfig.get()
        if self.sweep is None:
            try:
                finished = self._experiment(cfg, note)
                if finished.ended:  # else the last shard shows the whole run
                    _show(finished)
                if finished.record.status == "failed":
                    note(f"error: the run failed: {finished.record.message}")
                self.codes.append(_code(finished))
            except Exception as error:
                self.codes.append(report(error))
            return
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

    def _job(self, cfg: "DictConfig", sweep: Sweep, job: JobRecord, words: str) -> None:
        """One experiment of a sweep. Whatever becomes of it is written down; only a signal gets out of here, because
        the other experiments do not depend on this one."""
        name = f"job {job.number}" + (f" of {len(self.labels)}" if self.labels else "")
        left = sweep.left_s()
        what = self.labels[job.number - 1] if self.labels else words
        note(f"{name}: {what}{f', {format_seconds(left)} left' if left else ''}")
        try:
            finished = self._experiment(cfg, self._say_once())
            job.run = os.path.relpath(finished.folder, sweep.results_dir)
            if finished.reference is not None and finished.record.comparison is not None:
                reference = Path(cfg.results_dir) / finished.record.comparison.reference
                job.reference = os.path.relpath(reference, sweep.results_dir)
            sessions = [session for record in finished.records for session in record.sessions]
            job.num_done = sum(session.num_done for session in sessions if session.started >= job.started)
            if finished.ended:
                _draw(finished)
            job.message, job.code = finished.record.message, _code(finished)
            status = finished.record.status if finished.ended else f"shard {cfg.shard} is done"
            note(f"{name}: {status}, {finished.folder}")
            if job.code:
                note(f"error: the run failed: {job.message}")
        except KeyboardInterrupt as stop:
            job.message, job.code = f"stopped by {str(stop) or 'SIGINT'}", endings.exit_code(stop)
            raise
        except Exception as error:
            if self.skip and isinstance(error, NotForModel):
                job.message, job.code = f"left out: {error}", 0
                note(f"{name}: {job.message}")
            else:
                job.message, job.code = f"{error}" or type(error).__name__, report(error)

    def _experiment(self, cfg: "DictConfig", say: Callable[[str], None]) -> "Run":
        from hydra.core.hydra_config import HydraConfig

        from kvbench.runs import parts
        from kvbench.runs.run import run_experiment
        from kvbench.runs.sessions import Origin

        if self.key not in _parts:
            _parts.clear()  # let go of another sweep's model
            _parts[self.key] = parts.Loaders()
        settings = HydraConfig.get()
        choices = settings.runtime.choices
        own = [*config_dir_flags(self.own), *settings.overrides.task]  # of a sweep, this job's own values
        origin = Origin(command=own, experiment=choices.get("experiment") or "")
        return run_experiment(cfg, method=choices["method"], parts=_parts[self.key], say=say, origin=origin)

    def _say_once(self) -> Callable[[str], None]:
        """Notes in a sweep: what is there already is said shortly, and once in each process."""
        said = _said.setdefault(self.key, set())

        def say(text: str) -> None:
            if text.startswith("already there: "):
                text = text.removesuffix(" (resume=false runs it again)")
                if text in said:
                    return
                said.add(text)
            note(text)

        return say

    def finish(self) -> int:
        """Let go of what jobs of this process shared; show what became of a sweep. Gives the worst exit code."""
        _parts.pop(self.key, None)
        _said.pop(self.key, None)
        if self.sweep is None:
            return max(self.codes, default=0)
        sweep = Sweep(self.sweep)
        with logged(sweep.log):
            return show_sweep(sweep)


_said: dict[str, set[str]] = {}  # of this process, by `Jobs.key`


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
        label = f"{number} ({labels[number]})" if number in labels else f"{number}"
        if state == "failed":
            named.setdefault(f"failed: {jobs[number].message}", []).append(label)
        elif state in OPEN:
            named.setdefault(f"{OPEN[state]}; give the same command again to go on", []).append(label)
    for why, which in list(named.items())[:MAX_NAMED]:
        more = f" and {len(which) - MAX_NAMED} more" if len(which) > MAX_NAMED else ""
        note(f"job{'s' * (len(which) > 1)} {', '.join(which[:MAX_NAMED])}{more} {why}")
    codes = [jobs[number].code if state in ("done", "failed") else EXIT_FAILED for number, state in states.items()]
    return max((code or 0 for code in codes), default=0)


def check_data(jobs: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep one of whose tasks cannot be loaded, before any model is loaded."""
    from kvbench.config.compose import compose
    from kvbench.runs import parts

    check, seen = parts.Loaders().check_task, set()
    for job in jobs:
        about_task = frozenset(word for word in job if not word.startswith(("method", "hydra", "model", "batch_size")))
        if about_task not in seen:
            seen.add(about_task)
            check(compose(list(job)))


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _code(finished: "Run") -> int:
    return EXIT_FAILED if finished.record.status == "failed" else 0


def _show(finished: "Run") -> None:
    from kvbench.show import table

    picture = _draw(finished)
    table.show(finished.records, [finished.folder / "run.json", finished.folder / "samples.jsonl", picture])


def _draw(finished: "Run") -> Path:
    from kvbench.show import figure

    return figure.draw(finished.records, finished.folder / "result.png")
