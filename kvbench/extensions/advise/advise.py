"""Command `advise`: methods that fit a card and a loss margin, their evidence, and the run that would decide."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from kvbench.config import files
from kvbench.config.files import AGREED, FULL
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import SettingMissing, SettingsConflict, SettingValue, Unsupported, check_whole
from kvbench.evidence.load import RUNS, Group, load_groups
from kvbench.evidence.settings import check_margin
from kvbench.extensions.advise import recommend, shipped
from kvbench.extensions.advise.advice import (
    ADVISED,
    ELSEWHERE,
    MEANING,
    OPEN,
    TOO_LARGE,
    UNMEASURED,
    WHOSE,
    Advice,
    Quality,
    Speed,
    Target,
    gather,
)
from kvbench.extensions.advise.cards import Card, find_card
from kvbench.extensions.advise.engines import known_flags
from kvbench.extensions.advise.named import method_of
from kvbench.extensions.advise.printed import carried, show_printed, studies
from kvbench.rules import MAX_TOKENS, Whole
from kvbench.rules.sizes import read_bytes
from kvbench.show import terminal
from kvbench.show.progress import format_bytes, said_when_slow
from kvbench.show.terminal import NO_INTERVAL, number
from kvbench.show.text import LINE_LENGTH, safe
from kvbench.sizing.shapes import NamedShape, find_shape

FAR = 2  # a context this many times as long as the longest measured prompt is another question
NAMED = 3  # methods that a command names
BENCHES = ("throughput", "decode")  # what of `kvbench bench` measures tokens per second of a whole model


def main(cfg: DictConfig) -> int:
    """Print the table."""
    card = None if cfg.gpu is None else find_card(cfg.gpu)
    target, room = read_target(cfg, card)
    most = None if cfg.rows is None else check_whole("rows", cfg.rows, 1)
    for name in ("study", "why"):
        if not isinstance(cfg[name], bool):
            raise SettingValue(f"{name}={cfg[name]} must be true or false", setting=name)
    comparing = OmegaConf.create(as_dict(cfg) | {"against": FULL, "at_bytes": None, "where": None})
    bench = Path(str(cfg.bench)) if cfg.bench is not None else Path(str(cfg.results_dir)) / "bench"
    speeds, notes = read_speeds(bench)
    with said_when_slow("reading runs and comparing them"):
        groups, missing = _stored_groups(comparing)
        advice, said = gather(groups, comparing, target, speeds)
    with said_when_slow(f"counting the bytes of {len(advice)} methods at {target.context_tokens} tokens"):
        ranked = sorted(advice, key=lambda item: item.rank)
        for item in ranked[:most]:
            _ = item.bytes_of  # of what loses more, only those that are shown
    if cfg.study and not shipped.study_folders():
        missing.append(shipped.ABSENT)
    if target.shape.context and target.context_tokens > target.shape.context:
        name, made = target.shape.name, target.shape.context
        missing.append(f"{name} was made for {made} tokens; context={target.context_tokens} is more.")
    metric, has_speeds = str(cfg.metric), bool(speeds)
    if cfg.why:
        show(ranked, target, [*missing, *notes, *said], room, card, has_speeds=has_speeds, most=most, metric=metric)
        show_printed(target, metric)
        print()
    console = terminal.console(recommend.WIDTH)
    for line in recommend.recommendation(ranked, target, card):
        console.print(Text(line), soft_wrap=True)
    if target.memory_bytes is not None and target.memory_bytes < 0:
        console.print(Text("The weights alone do not fit; weights=BYTES says what quantised ones take."))
    if not cfg.why:
        left = len(missing) + len(notes) + len(said)
        others = f"why=true shows all {len(ranked)} methods, whose evidence there is, and {left} notes."
        console.print(Text(others, style="dim"))
    return 0


def _stored_groups(cfg: DictConfig) -> tuple[list[Group], list[str]]:
    """The user's runs, or the reason why there are none; the repository's evidence is used without them."""
    try:
        return load_groups(cfg), []
    except ValueError as error:
        deeper = next(Path(str(cfg.results_dir)).glob(f"*/{RUNS}"), None)
        hint = f" Runs lie in results_dir={deeper.parents[4]}." if deeper else ""
        return [], [f"No run of yours counts: {error}.{hint} What follows is others' evidence, and counted bytes."]


def read_target(cfg: DictConfig, card: Card | None) -> tuple[Target, str]:
    """Check the settings of the target; also returns a description of the memory for caches."""
    context = read_tokens(cfg.context)
    Whole(0, context - 1, unit="tokens").check("answer", cfg.answer)
    Whole(1, 2**20, unit="sequences").check("batch", cfg.batch)
    if cfg.margin is None:
        raise SettingMissing(
            "margin=null says nothing; give the loss that you accept, for example margin=0.01", setting="margin"
        )
    check_margin(cfg.margin)
    for name, least in (("resamples", 100), ("seed", 0)):
        check_whole(name, cfg[name], least)
    with said_when_slow(f"reading {cfg.model}"):
        shape = find_shape(cfg.model)
    if not shape.is_plain:
        raise Unsupported(
            f"advise counts models whose layers all see everything, and not all of {shape.name} do; "
            f"kvbench bytes model={cfg.model} says what each method would hold",
            setting="model",
        )
    memory_bytes, room = _room(cfg, card, shape)
    target = Target(
        shape=shape,
        context_tokens=context,
        answer_tokens=cfg.answer,
        batch=cfg.batch,
        memory_bytes=memory_bytes,
        margin=float(cfg.margin),
    )
    return target, room


def _room(cfg: DictConfig, card: Card | None, shape: NamedShape) -> tuple[int | None, str]:
    """Bytes for the caches, None for any, and where they are from: a device less the weights, or as they were given."""
    limits = [name for name in ("gpu", "memory", "cache_memory") if cfg[name] is not None]
    if len(limits) > 1:
        raise SettingsConflict(f"{' and '.join(limits)} say the same thing; give one of them")
    if limits in ([], ["cache_memory"]):
        if cfg.weights is not None:
            raise SettingsConflict(
                f"weights={cfg.weights} is taken off gpu or memory; give one of them", setting="weights"
            )
        return (None, "") if not limits else (read_bytes("cache_memory", cfg.cache_memory), "as given")
    device, name = (card.memory_bytes, card.name) if card else (read_bytes("memory", cfg.memory), "the device")
    weights = shape.weights_bytes if cfg.weights is None else read_bytes("weights", cfg.weights)
    if weights is None:
        raise SettingMissing(
            f"the weights of {shape.name} are not known; give weights=16GiB, or cache_memory for caches alone",
            setting="weights",
        )
    return device - weights, f"{format_bytes(device)} of {name} less {format_bytes(weights)} of weights"


def read_tokens(value: object) -> int:
    """Read a number of tokens, or text such as 32k."""
    match = re.fullmatch(r"([0-9]{1,9})([kK]?)", str(value)) if not isinstance(value, bool) else None
    tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not 1 < tokens <= MAX_TOKENS:
        raise SettingValue(
            f"context={value} is no number of tokens; write a whole number, or text such as 32k", setting="context"
        )
    return tokens


def read_speeds(folder: Path) -> tuple[dict[str, list[Speed]], list[str]]:
    """Read the measured throughput of every method, by the text of its policy, and say which files cannot be read."""
    speeds: dict[str, list[Speed]] = {}
    notes: list[str] = []
    paths = sorted(folder.glob("**/bench.json"))
    if not paths:
        return speeds, notes
    from kvbench.kernels.bench.bench import read_document

    for path in paths:
        try:
            document = read_document(path)
        except ValueError as error:
            notes.append(f"{path} is left out: {error}")
            continue
        if document["what"] not in BENCHES:
            continue
        model = str((document.get("model") or {}).get("name", "unknown"))
        for cell in document["cells"]:
            for row in cell["variants"]:
                if not row.get("tokens_per_call"):
                    continue
                try:
                    key = method_of(row["name"]).text
                except ValueError:  # a baseline, such as transformers' own cache
                    continue
                rate, context = row["tokens_per_call"] / row["median"], int(cell["cell"].get("context", 0))
                speeds.setdefault(key, []).append(Speed(tokens_per_s=rate, model=model, context_tokens=context))
    return speeds, notes


def show(
    ranked: Sequence[Advice],
    target: Target,
    notes: Sequence[str],
    room: str,
    card: Card | None,
    *,
    has_speeds: bool,
    most: int | None,
    metric: str,
) -> None:
    """Print the table, at most `most` rows of it, and notes."""
    console = terminal.console(80)
    memory = target.memory_bytes
    there = "" if memory is None else f", {format_bytes(max(0, memory))} for caches"
    table = terminal.plain_table(f"{target.shape.name}: {target.batch} x {target.context_tokens} tokens{there}")
    table.add_column("method", overflow="fold", min_width=12)
    unit = next((f", {quality.unit}" for one in ranked for quality in one.quality), "")
    for heading in ("caches", "%", f"loss{unit}", *(["tok/s"] if has_speeds else []), "whose", "says"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in ranked[:most]:
        speed = item.speed
        rate = "-" if speed is None else f"{speed.tokens_per_s:.3g}{'' if item.measured_rate else '*'}"
        table.add_row(
            safe(item.label, LINE_LENGTH),
            format_bytes(item.total_bytes),
            "-" if item.bytes_of is None else f"{100 * item.bytes_of.ratio:.1f}",
            "0" if item.method == FULL else loss_text(item),
            *([rate] if has_speeds else []),
            item.whose,
            item.says,
        )
    console.print(table)
    if rest := ranked[most:] if most is not None else ():
        counted = ", ".join(f"{count} {name}" for name, count in Counter(item.says for item in rest).items())
        console.print(Text(f"and {len(rest)} more ({counted}); rows=null shows all", style="dim"))
    if room and memory is not None:
        console.print(Text(f"Room for caches: {format_bytes(max(0, memory))} ({room}); activations need some of it."))
        if memory < 0:
            console.print(Text("The weights alone do not fit; weights=BYTES says what quantised ones take."))
    known = [*summary(ranked, target), *studies(ranked), *carried(ranked, target, metric)]
    for line in (*known, *unknown(ranked, target, has_speeds)):
        console.print(Text(line), soft_wrap=line.startswith(" "))  # a command is copied
    for note in notes:
        terminal.print_note(Text(f"! {note}"), console)
    says, whose = ({getattr(item, name) for item in ranked} for name in ("says", "whose"))
    console.print(
        Text(
            "loss: mean paired difference to the full cache [95 % interval], of the task that leaves most open; * "
            "another model; each interval is by itself. caches: all sequences, weights and activations apart, to "
            "within 1 % (`kvbench bytes` counts them whole); %: of FP16. whose: "
            + ", ".join(f"{name} = {meaning}" for name, meaning in WHOSE.items() if name in whose)
            + ". "
            + " ".join(f"{name}: {meaning}." for name, meaning in MEANING.items() if name in says)
            + " Sorted by this, then tokens per second measured on this model, then bytes.",
            style="dim",
        )
    )


def loss_text(item: Advice) -> str:
    """The loss with its interval, in shown units; a star where it is another model's."""
    worst = item.worst
    if worst is None:
        return "-"
    scale, star = worst.scale, "" if worst.same_model else "*"
    text = number(worst.lost, scale, signed=True)
    if worst.least is None or worst.most is None:
        return f"{text} {NO_INTERVAL}{star}"
    return f"{text} [{number(worst.least, scale, signed=True)}, {number(worst.most, scale, signed=True)}]{star}"


def summary(ranked: Sequence[Advice], target: Target) -> list[str]:
    """One sentence that names the recommended method."""
    lines = []
    if target.memory_bytes is not None:
        fits = [item.says == ADVISED for item in ranked if item.method == FULL]
        lines += [f"The full cache {'fits' if fit else 'does not fit'}." for fit in fits[:1]]
    best = next((item for item in ranked if item.says == ADVISED and item.method != FULL), None)
    name = target.shape.name
    if best is None or best.worst is None:
        return [*lines, f"Nothing that fits is shown to lose no more than the margin on {name}, so none is advised."]
    by = f" by the repository's study ({best.worst.task} in {best.worst.study})" if best.worst.study else ""
    return [
        *lines,
        f"Measured on {name}{by}, it fits and loses no more than the margin: {safe(best.label)} "
        f"({best.worst.num_samples} samples).",
        *_flags(best, target),
    ]


def unknown(ranked: Sequence[Advice], target: Target, has_speeds: bool) -> list[str]:
    """Lines on unknowns, with commands that would measure them."""
    methods, name = [item for item in ranked if item.method != FULL], target.shape.name
    lines, model = [], recommend.model_words(target.shape)
    if elsewhere := [item for item in methods if item.says in (ELSEWHERE, UNMEASURED)]:
        task = next((item.worst.task for item in elsewhere if item.worst), "longctx")
        lines.append(f"Not measured on {name}, so not advised: {_named(elsewhere)}. To find out:")
        lines += [_command(item, [*_task_words(task), *model]) for item in elsewhere[:NAMED]]
    # First the one that fewest more samples would settle.
    undecided = [(one, item) for item in methods if item.says == OPEN and (one := item.worst) and _is_open(one, target)]
    if undecided:
        undecided.sort(key=lambda pair: pair[0].needed or float("inf"))
        worst, first = undecided[0]
        needed, there = worst.needed, worst.num_samples
        more = f"about {needed} samples would tell (there are {there})" if needed else "more samples"
        lines.append(f"Too few samples to tell: {_named([item for _, item in undecided])}; {more}. To find out:")
        on = [f"model={worst.model}"] if worst.same_model and worst.model in files.options("model") else model
        lines.append(_command(first, [*_task_words(worst.task), *on, "limit=null"]))
    longest = max((quality.longest_tokens for item in methods for quality in item.quality), default=0)
    if longest and target.context_tokens > FAR * longest:
        lines.append(
            f"Quality was measured on prompts of up to {longest} tokens; at {target.context_tokens} it is not known. "
            "To find out:"
        )
        lines.append(_command(methods[0], ["task=ruler", f"task.lengths=[{target.context_tokens}]", *model]))
    if slow := [item for item in methods if item.says != TOO_LARGE and not item.measured_rate]:
        what = "No throughput was measured" + (f" on {name}" if has_speeds else "")
        named = [FULL, *(f'"{" ".join([item.method, *_words(item)])}"' for item in slow[:NAMED])]
        of = model[0].partition("=")[2] if len(model) == 1 else " ".join(word.removeprefix("model.") for word in model)
        words = [f"throughput.model={of.removeprefix('model=')}", f"throughput.methods=[{','.join(named)}]"]
        words.append(f"throughput.context={target.context_tokens - target.answer_tokens}")
        if target.memory_bytes is not None and target.memory_bytes > 0:
            words.append(f"throughput.kv_mb={target.memory_bytes // 10**6}")
        lines.append(f"{what} of {_named(slow)}. To find out:")
        lines.append("  " + shlex.join(["kvbench", "bench", "what=throughput", *words]))
    return lines


def _is_open(worst: Quality, target: Target) -> bool:
    """True where more samples may show that a method keeps to the margin: its estimate does, and few are needed."""
    return worst.lost <= target.margin and (worst.needed or 0) <= recommend.MOST_SAMPLES


def _task_words(task: str) -> list[str]:
    """Command-line words of a task, with the consent that it requires to run code of the model."""
    takes = read_config(files.path_of("task", task)) if task in files.options("task") else {}
    return [f"task={task}", *([f"task.{AGREED}=true"] if AGREED in takes else [])]


def _flags(item: Advice, target: Target) -> list[str]:
    """The flags of each engine that ships the method."""
    flags = [] if item.known is None else known_flags(item.known, target.shape.layers)
    return ["In an engine:", *(f"  {line}" for line in flags)] if flags else []


def _named(items: Sequence[Advice]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(safe(item.label) for item in items[:NAMED]) + more


def _words(item: Advice) -> list[str]:
    return [f"{name}={value}" for name, value in item.settings.items()]


def _command(item: Advice, more: Sequence[str]) -> str:
    words = [f"method={item.method}", *(f"method.{word}" for word in _words(item)), *more]
    return "  " + shlex.join(["kvbench", *map(str, words)])
