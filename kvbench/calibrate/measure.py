"""Measures the points of a grid: every setting on the same prompts, each prompt read once for all of them.

Each point has a journal of its own, named by the hash of the run that it is. A kill loses no finished sample, and
another calibration that needs the same point takes it as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kvbench.config.files import FULL
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.results.identity import HASH_DIGITS
from kvbench.results.journal import Journal
from kvbench.results.sample import SampleRecord, journal_record
from kvbench.runs.experiment import Experiment, prepare, reference_config
from kvbench.runs.parts import Parts
from kvbench.runs.run import score_outcome, unfinished_groups
from kvbench.show.progress import Progress
from kvbench.tasks.taskset import TaskSet


@dataclass(kw_only=True)
class Point:
    """One setting of the method on one set of samples."""

    settings: dict
    """The tuned settings; empty for the full cache."""
    experiment: Experiment
    records: list[SampleRecord] = field(default_factory=list)
    """Journal records in request order, once it was measured."""


class Sweep:
    """Makes and measures points.

    Args:
        cfg: The experiment's settings.
        method: Name of the method's configuration.
        parts: The loaders.
        folder: Where the journals go.
        prompts: Prompts that were read.
        say: Takes one-line notes.
    """

    def __init__(
        self,
        cfg: DictConfig,
        method: str,
        parts: Parts,
        *,
        folder: Path,
        prompts: PromptCache,
        say: Callable[[str], None],
    ) -> None:
        self.cfg, self.method, self.parts = cfg, method, parts
        self.folder, self.prompts, self.say = folder, prompts, say
        self._begun: set[str] = set()  # points that this sweep has measured; resume=false starts the others again

    def point(self, settings: dict, task: TaskSet) -> Point:
        """The method at some settings.

        Raises:
            ValueError: The method refuses them.
        """
        changed = OmegaConf.create(OmegaConf.to_container(self.cfg, resolve=True))
        for name, value in settings.items():
            changed.method[name] = value
        return Point(settings=settings, experiment=prepare(changed, self.method, _on(self.parts, task)))

    def full(self, task: TaskSet) -> Point:
        """The full cache."""
        return Point(settings={}, experiment=prepare(reference_config(self.cfg), FULL, _on(self.parts, task)))

    def measure(self, points: Sequence[Point], label: str) -> None:
        """Fill the points' records, from their journals as far as they go.

        Args:
            points: Points on the same samples.
            label: Named on the progress bar.

        Raises:
            JournalError: The disk is full; what was measured stays.
        """
        requests = points[0].experiment.task.requests
        batch = self.cfg.batch_size
        with ExitStack() as stack:
            journals = [stack.enter_context(closing(self._journal(point))) for point in points]
            total, done = sum(len(point.experiment.keys) for point in points), sum(len(j.records) for j in journals)
            bar = stack.enter_context(Progress(label, total, done))
            # Group by group, and in each group setting by setting: room for the prompts of one group is enough.
            for start in range(0, len(requests), batch):
                group = requests[start : start + batch]
                for point, journal in zip(points, journals, strict=True):
                    if unfinished_groups(group, batch, journal):
                        self._run(point, group, journal, bar)
                self.prompts.settle()
            for point, journal in zip(points, journals, strict=True):
                point.records = [journal.records[key] for key in point.experiment.keys]

    def _journal(self, point: Point) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(self.folder / f"{point.experiment.hash[:HASH_DIGITS]}.jsonl", warn=self.say)
        if not self.cfg.resume and point.experiment.hash not in self._begun:
            journal.clear()
        self._begun.add(point.experiment.hash)
        return journal

    def _run(self, point: Point, group: Sequence[Request], journal: Journal, bar: Progress) -> None:
        experiment, by_id = point.experiment, {request.sample_id: request for request in group}

        def on_outcome(outcome: Outcome) -> None:
            if (outcome.sample_id, outcome.repeat) in journal:
                return
            request = by_id[outcome.sample_id]
            scores = score_outcome(experiment.task, request, outcome)
            record = journal_record(request, outcome, scores, experiment.task.protocol)
            del record["timing"]  # of a replayed prompt it would say nothing
            journal.append(record)
            bar.advance()

        # An engine of its own each time: it holds its page pool as long as it lives.
        engine = self.parts.make_engine(experiment.cfg, experiment.model, experiment.policy)
        engine.prompts = self.prompts
        engine.run(group, on_outcome=on_outcome, on_step=bar.step, sizing=experiment.task.requests)


def _on(parts: Parts, task: TaskSet) -> Parts:
    """The loaders, with the task at hand in place of the configured one."""
    return replace(parts, load_task=lambda *_, **__: task)
