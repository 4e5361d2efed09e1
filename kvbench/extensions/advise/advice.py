"""Evidence on every method for `kvbench advise`: losses, bytes, throughput, and their sources."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from omegaconf import DictConfig

from kvbench.config.files import FULL
from kvbench.evidence.compare import compare_group
from kvbench.evidence.compared import ComparedRun
from kvbench.evidence.load import Group, StoredRun, lets_through, patterns
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.named import NamedMethod, method_of, stored_method
from kvbench.results.measures import FIDELITY, SCORE, Measure
from kvbench.sizing.projection import Projection
from kvbench.sizing.shapes import NamedShape, preset_of
from kvbench.sizing.stored import changed_settings, tier_shares, usual_settings

ADVISED, ELSEWHERE, OPEN, UNMEASURED = "advised", "other model", "cannot tell", "not measured"
LOSES, UNSIZED, TOO_LARGE = "loses more", "bytes unknown", "too large"
MEANING = {  # the best first
    ADVISED: "it fits, and the whole interval of its loss on this model is within the margin",
    ELSEWHERE: "the same on another model",
    OPEN: "it fits, and the interval reaches beyond the margin",
    UNMEASURED: "it fits, and its quality was never compared with the full cache's",
    TOO_LARGE: "it does not fit",
    LOSES: "the whole interval is beyond the margin, whether it fits or not",
    UNSIZED: "its method is not for this model, or keeps what the text decides",
}
NEAR = 4  # a model, or a context, up to this many times as large as one that was measured is near it
FEW = 4  # a measurement with fewer than one in so many of another's samples does not count
HERE, STUDY, BYTES = "yours", "study", "bytes"
WHOSE = {  # the evidence of a row, the best first
    HERE: "your runs, under results_dir",
    STUDY: f"the repository's studies ({shipped.FOLDER})",
    BYTES: "counted, and nothing measured",
}
# Methods that are listed where no measurement exists.
SHIPPED = ("fp8", "engine_format tier=q8_0")  # of serving engines, where nothing was measured near the model
COUNTED = ("fp8", "int8", "int4", "kivi", "minikv", "snapkv", "pyramidkv", "h2o", "streaming_llm", "turboquant_4bit")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Deployment target: model, context, batch, memory and margin."""

    shape: NamedShape
    context_tokens: int
    answer_tokens: int
    batch: int
    memory_bytes: int | None
    """For the caches alone, below 0 where not even the weights fit; None for any."""
    margin: float
    """Loss that is accepted, in the metric's unit."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Throughput that a bench measured."""

    tokens_per_s: float
    model: str
    context_tokens: int


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The paired difference to the full cache on one task and model."""

    task: str
    model: str
    whose: str
    """A key of `WHOSE`."""
    same_model: bool
    """It was measured on the target model."""
    lost: float
    """Mean loss, positive when worse."""
    least: float | None
    """Smallest loss that the 95 % interval leaves open; None where it is not known."""
    most: float | None
    """Largest loss that the interval leaves open, the missing answers as bad as they can be."""
    num_samples: int
    needed: int | None
    """Samples needed to decide; None where that is not known."""
    longest_tokens: int
    """Of its prompts."""
    scale: float
    """Factor of a loss that is shown."""
    unit: str
    study: str = ""
    """The folder of the repository's study that measured it; empty for others."""


def counts(quality: Quality, target: Target) -> bool:
    """True where a measurement is evidence for a model and a context.

    It is of the model itself, or of one of nearly its size, on prompts of nearly the length.
    """
    if quality.same_model:
        return True
    known = preset_of(quality.model)
    mine, theirs = target.shape.parameters, known.parameters if known else None
    if mine is None or theirs is None or target.context_tokens > NEAR * quality.longest_tokens:
        return False
    return max(mine, theirs) <= NEAR * min(mine, theirs)


def _quality(row: ComparedRun, margin: float, **where: Any) -> Quality:
    """Loss of a comparison, and the samples needed where the present ones do not decide."""
    sign = -1 if row.what.higher_is_better else 1
    least = most = None
    if row.pairs.is_enough and not row.pairs.unfit:
        intervals = [None if one is None else one.interval[0] for one in (row.difference, *(row.extremes or ()))]
        least = None if row.interval is None else min(sign * end for end in row.interval)
        most = None if None in intervals else max(sign * end for ends in intervals if ends for end in ends)
    return Quality(
        lost=sign * row.value,
        least=least,
        most=most,
        num_samples=row.pairs.num_samples,
        needed=row.needed if most is None or least is None or least <= margin < most else None,
        scale=row.what.scale,
        unit=row.what.unit,
        **where,
    )


@dataclass(kw_only=True)
class Advice:
    """Evidence on one method and setting."""

    target: Target
    label: str
    method: str
    settings: dict[str, Any]
    """The settings that differ from the method's configuration."""
    known: NamedMethod | None
    """None where today's code no longer fits its settings."""
    speeds: list[Speed]
    runs: list[StoredRun] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)

    @cached_property
    def bytes_of(self) -> Projection | None:
        """Bytes of one sequence on the target model; None where they cannot be known."""
        if self.known is None:
            return None
        answer = self.target.answer_tokens
        sizes = self.target.shape, self.target.context_tokens - answer, answer
        shares = tier_shares(chain.from_iterable(run.samples.values() for run in self.runs))
        try:
            projections = self.known.outline(*sizes, shares)
            if projections is None and not shares:
                shares = shipped.shares_in_study(self.method, self.known, self.target.shape.name)[0]
                projections = self.known.outline(*sizes, shares)
        except ValueError:  # a table of heads, a window or a group that is for another shape
            return None
        return projections

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all sequences."""
        return None if self.bytes_of is None else self.target.batch * self.bytes_of.resident_bytes

    @cached_property
    def worst(self) -> Quality | None:
        """The decisive measurement: on the same model, where there is any.

        Of one task that with the most samples; of tasks with nearly as many samples, the one with the greatest possible
        loss.
        """
        best = any(item.same_model for item in self.quality)
        best_known = [item for item in self.quality if item.same_model == best]
        most = max((item.num_samples for item in best_known), default=0)
        best_known = [item for item in best_known if FEW * item.num_samples >= most]
        return max(best_known, key=lambda item: (item.most is None, item.most or 0.0, item.lost), default=None)

    @property
    def speed(self) -> Speed | None:
        """The measurement nearest to the target: of the same model first, then of the nearest length."""
        name, length = self.target.shape.name, self.target.context_tokens
        near = lambda item: (item.model != name, abs(item.context_tokens - length))  # noqa: E731
        return min(self.speeds, key=near, default=None)

    @property
    def measured_rate(self) -> float:
        """Tokens per second on the target model; 0 where none were measured."""
        return self.speed.tokens_per_s if self.speed and self.speed.model == self.target.shape.name else 0.0

    @cached_property
    def says(self) -> str:
        """Strongest supported conclusion, a key of `MEANING`."""
        worst, margin = self.worst, self.target.margin
        if worst is not None and worst.least is not None and worst.least > margin:
            return LOSES  # first, since it needs no bytes
        if self.total_bytes is None:
            return UNSIZED
        if self.target.memory_bytes is not None and self.total_bytes > self.target.memory_bytes:
            return TOO_LARGE
        if self.method == FULL:
            return ADVISED
        if worst is None:
            return UNMEASURED
        if worst.most is not None and worst.most <= margin:
            return ADVISED if worst.same_model else ELSEWHERE
        return OPEN

    @property
    def whose(self) -> str:
        """Source of the evidence, a key of `WHOSE`."""
        return BYTES if self.worst is None else self.worst.whose

    @property
    def rank(self) -> tuple:
        """Sort key, the best first: conclusion, measured throughput, bytes; the loss of methods that lose more."""
        says = self.says
        size = (self.worst.lost if self.worst else 0.0) if says == LOSES else float(self.total_bytes or 0)
        return list(MEANING).index(says), -self.measured_rate, size, self.label


def gather(
    groups: list[Group], cfg: DictConfig, target: Target, speeds: Mapping[str, list[Speed]]
) -> tuple[list[Advice], list[str]]:
    """Gather the evidence on every method and setting, one entry each, and notes on it."""
    advice: dict[str, Advice] = {}
    notes: list[str] = []
    is_study = shipped.is_study(cfg.results_dir)
    for group in groups:
        try:
            rows, said = compare_group(group, cfg, has_verdicts=False)
        except ValueError as error:
            notes.append(f"{group.title}: {error}")
            continue
        notes += [*group.notes, *said]
        quality = {row.run.name: row for row in rows if row.run is not None}
        for run in group.runs:
            if run in group.repeats:
                continue
            known, identity = stored_method(run.record.identity), run.record.identity.get("method") or {}
            key = known.text if known is not None else f"{run.method} {identity}"
            if key not in advice:
                advice[key] = _entry(run.method, identity, known, target, speeds.get(key, []), run.label)
            advice[key].runs.append(run)
            if row := quality.get(run.name):
                longest = max((record["num_prompt_tokens"] for record in run.samples.values()), default=0)
                where = {"task": group.task, "model": group.model, "same_model": target.shape.is_called(group.model)}
                where["study"] = str(cfg.results_dir) if is_study else ""
                advice[key].quality.append(
                    _quality(row, target.margin, whose=STUDY if is_study else HERE, longest_tokens=longest, **where)
                )
    if cfg.study and not is_study:
        for label, quality_there in _of_study(cfg, target):
            _add(advice, label, target, speeds).quality.append(quality_there)
    nothing = not any(item.quality for item in advice.values())
    far = not any(counts(quality, target) for item in advice.values() for quality in item.quality)
    for label in SHIPPED if far and not nothing else ():
        if _wanted(cfg.methods, label.split()[0]):
            _add(advice, label, target, speeds)
    for name in (FULL, *(COUNTED if nothing else ())):
        if not any(item.method == name for item in advice.values()) and (name == FULL or _wanted(cfg.methods, name)):
            _add(advice, name, target, speeds)
    return list(advice.values()), list(dict.fromkeys(notes))


def _add(advice: dict[str, Advice], label: str, target: Target, speeds: Mapping[str, list[Speed]]) -> Advice:
    """The entry of a method in words such as `kivi bits=2`, a new one where there is none."""
    known = method_of(label)
    key, method = known.text, label.split()[0]
    if key not in advice:
        settings = {name: known.settings.get(name, value) for name, value in usual_settings(method).items()}
        advice[key] = _entry(method, settings, known, target, speeds.get(key, []), label)
    return advice[key]


def of_study(row: shipped.StudyLoss, what: Measure, target: Target) -> Quality:
    """A loss that a study of the repository measured, as evidence for the target."""
    sign = -1 if what.higher_is_better else 1
    least, most = sorted((sign * row.low, sign * row.high))
    return Quality(
        task=row.task,
        model=row.model,
        whose=STUDY,
        same_model=target.shape.is_called(row.model),
        lost=sign * row.difference,
        least=least,
        most=most,
        num_samples=row.samples,
        needed=None,
        longest_tokens=row.longest_tokens,
        scale=what.scale,
        unit=what.unit,
        study=row.study,
    )


def _of_study(cfg: DictConfig, target: Target) -> Iterator[tuple[str, Quality]]:
    """The losses of the repository's studies that the filters let through, by the words of their methods."""
    what = FIDELITY.get(str(cfg.metric), SCORE)
    for row in shipped.losses(str(cfg.metric)):
        named = {"models": row.model, "tasks": row.task, "methods": row.method}
        if not all(_wanted(cfg[name], value) for name, value in named.items()):
            continue
        yield row.label, of_study(row, what, target)


def _wanted(wanted: object, name: str) -> bool:
    """True where a filter lets a name through; an empty one does."""
    return lets_through(patterns(wanted) or None, name)


def _entry(
    method: str, stored: Mapping[str, Any], known: NamedMethod | None, target: Target, speeds: list[Speed], label: str
) -> Advice:
    return Advice(
        target=target, label=label, method=method, settings=changed_settings(method, stored), known=known, speeds=speeds
    )
