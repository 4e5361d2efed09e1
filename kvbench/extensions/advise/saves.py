"""The bytes that an engine's flags save, and the loss that is known of them."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.config.compose import compose
from kvbench.config.files import FULL
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.advice import Target, counts, of_study
from kvbench.results.measures import SCORE
from kvbench.runs.choices import make_method
from kvbench.runs.parts import make_policy
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number
from kvbench.sizing.outline import outline
from kvbench.sizing.shapes import HEADLINE, NamedShape, find_shape, presets

ANSWER = 64  # tokens of the sequence that are written
MOST_LOSSES = 3


def answer(words: Sequence[str], context_tokens: int | None) -> list[str]:
    """Describe the share of the full cache that a setting holds, and its measured losses, in lines of text.

    Args:
        words: Words of the run that the engine's command translates to.
        context_tokens: Tokens of one sequence, where the command sets them; else the model's context length.
    """
    group = compose([word for word in words if word.startswith("method")]).method
    policy = make_policy({name: value for name, value in group.items() if name != "scales"})
    shape, whose = _shape(words)
    tokens = context_tokens or shape.context or HEADLINE[1]
    tokens = max(ANSWER + 1, tokens)
    sizes = shape.store_shape, tokens - ANSWER, ANSWER
    held = outline(policy, *sizes)
    lines = []
    if held is not None:
        share = f"{100 * held.resident_bytes / held.fp16_bytes:.1f} %"
        lines.append(
            f"Bytes: {format_bytes(held.resident_bytes)} of the full cache's {format_bytes(held.fp16_bytes)} ({share}) "
            f"for one sequence of {tokens} tokens on {shape.name}{whose}."
        )
    if group._target_ == compose([f"method={FULL}"]).method._target_:
        return [*lines, "Loss: none; this is the full cache."]
    matching = [one for one in shipped.losses(SCORE.key) if repr(make_method(one.label)) == repr(policy)]
    if not matching:
        lines.append("Loss: not measured by the repository's studies; run=... measures it, as below.")
    target = Target(shape=shape, context_tokens=tokens, answer_tokens=ANSWER, batch=1, memory_bytes=None, margin=0.01)
    for one in matching[:MOST_LOSSES]:
        difference, low, high = (
            number(value, SCORE.scale, signed=True) for value in (one.difference, one.low, one.high)
        )
        is_near = counts(of_study(one, SCORE, target), target)
        near = "" if is_near else "; another model or length, so no evidence for yours"
        lines.append(
            f"Loss: {difference} {SCORE.unit} [{low}, {high}] on {one.task} with {one.model}, n={one.samples}{near}."
        )
    return lines


def _shape(words: Sequence[str]) -> tuple[NamedShape, str]:
    """The model of a command, where it is known or its files are there; else a usual one, and a word that says so."""
    path = next((word.partition("=")[2] for word in words if word.startswith("model.path=")), "")
    if known := next((shape for shape in presets().values() if path and shape.path.lower() == path.lower()), None):
        return known, ""
    if path and Path(path).expanduser().exists():
        return find_shape(path), ""
    return find_shape(HEADLINE[0]), (f" ({path} is not known here)" if path else " (the command names no model)")
