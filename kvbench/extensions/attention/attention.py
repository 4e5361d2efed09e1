"""`kvbench calibrate what=attention`: statistics of attention with the full cache, as in papers before a method.

How scores and values are distributed, how few tokens matter, which channels stand out, what persists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from kvbench.engine.supported import model_shape
from kvbench.errors import SettingValue, check_whole, unknown_name
from kvbench.extensions.attention.figures import BEHIND, FIGURES, Seen
from kvbench.extensions.calibrate.tables import Looks, look_at
from kvbench.policy import ALL_QUERIES, LayerTensors, Need, ScoreSpec
from kvbench.results.writing import write_files
from kvbench.rules import Number
from kvbench.runs.parts import Loaders
from kvbench.show import terminal
from kvbench.show.csv_file import records_csv
from kvbench.show.picture import drawn
from kvbench.show.progress import Progress

WINDOWS = 8  # equal parts of a prompt's queries; tokens of the first part are looked at by the others
MOST_NUMBERS = 1 << 24  # of probabilities at once
KINDS = ("png", "svg")
STYLE: dict[Any, Any] = {"font.size": 7}


@dataclass(frozen=True)
class Attention(Looks):
    """Reduces each layer's attention, keys and values of a prompt to what the pictures need.

    Args:
        share: Share of a query's attention that its critical tokens have together, in (0, 1).
        mapped: Layers of which the whole map is kept too, the mean over heads: 4 bytes x tokens^2 for each.
        top: Tokens that count as the heaviest ones of a head at a step.
    """

    share: float = 0.95
    top: int = 150
    mapped: frozenset[int] = frozenset()
    collected: dict[int, list[Any]] = field(default_factory=dict, compare=False)
    needs: ClassVar[frozenset[Need]] = frozenset()

    def look(self, seen: LayerTensors) -> Any:
        heads, tokens = seen.q.shape[0], seen.k.shape[1]
        step = max(1, MOST_NUMBERS // (heads * tokens))
        windows, needed, rows = torch.zeros(WINDOWS, heads, tokens), torch.zeros(heads), []
        ends = steps_of(tokens)
        sums = torch.zeros(len(ends), heads, ends[0] - 1)
        last = torch.arange(tokens) * WINDOWS // tokens == WINDOWS - 1  # queries that see nearly all of the prompt
        for first in range(0, tokens, step):
            places = torch.arange(first, min(first + step, tokens))
            weights = seen.softmax(seen.logits(slice(first, first + step))).float().cpu()  # [query heads, step, tokens]
            windows.index_add_(0, places * WINDOWS // tokens, weights.transpose(0, 1))
            counts = (places < torch.tensor(ends)[:, None]).float()
            sums += torch.einsum("sp,hpt->sht", counts, weights[..., : ends[0] - 1])
            late = places[last[places]]
            needed += (critical_tokens(weights[:, last[places]], self.share) / (late + 1)).sum(1)
            rows += [weights.mean(0)] if seen.layer in self.mapped else []
        return Seen(
            received=windows.sum(0) / torch.arange(tokens, 0, -1),
            windows=windows[..., : tokens // WINDOWS],
            critical=needed / last.sum(),
            keys=seen.k.float().cpu(),
            values=seen.v.float().cpu(),
            variance=float(windows.sum(0).view(seen.k.shape[0], -1, tokens).sum(1).var(-1, correction=0).mean()),
            mapped=torch.cat(rows) if rows else None,
            heaviest=sums.topk(min(self.top, sums.shape[-1]), -1).indices,
        )


def steps_of(tokens: int) -> tuple[int, int, int]:
    """Queries read at the first, middle and last step of a prompt's end, which stands for an answer.

    Of 64 tokens and more its last 32, so that these are steps 1, 16 and 32.
    """
    behind = min(BEHIND, tokens // 2)
    return tokens - behind + 1, tokens - behind + behind // 2, tokens


def critical_tokens(probabilities: Tensor, share: float) -> Tensor:
    """The fewest tokens that have a share of each query's attention: int64 [...] from [..., tokens]."""
    reached = probabilities.sort(-1, descending=True).values.cumsum(-1)
    return ((reached < share).sum(-1) + 1).clamp(max=probabilities.shape[-1])


@torch.no_grad()
def measure(loaded: Any, prompts: Sequence[Sequence[int]], spec: Attention, advance: Any = lambda: None) -> list:
    """Run `Attention` on prompts; returns a list of lists of `Seen`, by prompt and layer."""
    look_at(
        loaded, ScoreSpec(statistic=spec, prefill_queries=ALL_QUERIES), [list(prompt) for prompt in prompts], advance
    )
    return [list(layers) for layers in zip(*(parts for _, parts in sorted(spec.collected.items())), strict=True)]


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench calibrate what=attention`; see conf/command/attention.yaml."""
    settings = cfg.attention
    wanted = list(FIGURES) if settings.what == "all" else [str(settings.what)]
    for name in wanted:
        if name not in FIGURES:
            raise unknown_name("attention.what", name, ["all", *FIGURES])
    count = check_whole("attention.prompts", settings.prompts, 1)
    check_whole("attention.maps", settings.maps, 1)
    check_whole("attention.top", settings.top, 1)
    Number(0, 1, above=True).check("attention.share", settings.share)
    parts = Loaders()
    parts.check_task(cfg)
    model = parts.load_model(cfg.model)
    task = parts.load_task(cfg.task, model, limit=count, seed=cfg.seed, protocol=cfg.protocol)
    prompts = [request.prompt for request in task.requests if len(request.prompt) >= 2 * WINDOWS]
    if not prompts:
        raise SettingValue(f"task={task.name} has no prompt of {2 * WINDOWS} tokens; task=longctx has", setting="task")
    last = model_shape(model.model).num_layers - 1
    mapped = {round(number) for number in torch.linspace(0, last, settings.maps).tolist()} if "maps" in wanted else ()
    spec = Attention(share=settings.share, mapped=frozenset(mapped), top=settings.top)
    with Progress(f"attention of {model.name} on {task.name}", len(prompts), 0) as progress:
        measured = measure(model, prompts, spec, progress.advance)
    tokens = sorted(map(len, prompts))
    title = f"{model.name} on {task.name}, n = {len(prompts)} prompts of {tokens[0]} to {tokens[-1]} tokens"
    root, console = Path(str(settings.out)), terminal.console(120)
    contents: dict[Path, bytes] = {}
    for name in wanted:
        made = FIGURES[name](measured, settings.share)
        for kind in KINDS:
            contents[root / f"{name}.{kind}"] = drawn(partial(made.draw, title), kind, STYLE, dpi=200)
        contents[root / f"{name}.csv"] = records_csv(made.records)
        console.print(f"{name}: {made.said}", soft_wrap=True)
    console.print(title, soft_wrap=True)
    terminal.print_paths(write_files(root, contents), console)
    return 0
