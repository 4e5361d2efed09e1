"""A stored run with its samples, and the group of runs it may be compared with."""

from collections import Counter
from dataclasses import dataclass, field

from kvbench.config.files import FULL
from kvbench.results.record import RunRecord
from kvbench.results.sample import Key, SampleRecord

CONDITIONS = ("batch_size", "backend")  # may differ inside a group: they change rounding, not the question


@dataclass(kw_only=True)
class StoredRun:
    """One run as it lies in the results folder."""

    name: str
    """Folder, relative to the results folder."""
    record: RunRecord
    """Content of `run.json`."""
    samples: dict[Key, SampleRecord]
    """Whole journal records, of any status."""
    total: int | None
    """Answers the run consists of; None when the run was killed and no other run of its group tells."""
    label: str = ""
    """Method and the settings that tell it from the other runs of its group."""

    @property
    def method(self) -> str:
        """Name of the method's configuration."""
        return self.record.method

    @property
    def complete(self) -> bool:
        """Every answer is there."""
        return self.record.status == "complete"

    @property
    def settings(self) -> dict:
        """Everything a filter may ask for, by its short name."""
        identity = self.record.identity
        flat = {**identity.get("task", {}).get("protocol", {}), **identity.get("method", {})}
        return {**flat, "seed": self.record.seed} | {name: identity.get(name) for name in CONDITIONS}

    @property
    def conditions(self) -> tuple:
        """What may differ between two runs of the same thing: batch size and backend."""
        return tuple(str(self.record.identity.get(name)) for name in CONDITIONS)

    @property
    def progress(self) -> str:
        """How many answers there are, in words: `12 of 24 answers`."""
        return f"{len(self.samples)} of {'an unknown number of' if self.total is None else self.total} answers"


@dataclass(kw_only=True)
class Group:
    """Runs of one model on one set of questions, made by one version of the code."""

    task: str
    model: str
    title: str
    """Task and model, and what tells this group from another of the same two."""
    runs: list[StoredRun] = field(default_factory=list)
    """Runs with at least one finished sample, by method; complete or not."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: which runs are incomplete, failed or of another version."""

    @property
    def reference(self) -> StoredRun | None:
        """The full-cache run under the conditions most of the others ran in; None without one."""
        usual = Counter(run.conditions for run in self.runs if run.method != FULL).most_common()
        order = [conditions for conditions, _ in usual]

        def rank(run: StoredRun) -> tuple:
            place = order.index(run.conditions) if run.conditions in order else len(order)
            return not run.complete, str(run.settings.get("tier")) != "fp16", place, run.name

        return min((run for run in self.runs if run.method == FULL), key=rank, default=None)

    @property
    def repeats(self) -> list[StoredRun]:
        """Other full-cache runs of the same precision: the same computation with another batch size or backend."""
        reference = self.reference
        if reference is None:
            return []
        same = reference.record.identity.get("method")
        others = (run for run in self.runs if run.method == FULL and run is not reference and run.complete)
        return [run for run in others if run.record.identity.get("method") == same]
