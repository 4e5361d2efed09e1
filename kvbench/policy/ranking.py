"""Ranking tokens and sharing budgets, the same way in every method. Methods import these from `kvbench.policy`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Count = TypeVar("Count", int, Tensor)


def rank_descending(score: Tensor) -> Tensor:
    """Rank of each element along the last axis: score descending, then position ascending (stable).

    Same shape, int64.
    """
    return _inverse(torch.argsort(score, dim=-1, descending=True, stable=True))


def largest_remainder(parts: Sequence[Fraction | int], denominator: Fraction | int, total: int) -> list[int]:
    """Rounds parts[i] / denominator to whole numbers with the given sum.

    Floors first, then +1 by remainder descending, index ascending.

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
    base: int,
    room: int,
    num_tokens: int,
    num_layers: int,
    *,
    beta: int,
    official_rounding: bool = False,
    uniform_middle: bool = True,
) -> list[int]:
    """Prefix tokens per layer that fall linearly from the first layer to the last; their sum is base * num_layers.

    Args:
        base: Mean prefix tokens per layer.
        room: Prefix tokens that exist, num_tokens - window.
        num_tokens: Prompt length.
        num_layers: Layers.
        beta: The last layer keeps base / beta.
        official_rounding: Round the step between layers down, which may spend more than the sum.
        uniform_middle: Prompts below twice the base get it in every layer; AdaKV's code has no such branch.

    Source: KVCache-Factory at c97f9d7, PyramidKVCluster.
    Differs: largest remainder instead of a floored step; one layer works.
    """
    if base >= room:
        return [room] * num_layers
    if num_layers == 1 or (
        uniform_middle and num_tokens < 2 * base
    ):  # the released code's guard: uniform where the top would not fit
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


def share_with_cap(weight: Tensor, total: int, cap: int, at_least: int = 1) -> list[int]:
    """Integer shares proportional to `weight` [L], none above `cap`.

    The excess over a cap is distributed among the others.

    Args:
        weight: fp64 [L], >= 0.
        total: Wanted sum; what no cap leaves room for is dropped.
        cap: Largest share.
        at_least: Smallest share, 0 or 1; with 1 the sum may be above `total`.
    """
    shares, open_layers, left = [0] * len(weight), list(range(len(weight))), min(total, cap * len(weight))
    while open_layers:
        # A weight that is not finite comes from a model whose logits will show it; it counts for nothing here.
        values = [float(weight[layer]) for layer in open_layers]
        parts = [Fraction(value if math.isfinite(value) else 0) for value in values]
        parts = parts if sum(parts) else [Fraction(1)] * len(parts)
        scaled = [part * left / sum(parts) for part in parts]
        over = [layer for layer, part in zip(open_layers, scaled, strict=True) if part >= cap]
        if not over:
            common = sum(parts)
            exact = largest_remainder([part * left for part in parts], common, left)
            for layer, value in zip(open_layers, exact, strict=True):
                shares[layer] = value
            break
        for layer in over:
            shares[layer] = cap
        left -= cap * len(over)
        open_layers = [layer for layer in open_layers if layer not in over]
    return [max(at_least, share) for share in shares]


def num_blocks(held: Count, block: int) -> Count:
    """Blocks that so many slots take, the last one perhaps part-filled."""
    return (held + (block - 1)) // block


def keep_blocks(cost: Tensor, held: Tensor, block: int, surplus: Tensor | int) -> Tensor:
    """Mask of slots that stay when `surplus` blocks become free, cheapest blocks first; bool [..., M, n].

    Freeing e blocks of a list costs the metric of the last slot that has to go, slots going in ascending order; the
    first block is freed once as many slots are gone as its last block holds. Lists compete with the others of their
    sequence; leading dimensions are sequences. No number goes to the host.

    Args:
        cost: fp32 [..., M, n], +inf for slots that must stay and past a list's end.
        held: int64 [..., M] slots per list.
        surplus: Blocks to free, int64 [...] or one number; fewer are freed when all others hold protected slots.
    """
    num_slots = cost.shape[-1]
    if short := -num_slots % block:
        cost = F.pad(cost, (0, short), value=float("inf"))
    ranked, order = cost.sort(dim=-1, stable=True)
    # The slot that has to go last, of a list's last block and of the others; after a list's end all cost infinity.
    last = (held - 1) % block
    price = ranked.gather(-1, last[..., None] + torch.arange(0, cost.shape[-1], block, device=cost.device))
    limit = surplus[..., None, None] if isinstance(surplus, Tensor) else surplus
    rank = _inverse(price.flatten(-2).argsort(dim=-1, stable=True)).view_as(price)
    count = ((rank < limit) & (price < float("inf"))).sum(-1)
    last = torch.add(last, count - 1, alpha=block)  # below 0 where no block goes
    return (_inverse(order) > last[..., None])[..., :num_slots]


def chunk_means(score: Tensor, held: Tensor, chunk: int) -> Tensor:
    """Every token's mean over those of its chunk that are held, fp32 [V, H, n]; equal chunks keep their order."""
    mean = _per_chunk(score.masked_fill(~held, 0.0), chunk) / _per_chunk(held.long(), chunk).clamp(min=1)
    return mean[..., _chunk_of(score, chunk)]


def whole_chunks(chosen: Tensor, held: Tensor, chunk: int, may_be_none: bool) -> Tensor:
    """Chosen tokens, bool [V, H, n], without incomplete chunks.

    A chunk is complete if all its held tokens are chosen; a list that would be empty keeps its part of a chunk unless
    it `may_be_none`.
    """
    is_whole = _per_chunk((chosen & held).long(), chunk) == _per_chunk(held.long(), chunk)
    whole = chosen & is_whole[..., _chunk_of(chosen, chunk)]
    return whole if may_be_none else torch.where(whole.any(-1, keepdim=True), whole, chosen)


def _chunk_of(tokens: Tensor, chunk: int) -> Tensor:
    """Chunk of each of tokens [.., n], int64 [n]."""
    return torch.arange(tokens.shape[-1], device=tokens.device) // chunk


def _per_chunk(x: Tensor, chunk: int) -> Tensor:
    """Sum `x` [.., n] over chunks."""
    return x.new_zeros(*x.shape[:-1], num_blocks(x.shape[-1], chunk)).index_add_(-1, _chunk_of(x, chunk), x)


@dataclass(frozen=True)
class TwoStages:
    """CriticalKV's choice: some tokens by their score alone, the others by the score times a norm.

    Args:
        first: Share of a list's tokens that go by the score alone.
        epsilon: Added to the score before it is multiplied.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    def choose(self, score: Tensor, norm: Tensor, held: Tensor, counts: Tensor) -> Tensor:
        """Mask bool [V, H, n] of the `counts` tokens of each list; scores below 0 count from the smallest."""
        score = score - score.masked_fill(~held, float("inf")).amin(-1, keepdim=True).clamp(max=0)
        first = rank_descending(score) < (counts * self.first).long()
        worth = ((score + self.epsilon) * norm).masked_fill(~held, float("-inf"))
        return rank_descending(worth.masked_fill(first, float("inf"))) < counts


def uniform(seed: int, *indices: Tensor) -> Tensor:
    """Numbers drawn evenly between 0 and 1: the same in any batch and on any device, and without the host.

    Args:
        seed: A whole number, at most 2**63 - 1.
        indices: int64 tensors that broadcast: whose numbers these are.

    Returns:
        fp32 in their common shape, never 0; one of 2**24 values.
    """
    mixed = torch.full((), seed, dtype=torch.int64, device=indices[0].device)
    for number in indices:  # overflow wraps, as meant
        mixed = (mixed + number + 1) * 0x5851F42D4C957F2D
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
        mixed = mixed * 0x2545F4914F6CDD1D
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    return ((mixed & 0xFFFFFF).float() + 0.5) / 2**24


def _inverse(order: Tensor) -> Tensor:
    """The rank of each element, from the order that sorts the last axis; int64 in the same shape."""
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, rank)
