"""Carries out a step's plan on the pages: room for the incoming tokens, demotions, bulk evictions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def make_room(
    pages: Pages,
    lists: Tensor,
    plan: DecodePlan,
    *,
    own_all: bool,
    acts: bool = True,
    judge: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Reserves the slots of a step, takes those it writes to out of shared pages, and moves the tokens it demotes.

    Args:
        pages: The pages.
        lists: int64 [M] all lists of the step.
        plan: What the policy decided for them.
        own_all: The step writes to every page, since scores are added to all slots.
        acts: The policy may overwrite slots.
        judge: Takes the rules that the plan broke on a device, as `PageTable.take` gives them.

    Returns:
        Page and slot in it for each list's incoming token, int64 [M].

    Raises:
        PoolExhausted: No page for a new slot; nothing was changed.
        ValueError: A page table is full; nothing was changed.
    """
    if pages.on_device:
        return _make_room_by_masks(pages, lists, plan, own_all, acts, judge)
    slot = _flat(plan.slot, APPEND, lists)
    demote_to = _flat(plan.demote_to, EVICT, lists)
    demote_slot = _flat(plan.demote_slot, APPEND, lists)
    fresh = (slot == APPEND).nonzero()[:, 0]
    moving = ((slot != APPEND) & (demote_to != EVICT)).nonzero()[:, 0]
    displaced = _Displaced(lists[moving], slot[moving], demote_to[moving], demote_slot[moving])
    with _undone(pages) as done:
        slot[fresh] = _reserve(pages, plan.tier, lists[fresh], displaced, done)
        if pages.pool.others is not None:
            _own(pages, lists, plan.tier, slot, displaced, own_all)
    if moving.numel():
        _demote(pages, plan.tier, displaced)
    return pages.table.lookup(lists, plan.tier, slot)


def make_room_at_home(pages: Pages, lists: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Reserves a new slot in every list, where layers or heads keep their tokens in different tiers.

    Args:
        pages: The pages.
        lists: int64 [M] all lists of so many rows.

    Returns:
        Page and slot in it for each list's incoming token, int64 [M].

    Raises:
        PoolExhausted: No page for a new slot; nothing was changed.
        ValueError: A page table is full; nothing was changed.
    """
    assert pages.homes is not None, "the caller looked"
    page, slot = torch.empty_like(lists), torch.empty_like(lists)
    written = []
    with _undone(pages) as done:
        for tier in pages.homes.tiers:
            where = pages.homes.where(tier, num_rows)
            own = lists[where]
            before = pages.table.reserve(own, tier, torch.ones_like(own), at_most=len(own))
            done.append((own, tier, before))
            written.append((tier, where, own, before))
        pages.table.own([(tier, own, before) for tier, _, own, before in written])
    for tier, where, own, before in written:
        page[where], slot[where] = pages.table.lookup(own, tier, before)
    return page, slot


def _make_room_by_masks(
    pages: Pages, lists: Tensor, plan: DecodePlan, own_all: bool, acts: bool, judge: Callable[[Tensor], None] | None
) -> tuple[Tensor, Tensor]:
    """The same without a size that depends on content: who takes no part has page -1, which is passed over."""
    with _undone(pages) as done:
        page, slot, broken = pages.table.take(
            lists, plan.tier, plan.slot, plan.demote_to, plan.demote_slot, acts=acts, own_all=own_all, done=done
        )
    if broken is not None and judge is not None:
        judge(broken)
    if plan.slot is not None and plan.demote_to is not None:
        for other in range(len(pages.formats)):
            if other != plan.tier:
                pages.demote(plan.tier, other, (page[plan.tier], slot[plan.tier]), (page[other], slot[other]))
    return page[plan.tier], slot[plan.tier]


def evict(pages: Pages, lists: Tensor, plan: CompactPlan) -> None:
    """Carries out a bulk eviction on lists (int64 [M])."""
    for tier, keep in enumerate(plan.keep):
        if keep is not None:
            pages.compact(tier, lists, keep.flatten(0, 2))


@contextmanager
def _undone(pages: Pages) -> Iterator[list[tuple[Tensor, int, Tensor]]]:
    """Gives back what was reserved (lists, tier, slots before) when anything goes wrong."""
    done: list[tuple[Tensor, int, Tensor]] = []
    try:
        yield done
    except BaseException:
        for lists, which, before in reversed(done):
            pages.table.truncate(lists, which, before)
        raise


def _reserve(
    pages: Pages, tier: int, fresh: Tensor, displaced: _Displaced, done: list[tuple[Tensor, int, Tensor]]
) -> Tensor:
    """Takes all new slots of the step: fills the targets of the displaced tokens, notes what was `done`, and returns
    the first new slot of the `fresh` lists, int64."""

    def take(lists: Tensor, which: int) -> Tensor:
        before = pages.table.reserve(lists, which, torch.ones_like(lists))
        done.append((lists, which, before))
        return before

    first = take(fresh, tier)
    for other in range(len(pages.formats)):
        new = ((displaced.demote_to == other) & (displaced.target == APPEND)).nonzero()[:, 0]
        if new.numel():
            displaced.target[new] = take(displaced.lists[new], other)
    return first


def _own(pages: Pages, lists: Tensor, tier: int, slot: Tensor, displaced: _Displaced, own_all: bool) -> None:
    """Takes the pages that a step writes to out of what the lists share."""
    if own_all:
        pages.table.own_all(lists)
        return
    moved = [(displaced.demote_to == other).nonzero()[:, 0] for other in range(len(pages.formats))]
    targets = [(other, displaced.lists[to], displaced.target[to]) for other, to in enumerate(moved)]
    pages.table.own([(tier, lists, slot), *targets])


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
