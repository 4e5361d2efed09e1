"""Stored runs with their samples, and groups of them, on which every reader of results works.

Also the one rule by which a group's reference is chosen.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.config.files import FULL, FULL_STORE
from kvbench.results.measures import COSTS, Measure
from kvbench.results.record import RunRecord
from kvbench.results.sample import Key, SampleRecord
from kvbench.show.unfit import unfit

CONDITIONS = ("batch_size", "batch", "backend")  # may differ inside a group: they change rounding, not the question
OF_TASK = ("task", "python")  # entries of a run's code, up to a colon, that say how its answers are posed and scored


@dataclass(kw_only=True)
class StoredRun:
    """One stored run with its samples."""

    name: str
    """Folder, relative to the results folder."""
    record: RunRecord
    samples: dict[Key, SampleRecord]
    """Whole journal records, of any status."""
    total: int | None
    """Answers the run consists of; None when the run was killed and no other run of its group has the number."""
    label: str = ""
    """Method and the settings that distinguish it from the other runs of its group."""
    apart: str = ""
    """Its model, in a group of several; else empty."""

    @property
    def method(self) -> str:
        """Name of the method's configuration."""
        return self.record.method

    @property
    def complete(self) -> bool:
        """True where every answer is there."""
        return self.record.status == "complete"

    @property
    def has_scores(self) -> bool:
        """True where `run.json` has a score, which it gets when a run ends or is stopped."""
        return any(metric.value is not None for metric in self.record.metrics.values())

    @property
    def settings(self) -> dict:
        """Filterable settings by their short names."""
        identity = self.record.identity
        flat = {**identity.get("task", {}).get("protocol", {}), **identity.get("method", {})}
        return {**flat, "seed": self.record.seed} | {name: identity.get(name) for name in CONDITIONS}

    @property
    def conditions(self) -> tuple[str, ...]:
        """Batch size and backend, which may differ between two runs of the same thing."""
        return tuple(str(self.record.identity.get(name)) for name in CONDITIONS)

    @property
    def method_key(self) -> str:
        """Method and its settings, the key of the run across groups."""
        settings = json.dumps([self.record.identity.get(part) for part in ("method", "store")], sort_keys=True)
        return f"{self.apart} {self.method} {settings}" if self.apart else f"{self.method} {settings}"

    @property
    def key(self) -> str:
        """`method_key` and the conditions."""
        return " ".join([self.method_key, *self.conditions])

    @property
    def version(self) -> str:
        """Version of the code that computed the run, without the method's code, the task's, and their libraries.

        Its first word is a short form of all of it (`bee5518e-3f2a`: harness, libraries), and is no number.
        """
        code = self.record.identity.get("code", {})
        not_shared = ("harness", "method", *OF_TASK)
        shared = {name: version for name, version in code.items() if name.partition(":")[0] not in not_shared}
        libraries = " ".join(f"{name} {version}" for name, version in shared.items())
        return f"{code.get('harness', '')[:8]}-{hashlib.sha256(libraries.encode()).hexdigest()[:4]} {libraries}"

    @property
    def answered(self) -> set[Key]:
        """The answers that ended well."""
        return {key for key, record in self.samples.items() if record["status"] == "ok"}

    @property
    def progress(self) -> str:
        """Progress in words: `12 of 24 answers`."""
        return f"{len(self.samples)} of {'an unknown number of' if self.total is None else self.total} answers"


@dataclass(kw_only=True)
class Group:
    """Runs of one model on one set of questions, made by one version of the code."""

    task: str
    model: str
    title: str
    """Task and model, and the settings that distinguish this group from another of the same two."""
    runs: list[StoredRun] = field(default_factory=list)
    """At least one run, each with a finished sample, by method; complete or not."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the reader: which runs are incomplete, failed or of another version."""
    largest: str = ""
    """The model with the most bytes of weights, in a group of several; else empty."""
    axes: Mapping[str, Measure] = field(default_factory=lambda: COSTS)
    """Costs that its quality can be drawn against."""

    @property
    def reference(self) -> StoredRun | None:
        """Full-cache run with the store options of a reference that lacks the fewest answers; None without one.

        Of several the FP16 one, under the most common conditions of the other runs.
        """
        usual = Counter(run.conditions for run in self.runs if run.method != FULL).most_common()
        order = [conditions for conditions, _ in usual]

        def rank(run: StoredRun) -> tuple:
            position = order.index(run.conditions) if run.conditions in order else len(order)
            is_fp16, store = str(run.settings.get("tier")) == "fp16", run.record.identity.get("store") or {}
            is_usual = all(store.get(name, value) == value for name, value in FULL_STORE.items())
            is_whole = run.apart != self.largest, not run.complete, not is_usual, -len(run.answered)
            return *is_whole, not is_fp16, position, run.name

        return min((run for run in self.runs if run.method == FULL), key=rank, default=None)

    def unfit(self, what: Measure) -> str:
        """Reason why no run can be judged by a score of the full cache (`kvbench.show.unfit`); empty where it can."""
        return unfit(self.reference.samples.values(), what) if self.reference else ""

    @property
    def repeats(self) -> list[StoredRun]:
        """Other full-cache runs of the same precision and store that have every answer of the reference.

        They are the same computation with another batch size or backend.
        """
        reference = self.reference
        if reference is None:
            return []
        others = (run for run in self.runs if run.method_key == reference.method_key and run is not reference)
        return [run for run in others if run.complete and run.answered >= reference.answered]
