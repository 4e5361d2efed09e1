"""One recommendation: the setting, its bytes, its measurements, the bounded risk, and the run that would decide."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.config import files
from kvbench.config.files import FULL
from kvbench.extensions.advise.advice import Advice, Quality, Target, counts
from kvbench.extensions.advise.cards import Card
from kvbench.extensions.advise.engines import known_flags
from kvbench.show.progress import format_bytes, format_seconds
from kvbench.show.terminal import number
from kvbench.show.text import safe
from kvbench.sizing.shapes import NamedShape

WIDTH = 80
RULER_TASKS = 11
SAMPLES, MOST_SAMPLES = 200, 2000  # of a run that settles: where none are known to be needed, and at most
GENTLE = 0.75  # share of the full cache's bytes from which on a setting saves too little to be tried first
MOST_FLAGS = 3


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The method that is recommended, or to be tried first.

    Args:
        item: Evidence on it.
        evidence: The measurement in its favour; None where none counts for this model and context.
        is_proven: The whole interval of its loss is within the margin.
    """

    item: Advice
    evidence: Quality | None
    is_proven: bool


def evidence_of(item: Advice) -> Quality | None:
    """Measurement of a method that counts for the target model; None where nothing near was measured.

    On the model itself before a model near it, and of these the one with more samples.
    """
    target = item.target
    qualities = [quality for quality in item.quality if counts(quality, target)]
    return max(qualities, key=lambda quality: (quality.same_model, quality.num_samples), default=None)


def choose(ranked: Sequence[Advice]) -> Choice | None:
    """Choose among the methods that fit and save bytes.

    The smallest that is proven; else, of those with a favourable estimate, the one with the least possible loss; else
    the gentlest that no estimate refutes, an engine's methods before others.
    """
    full = next((item.total_bytes for item in ranked if item.method == FULL), None)
    fitting = [item for item in ranked if item.method != FULL and _fits(item) and _saves(item, full)]
    known = [(item, evidence) for item in fitting if (evidence := evidence_of(item)) is not None]
    kept = [(item, evidence) for item, evidence in known if evidence.lost <= item.target.margin]
    proven = [(item, one) for item, one in kept if one.most is not None and one.most <= item.target.margin]
    if proven:
        item, evidence = min(proven, key=lambda pair: (not pair[1].same_model, pair[0].total_bytes or 0))
        return Choice(item=item, evidence=evidence, is_proven=True)
    if kept:
        item, evidence = min(
            kept, key=lambda pair: (not pair[1].same_model, math.inf if pair[1].most is None else pair[1].most)
        )
        return Choice(item=item, evidence=evidence, is_proven=False)
    refuted = {id(item) for item, _ in known}
    rest = [item for item in fitting if id(item) not in refuted and not _lost_elsewhere(item)]
    if not rest:
        return None
    share = lambda item: (item.total_bytes or 0) / (full or 1)  # noqa: E731
    order = lambda item: (not _flags(item), share(item) > GENTLE, -share(item), item.label)  # noqa: E731
    return Choice(item=min(rest, key=order), evidence=None, is_proven=False)


def _lost_elsewhere(item: Advice) -> bool:
    """True for a method that lost more than the margin wherever it was measured.

    That is no evidence for the target, but a poor first choice.
    """
    return bool(item.quality) and all(quality.lost > item.target.margin for quality in item.quality)


def _fits(item: Advice) -> bool:
    room = item.target.memory_bytes
    return item.total_bytes is not None and (room is None or item.total_bytes <= room)


def _saves(item: Advice, full: int | None) -> bool:
    return full is None or (item.total_bytes or 0) < full


def recommendation(ranked: Sequence[Advice], target: Target, card: Card | None) -> list[str]:
    """The recommendation in lines of text; a line that begins with two spaces is a command to copy."""
    shape, full = target.shape, next((item for item in ranked if item.method == FULL), None)
    lines = [_of_full(full, target)] if full is not None else []
    if shape.context and target.context_tokens > shape.context:
        lines.append(
            f"{shape.name} was made for {shape.context} tokens, and context={target.context_tokens} is more: what it "
            f"says there is worth little with any cache. Ask with context={shape.context}."
        )
    choice = choose(ranked)
    if choice is None:
        lines.append(_of_nothing(full, target))
        return _folded(lines)
    item, evidence = choice.item, choice.evidence
    assert item.total_bytes is not None, "what is ranked is counted"
    saved = (
        "" if full is None or not full.total_bytes else f", {100 * item.total_bytes / full.total_bytes:.0f} % of full's"
    )
    word = "Recommended" if choice.is_proven else "Try first"
    lines += ["", f"{word}: {safe(item.label)}. Its caches take {format_bytes(item.total_bytes)}{saved}."]
    if flags := _flags(item)[:MOST_FLAGS]:
        lines += ["In an engine:", *(f"  {line}" for line in flags)]
    lines.append(_measured(choice, target))
    lines.append(_risk(evidence))
    if not choice.is_proven:
        lines += _settling(choice, target, card)
    return _folded(lines)


def _of_full(full: Advice, target: Target) -> str:
    what = f"{target.shape.name}, {target.batch} x {target.context_tokens} tokens: the full cache takes "
    what += format_bytes(full.total_bytes)
    if target.memory_bytes is None:
        return f"{what}."
    room = format_bytes(max(0, target.memory_bytes))
    return f"{what}, and {'fits' if _fits(full) else 'does not fit'} into the {room} that are free for caches."


def _of_nothing(full: Advice | None, target: Target) -> str:
    if full is not None and _fits(full):
        return "Keep the full cache: nothing smaller that was measured loses as little as the margin allows."
    if target.memory_bytes is None or full is None or not full.total_bytes:
        return "Nothing can be recommended: no method is known to lose as little as the margin allows."
    count = max(0, target.memory_bytes) * target.batch // full.total_bytes
    return (
        f"Nothing that fits is known to lose as little as the margin allows. The full cache of {count} such sequences "
        "fits; or allow more loss with margin=."
    )


def _measured(choice: Choice, target: Target) -> str:
    evidence, name = choice.evidence, target.shape.name
    if evidence is None:
        ships = "an engine ships it, and " if _flags(choice.item) else ""
        return (
            f"Nothing counts as measured for {name} at {target.context_tokens} tokens: neither it nor a model of "
            f"nearly its size was. Why this one: {ships}of what fits it is the gentlest that lost nothing elsewhere."
        )
    by = "your runs" if not evidence.study else evidence.study
    far = ""
    if target.context_tokens > 2 * evidence.longest_tokens:
        far = f" Its prompts had up to {evidence.longest_tokens} tokens; longer ones may lose more."
    shown = f"{number(-evidence.lost, evidence.scale, signed=True)} {evidence.unit}"
    if evidence.least is not None and evidence.most is not None:
        low, high = (number(-end, evidence.scale, signed=True) for end in (evidence.most, evidence.least))
        shown += f" [{low}, {high}]"
    return f"Measured: {shown} on {evidence.task} with {evidence.model}, n={evidence.num_samples} ({by}).{far}"


def _risk(evidence: Quality | None) -> str:
    """The risk in words, with its bound."""
    if evidence is None:
        return "Risk: unknown."
    if evidence.most is None:
        return "Risk: too few samples for a bound."
    shown = "a loss is shown" if evidence.least is not None and evidence.least > 0 else "no loss shown"
    return f"Risk: {shown}; at most {number(max(0.0, evidence.most), evidence.scale)} {evidence.unit} by 95 %."


def _settling(choice: Choice, target: Target, card: Card | None) -> list[str]:
    """The run that would decide, and its time."""
    item, needed = choice.item, choice.evidence.needed if choice.evidence else None
    count = SAMPLES if needed is None or needed > MOST_SAMPLES else max(needed, SAMPLES)
    items = math.ceil(count / RULER_TASKS)
    length = min(target.context_tokens, target.shape.context or target.context_tokens)
    words = [f"method={item.method}", *(f"method.{name}={value}" for name, value in item.settings.items())]
    words += ["task=ruler", f"task.lengths=[{length}]", f"task.items={items}", *model_words(target.shape)]
    words += ["model.device=cuda", "model.dtype=bfloat16"] if card else []
    lines = ["", f"This run would settle it, with {items * RULER_TASKS} questions of {length} tokens:"]
    lines.append("  " + shlex.join(["kvbench", *words]))
    if card is None:
        return [*lines, "gpu=NAME says how long it takes."]
    prompts = 2 * items * RULER_TASKS  # of the method and of the full cache
    seconds = card.seconds(target.shape, prompts, length - target.answer_tokens, target.answer_tokens)
    if seconds is not None:
        lines.append(f"It takes about {format_seconds(seconds)} on one {card.name}; that is computed, not measured.")
    return lines


def model_words(shape: NamedShape) -> list[str]:
    """The words of a run that choose the model: one of kvbench's own, a file, a folder, or the page of a preset."""
    if shape.name in files.options("model"):
        return [f"model={shape.name}"]
    return [f"model={'gguf' if shape.path.endswith('.gguf') else 'hf'}", f"model.path={shape.path}"]


def _flags(item: Advice) -> list[str]:
    return [] if item.known is None else known_flags(item.known, item.target.shape.layers)


def _folded(lines: Sequence[str]) -> list[str]:
    """Wrap lines to `WIDTH` columns, except commands, which are meant to be copied."""
    result: list[str] = []
    for line in lines:
        result += [line] if line.startswith("  ") or not line else textwrap.wrap(line, WIDTH, break_on_hyphens=False)
    return result
