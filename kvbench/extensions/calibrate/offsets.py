"""`calibrate what=offsets` measures the mean keys of a model, which `store.key_offset` subtracts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from kvbench.extensions.calibrate.tables import Advance, Looks, look_at, write_table
from kvbench.policy import LayerTensors, Need, ScoreSpec

if TYPE_CHECKING:
    from kvbench.engine.requests import Request
    from kvbench.models.load import LoadedModel


def offsets(cfg: DictConfig) -> int:
    """Measures the mean keys and writes them; see conf/command/calibrate/offsets.yaml."""
    return write_table(cfg, "offsets", measure_offsets, "numbers", "int4 store.key_offset", form=".6g")


@dataclass(frozen=True)
class _Keys(Looks):
    """Sums of keys as they are stored."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    by_queries: ClassVar[bool] = False

    def look(self, seen: LayerTensors) -> tuple[Tensor, ...]:
        return (seen.k.double().sum(1).flatten().cpu(),)


@torch.no_grad()
def measure_offsets(loaded: "LoadedModel", requests: "Sequence[Request]", advance: Advance = lambda: None) -> Tensor:
    """Measure the mean key of each KV head after its rotary embedding; restores the model's attention.

    Returns:
        fp64 [layers, KV heads x D]: the mean over all tokens of the prompts, each alike.

    Source: PrismML-Eng's fork of llama.cpp, pull request 51, which centres keys by a table of a calibration.
    """
    looks, prompts = _Keys(), [list(request.prompt) for request in requests]
    look_at(loaded, ScoreSpec(statistic=looks), prompts, advance)
    sums = [sum((keys for (keys,) in parts), torch.zeros(())) for _, parts in sorted(looks.collected.items())]
    return torch.stack(sums) / sum(map(len, prompts))
