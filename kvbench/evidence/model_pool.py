"""Runs of several models on the same questions in one group, at equal bytes of weights and cache.

Is a compressed cache on a large model worth more than a full one on a small model?

Models have different tokenizers, so their prompts differ. The questions must be the same: the task, its protocol except
for the chat template, the seed, the name of each sample and its right answers. Samples that differ in these are left
out, with a note.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.errors import SettingMissing, SettingValue, check_whole, unknown_name
from kvbench.evidence.load import Group, StoredRun
from kvbench.results.measures import TOTAL
from kvbench.results.refusals import NoResults
from kvbench.results.sample import Key, SampleRecord
from kvbench.show.progress import format_bytes
from kvbench.sizing.shapes import presets, size_of_weights

# Of a protocol: what a model's own tokenizer and chat template decide.
MODEL_SETTINGS = ("chat", "chat_template")


@dataclass(frozen=True, kw_only=True)
class Total:
    """Setting `together`: the sequences and weights whose bytes are added up."""

    context: int | None = None
    """Tokens of each sequence; None for those of the samples."""
    sequences: int = 1
    """Concurrent sequences per copy of the weights."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Model -> bytes of its weights, where they are to be other ones than the run's."""

    @classmethod
    def read(cls, value: object) -> "Total | None":
        """The setting: null, or any of the three by name; raises ValueError for others."""
        if value is None:
            return None
        settings: Any = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if not isinstance(settings, Mapping):
            raise SettingValue(
                f"together={settings} is none of its settings; write together={{}}, or for example "
                "'together={context:32768,sequences:4,weights:{my-8b:4.5GiB}}'",
                setting="together",
            )
        if unknown := [name for name in settings if name not in cls.__dataclass_fields__]:
            raise unknown_name("together", unknown[0], list(cls.__dataclass_fields__))
        context, sequences = settings.get("context"), settings.get("sequences", 1)
        if context is not None:
            check_whole("together.context", context, 1)
        weights = settings.get("weights") or {}
        sizes = {str(name): size_of_weights(f"together.weights of {name}", size) for name, size in weights.items()}
        return cls(context=context, sequences=check_whole("together.sequences", sequences, 1), weights=sizes)

    def weights_of(self, run: StoredRun) -> float | None:
        """Bytes of the weights of a run's model: by the setting, as loaded, or as known of its name; None otherwise."""
        known = presets().get(run.record.model)
        said = self.weights.get(run.record.model), run.record.weights_bytes, known.weights_bytes if known else None
        return next((size for size in said if size is not None), None)

    def of(self, record: SampleRecord, weights: float) -> float | None:
        """Bytes of the weights and of sequences like a sample; None where it does not say what it held."""
        held, whole = (record["ledger"].get(name) for name in ("resident_bytes", "fp16_bytes"))
        tokens = record["kept"].get("tokens_seen")
        if held is None or not whole or not tokens:
            return None
        each = held if self.context is None else held / tokens * self.context
        return weights + self.sequences * each

    @property
    def words(self) -> str:
        """Description of the cache bytes that are added to the weights."""
        each = "a sample's cache" if self.context is None else f"the cache of {self.context} tokens"
        return f"{self.sequences} times {each}"


def pool_models(groups: Sequence[Group], cfg: DictConfig | Mapping) -> list[Group]:
    """Merge groups of several models on the same questions into one each, where the setting `together` is set.

    Raises:
        ValueError: The setting is wrong, the weights of a model are not known, or no two models have the same
            questions.
    """
    total = Total.read(cfg.get("together"))
    if total is None:
        return list(groups)
    alike: dict[str, list[Group]] = {}
    for group in groups:
        alike.setdefault(_question_key(group), []).append(group)
    pooled = [_join(members, total) if len(members) > 1 else members[0] for members in alike.values()]
    if not any(group.largest for group in pooled):
        titles = "; ".join(group.title for group in groups)
        raise NoResults(
            f"together: no two models were asked the same questions by the same version of the code ({titles}); run "
            "both with the same task, protocol and seed",
            setting="together",
        )
    return pooled


def _question_key(group: Group) -> str:
    """Key of the questions of a group: equal for groups of different models that can be pooled."""
    run = group.runs[0]
    identity, task = run.record.identity, run.record.identity.get("task", {})
    protocol = {key: value for key, value in task.get("protocol", {}).items() if key not in MODEL_SETTINGS}
    parts = [group.task, protocol, identity.get("generation"), identity.get("seed"), run.version]
    return json.dumps(parts, sort_keys=True)


def _join(groups: Sequence[Group], total: Total) -> Group:
    """One group of several: the samples that all models have, each with the bytes of weights and cache."""
    sizes: dict[str, float] = {}
    for group in groups:
        weights = total.weights_of(group.runs[0])
        if weights is None:
            raise SettingMissing(
                f"together: the weights of {group.model} are not known; give them, as in "
                f"'together={{weights:{{{group.model}:4.5GiB}}}}'",
                setting="together.weights",
            )
        sizes[group.model] = weights
    if len(sizes) < len(groups):
        models = ", ".join(group.title for group in groups)
        raise NoResults(
            f"together: several groups of one model were asked the same ({models}); choose with models=",
            setting="together",
        )
    answers = [_right_answers(group) for group in groups]
    same = {key for key in set.intersection(*map(set, answers)) if len({answer[key] for answer in answers}) == 1}
    if not same:
        raise NoResults(
            f"together: {' and '.join(sizes)} share no sample with the same right answers; a task whose questions "
            "depend on the tokenizer cannot be compared between them",
            setting="together",
        )
    most = max(map(len, answers))
    notes = [note for group in groups for note in group.notes]
    notes += [f"{most - len(same)} of {most} samples are not the same for all models, and left out"] * (
        len(same) < most
    )
    notes.append(
        f"weights and cache: {', '.join(f'{name} {format_bytes(size)}' for name, size in sizes.items())}, and "
        f"{total.words}; a cache grows with its tokens as it did in the run"
    )
    names = sorted(sizes, key=lambda name: -sizes[name])
    return replace(
        groups[0],
        model=" and ".join(names),
        title=f"{groups[0].task} with {' and '.join(names)}",
        runs=[_moved(run, same, sizes[group.model], total) for group in groups for run in group.runs],
        notes=notes,
        largest=names[0],
        axes={TOTAL.name: TOTAL},
    )


def _right_answers(group: Group) -> dict[Key, str]:
    """Sample and repeat -> its subset and its right answers, as text that can be compared."""
    return {
        key: json.dumps([record["subset"], record.get("gold")])
        for run in group.runs
        for key, record in run.samples.items()
    }


def _moved(run: StoredRun, keys: Iterable[Key], weights: float, total: Total) -> StoredRun:
    """A run among those of other models."""
    samples: dict[Key, SampleRecord] = {}
    for key in keys:
        if (record := run.samples.get(key)) is not None:
            size = total.of(record, weights)
            more = {} if size is None else {TOTAL.key: size}
            samples[key] = {**record, "ledger": record["ledger"] | more}
    return replace(
        run,
        label=f"{run.record.model} {run.label}",
        samples=samples,
        total=len(samples) if run.complete else run.total,
        apart=run.record.model,
    )
