"""Ranking tokens and sharing budgets, the same way in every method. Methods import these from `kvbench.policy`."""

import torch
from torch import Tensor


def rank_descending(score: Tensor) -> Tensor:
    """Rank of each element along the last axis: score descending, then position ascending (stable); same shape,
    int64."""
    order = torch.argsort(score, dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(score.shape[-1], device=score.device).expand_as(order)
    )


def largest_remainder(parts: list, denominator: object, total: int) -> list[int]:
    """Rounds parts[i] / denominator to whole numbers with the given sum: floors first, then +1 by remainder descending,
    index ascending.

    Args:
        parts: Whole numbers or fractions, so that ties are ties (0.2 is not exact in binary).
        denominator: Common denominator.
        total: Wanted sum; at least the sum of the floors, at most one more per part.
    """
    floors = [int(part // denominator) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(parts[i] - floors[i] * denominator), i))
    for index in by_remainder[: total - sum(floors)]:
        floors[index] += 1
    return floors


def pyramid_budgets(
    base: int, room: int, num_tokens: int, num_layers: int, *, beta: int, official_rounding: bool = False
) -> list[int]:
    """Prefix tokens per layer that fall linearly from the first layer to the last; their sum is base * num_layers.

    Args:
        base: Mean prefix tokens per layer.
        room: Prefix tokens that exist, num_tokens - window.
        num_tokens: Prompt length.
        num_layers: Layers.
        beta: The last layer keeps base / beta.
        official_rounding: Round the step between layers down, which may spend more than the sum.

    Source: KVCache-Factory at c97f9d7, PyramidKVCluster.
    Differs: largest remainder instead of a floored step; one layer works.
    """
    if base >= room:
        return [room] * num_layers
    if num_layers == 1 or num_tokens < 2 * base:  # the released code's guard: uniform where the top would not fit
        return [base] * num_layers
    low = base // beta
    high = 2 * base - low
    if high >= room:
        high, low = room, 2 * base - room
    steps = num_layers - 1
    if official_rounding:
        return [high - layer * ((high - low) // steps) for layer in range(num_layers)]
    return largest_remainder(
        [high * steps - layer * (high - low) for layer in range(num_layers)], steps, base * num_layers
    )
