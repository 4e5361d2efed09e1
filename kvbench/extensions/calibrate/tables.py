"""Commands that run a model over prompts to make a table that a method needs.

`gates`: heads that look far back (`duo_attention`); `centres`: the mean queries of heads (`triattention`); `books`:
levels and scales of key and value codes (`kvquant`); `scales`: the divisors of `fp8`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from kvbench.cache.options import StoreOptions
from kvbench.engine.engine import Engine
from kvbench.engine.supported import heads_of, layer_kinds
from kvbench.errors import SettingValue, check_name, check_whole
from kvbench.kernels.codes import BOOK_TOP, E4M3_LARGEST
from kvbench.methods.kvquant import WIDTHS
from kvbench.policy import ALL_QUERIES, LayerTensors, Need, Policy, ScoreSpec, Statistic
from kvbench.results.writing import write_file
from kvbench.rules import Number
from kvbench.runs.parts import Loaders
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

FINE = 16  # bins of a level in the counts that tables are made from
ROUNDS = 200  # of k-means; most tables stand still after some dozens
Advance = Callable[[], object]


def gates(cfg: DictConfig) -> int:
    """Measures the gates and writes them; see conf/command/gates.yaml."""
    settings = cfg.gates
    check_whole("gates.sinks", settings.sinks, 0)
    check_whole("gates.recent", settings.recent, 1)
    measure = partial(measure_gates, sinks=settings.sinks, recent=settings.recent)
    return write_table(cfg, "gates", measure, "KV heads", "duo_attention method.table")


def centres(cfg: DictConfig) -> int:
    """Measures the mean queries and writes them; see conf/command/centres.yaml."""
    return write_table(cfg, "centres", measure_centres, "numbers", "triattention method.centres")


def books(cfg: DictConfig) -> int:
    """Measures the codebooks and writes them; see conf/command/books.yaml."""
    settings = cfg.books
    check_whole("books.sinks", settings.sinks, 0)
    Number(0, 0.5).check("books.outside", settings.outside)
    measure = partial(measure_books, outside=settings.outside, sinks=settings.sinks)
    return write_table(cfg, "books", measure, "numbers", "kvquant method.books", form=".6g")


def scales(cfg: DictConfig) -> int:
    """Measures the scales of fp8 and writes them; see conf/command/scales.yaml."""
    settings = cfg.scales
    check_name("scales.per", settings.per, ("tensor", "head"))
    check_name("scales.tokens", settings.tokens, ("task", "random"))
    seed = int(cfg.seed) if settings.tokens == "random" else None
    measure = partial(measure_scales, by_head=settings.per == "head", seed=seed)
    return write_table(cfg, "scales", measure, "numbers", "fp8 method.scales", form=".9g")


def write_table(
    cfg: DictConfig, name: str, measure: "Callable[..., Tensor]", unit: str, use: str, *, form: str = ".4f"
) -> int:
    """Measures on the prompts of a task, and writes a line per layer as `kvbench.policy.read_table` reads it."""
    out, count = cfg[name].out, check_whole(f"{name}.prompts", cfg[name].prompts, 1)
    parts = Loaders()
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    task = parts.load_task(cfg.task, model, limit=count, seed=cfg.seed, protocol=cfg.protocol)
    requests = [request for request in task.requests if request.gold or name != "gates"]
    if not requests:
        raise SettingValue(f"task={task.name} has no gold answers to measure with; task=longctx has", setting="task")
    with Progress(f"{name} of {model.name} on {task.name}", len(requests), 0) as progress:
        table = measure(model, requests, advance=progress.advance)
    text = "".join("\t".join(f"{number:{form}}" for number in row) + "\n" for row in table.tolist())
    write_file(Path(out), text.encode("ascii"))
    said = f"{out}: {table.shape[0]} layers x {table.shape[1]} {unit} from {len(requests)} prompts"
    if name == "gates":
        far = table.flatten().sort(descending=True).values
        said += f"; gates from {far[-1]:.3f} to {far[0]:.3f}, median {far.median():.3f}"
    print(said, file=sys.stderr)
    print(f"use it: kvbench method={use}={out}")
    return 0


@torch.no_grad()
def measure_gates(
    loaded: "LoadedModel", requests: "Sequence[Request]", sinks: int, recent: int, advance: Advance = lambda: None
) -> Tensor:
    """Measure the mean share of attention of answer positions on tokens outside sinks and recent ones.

    That is between the first `sinks` and the `recent` ones, up to and including the position itself; restores the
    model's attention.

    Returns:
        fp32 [layers, KV heads] of those that see everything, in [0, 1]: the mean over the prompts, their answer
            positions and the query heads of a group.

    Source: the idea of finding retrieval heads by their attention; Wu et al. (2024) count copied tokens instead.
    """
    model = loaded.model
    config = model.config.get_text_config()
    before = config._attn_implementation
    model.set_attn_implementation("eager")
    layers = layer_kinds(config).full
    _, num_kv_heads, _ = heads_of(config, layers[0])
    total = torch.zeros(len(layers), num_kv_heads)
    try:
        for request in requests:
            prompt = request.prompt
            tokens = torch.tensor([[*prompt, *request.gold[:-1]]], device=model.device)
            out = model(input_ids=tokens, output_attentions=True, logits_to_keep=1, use_cache=False)
            rows = torch.arange(len(prompt) - 1, tokens.shape[1], device=model.device)
            positions = torch.arange(tokens.shape[1], device=model.device)
            far = (positions >= sinks) & (positions <= rows[:, None] - recent)
            for layer, number in enumerate(layers):
                share = (out.attentions[number][0, :, rows].float() * far).sum(-1).mean(-1)  # [query heads]
                total[layer] += share.view(num_kv_heads, -1).mean(1).cpu()
            advance()
    finally:
        model.set_attn_implementation(before)
    return total / len(requests)


@dataclass(frozen=True)
class Looks(Statistic):
    """Statistic that collects every layer's tensors of a prompt before the rotary embedding, and scores nothing."""

    collected: dict[int, list[tuple[Tensor, ...]]] = field(default_factory=dict, compare=False)
    needs: ClassVar[frozenset[Need]] = frozenset({"before_rope"})

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        self.collected.setdefault(seen.layer, []).append(self.look(seen))
        return torch.zeros(seen.k.shape[:2], device=seen.k.device)

    def look(self, seen: LayerTensors) -> tuple[Tensor, ...]:
        """The part of a layer that is kept."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Queries(Looks):
    """Sums of queries and of the lengths of their pairs of channels."""

    def look(self, seen: LayerTensors) -> tuple[Tensor, ...]:
        plain = seen.rotated(seen.q, -seen.q_pos)
        length = torch.hypot(*plain.chunk(2, -1))
        return (torch.cat([plain, length], -1).double().sum(1).flatten().cpu(),)


@dataclass(frozen=True)
class _KeysAndValues(Looks):
    """Keys and values after the first `sinks` tokens."""

    sinks: int = 0
    by_queries: ClassVar[bool] = False

    def look(self, seen: LayerTensors) -> tuple[Tensor, ...]:
        keys = seen.rotated(seen.k, -seen.pos)[:, self.sinks :].cpu()
        return keys, seen.v[:, self.sinks :].float().cpu()


@dataclass(frozen=True)
class _Largest(Looks):
    """The largest key and value of each KV head, keys as they are stored."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    by_queries: ClassVar[bool] = False

    def look(self, seen: LayerTensors) -> tuple[Tensor, ...]:
        return (torch.stack([x.float().abs().amax((1, 2)) for x in (seen.k, seen.v)]).cpu(),)


def look_at(loaded: "LoadedModel", score: ScoreSpec, prompts: list[list[int]], advance: Advance) -> None:
    """Read prompts under the full cache with a collecting statistic; restores the model's attention."""
    policy, before = Policy(), loaded.model.config.get_text_config()._attn_implementation
    policy.score = score
    try:
        engine = Engine(loaded, policy, store=StoreOptions(), batch_size=1, seed=0, fidelity_max_tokens=0)
        engine.runner.reserve(rows=1, prompt_tokens=max(map(len, prompts)), new_tokens=1)
        for prompt in prompts:
            row, _ = engine.runner.read(prompt)
            engine.runner.close(row)
            advance()
    finally:
        loaded.model.set_attn_implementation(before)


@torch.no_grad()
def measure_centres(loaded: "LoadedModel", requests: "Sequence[Request]", advance: Advance = lambda: None) -> Tensor:
    """Measure the mean query of each head before its rotary embedding, and the mean length of its channel pairs.

    Needs a plain rotary embedding, and restores the model's attention.

    Returns:
        fp64 [layers, query heads x 3 D / 2]: per query head D numbers of the mean query, then D / 2 mean lengths.

    Source: WeianMao/triattention at c3744ee6, scripts/calibrate.py.
    Differs: all prompts of a task count, each token alike, where the original reads one long text.
    """
    looks, prompts = _Queries(), [list(request.prompt) for request in requests]
    look_at(loaded, ScoreSpec(statistic=looks, prefill_queries=ALL_QUERIES), prompts, advance)
    sums = [sum((queries for (queries,) in parts), torch.zeros(())) for _, parts in sorted(looks.collected.items())]
    return torch.stack(sums) / sum(map(len, prompts))


@torch.no_grad()
def measure_books(
    loaded: "LoadedModel", requests: "Sequence[Request]", outside: float, sinks: int, advance: Advance = lambda: None
) -> Tensor:
    """Measure the tables of each layer's codes, and the scale and zero of each of its key channels.

    Needs a plain rotary embedding, and restores the model's attention.

    Args:
        requests: Prompts; their keys and values are held all at once, in 8 bytes x channels x tokens.
        outside: Share of a key channel's numbers that may lie outside its range, in [0, 0.5].
        sinks: First tokens of each prompt that do not count; some prompt has more.

    Returns:
        fp64 [layers, numbers]: as `method=kvquant` reads them.

    Source: KVQuant (Hooper et al. 2024), sections 3.1 and 3.3, from memory.
    Differs: k-means counts every number alike, where the paper weighs it by the squared gradient of the loss.
    """
    looks, prompts = _KeysAndValues(sinks=sinks), [list(request.prompt) for request in requests]
    if max(map(len, prompts)) <= sinks:
        raise SettingValue(
            f"books.sinks={sinks} leaves no token of any prompt; give less, or a longer task.length",
            setting="books.sinks",
        )
    look_at(loaded, ScoreSpec(statistic=looks), prompts, advance)
    rows = []
    for layer in sorted(looks.collected):
        keys, values = (torch.cat(parts, 1) for parts in zip(*looks.collected.pop(layer), strict=True))
        rows.append(_books_of_layer(keys, values, outside))
    return torch.stack(rows)


@torch.no_grad()
def measure_scales(
    loaded: "LoadedModel",
    requests: "Sequence[Request]",
    by_head: bool,
    seed: int | None = None,
    advance: Advance = lambda: None,
) -> Tensor:
    """Measure the scales by which each layer's keys and values are divided to become e4m3 floats.

    Restores the model's attention.

    Args:
        requests: Prompts.
        by_head: One number for each KV head; otherwise one for all of them.
        seed: Seed of random tokens that replace the prompts; None = the prompts themselves.

    Returns:
        fp32 [layers, 2 or 2 x KV heads], those of keys first: the largest number over 448, the largest float; of random
            tokens over 200 for keys and 100 for values, which leaves room.

    Source: compressed-tensors' `calculate_qparams` (symmetric), with which llm-compressor calibrates; vLLM's
        `calc_kv_scales` with `--calculate-kv-scales` (PR 11906) of random tokens, there for whole tensors only.
    Differs: the largest of all prompts counts, where llm-compressor's usual observer averages those of its batches.
    """
    looks, prompts, room = _Largest(), [list(request.prompt) for request in requests], (E4M3_LARGEST, E4M3_LARGEST)
    if seed is not None:
        room, make = (200.0, 100.0), torch.Generator().manual_seed(seed)
        most = loaded.model.config.get_text_config().vocab_size
        prompts = [torch.randint(most, (len(prompt),), generator=make).tolist() for prompt in prompts]
    look_at(loaded, ScoreSpec(statistic=looks), prompts, advance)
    largest = torch.stack([torch.stack([x for (x,) in parts]).amax(0) for _, parts in sorted(looks.collected.items())])
    if not by_head:
        largest = largest.amax(-1, keepdim=True)
    return (largest / torch.tensor(room)[:, None]).clamp(min=torch.finfo(torch.float32).eps).flatten(1)


def _books_of_layer(keys: Tensor, values: Tensor, outside: float) -> Tensor:
    """The line of a layer, from keys and values [H, n, D]."""
    channels = keys.transpose(1, 2).flatten(0, 1).double()  # [H * D, n]
    ordered = channels.sort(-1).values
    cut = int(outside / 2 * channels.shape[1])
    zero, high = ordered[:, cut], ordered[:, channels.shape[1] - 1 - cut]
    scale = (high - zero) / BOOK_TOP
    low, top = values.double().aminmax(dim=-1, keepdim=True)
    counts = [_counts(channels, zero[:, None], scale[:, None]), _counts(values.double(), low, (top - low) / BOOK_TOP)]
    tables = [table_of(count, 2**bits) for bits in WIDTHS for count in counts]
    return torch.cat([*(table.double() for table in tables), scale, zero])


def _counts(x: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """Histogram fp64 [bins] of numbers over their range, in sixteenths of a level.

    Those outside of it count at its ends, and at 0 where the range is one point.
    """
    levels = ((x - zero) / torch.where(scale > 0, scale, torch.inf)).clamp(0, BOOK_TOP)
    return torch.bincount((levels * FINE).round().long().flatten(), minlength=BOOK_TOP * FINE + 1).double()


def table_of(counts: Tensor, size: int) -> Tensor:
    """Levels with the least mean distance, by k-means in one dimension: int64 [size], ascending, each level once.

    From fp64 [255 * FINE + 1], the histogram of the numbers.
    """
    levels = torch.arange(len(counts), dtype=torch.float64) / FINE
    number, total = (torch.cat([x.new_zeros(1), x.cumsum(0)]) for x in (counts, counts * levels))
    share = (torch.arange(size, dtype=torch.float64) + 0.5) / size * number[-1]
    centre = levels[torch.searchsorted(number[1:], share).clamp(max=len(levels) - 1)]
    for _ in range(ROUNDS):
        edge = torch.searchsorted(levels, (centre[1:] + centre[:-1]) / 2)
        edge = torch.cat([edge.new_zeros(1), edge, edge.new_tensor([len(levels)])])
        held = number[edge].diff()
        moved = torch.where(held > 0, total[edge].diff() / held.clamp(min=1), centre)
        if torch.equal(moved, centre):
            break
        centre = moved
    step = torch.arange(size)
    level = (centre.round().long() - step).cummax(0).values  # equal levels make room for one another
    return level.clamp(max=BOOK_TOP + 1 - size) + step
