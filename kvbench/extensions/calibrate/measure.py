"""Runs the model at every setting of a grid, on the same prompts; each prompt is read once for all settings.

Each trial has a journal of its own, named by the hash of the run that it is. A kill loses no finished sample, and
another calibration that needs the same trial reuses it.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from kvbench.config import durable
from kvbench.config.files import FULL
from kvbench.config.methods import method_settings
from kvbench.config.settings import copy_config
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Request
from kvbench.extensions.calibrate.plan import Number
from kvbench.results.identity import HASH_DIGITS
from kvbench.results.journal import Journal
from kvbench.results.sample import SampleRecord
from kvbench.runs.answers import finish, record_answers, unfinished_groups
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import Experiment, prepare
from kvbench.runs.parts import Loaders
from kvbench.show.progress import Progress, note
from kvbench.tasks.taskset import TaskSet


@dataclass(kw_only=True)
class Trial:
    """One setting of the method (none: the full cache) on one set of samples.

    With its journal's records in request order once it was measured.
    """

    settings: dict[str, Number]
    experiment: Experiment
    records: list[SampleRecord] = field(default_factory=list)


class Sweep:
    """Makes trials and measures them; the journals go to `folder`, and `prompts` keeps what was read."""

    def __init__(self, cfg: DictConfig, method: str, parts: Loaders, *, folder: Path, prompts: PromptCache) -> None:
        self.cfg, self.method, self.parts, self.folder, self.prompts = cfg, method, parts, folder, prompts
        self._begun: set[str] = set()  # trials that this sweep has measured; resume=false starts the others again

    def of(self, method: str) -> "Sweep":
        """Sweep of another method, based on the settings of its file."""
        changed = copy_config(self.cfg)
        changed.method = method_settings(method)
        return Sweep(changed, method, self.parts, folder=self.folder, prompts=self.prompts)

    def trial(self, settings: Mapping[str, Number], task: TaskSet) -> Trial:
        """The method at some settings; raises ValueError where it refuses them."""
        changed = copy_config(self.cfg)
        changed.method.update(settings)
        experiment = prepare(RunConfig.read(changed), self.method, self.parts, task)
        return Trial(settings=dict(settings), experiment=experiment)

    def full(self, task: TaskSet) -> Trial:
        """The full cache."""
        return Trial(settings={}, experiment=prepare(RunConfig.read(self.cfg).of_full(), FULL, self.parts, task))

    def measure(self, trials: Sequence[Trial], label: str) -> None:
        """Complete the records of trials on the same samples, from their journals first."""
        requests = trials[0].experiment.task.requests
        batch = trials[0].experiment.engine.most_requests
        with ExitStack() as stack:
            journals = [stack.enter_context(closing(self._journal(trial))) for trial in trials]
            total, done = sum(len(trial.experiment.keys) for trial in trials), sum(len(j.records) for j in journals)
            bar = stack.enter_context(Progress(label, total, done))
            # Group by group, and in each group setting by setting: room for the prompts of one group is enough.
            for start in range(0, len(requests), batch):
                group = requests[start : start + batch]
                for trial, journal in zip(trials, journals, strict=True):
                    if unfinished_groups(group, len(group), journal):
                        self._run(trial, group, journal, bar)
                self.prompts.settle()
            for trial, journal in zip(trials, journals, strict=True):
                trial.records = [journal.records[key] for key in trial.experiment.keys]

    def _journal(self, trial: Trial) -> Journal:
        durable.make_folder(self.folder)
        run = trial.experiment.hash
        journal = Journal(self.folder / f"{run[:HASH_DIGITS]}.jsonl", run=run, warn=note)
        if not self.cfg.resume and trial.experiment.hash not in self._begun:
            journal.clear()
        self._begun.add(trial.experiment.hash)
        return journal

    def _run(self, trial: Trial, group: Sequence[Request], journal: Journal, bar: Progress) -> None:
        experiment = trial.experiment
        # An engine of its own each time: it holds its page pool as long as it lives.
        engine = self.parts.make_engine(experiment.config, experiment.model, experiment.policy, prompts=self.prompts)
        finish(record_answers(engine, experiment.task, group, journal, bar, with_timing=False))
