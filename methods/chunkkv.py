"""ChunkKV: the observation window chooses whole chunks of the prompt, not single tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvbench.methods.snapkv import SnapKV
from kvbench.policy import PrefillView, Whole


@dataclass(kw_only=True)
class ChunkKV(SnapKV):
    """Keeps the observation window and the chunks of consecutive tokens that its queries attend to most.

    Args:
        chunk: Tokens per chunk; >= 1.
        reuse: Neighbouring layers that keep what the first of them chose; 1 = every layer chooses. With more the
            method sees all layers at once, which holds the whole uncompressed prompt meanwhile.
        pool: `max`, `avg` or `none`, over the prompt before the window, before chunks are formed.

    Source: ChunkKV (Liu et al. 2025, arXiv 2502.00299), Algorithms 1 and 2; NVIDIA/kvpress chunkkv_press.py, which
        takes the mean over a chunk and one choice for all heads of a layer.
    Differs: the window is kept in addition to the chunks; the last chunk that fits in part stays in part, so that the
        budget is met; the last chunk of a prompt may be shorter than the others.
    """

    chunk: Annotated[int, Whole(1, unit="tokens")] = 10
    reuse: Annotated[int, Whole(1, 1000, unit="layers")] = 1
    pool: Literal["max", "avg", "none"] = "none"

    def declare(self) -> None:
        super().declare()
        if self.reuse > 1:
            self.scope = "model"

    def ranking(self, view: PrefillView) -> Tensor:
        chosen_by = torch.arange(len(view.layers), device=view.layers.device) // self.reuse * self.reuse
        return view.score.sum(1)[chosen_by][:, None].expand_as(view.score)
