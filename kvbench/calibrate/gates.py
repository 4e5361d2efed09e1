"""The `gates` command runs a model to see which heads look far back: a table for `method=duo_attention`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from torch import Tensor

from kvbench.errors import check_whole
from kvbench.results.writing import write_file
from kvbench.runs.parts import default_parts
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvbench.engine.requests import Request


def main(cfg: DictConfig) -> int:
    """Measure the gates and write them.

    Args:
        cfg: The settings of conf/command/gates.yaml and of an experiment.

    Returns:
        0.

    Raises:
        ValueError: A setting is out of range, or the task has no gold answers.
    """
    own = cfg.gates
    for key, least in (("prompts", 1), ("sinks", 0), ("recent", 1)):
        check_whole(f"gates.{key}", own[key], least)
    parts = default_parts()
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    task = parts.load_task(cfg.task, model, limit=own.prompts, seed=cfg.seed, protocol=cfg.protocol)
    requests = [request for request in task.requests if request.gold]
    if not requests:
        raise ValueError(f"task={task.name} has no gold answers to measure with; task=longctx has")
    with Progress(f"gates of {model.name} on {task.name}", len(requests), 0) as progress:
        gates = measure(model.model, requests, own.sinks, own.recent, progress.advance)
    write_table(own.out, gates)
    far = gates.flatten().sort(descending=True).values
    print(
        f"{own.out}: {gates.shape[0]} layers x {gates.shape[1]} KV heads from {len(requests)} prompts; "
        f"gates from {far[-1]:.3f} to {far[0]:.3f}, median {far.median():.3f}",
        file=sys.stderr,
    )
    print(f"use it: kvbench method=duo_attention method.table={own.out}")
    return 0


def write_table(path: str, table: Tensor, form: str = ".4f") -> None:
    """Writes numbers as `kvbench.policy.read_table` reads them: a line per layer, parted by tabs.

    Args:
        path: The file.
        table: [layers, numbers].
        form: How a number is written.
    """
    text = "".join("\t".join(f"{number:{form}}" for number in row) + "\n" for row in table.tolist())
    write_file(Path(path), text.encode("ascii"))


@torch.no_grad()
def measure(
    model: "PreTrainedModel",
    requests: "Sequence[Request]",
    sinks: int,
    recent: int,
    advance: Callable[[], object] = lambda: None,
) -> Tensor:
    """The mean share of attention that answer positions give to tokens between the sinks and the recent window.

    Args:
        model: A model whose attention can be asked for its weights (`eager`); it gets its own attention back.
        requests: Prompts with gold tokens.
        sinks: First tokens that do not count.
        recent: Tokens up to and with the position itself that do not count.
        advance: Called after every prompt.

    Returns:
        fp32 [layers, KV heads], in [0, 1]: the mean over the prompts, their answer positions and the query heads of a
        group.

    Source: the idea of telling retrieval heads by where they look; Wu et al. (2024) count copied tokens instead.
    """
    config = model.config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    before = config._attn_implementation
    model.set_attn_implementation("eager")
    total = torch.zeros(config.num_hidden_layers, num_kv_heads)
    try:
        for request in requests:
            prompt = request.prompt
            tokens = torch.tensor([[*prompt, *request.gold[:-1]]], device=model.device)
            out = model(input_ids=tokens, output_attentions=True, logits_to_keep=1, use_cache=False)
            rows = torch.arange(len(prompt) - 1, tokens.shape[1], device=model.device)
            place = torch.arange(tokens.shape[1], device=model.device)
            far = (place >= sinks) & (place <= rows[:, None] - recent)
            for layer, weights in enumerate(out.attentions):
                share = (weights[0, :, rows].float() * far).sum(-1).mean(-1)  # [query heads]
                total[layer] += share.view(num_kv_heads, -1).mean(1).cpu()
            advance()
    finally:
        model.set_attn_implementation(before)
    return total / len(requests)
