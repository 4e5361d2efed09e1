"""A layer of a prompt on its way into the cache, and the tokens of it that are kept."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prompt on its way into the cache.

    Args:
        row: The row.
        layer: The layer.
        lists: int64 [H] its lists.
        k, v: [H, N, D] keys and values as the model gives them.
        paged_k: [H, N, D] keys as pages hold them.
        score: fp32 [H, N] what the slots' scores begin with, or None for 0.
    """

    row: int
    layer: int
    lists: Tensor
    k: Tensor
    v: Tensor
    paged_k: Tensor
    score: Tensor | None


@dataclass(frozen=True)
class Kept:
    """The tokens of a prompt layer that go to one tier, in position order.

    Args:
        head: int64 [M].
        token: int64 [M] position in the prompt.
        ordinal: int64 [M] place in the head's list.
        count: int64 [H] tokens per head.
    """

    head: Tensor
    token: Tensor
    ordinal: Tensor
    count: Tensor

    @staticmethod
    def of(chosen: Tensor) -> "Kept":
        """From bool [H, N]."""
        count = chosen.sum(1)
        head, token = chosen.nonzero(as_tuple=True)
        ordinal = torch.arange(len(head), device=chosen.device) - (count.cumsum(0) - count)[head]
        return Kept(head, token, ordinal, count)
