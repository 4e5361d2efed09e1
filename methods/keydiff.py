"""KeyDiff: tokens whose keys point away from the mean direction stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvbench.policy import LayerTensors, Scored, Statistic


@dataclass(frozen=True)
class KeyDifference(Statistic):
    """Minus the cosine between a key and the mean of all keys' directions."""

    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "cosine of keys to their mean direction"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        keys = seen.k.float()
        anchor = F.normalize(keys, dim=-1).mean(-2, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)

    of_slots = of_prompt


@dataclass(kw_only=True)
class KeyDiff(Scored):
    """Keeps, per KV head, the tokens whose keys are least like the others; no attention is looked at.

    Source: KeyDiff (Park et al. 2025, arXiv 2504.15364), as NVIDIA/kvpress keydiff_press.py computes its anchor.
    Differs: the prompt is compressed at once, after it was read, where the paper reads it in blocks and evicts after
        each, as `prefill.chunk` does. Keys are compared in fp32; equal ones keep the earlier token.
    """

    def declare(self) -> None:
        super().declare()
        self.score_by(KeyDifference())
