"""What `kvbench advise` prints: the ranked table, what is not known, and the commands that would find out."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvbench.cli.advice import ADVISED, ELSEWHERE, FAR, MEANING, OPEN, RANKS, TOO_LARGE, UNMEASURED, Advice, Asked
from kvbench.config import files
from kvbench.config.files import FULL
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import NO_INTERVAL, number
from kvbench.show.text import LINE_LENGTH, safe
from kvbench.sizing.shapes import NamedShape

MANY = 2**62
NAMED = 3  # methods that a command names


def own_settings(method: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run that differ from its method's configuration."""
    if method not in files.options("method"):
        return {}
    usual = as_dict(method_settings(method))
    return {name: value for name, value in stored.items() if name in usual and value != usual[name]}


def show(
    found: Sequence[Advice],
    asked: Asked,
    shape: NamedShape,
    notes: Sequence[str],
    *,
    has_speeds: bool,
    most: int | None,
    console: Console | None = None,
) -> None:
    """Print the table and what must be known to read it.

    Args:
        has_speeds: Some throughput was measured.
        most: Rows at most; None for all.
    """
    console = console or terminal.console(80)
    ranked = sorted(found, key=lambda item: item.rank(asked, shape.name, item.method == FULL))
    room = "" if asked.memory_bytes is None else f", {format_bytes(asked.memory_bytes)} for caches"
    title = f"{shape.name}: {asked.batch} x {asked.context_tokens} tokens{room}"
    table = terminal.plain_table(title)
    table.add_column("method", overflow="fold", min_width=12)
    what = next((item.row.what for one in ranked for item in one.quality), None)
    headings = ["caches", "%", "loss" if what is None else f"loss, {what.unit}"]
    for heading in [*headings, *(["tok/s"] if has_speeds else []), "says"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for item in ranked[:most]:
        speed = item.speed(shape.name, asked)
        rate = "-" if speed is None else f"{speed.tokens_per_s:.3g}{'' if speed.model == shape.name else '*'}"
        table.add_row(
            safe(item.label, LINE_LENGTH),
            format_bytes(item.total_bytes(asked)),
            "-" if item.bytes_of is None else f"{100 * item.bytes_of.ratio:.1f}",
            "0" if item.method == FULL else loss_text(item),
            *([rate] if has_speeds else []),
            item.says(asked, item.method == FULL),
        )
    console.print(table)
    if most is not None and len(ranked) > most:
        rest = Counter(item.says(asked, item.method == FULL) for item in ranked[most:])
        counted = ", ".join(f"{count} {name}" for name, count in rest.items())
        console.print(Text(f"and {len(ranked) - most} more ({counted}); rows=null shows all", style="dim"))
    for line in (*summary(ranked, asked, shape), *unknown(ranked, asked, shape, has_speeds=has_speeds)):
        console.print(Text(line), soft_wrap=line.startswith(" "))  # a command is copied
    for note in notes:
        console.print(Text(f"! {note}"), soft_wrap=True)
    shown = {item.says(asked, item.method == FULL) for item in ranked}
    console.print(
        Text(
            "loss: mean paired difference to the full cache [95 % interval], of the task that leaves most open; * "
            "another model; each interval is by itself. caches: all sequences, weights and activations apart; %: of "
            "FP16. "
            + " ".join(f"{name}: {MEANING[name]}." for name in RANKS if name in shown)
            + " Sorted by this, then tokens per second measured on this model, then bytes.",
            style="dim",
        )
    )


def loss_text(item: Advice) -> str:
    """The loss with its interval, in shown units; a star where it is another model's."""
    worst = item.worst
    if worst is None:
        return "-"
    scale, star = worst.row.what.scale, "" if worst.own else "*"
    text = number(worst.lost, scale, signed=True)
    if worst.least is None or worst.most is None:
        return f"{text} {NO_INTERVAL}{star}"
    return f"{text} [{number(worst.least, scale, signed=True)}, {number(worst.most, scale, signed=True)}]{star}"


def summary(ranked: Sequence[Advice], asked: Asked, shape: NamedShape) -> list[str]:
    """What is advised, in a sentence."""
    methods = [item for item in ranked if item.method != FULL]
    advised = [item for item in methods if item.says(asked, False) == ADVISED]
    full = next((item for item in ranked if item.method == FULL), None)
    lines = []
    if full is not None and asked.memory_bytes is not None:
        fits = full.says(asked, True) == ADVISED
        lines.append("The full cache fits." if fits else "The full cache does not fit.")
    if advised:
        count = advised[0].worst.row.pairs.num_samples if advised[0].worst else 0
        lines.append(
            f"Measured on {shape.name}, it fits and loses no more than the margin: {safe(advised[0].label)} "
            f"({count} samples)."
        )
    else:
        lines.append(f"Nothing that fits is shown to lose no more than the margin on {shape.name}, so none is advised.")
    return lines


def unknown(ranked: Sequence[Advice], asked: Asked, shape: NamedShape, *, has_speeds: bool) -> list[str]:
    """What is not known, and the command that would find out."""
    methods = [item for item in ranked if item.method != FULL]
    lines = []
    model = [f"model={shape.name}"] if shape.name in files.options("model") else ["model=hf", "model.path=FOLDER"]
    elsewhere = [item for item in methods if item.says(asked, False) in (ELSEWHERE, UNMEASURED)]
    if elsewhere:
        task = next((item.worst.task for item in elsewhere if item.worst), "longctx")
        lines.append(f"Not measured on {shape.name}, so not advised: {_named(elsewhere)}. To find out:")
        lines += [_command(item, [f"task={task}", *model]) for item in elsewhere[:NAMED]]
    # First the one that fewest more samples would settle.
    open_ones = sorted(
        (item for item in methods if item.says(asked, False) == OPEN),
        key=lambda item: item.worst.row.needed or MANY if item.worst else MANY,
    )
    if open_ones:
        first = open_ones[0].worst
        assert first is not None
        needed = first.row.needed
        more = (
            f"about {needed} samples would tell (there are {first.row.pairs.num_samples})" if needed else "more samples"
        )
        lines.append(f"Too few samples to tell: {_named(open_ones)}; {more}. To find out:")
        on = [f"model={first.model}"] if first.model in files.options("model") else ["model=hf", "model.path=FOLDER"]
        lines.append(_command(open_ones[0], [f"task={first.task}", *(on if first.own else model), "limit=null"]))
    longest = max((quality.longest_tokens for item in methods for quality in item.quality), default=0)
    if longest and asked.context_tokens > FAR * longest:
        lines.append(
            f"Quality was measured on prompts of up to {longest} tokens; at {asked.context_tokens} it is not known. To "
            "find out:"
        )
        best = next(iter(methods), None)
        if best is not None:
            lines.append(_command(best, ["task=ruler", f"task.lengths=[{asked.context_tokens}]", *model]))
    slow = [item for item in methods if item.says(asked, False) != TOO_LARGE and not _has_speed(item, shape)]
    if slow:
        what = "No throughput was measured" if not has_speeds else f"No throughput was measured on {shape.name}"
        named = [FULL, *(f'"{" ".join([item.method, *_words(item)])}"' for item in slow[:NAMED])]
        of = model[0].partition("=")[2] if len(model) == 1 else "hf path=FOLDER"
        words = [f"throughput.model={of}", f"throughput.methods=[{','.join(named)}]"]
        words.append(f"throughput.context={asked.context_tokens - asked.answer_tokens}")
        if asked.memory_bytes is not None:
            words.append(f"throughput.kv_mb={asked.memory_bytes // 10**6}")
        lines.append(f"{what} of {_named(slow)}. To find out:")
        lines.append("  " + shlex.join(["kvbench", "bench", "what=throughput", *words]))
    return lines


def _has_speed(item: Advice, shape: NamedShape) -> bool:
    return any(speed.model == shape.name for speed in item.speeds)


def _named(items: Sequence[Advice]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(safe(item.label) for item in items[:NAMED]) + more


def _words(item: Advice) -> list[str]:
    return [f"{name}={value}" for name, value in item.settings.items()]


def _command(item: Advice, more: Sequence[str]) -> str:
    words = [f"method={item.method}", *(f"method.{word}" for word in _words(item)), *more]
    return "  " + shlex.join(["kvbench", *map(str, words)])
