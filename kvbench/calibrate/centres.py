"""The `centres` command runs a model to see where each head's queries gather: a table for `method=triattention`."""

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
from kvbench.policy import ALL_QUERIES, LayerTensors, Need, Policy, ScoreSpec, Statistic
from kvbench.runs.parts import default_parts
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel


def main(cfg: DictConfig) -> int:
    """Measure the mean queries and write them.

    Args:
        cfg: The settings of conf/command/centres.yaml and of an experiment.

    Returns:
        0.

    Raises:
        ValueError: A setting is out of range, or the model's rotary embedding cannot be taken off.
    """
    own = cfg.centres
    check_whole("centres.prompts", own.prompts, 1)
    parts = default_parts()
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    task = parts.load_task(cfg.task, model, limit=own.prompts, seed=cfg.seed, protocol=cfg.protocol)
    with Progress(f"centres of {model.name} on {task.name}", len(task.requests), 0) as progress:
        table = measure(model, task.requests, progress.advance)
    write_table(own.out, table)
    layers, numbers = table.shape
    print(f"{own.out}: {layers} layers x {numbers} numbers from {len(task.requests)} prompts", file=sys.stderr)
    print(f"use it: kvbench method=triattention method.centres={own.out}")
    return 0


@dataclass(frozen=True)
class _Collects(Statistic):
    """Adds up the queries of every layer as they were before their rotary embedding, and scores nothing."""

    sums: dict[int, Tensor] = field(default_factory=dict, compare=False)
    needs: ClassVar[frozenset[Need]] = frozenset({"before_rope"})

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        plain = seen.turned(seen.q, -seen.q_pos)
        half = plain.shape[-1] // 2
        length = torch.hypot(plain[..., :half], plain[..., half:])
        own = torch.cat([plain, length], -1).double().sum(1).flatten().cpu()
        self.sums[seen.layer] = self.sums.get(seen.layer, 0) + own
        return torch.zeros(seen.k.shape[:2], device=seen.k.device)


class _KeepsAll(Policy):
    """The full cache, with a look at the queries."""

    def __post_init__(self) -> None:
        self.score = ScoreSpec(statistic=_Collects(), prefill_queries=ALL_QUERIES)


@torch.no_grad()
def measure(
    model: "LoadedModel", requests: "Sequence[Request]", advance: Callable[[], object] = lambda: None
) -> Tensor:
    """The mean query of each head before its rotary embedding, and the mean length of its pairs of channels.

    Args:
        model: A loaded model with a plain rotary embedding; it gets its own attention back.
        requests: Prompts.
        advance: Called after every prompt.

    Returns:
        fp64 [layers, query heads x 3 D / 2]: per query head D numbers of the mean query, then D / 2 mean lengths.

    Raises:
        ValueError: The model's rotary embedding is not of the plain kind.

    Source: WeianMao/triattention at c3744ee6, scripts/calibrate.py.
    Differs: all prompts of a task count, each token alike, where the original reads one long text.
    """
    policy, before = _KeepsAll(), model.model.config.get_text_config()._attn_implementation
    collects = policy.score.statistic
    assert isinstance(collects, _Collects)
    try:
        engine = Engine(model, policy, store=StoreOptions(), batch_size=1, seed=0, fidelity_max_tokens=0)
        prompts = [list(request.prompt) for request in requests]
        engine.runner.reserve(rows=1, prompt_tokens=max(map(len, prompts)), new_tokens=1)
        for prompt in prompts:
            row, _ = engine.runner.read(prompt)
            engine.runner.close(row)
            advance()
    finally:
        model.model.set_attn_implementation(before)
    return torch.stack([collects.sums[layer] for layer in sorted(collects.sums)]) / sum(map(len, prompts))
