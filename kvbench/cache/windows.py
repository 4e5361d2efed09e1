"""Sliding-window layers: tokens that the next query can still see, and nothing else."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.options import StoreOptions
from kvbench.cache.paged import SCRATCH_SLOTS
from kvbench.errors import SettingsConflict, SettingValue
from kvbench.kernels.operands import Window
from kvbench.policy import (
    APPEND,
    EVICT,
    Compaction,
    CompactPlan,
    DecodePlan,
    DecodeView,
    Policy,
    PrefillPlan,
    PrefillView,
    Tier,
)


def less_windows(options: StoreOptions, rows: int, held_bytes: int) -> StoreOptions:
    """Copy of options with the limit on pages reduced by the windows of so many rows, of `held_bytes` each."""
    assert options.budget_bytes is not None, "the caller looked"
    if options.budget_bytes <= rows * held_bytes:
        raise SettingValue(
            f"store.budget_bytes={options.budget_bytes} leaves nothing beside the windows of {rows} rows, which "
            f"take {rows * held_bytes} B; raise it, or lower batch_size",
            setting="store.budget_bytes",
        )
    return replace(options, budget_bytes=options.budget_bytes - rows * held_bytes)


def window_tier(policy: Policy, how: str) -> Tier:
    """Precision of the windows of a model under a method.

    `exact` is 16 bits, or the model's dtype where the method keeps that; `method` is that of the method, which is
    refused where a single slot cannot have it.
    """
    (first, *others), reason = policy.tiers, ""
    if how == "exact":
        return next((tier for tier in policy.tiers if tier.native), Tier())
    if others or policy.by_layer is not None:
        reason = "has several precisions"
    elif policy.residual is not None:
        reason = "quantises tokens once they leave a residual buffer"
    elif policy.codebooks is not None:
        reason = "has tables of codes for the layers that it acts on"
    elif first.k_kept < 1:
        reason = "leaves out channels of keys by the prompt's queries"
    if reason:
        raise SettingsConflict(
            f"store.windows={how}: {type(policy).__name__} {reason}, and in a window each new token takes the place of "
            "another one; set store.windows=exact",
            setting="store.windows",
        )
    return first


@dataclass(frozen=True)
class _ChunkBegins(Compaction):
    """Due before a token that begins a chunk."""

    def due(self, view: DecodeView) -> Tensor:
        return (view.tokens_seen > 0) & (view.tokens_seen % self.every == 0)


class Windows(Policy):
    """Keeps the tokens in a window, in one tier. A new token overwrites the oldest one; the first of a chunk, all."""

    def __init__(self, window: Window, tier: Tier) -> None:
        super().__init__()
        self.window, self.tiers, self.acts_in_decode = window, (tier,), True
        if window.in_chunks:
            self.compaction = _ChunkBegins(window.num_tokens)

    def max_slots(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        return self.window.num_tokens + SCRATCH_SLOTS  # what a prompt in chunks moves goes through the latter

    def most_tokens(self, budget: int, num_prompt_tokens: int, num_new_tokens: int) -> int:
        return min(self.window.num_tokens, num_prompt_tokens + num_new_tokens)

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        length, size = view.num_tokens, self.window.num_tokens
        first = length - size
        if self.window.in_chunks:  # a list keeps one token at least, which the first of the next chunk overwrites
            first = length // size * size if length % size else length - 1
        tier_of = view.filled(0)
        tier_of[..., : max(0, first)] = EVICT
        return PrefillPlan(tier_of=tier_of)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        seen, size = view.tokens_seen, self.window.num_tokens
        if self.window.in_chunks:
            slot = torch.where((seen > 0) & (seen % size == 0), 0, APPEND)
        else:  # slots are a ring, which begins at the oldest token of a prompt
            begin = view.prompt_tokens.clamp(min=size)
            slot = torch.where(seen >= begin, (seen - begin) % size, APPEND)
        return DecodePlan(slot=slot[:, None, None].expand(view.shape))

    def plan_compact(self, view: DecodeView) -> CompactPlan:
        keep = torch.zeros_like(view.slots(0).valid)
        keep[..., 0] = True
        return CompactPlan(keep=[keep])
