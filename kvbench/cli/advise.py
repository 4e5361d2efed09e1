"""The command `advise`: which method fits a memory and loses no more than is accepted, by what was measured."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from kvbench.config import files
from kvbench.config.files import FULL
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.errors import check_whole
from kvbench.evidence.compare import ComparedRun, compare_group
from kvbench.evidence.load import Group, StoredRun, load_groups
from kvbench.evidence.settings import check_margin
from kvbench.policy import MAX_TOKENS
from kvbench.rules import Whole
from kvbench.runs.config import read_bytes
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import NO_INTERVAL, number
from kvbench.show.text import LINE_LENGTH, safe
from kvbench.sizing.project import Projection
from kvbench.sizing.shapes import NamedShape, find_shape
from kvbench.sizing.stored import policy_of, projected

FAR = 2  # a context this many times as long as the longest measured prompt is another question
NAMED = 3  # methods that a command names
BENCHES = ("throughput", "decode")  # what of `kvbench bench` measures tokens per second of a whole model
ADVISED, ELSEWHERE, OPEN, UNMEASURED = "advised", "other model", "cannot tell", "not measured"
LOSES, UNSIZED, TOO_LARGE = "loses more", "bytes unknown", "too large"
MEANING = {  # the best first
    ADVISED: "it fits, and the whole interval of its loss on this model is within the margin",
    ELSEWHERE: "the same on another model",
    OPEN: "it fits, and the interval reaches beyond the margin",
    UNMEASURED: "it fits, and its quality was never compared with the full cache's",
    LOSES: "it fits, and the whole interval is beyond the margin",
    UNSIZED: "its method is not for this model, or keeps what the text decides",
    TOO_LARGE: "it does not fit",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question."""

    shape: NamedShape
    context_tokens: int
    answer_tokens: int
    batch: int
    memory_bytes: int | None
    """For the caches alone; None for any."""
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

    row: ComparedRun
    task: str
    model: str
    own: bool
    """It was measured on the model that is asked about."""
    longest_tokens: int
    """Of its prompts."""

    def _losses(self, differences: list[float]) -> list[float]:
        return sorted(-one if self.row.what.higher_is_better else one for one in differences)

    @property
    def lost(self) -> float:
        """Mean loss, positive when worse."""
        return self._losses([self.row.value])[0]

    @property
    def least(self) -> float | None:
        """Smallest loss that the 95 % interval leaves open; None where it is not known."""
        ends = self.row.interval if self.row.pairs.is_enough else None
        return None if ends is None else self._losses([*ends])[0]

    @property
    def most(self) -> float | None:
        """Largest loss that the interval leaves open, the missing answers as bad as they can be."""
        intervals = [None if one is None else one.interval[0] for one in (self.row.found, *(self.row.extremes or ()))]
        if None in intervals or not self.row.pairs.is_enough:
            return None
        return self._losses([end for ends in intervals if ends for end in ends])[-1]


@dataclass(kw_only=True)
class Advice:
    """Everything that is known of one method and setting."""

    asked: Asked
    label: str
    method: str
    settings: dict[str, Any]
    """The settings that differ from the method's configuration."""
    bytes_of: Projection | None
    """One sequence on the model that is asked about; None where it cannot be known."""
    speeds: list[Speed]
    quality: list[Quality] = field(default_factory=list)

    @property
    def total_bytes(self) -> int | None:
        """Of all sequences."""
        return None if self.bytes_of is None else self.asked.batch * self.bytes_of.resident_bytes

    @property
    def worst(self) -> Quality | None:
        """The task that counts: of those on the own model, where there is any, the one that leaves most loss open."""
        found = [item for item in self.quality if item.own] or self.quality
        return max(found, key=lambda item: (item.most is None, item.most or 0.0, item.lost), default=None)

    @property
    def speed(self) -> Speed | None:
        """The measurement that is nearest to what is asked for: of the own model first, then of the nearest length."""
        name, length = self.asked.shape.name, self.asked.context_tokens
        near = lambda item: (item.model != name, abs(item.context_tokens - length))  # noqa: E731
        return min(self.speeds, key=near, default=None)

    @property
    def own_rate(self) -> float:
        """Tokens per second on the model that is asked about; 0 where none were measured."""
        return self.speed.tokens_per_s if self.speed and self.speed.model == self.asked.shape.name else 0.0

    @property
    def says(self) -> str:
        """The most that can be said, a key of `MEANING`."""
        total, worst, margin = self.total_bytes, self.worst, self.asked.margin
        if total is None:
            return UNSIZED
        if self.asked.memory_bytes is not None and total > self.asked.memory_bytes:
            return TOO_LARGE
        if self.method == FULL:
            return ADVISED
        if worst is None:
            return UNMEASURED
        if worst.most is not None and worst.most <= margin:
            return ADVISED if worst.own else ELSEWHERE
        return LOSES if worst.least is not None and worst.least > margin else OPEN

    @property
    def rank(self) -> tuple:
        """For sorting, the best first: what is said, measured throughput, bytes."""
        return list(MEANING).index(self.says), -self.own_rate, self.total_bytes or 0, self.label


def main(cfg: DictConfig) -> int:
    """Print the table."""
    asked = read_asked(cfg)
    most = None if cfg.rows is None else check_whole("rows", cfg.rows, 1)
    comparing = OmegaConf.create(as_dict(cfg) | {"against": FULL, "at_bytes": None, "where": None})
    groups = load_groups(comparing)
    bench = Path(str(cfg.bench)) if cfg.bench is not None else Path(str(cfg.results_dir)) / "bench"
    speeds, notes = read_speeds(bench)
    found, said = gather(groups, comparing, asked, speeds)
    ranked = sorted(found, key=lambda item: item.rank)
    show(ranked, asked, [*notes, *said], has_speeds=bool(speeds), most=most)
    return 0


def read_asked(cfg: DictConfig) -> Asked:
    """Check the question."""
    context = read_tokens(cfg.context)
    Whole(0, context - 1, unit="tokens").check("answer", cfg.answer)
    Whole(1, 2**20, unit="sequences").check("batch", cfg.batch)
    if cfg.margin is None:
        raise ValueError("margin=null says nothing; give the loss that you accept, for example margin=0.01")
    check_margin(cfg.margin)
    for name, least in (("resamples", 100), ("seed", 0)):
        check_whole(name, cfg[name], least)
    return Asked(
        shape=find_shape(cfg.model),
        context_tokens=context,
        answer_tokens=cfg.answer,
        batch=cfg.batch,
        memory_bytes=None if cfg.memory is None else read_bytes("memory", cfg.memory),
        margin=float(cfg.margin),
    )


def read_tokens(value: object) -> int:
    """Read a number of tokens, or text such as 32k."""
    match = re.fullmatch(r"([0-9]{1,9})([kK]?)", str(value)) if not isinstance(value, bool) else None
    found = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not 1 < found <= MAX_TOKENS:
        raise ValueError(f"context={value} is no number of tokens; write a whole number, or text such as 32k")
    return found


def gather(
    groups: list[Group], cfg: DictConfig, asked: Asked, speeds: Mapping[str, list[Speed]]
) -> tuple[list[Advice], list[str]]:
    """Gather what is known of every stored method and setting, one entry each, and what must be known beside them."""
    found: dict[str, Advice] = {}
    notes: list[str] = []
    for group in groups:
        try:
            rows, said = compare_group(group, cfg)
        except ValueError as error:
            notes.append(f"{group.title}: {error}")
            continue
        notes += [*group.notes, *said]
        quality = {row.run.name: row for row in rows if row.run is not None}
        for run in group.runs:
            if run in group.repeats:
                continue
            policy = policy_of(run.record.identity)
            key = repr(policy) if policy is not None else f"{run.method} {run.record.identity.get('method')}"
            if key not in found:
                found[key] = _entry(run, asked, speeds.get(key, []))
            if row := quality.get(run.name):
                longest = max((record["num_prompt_tokens"] for record in run.samples.values()), default=0)
                own = group.model == asked.shape.name
                measured = Quality(row=row, task=group.task, model=group.model, own=own, longest_tokens=longest)
                found[key].quality.append(measured)
    return list(found.values()), list(dict.fromkeys(notes))


def _entry(run: StoredRun, asked: Asked, speeds: list[Speed]) -> Advice:
    identity, answer = run.record.identity, asked.answer_tokens
    known = run.method in files.options("method")
    usual = as_dict(method_settings(run.method)) if known else {}
    stored = identity.get("method") or {}
    return Advice(
        asked=asked,
        label=run.label,
        method=run.method,
        settings={name: value for name, value in stored.items() if name in usual and value != usual[name]},
        bytes_of=projected(identity, run.samples.values(), asked.shape, asked.context_tokens - answer, answer),
        speeds=speeds,
    )


def read_speeds(folder: Path) -> tuple[dict[str, list[Speed]], list[str]]:
    """Read the measured throughput of every method, by the text of its policy, and say which files cannot be read."""
    from kvbench.bench.choices import make_method
    from kvbench.bench.command import read_document

    found: dict[str, list[Speed]] = {}
    notes = []
    for path in sorted(folder.glob("**/bench.json")):
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
                    key = repr(make_method(row["name"]))
                except ValueError:  # a baseline, such as transformers' own cache
                    continue
                rate, context = row["tokens_per_call"] / row["median"], int(cell["cell"].get("context", 0))
                found.setdefault(key, []).append(Speed(tokens_per_s=rate, model=model, context_tokens=context))
    return found, notes


def show(ranked: Sequence[Advice], asked: Asked, notes: Sequence[str], *, has_speeds: bool, most: int | None) -> None:
    """Print the table, at most `most` rows of it, and what must be known to read it."""
    console = terminal.console(80)
    room = "" if asked.memory_bytes is None else f", {format_bytes(asked.memory_bytes)} for caches"
    table = terminal.plain_table(f"{asked.shape.name}: {asked.batch} x {asked.context_tokens} tokens{room}")
    table.add_column("method", overflow="fold", min_width=12)
    unit = next((f", {item.row.what.unit}" for one in ranked for item in one.quality), "")
    for heading in ("caches", "%", f"loss{unit}", *(["tok/s"] if has_speeds else []), "says"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in ranked[:most]:
        speed = item.speed
        rate = "-" if speed is None else f"{speed.tokens_per_s:.3g}{'' if item.own_rate else '*'}"
        table.add_row(
            safe(item.label, LINE_LENGTH),
            format_bytes(item.total_bytes),
            "-" if item.bytes_of is None else f"{100 * item.bytes_of.ratio:.1f}",
            "0" if item.method == FULL else loss_text(item),
            *([rate] if has_speeds else []),
            item.says,
        )
    console.print(table)
    if rest := ranked[most:] if most is not None else ():
        counted = ", ".join(f"{count} {name}" for name, count in Counter(item.says for item in rest).items())
        console.print(Text(f"and {len(rest)} more ({counted}); rows=null shows all", style="dim"))
    for line in (*summary(ranked, asked), *unknown(ranked, asked, has_speeds)):
        console.print(Text(line), soft_wrap=line.startswith(" "))  # a command is copied
    for note in notes:
        console.print(Text(f"! {note}"), soft_wrap=True)
    shown = {item.says for item in ranked}
    console.print(
        Text(
            "loss: mean paired difference to the full cache [95 % interval], of the task that leaves most open; * "
            "another model; each interval is by itself. caches: all sequences, weights and activations apart; %: of "
            "FP16. "
            + " ".join(f"{name}: {meaning}." for name, meaning in MEANING.items() if name in shown)
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


def summary(ranked: Sequence[Advice], asked: Asked) -> list[str]:
    """Name the method that is advised, in a sentence."""
    lines = []
    if asked.memory_bytes is not None:
        fits = [item.says == ADVISED for item in ranked if item.method == FULL]
        lines += [f"The full cache {'fits' if fit else 'does not fit'}." for fit in fits[:1]]
    best = next((item for item in ranked if item.says == ADVISED and item.method != FULL), None)
    if best is None or best.worst is None:
        name = asked.shape.name
        return [*lines, f"Nothing that fits is shown to lose no more than the margin on {name}, so none is advised."]
    return [
        *lines,
        f"Measured on {asked.shape.name}, it fits and loses no more than the margin: {safe(best.label)} "
        f"({best.worst.row.pairs.num_samples} samples).",
    ]


def unknown(ranked: Sequence[Advice], asked: Asked, has_speeds: bool) -> list[str]:
    """Name what is not known, and the commands that would find out."""
    methods, name = [item for item in ranked if item.method != FULL], asked.shape.name
    lines, model = [], _model_words(name)
    if elsewhere := [item for item in methods if item.says in (ELSEWHERE, UNMEASURED)]:
        task = next((item.worst.task for item in elsewhere if item.worst), "longctx")
        lines.append(f"Not measured on {name}, so not advised: {_named(elsewhere)}. To find out:")
        lines += [_command(item, [f"task={task}", *model]) for item in elsewhere[:NAMED]]
    # First the one that fewest more samples would settle.
    undecided = [(item.worst, item) for item in methods if item.says == OPEN and item.worst]
    if undecided:
        undecided.sort(key=lambda pair: pair[0].row.needed or float("inf"))
        worst, first = undecided[0]
        needed, there = worst.row.needed, worst.row.pairs.num_samples
        more = f"about {needed} samples would tell (there are {there})" if needed else "more samples"
        lines.append(f"Too few samples to tell: {_named([item for _, item in undecided])}; {more}. To find out:")
        on = _model_words(worst.model) if worst.own else model
        lines.append(_command(first, [f"task={worst.task}", *on, "limit=null"]))
    longest = max((quality.longest_tokens for item in methods for quality in item.quality), default=0)
    if longest and asked.context_tokens > FAR * longest:
        lines.append(
            f"Quality was measured on prompts of up to {longest} tokens; at {asked.context_tokens} it is not known. To "
            "find out:"
        )
        lines.append(_command(methods[0], ["task=ruler", f"task.lengths=[{asked.context_tokens}]", *model]))
    if slow := [item for item in methods if item.says != TOO_LARGE and not item.own_rate]:
        what = "No throughput was measured" + (f" on {name}" if has_speeds else "")
        named = [FULL, *(f'"{" ".join([item.method, *_words(item)])}"' for item in slow[:NAMED])]
        of = model[0].partition("=")[2] if len(model) == 1 else "hf path=FOLDER"
        words = [f"throughput.model={of}", f"throughput.methods=[{','.join(named)}]"]
        words.append(f"throughput.context={asked.context_tokens - asked.answer_tokens}")
        if asked.memory_bytes is not None:
            words.append(f"throughput.kv_mb={asked.memory_bytes // 10**6}")
        lines.append(f"{what} of {_named(slow)}. To find out:")
        lines.append("  " + shlex.join(["kvbench", "bench", "what=throughput", *words]))
    return lines


def _model_words(name: str) -> list[str]:
    return [f"model={name}"] if name in files.options("model") else ["model=hf", "model.path=FOLDER"]


def _named(items: Sequence[Advice]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(safe(item.label) for item in items[:NAMED]) + more


def _words(item: Advice) -> list[str]:
    return [f"{name}={value}" for name, value in item.settings.items()]


def _command(item: Advice, more: Sequence[str]) -> str:
    words = [f"method={item.method}", *(f"method.{word}" for word in _words(item)), *more]
    return "  " + shlex.join(["kvbench", *map(str, words)])
