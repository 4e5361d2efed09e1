"""The bytes that an engine's flags save, and the loss that is known of them."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.config.files import FULL
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.advice import Target, counts, of_study
from kvbench.extensions.advise.engines import read_command
from kvbench.extensions.advise.named import NamedMethod, method_of
from kvbench.results.measures import SCORE
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number
from kvbench.sizing.shapes import HEADLINE, NamedShape, find_shape, presets

ANSWER = 64  # tokens of the sequence that are written
MOST_LOSSES = 3
FAR = "; another model or length, so no evidence for yours"
_METHOD = "method."
_SCALES = "scales="  # of a file that a run finds first


def answer(words: Sequence[str], context_tokens: int | None) -> list[str]:
    """Describe the share of the full cache that a setting holds, and its measured losses, in lines of text.

    Args:
        words: Words of the run that the engine's command translates to.
        context_tokens: Tokens of one sequence, where the command sets them; else the model's context length.
    """
    known = _method(words)
    shape, whose = _shape(words)
    tokens = context_tokens or shape.context or HEADLINE[1]
    tokens = max(ANSWER + 1, tokens)
    held = known.outline(shape, tokens - ANSWER, ANSWER)
    lines = []
    if held is not None:
        share = f"{100 * held.resident_bytes / held.fp16_bytes:.1f} %"
        lines.append(
            f"Bytes: {format_bytes(held.resident_bytes)} of the full cache's {format_bytes(held.fp16_bytes)} ({share}) "
            f"for one sequence of {tokens} tokens on {shape.name}{whose}."
        )
    if known.text == method_of(FULL).text:
        return [*lines, "Loss: none; this is the full cache."]
    target = Target(shape=shape, context_tokens=tokens, answer_tokens=ANSWER, batch=1, memory_bytes=None, margin=0.01)
    losses = [*_on_tasks(known, target), *_on_text(known, words, target)]
    return [*lines, *(losses or ["Loss: not measured by the repository's studies; run=... measures it, as below."])]


def _method(words: Sequence[str]) -> NamedMethod:
    """The method of a run's words; scales that a run finds first change neither bytes nor formats."""
    name = next((word.partition("=")[2] for word in words if word.startswith("method=")), FULL)
    settings = [word.removeprefix(_METHOD) for word in words if word.startswith(_METHOD)]
    return method_of(name, *(word for word in settings if not word.startswith(_SCALES)))


def _is_scaled(words: Sequence[str]) -> bool:
    return any(word.startswith(f"{_METHOD}{_SCALES}") for word in words)


def _on_tasks(known: NamedMethod, target: Target) -> list[str]:
    """Losses of scores that the repository's studies measured."""
    lines = []
    for one in [one for one in shipped.losses(SCORE.key) if method_of(one.label).text == known.text][:MOST_LOSSES]:
        difference, low, high = (
            number(value, SCORE.scale, signed=True) for value in (one.difference, one.low, one.high)
        )
        far = "" if counts(of_study(one, SCORE, target), target) else FAR
        lines.append(
            f"Loss: {difference} {SCORE.unit} [{low}, {high}] on {one.task} with {one.model}, n={one.samples}{far}."
        )
    return lines


def _on_text(known: NamedMethod, words: Sequence[str], target: Target) -> list[str]:
    """The loss on running text of the format that the words choose, where its study measured it."""
    if any(word.startswith("store.") for word in words):
        return []  # the study has the usual store alone
    for one in shipped.text_losses():
        theirs = read_command(one.command).words
        if _is_scaled(theirs) == _is_scaled(words) and _method(theirs).text == known.text:
            (change, low, high), same = one.perplexity, one.same_first_choice[0]
            far = "" if target.shape.name == shipped.TEXT_MODEL else FAR
            return [
                f"Loss: {number(change, 100, signed=True)} % of perplexity [{number(low, 100, signed=True)}, "
                f"{number(high, 100, signed=True)}], the same first choice at {number(same, 100)} % of {one.tokens} "
                f"tokens, on {shipped.TEXT} with {shipped.TEXT_MODEL}{far}."
            ]
    return []


def _shape(words: Sequence[str]) -> tuple[NamedShape, str]:
    """The model of a command, where it is known or its files are there; else a usual one, and a word that says so."""
    path = next((word.partition("=")[2] for word in words if word.startswith("model.path=")), "")
    if known := next((shape for shape in presets().values() if path and shape.path.lower() == path.lower()), None):
        return known, ""
    if path and Path(path).expanduser().exists():
        return find_shape(path), ""
    return find_shape(HEADLINE[0]), (f" ({path} is not known here)" if path else " (the command names no model)")
