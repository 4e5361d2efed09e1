"""The records of a run: its folder, and the typed content of `run.json`.

results/<task>/<model>/<method>/<hash>/
    config.yaml     the resolved configuration
    run.json        `RunRecord` below
    samples.jsonl   one `kvbench.results.sample.SampleRecord` per finished sample; may be packed as samples.jsonl.xz
    samples.dropped.jsonl   lines that were in it and do not count; absent where there were none
    result.png      the picture of the run
"""

import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kvbench.errors import FileContent, FileMissing
from kvbench.results.claims import contradiction
from kvbench.results.identity import hash_identity
from kvbench.results.provenance import Git, Machine, Versions
from kvbench.results.typed import MAX_BYTES, Misfit, parse, read_json
from kvbench.results.writing import write_record
from kvbench.rules.files import read_regular
from kvbench.stats.intervals import Estimate
from kvbench.stats.strata import Weighting

SCHEMA_VERSION = 1


_SETTINGS = ("task", "method")  # parts of an identity
_FULL = "kvbench.methods.full."
CHUNK_LABEL = "prefill_chunk"  # in a protocol: tokens of a prompt that were read at once; absent where it was all


class TaskIdentity(typing.TypedDict, total=False):
    """The part of `RunRecord.identity` that is about the task."""

    name: str
    """Name of the task."""
    fingerprint: str
    """Hash of what is asked and how it is scored."""
    protocol: dict
    """As `RunRecord.protocol`."""
    limit: int | str | None
    """Samples per subset, or `first:n`; None for all."""


# The parts of an identity that readers look into; the others are not checked.
IDENTITY: dict[str, typing.Any] = {
    "task": TaskIdentity,
    "code": dict[str, str],
    **dict.fromkeys(("model", "method", "generation", "store", "fidelity"), dict),
}


@dataclass(kw_only=True)
class Metric(Estimate):
    """One metric of the task, over all subsets (with the weights that `RunRecord.weighting` names) and for each."""

    higher_is_better: bool = True
    """Direction of the metric."""
    description: str = ""
    """One sentence on what it measures."""
    primary: bool = False
    """True for the metric that tables and plots show."""
    subsets: dict[str, Estimate] = field(default_factory=dict)
    """The same for each subset by itself."""


@dataclass(kw_only=True)
class Comparison:
    """The difference to the full cache on the same samples."""

    reference: str = ""
    """Folder of the full-cache run, relative to the results folder."""
    metric: str = ""
    """The metric that is compared: the task's primary one."""
    difference: Estimate = field(default_factory=Estimate)
    """This run minus the reference, over the samples that ended well in both."""
    num_worse: int = 0
    """Samples with a worse score than the reference."""
    num_better: int = 0
    """Samples with a better score than the reference."""


@dataclass(kw_only=True)
class Counts:
    """Numbers of samples by what happened to them. Samples here are answers: prompts times answers per prompt."""

    total: int = 0
    """Answers the run consists of."""
    samples: int | None = None
    """Prompts the run consists of; None in older records, of which `RunRecord.num_prompts` knows it."""
    done: int = 0
    """Answers in the journal, of any status."""
    ok: int = 0
    """Answers that were scored."""
    nan: int = 0
    """Answers given up because logits or scores were not finite. They are left out of the scores, not counted as
    wrong."""
    oom: int = 0
    """Answers that did not fit in memory or in the page budget. They are left out of the scores, not counted as
    wrong."""
    ungraded: int = 0
    """Answers whose grader failed, or could not judge the right answer in time either. They are left out of the scores,
    not counted as wrong."""
    truncated: int = 0
    """Prompts the task's rule had to shorten."""
    quarantined: int = 0
    """Rows of the data that were set aside: they could not be read, or nothing can be graded against them."""
    copies: int = 0
    """Rows of the data that are the same as an earlier one, or have the same id; they are asked and counted again."""
    damaged: int = 0
    """Journal lines that a crash had torn, that were edited, or that another run wrote; their samples were done
    again."""


@dataclass(kw_only=True)
class Session:
    """One stretch of work on the run; a run that was stopped and resumed has several."""

    started: str = ""
    """Start, ISO 8601 in UTC."""
    ended: str = ""
    """End, ISO 8601 in UTC; empty when the process was killed."""
    wall_s: float = 0.0
    """Seconds spent on the samples of this session, model loading apart."""
    num_done: int = 0
    """Answers finished in this session."""
    asked_again: int = 0
    """Answers that were given once more, with the requests in another order, where they may hang on the rows next to
    them (`batch: free`)."""
    differing: int = 0
    """Of those asked again: answers with another token or status."""
    command: list[str] = field(default_factory=list)
    """The words after `python -m kvbench` that began it, those of one job of a sweep; empty when called from Python. A
    full-cache run that another run needed has that run's."""
    worker: str = ""
    """Name of the worker, where it had items of a manifest; else empty."""
    versions: Versions | None = None
    """Installed libraries."""
    git: Git = field(default_factory=Git)
    """State of the source tree."""
    machine: Machine | None = None
    """Hardware and thread settings."""


@dataclass(kw_only=True)
class DriftBin:
    """Fidelity in one stretch of the forced answers. Means are over all tokens there, of however many samples."""

    first: int = 0
    """Position of its first token in the answer, from 0."""
    last: int | None = None
    """Position of its last token; None: it has no end."""
    num_tokens: int = 0
    """Tokens that were predicted from the compressed cache."""
    num_samples: int = 0
    """Answers that reach this far."""
    nll: float = 0.0
    """Nats per token."""
    nll_full: float = 0.0
    """The same with the full cache."""
    kl: float = 0.0
    """Divergence from the full cache, nats per token."""
    top1: float = 0.0
    """Share of the tokens with the same first choice as the full cache."""


@dataclass(kw_only=True)
class Timing:
    """Speed of the run. Never part of what is compared between two runs."""

    prefill_s: float | None = None
    """Mean seconds to process one prompt."""
    probe_s: float | None = None
    """Of these, the seconds of a method's second pass over it; None without one."""
    decode_tokens_per_s: float | None = None
    """Generated tokens per second of decoding, over all rows of a batch together."""
    decode_tokens: int = 0
    """Tokens generated in the decoding steps that were timed."""
    wall_s: float = 0.0
    """Seconds spent on samples, over all sessions."""


class UnreadableRecord(FileContent):
    """A `run.json` that holds no record which this kvbench can read."""


@dataclass(kw_only=True)
class RunRecord:
    """The content of `run.json`."""

    schema_version: int = SCHEMA_VERSION
    """Rises when a field changes its meaning."""
    status: typing.Literal["running", "stopped", "complete", "failed"] = "running"
    """`running` (also after a kill), `stopped` (by a signal that can be answered), `complete`, or `failed`."""
    message: str = ""
    """Error or signal that ended it."""
    remark: str = ""
    """A word of the method on its work that readers should know, such as the share that a threshold kept."""
    task: str = ""
    """Name of the task."""
    model: str = ""
    """Name of the model."""
    method: str = ""
    """Name of the method: its file in conf/method/."""
    model_remark: str = ""
    """A wish for the model that could not be had, such as matrices packed for another processor; empty without one."""
    weights_bytes: int | None = None
    """Bytes of the model's weights as they were loaded; None where that is not known, and in older records."""
    prompt_only: bool = False
    """The method keeps whatever follows the prompt whole."""
    experiment: str = ""
    """Name of the file of the user's own that set several settings at once (`experiment=`); empty without one."""
    hash: str = ""
    """SHA-256 over `identity`; its first digits name the folder."""
    sealed: bool = False
    """Every line of `samples.jsonl` has a seal, so that one without does not count; False in older records."""
    revision: int = 0
    """Of the code that began it: which faults were mended (`kvbench.results.faults`); 0 in older records."""
    identity: dict = field(default_factory=dict)
    """Everything that can change an answer; compare two of these to see why two runs are not the same run."""
    protocol: dict = field(default_factory=dict)
    """Every choice of how the task is posed and scored."""
    backend: str = ""
    """Name of the kernels that ran, after `auto` was resolved."""
    backend_fallbacks: list[str] = field(default_factory=list)
    """Operations that plain torch did because the backend has no kernel for them; speed is no claim where there are
    any."""
    backend_decode: list[str] = field(default_factory=list)
    """Attention kernel of decode steps, where the backend has a choice: cuda, triton or torch, and behind a
    colon why it was not what `backend.decode` says; empty elsewhere, and in older records."""
    graphs: dict[str, int] = field(default_factory=dict)
    """Decode steps of the last session that made any: `replayed` from a CUDA graph, `eager_in_runs` between them, and
    `one_at_a_time`, for which the host waits; `captures`, and `failed_captures`, after one of which no graphs are used.
    Empty where none are from the beginning, as on a CPU."""
    seed: int = 0
    """Seed of sampling, data and policy."""
    versions: Versions | None = None
    """Installed libraries, of the last session."""
    git: Git = field(default_factory=Git)
    """State of the source tree, of the last session."""
    machine: Machine | None = None
    """Hardware and thread settings, of the last session."""
    started: str = ""
    """First start, ISO 8601 in UTC."""
    ended: str = ""
    """Last end, ISO 8601 in UTC."""
    sessions: list[Session] = field(default_factory=list)
    """Every stretch of work."""
    counts: Counts = field(default_factory=Counts)
    """Samples by outcome."""
    weighting: Weighting = "subset"
    """The unit that weighs the same in every mean over subsets: each `subset` or each `sample`, as its makers say."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """The task's scores, each with n and a 95 % interval."""
    task_aggregate: dict = field(default_factory=dict)
    """The task's own report (its own means and groups), as it gives it."""
    fidelity: dict[str, Estimate] = field(default_factory=dict)
    """Teacher-forced comparison with the full cache on the gold answers, or on its own (`fidelity.on`): over a sample's
    tokens, then its subset's samples, then the subsets, each with the number of samples that have it."""
    drift: list[DriftBin] = field(default_factory=list)
    """The same along the answers."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Bytes per sample and their ratios to the FP16 full cache of the same tokens, averaged over samples."""
    kept: dict[str, float] = field(default_factory=dict)
    """The method's work, averaged over samples."""
    timing: Timing = field(default_factory=Timing)
    """Speed."""
    comparison: Comparison | None = None
    """Difference to the full cache; None for the full cache itself and with `reference=none`."""
    quarantined: list[dict] = field(default_factory=list)
    """The first rows of the data that were set aside: file, line, reason."""
    unused_fields: list[str] = field(default_factory=list)
    """Fields of the data's rows that nothing reads, as `file: field, field`."""
    missing_subsets: list[str] = field(default_factory=list)
    """Subsets that were left out, as their data was not at hand."""

    @property
    def primary(self) -> str:
        """Name of the primary metric, or an empty string."""
        return next((name for name, metric in self.metrics.items() if metric.primary), "")

    @property
    def contradiction(self) -> str:
        """Contradictions of its claims (task, metrics) with its identity or the task's declaration, or empty."""
        task, method = (
            part_settings if isinstance(part_settings := self.identity.get(part), dict) else {} for part in _SETTINGS
        )
        name, posed = task.get("name", self.task), task.get("protocol")
        claims: dict[str, tuple[typing.Any, typing.Any]] = {"task": (self.task, name)}
        claims |= {
            what: (getattr(self, what), self.identity.get(what))
            for what in ("backend", "seed")
            if what in self.identity
        }
        if isinstance(posed, dict):  # all of the protocol but names of files
            claims |= {f"protocol {key}": (self.protocol.get(key), value) for key, value in posed.items()}
        for what, (claim, known) in claims.items():
            if claim != known:
                return f"claims the {what} {claim}, and its identity is of {known}"
        target = str(method.get("_target_", _FULL))
        if self.method == "full" and not target.startswith(_FULL):  # the reference of every other method
            return f"claims the method {self.method}, and its identity is of {target}"
        metrics = {name: (metric.higher_is_better, metric.primary) for name, metric in self.metrics.items()}
        return contradiction(name, metrics, self.weighting)

    @property
    def answers_each(self) -> int | None:
        """Answers to each prompt; None where the record does not say."""
        each = self.protocol.get("num_samples")
        if self.counts.samples:
            each = self.counts.total // self.counts.samples
        elif self.protocol.get("metric") == "choice":  # the choices of a prompt are scored once, whatever is sampled
            each = 1
        return each if type(each) is int and each >= 1 else None

    @property
    def num_prompts(self) -> int | None:
        """Samples that the run consists of, answered or not; None where the record does not say."""
        each, metric = self.answers_each, self.metrics.get(self.primary)
        if self.counts.samples is not None or each is None:
            return self.counts.samples
        count, rest = divmod(self.counts.total, each)
        return None if rest or not count or (metric is not None and metric.num_samples > count) else count

    def note_backend(self, fallbacks: Iterable[str], graphs: dict[str, int], decodes: Iterable[str]) -> None:
        """Merge the backend facts of one session with those of earlier sessions."""
        self.backend_fallbacks = sorted({*self.backend_fallbacks, *fallbacks})
        self.backend_decode = sorted({*self.backend_decode, *decodes})
        self.graphs = graphs or self.graphs

    def save(self, folder: Path) -> None:
        """Write `run.json` in one atomic step."""
        write_record(folder / "run.json", self, _read)

    @classmethod
    def load(cls, folder: Path) -> "RunRecord | None":
        """Read `run.json`; None when the folder has none yet.

        Raises:
            UnreadableRecord: It is not JSON, of another schema version, a field has another type than here, the
                identity was edited (the numbers of one run would stand under the settings of another), or it claims of
                a metric what its task does not.
            ValueError: The file cannot be read.
        """
        path = folder / "run.json"
        try:
            content = read_json(read_regular(path, MAX_BYTES))
        except FileNotFoundError:
            if path.is_symlink():
                raise FileMissing(f"{path} is a link that leads nowhere; remove it") from None
            return None
        except OSError as error:
            raise FileMissing(f"{path} cannot be read: {error.strerror}; use another results_dir") from error
        except ValueError as error:
            why = f"is not readable as JSON ({error}); remove it, the samples beside it are kept"
            raise UnreadableRecord(f"{path} {why}") from error
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise UnreadableRecord(
                f"{path} has schema version {version!r}, this kvbench reads {SCHEMA_VERSION}; use another results_dir"
            )
        try:
            record = _read(content)
        except Misfit as error:
            raise UnreadableRecord(
                f"{path} has fields this kvbench does not know ({error}); use another results_dir"
            ) from error
        if record.hash and hash_identity(record.identity) != record.hash:
            raise UnreadableRecord(
                f"{path} was edited: its identity is not the one that its hash {record.hash[:12]} names; remove it, "
                "the samples beside it are kept"
            )
        if why := record.contradiction:
            raise UnreadableRecord(f"{path} {why}; remove it, the samples beside it are kept")
        return record


def now() -> str:
    """The time, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(content: object) -> RunRecord:
    """The record that JSON holds; raises Misfit for another form."""
    record: RunRecord = parse(content, RunRecord)
    for part, inner in record.identity.items():
        parse(inner, IDENTITY.get(part, typing.Any), f"identity.{part}")
    return record
