"""Carries out a step's plan on the pages: room for the incoming tokens, demotions, bulk evictions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.policy import APPEND, EVICT, CompactPlan, DecodePlan


@dataclass(frozen=True)
class _Displaced:
    """Tokens that make room for incoming ones and go on to another tier.

    Args:
        lists: int64 [M] their lists.
        slot: int64 [M] where they lie in the incoming tokens' tier.
        demote_to: int64 [M] the tier they go to.
        target: int64 [M] the slot there; APPEND until it is reserved.
    """

    lists: Tensor
    slot: Tensor
    demote_to: Tensor
    target: Tensor


def make_room(pages: Pages, lists: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Reserves the slots of a step and moves the tokens that it demotes.

    Args:
        pages: The pages.
        lists: int64 [M] all lists of the step.
        plan: What the policy decided for them.

    Returns:
        Page and slot in it for each list's incoming token, int64 [M].

    Raises:
        PoolExhausted: No page for a new slot; nothing was changed.
        ValueError: A page table is full; nothing was changed.
    """
    slot = _flat(plan.slot, APPEND, lists)
    demote_to = _flat(plan.demote_to, EVICT, lists)
    demote_slot = _flat(plan.demote_slot, APPEND, lists)
    fresh = (slot == APPEND).nonzero()[:, 0]
    moving = ((slot != APPEND) & (demote_to != EVICT)).nonzero()[:, 0]
    displaced = _Displaced(lists[moving], slot[moving], demote_to[moving], demote_slot[moving])
    slot[fresh] = _reserve(pages, plan.tier, lists[fresh], displaced)
    if moving.numel():
        _demote(pages, plan.tier, displaced)
    return pages.table.lookup(lists, plan.tier, slot)


def evict(pages: Pages, lists: Tensor, plan: CompactPlan) -> None:
    """Carries out a bulk eviction on lists (int64 [M])."""
    for tier, keep in enumerate(plan.keep):
        if keep is not None:
            pages.compact(tier, lists, keep.flatten(0, 2))


def _reserve(pages: Pages, tier: int, fresh: Tensor, displaced: _Displaced) -> Tensor:
    """Takes all new slots of the step, or none: fills the targets of the displaced tokens and returns the first new
    slot of the `fresh` lists, int64."""
    done: list[tuple[Tensor, int, Tensor]] = []

    def take(lists: Tensor, which: int) -> Tensor:
        before = pages.table.reserve(lists, which, torch.ones_like(lists))
        done.append((lists, which, before))
        return before

    try:
        first = take(fresh, tier)
        for other in range(len(pages.formats)):
            new = ((displaced.demote_to == other) & (displaced.target == APPEND)).nonzero()[:, 0]
            if new.numel():
                displaced.target[new] = take(displaced.lists[new], other)
    except BaseException:
        for lists, which, before in reversed(done):
            pages.table.truncate(lists, which, before)
        raise
    return first


def _demote(pages: Pages, tier: int, displaced: _Displaced) -> None:
    """Requantises displaced tokens into their new tier, score and position included; every read happens before any
    write."""
    k, v, score, pos = pages.read(tier, *pages.table.lookup(displaced.lists, tier, displaced.slot))
    for other in range(len(pages.formats)):
        chosen = (displaced.demote_to == other).nonzero()[:, 0]
        if not chosen.numel():
            continue
        page, slot = pages.table.lookup(displaced.lists[chosen], other, displaced.target[chosen])
        kept = score[chosen] if score is not None else 0.0
        where = pos[chosen] if pos is not None else torch.zeros_like(chosen)
        pages.put(other, page, slot, k[chosen], v[chosen], score=kept, pos=where)


def _flat(value: Tensor | None, default: int, lists: Tensor) -> Tensor:
    return torch.full_like(lists, default) if value is None else value.reshape(-1).long().clone()
