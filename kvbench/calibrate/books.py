"""The `books` command runs a model to find the tables and scales that its keys and values are coded with: the books for
`method=kvquant`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from kvbench.cache.layout import StoreOptions
from kvbench.calibrate.gates import write_table
from kvbench.engine.engine import Engine
from kvbench.errors import check_whole
from kvbench.kernels.codes import BOOK_TOP
from kvbench.methods.kvquant import WIDTHS
from kvbench.policy import LayerTensors, Need, Policy, ScoreSpec, Statistic
from kvbench.rules import Number
from kvbench.runs.parts import default_parts
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel

FINE = 16  # bins of a level in the counts that tables are made from
ROUNDS = 200  # of k-means; most tables stand still after some dozens


def main(cfg: DictConfig) -> int:
    """Measure the books and write them.

    Args:
        cfg: The settings of conf/command/books.yaml and of an experiment.

    Returns:
        0.

    Raises:
        ValueError: A setting is out of range, or the model's rotary embedding cannot be taken off.
    """
    own = cfg.books
    check_whole("books.prompts", own.prompts, 1)
    check_whole("books.sinks", own.sinks, 0)
    Number(0, 0.5).check("books.outside", own.outside)
    parts = default_parts()
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    task = parts.load_task(cfg.task, model, limit=own.prompts, seed=cfg.seed, protocol=cfg.protocol)
    with Progress(f"books of {model.name} on {task.name}", len(task.requests), 0) as progress:
        table = measure(model, task.requests, own.outside, own.sinks, progress.advance)
    write_table(own.out, table, ".6g")
    layers, numbers = table.shape
    print(f"{own.out}: {layers} layers x {numbers} numbers from {len(task.requests)} prompts", file=sys.stderr)
    print(f"use it: kvbench method=kvquant method.books={own.out}")
    return 0


@dataclass(frozen=True)
class _Collects(Statistic):
    """Keeps the keys of every layer as they were before their rotary embedding, and the values; scores nothing."""

    sinks: int
    found: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, compare=False)
    needs: ClassVar[frozenset[Need]] = frozenset({"before_rope"})
    by_queries: ClassVar[bool] = False

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        keys = seen.turned(seen.k, -seen.pos)[:, self.sinks :].cpu()
        self.found.setdefault(seen.layer, []).append((keys, seen.v[:, self.sinks :].float().cpu()))
        return torch.zeros(seen.k.shape[:2], device=seen.k.device)


@dataclass(kw_only=True)
class _KeepsAll(Policy):
    """The full cache, with a look at keys and values."""

    sinks: int = 0

    def __post_init__(self) -> None:
        self.score = ScoreSpec(statistic=_Collects(self.sinks))


@torch.no_grad()
def measure(
    model: "LoadedModel",
    requests: "Sequence[Request]",
    outside: float,
    sinks: int,
    advance: Callable[[], object] = lambda: None,
) -> Tensor:
    """The tables of each layer's codes, and the scale and zero of each of its key channels.

    Args:
        model: A loaded model with a plain rotary embedding; it gets its own attention back.
        requests: Prompts; their keys and values are held all at once, in 8 bytes x channels x tokens.
        outside: Share of a key channel's numbers that may lie outside its range, in [0, 0.5].
        sinks: First tokens of each prompt that do not count; some prompt has more.
        advance: Called after every prompt.

    Returns:
        fp64 [layers, numbers]: as `method=kvquant` reads them.

    Raises:
        ValueError: The model's rotary embedding is not of the plain kind, or no prompt is longer than `sinks`.

    Source: KVQuant (Hooper et al. 2024), sections 3.1 and 3.3, from memory.
    Differs: k-means counts every number alike, where the paper weighs it by the squared gradient of the loss.
    """
    policy, before = _KeepsAll(sinks=sinks), model.model.config.get_text_config()._attn_implementation
    collects = policy.score.statistic
    assert isinstance(collects, _Collects)
    try:
        engine = Engine(model, policy, store=StoreOptions(), batch_size=1, seed=0, fidelity_max_tokens=0)
        prompts = [list(request.prompt) for request in requests]
        if max(map(len, prompts)) <= sinks:
            raise ValueError(f"books.sinks={sinks} leaves no token of any prompt; give less, or a longer task.length")
        engine.runner.reserve(rows=1, prompt_tokens=max(map(len, prompts)), new_tokens=1)
        for prompt in prompts:
            row, _ = engine.runner.read(prompt)
            engine.runner.close(row)
            advance()
    finally:
        model.model.set_attn_implementation(before)
    rows = []
    for layer in sorted(collects.found):
        keys, values = (torch.cat(parts, 1) for parts in zip(*collects.found.pop(layer), strict=True))
        rows.append(_of_layer(keys, values, outside))
    return torch.stack(rows)


def _of_layer(keys: Tensor, values: Tensor, outside: float) -> Tensor:
    """The line of a layer, from keys and values [H, n, D]."""
    channels = keys.transpose(1, 2).flatten(0, 1).double()  # [H * D, n]
    ordered = channels.sort(-1).values
    cut = int(outside / 2 * channels.shape[1])
    zero, high = ordered[:, cut], ordered[:, channels.shape[1] - 1 - cut]
    scale = (high - zero) / BOOK_TOP
    key_levels = _levels(channels, zero[:, None], scale[:, None])
    low = values.double().amin(-1, keepdim=True)
    value_levels = _levels(values.double(), low, (values.double().amax(-1, keepdim=True) - low) / BOOK_TOP)
    counts = [_counts(levels) for levels in (key_levels, value_levels)]
    tables = [table_of(count, 2**bits) for bits in WIDTHS for count in counts]
    return torch.cat([*(table.double() for table in tables), scale, zero])


def _levels(x: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """Numbers as levels of their range, those outside of it at its ends; 0 where the range is one point."""
    return ((x - zero) / torch.where(scale > 0, scale, torch.inf)).clamp(0, BOOK_TOP)


def _counts(levels: Tensor) -> Tensor:
    """fp64 [bins]: how many numbers lie in each sixteenth of a level."""
    return torch.bincount((levels * FINE).round().long().flatten(), minlength=BOOK_TOP * FINE + 1).double()


def table_of(counts: Tensor, size: int) -> Tensor:
    """The levels that numbers are nearest to in the mean, by k-means in one dimension, as whole numbers.

    Args:
        counts: fp64 [255 * FINE + 1] how many numbers lie in each bin, some at least.
        size: Levels, at most 256.

    Returns:
        int64 [size], ascending, each level once.
    """
    place = torch.arange(len(counts), dtype=torch.float64) / FINE
    number, total = (torch.cat([x.new_zeros(1), x.cumsum(0)]) for x in (counts, counts * place))
    share = (torch.arange(size, dtype=torch.float64) + 0.5) / size * number[-1]
    centre = place[torch.searchsorted(number[1:], share).clamp(max=len(place) - 1)]
    for _ in range(ROUNDS):
        edge = torch.searchsorted(place, (centre[1:] + centre[:-1]) / 2)
        edge = torch.cat([edge.new_zeros(1), edge, edge.new_tensor([len(place)])])
        held = number[edge].diff()
        moved = torch.where(held > 0, total[edge].diff() / held.clamp(min=1), centre)
        if torch.equal(moved, centre):
            break
        centre = moved
    step = torch.arange(size)
    level = (centre.round().long() - step).cummax(0).values  # equal levels make room for one another
    return level.clamp(max=BOOK_TOP + 1 - size) + step
