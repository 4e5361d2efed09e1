"""GPU backend: a step's plan held to its lists, and the places of what comes in and what moves down.

Two launches around the one in which pages are taken: nothing has a size that depends on content, and nothing is read
back. An entry without a move has page -1, which every kernel skips.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu.attend import table_page
from kvbench.kernels.gpu.parts import launch

_BLOCK = 256
NUM_RULES = 3


@triton.jit(do_not_specialize=["count", "num_lists"])
def _settle(
    lists, num_slots, slot, goes_to, goes_at, settled, wanted, broken, count, num_lists, TIER: tl.constexpr,
    TIERS: tl.constexpr, ACTS: tl.constexpr, MOVES: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes a slot that a step must not write to a new one, and says in which tiers each list needs a new slot.

    Rules: a slot is -1 or lies within its list (ACTS), or is -1; a tier that a token goes to is -1, or exists and is
    another one; a slot that is named there (NAMED) is -1 or lies within its list.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    which = tl.load(lists + i, mask=mask, other=0).to(tl.int64)
    at = tl.load(slot + i, mask=mask, other=-1).to(tl.int64)
    held = tl.load(num_slots + TIER * num_lists + which, mask=mask, other=0)
    if ACTS:
        wrong = (at < -1) | (at >= held)
    else:
        wrong = at != -1
    tl.atomic_max(broken, tl.max((wrong & mask).to(tl.int32), 0))
    to = tl.zeros_like(at) - 1
    onto = tl.zeros_like(at) - 1
    if MOVES:
        to = tl.load(goes_to + i, mask=mask, other=-1).to(tl.int64)
        beyond = (to < -1) | (to >= TIERS) | (to == TIER)
        tl.atomic_max(broken + 1, tl.max((beyond & mask).to(tl.int32), 0))
        if NAMED:
            onto = tl.load(goes_at + i, mask=mask, other=-1).to(tl.int64)
            there = tl.maximum(tl.minimum(to, TIERS - 1), 0)
            room = tl.load(num_slots + there * num_lists + which, mask=mask, other=0)
            off = (at != -1) & (to != -1) & ((onto < -1) | (onto >= room))
            tl.atomic_max(broken + 2, tl.max((off & mask).to(tl.int32), 0))
            wrong = wrong | off
        wrong = wrong | beyond
    at = tl.where(wrong, -1, at)
    to = tl.where(at < 0, -1, to)
    tl.store(settled + i, at, mask=mask)
    for tier in tl.static_range(TIERS):
        if tier == TIER:
            new = at < 0
        else:
            new = (to == tier) & (onto < 0)
        tl.store(wanted + tier * count + i, new.to(tl.int64), mask=mask)


@triton.jit
def _locate_tier(
    table, goes_to, goes_at, first, page, inside, i, mask, which, settled, count, width, tier: tl.constexpr,
    T: tl.constexpr, REVERSED: tl.constexpr, TIER: tl.constexpr, MOVES: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """Page and slot in it of what a step writes in one tier; see `_locate`."""
    at = settled
    live = mask
    if tier != TIER:
        if MOVES:
            live = mask & (settled >= 0) & (tl.load(goes_to + i, mask=mask, other=-1) == tier)
        else:
            live = mask & (i < 0)
        at = tl.zeros_like(settled) - 1
        if NAMED:
            at = tl.load(goes_at + i, mask=mask, other=-1).to(tl.int64)
    at = tl.where(at < 0, tl.load(first + tier * count + i, mask=live & (at < 0), other=0), at)
    live = live & (at >= 0)  # -1: there were too few pages, and the step is given up
    at = tl.maximum(at, 0)
    page_id = table_page(table, which, width, at // T, live, REVERSED)
    tl.store(page + tier * count + i, tl.where(live, page_id, -1), mask=mask)
    tl.store(inside + tier * count + i, at % T, mask=mask)


@triton.jit(do_not_specialize=["count", "width"])
def _locate(
    lists, settled, goes_to, goes_at, first, entries, further, page, inside, count, width, TIER: tl.constexpr,
    TIERS: tl.constexpr, MOVES: tl.constexpr, NAMED: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    T2: tl.constexpr, T3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Page and slot in it of what comes into TIER, and by tier of what goes there, page -1 where nothing does."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    which = tl.load(lists + i, mask=mask, other=0).to(tl.int64)
    slot = tl.load(settled + i, mask=mask, other=-1)
    _locate_tier(
        entries, goes_to, goes_at, first, page, inside, i, mask, which, slot, count, width, 0, T0, False, TIER,
        MOVES, NAMED,
    )  # fmt: skip
    if TIERS > 1:
        _locate_tier(
            entries, goes_to, goes_at, first, page, inside, i, mask, which, slot, count, width, 1, T1, True, TIER,
            MOVES, NAMED,
        )  # fmt: skip
    if TIERS > 2:
        _locate_tier(
            further, goes_to, goes_at, first, page, inside, i, mask, which, slot, count, width, 2, T2, False, TIER,
            MOVES, NAMED,
        )  # fmt: skip
    if TIERS > 3:
        _locate_tier(
            further, goes_to, goes_at, first, page, inside, i, mask, which, slot, count, width, 3, T3, True, TIER,
            MOVES, NAMED,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """A step's plan for the lists of some rows, on its way to the tables.

    Args:
        lists: int64 [M].
        tier: Tier of new tokens.
        slot: int64 [M] slots that they take, -1 for a new one; what broke a rule is -1.
        goes_to: int64 [M] tiers that displaced tokens go to, -1 for none; None = all -1.
        goes_at: int64 [M] slots there, -1 for a new one; None = all -1.
        wanted: int64 [tiers, M] new slots that each list needs.
        broken: int32 [NUM_RULES], 1 where a rule was broken.
    """

    lists: Tensor
    tier: int
    slot: Tensor
    goes_to: Tensor | None
    goes_at: Tensor | None
    wanted: Tensor
    broken: Tensor

    def target(self, tier: int, first: Tensor) -> Tensor:
        """Slots int64 [M] that are written to in a tier, -1 for none, once `first` were taken."""
        if tier == self.tier:
            return torch.where(self.slot < 0, first, self.slot)
        assert self.goes_to is not None
        goes = (self.slot >= 0) & (self.goes_to == tier)
        at = first if self.goes_at is None else torch.where(self.goes_at < 0, first, self.goes_at)
        return torch.where(goes, at, -1)


def settle(
    lists: Tensor, num_slots: Tensor, tier: int, slot: Tensor, goes_to: Tensor | None, goes_at: Tensor | None, *,
    acts: bool,
) -> SlotPlan:  # fmt: skip
    """Checks a plan (integer tensors [M], as in `SlotPlan`) against its lists.

    They hold `num_slots` int32 [tiers, all lists]; `acts`: slots may be overwritten at all.
    """
    slot = slot.reshape(-1).long().contiguous()
    goes_to, goes_at = (None if x is None else x.reshape(-1).long().contiguous() for x in (goes_to, goes_at))
    tiers, count = num_slots.shape[0], len(lists)
    settled, wanted = torch.empty_like(slot), torch.empty(tiers, count, dtype=torch.int64, device=lists.device)
    broken = torch.zeros(NUM_RULES, dtype=torch.int32, device=lists.device)
    launch(
        _settle, (-(-count // _BLOCK),), lists, num_slots, slot, slot if goes_to is None else goes_to,
        slot if goes_at is None else goes_at, settled, wanted, broken, count, num_slots.shape[1], TIER=tier,
        TIERS=tiers, ACTS=acts, MOVES=goes_to is not None, NAMED=goes_at is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return SlotPlan(
        lists=lists, tier=tier, slot=settled, goes_to=goes_to, goes_at=None if goes_to is None else goes_at,
        wanted=wanted, broken=broken,
    )  # fmt: skip


def locate(
    plan: SlotPlan, first: Tensor, entries: Tensor, further: Tensor, tokens_per_page: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Page and slot, int64 [tiers, M], of each write of a settled plan; page -1 where there is none.

    In a list's tier the incoming token, in the other tiers the demoted one. `first`: int64 [tiers, M] first new slots
    of the lists.
    """
    page, inside = torch.empty_like(plan.wanted), torch.empty_like(plan.wanted)
    tiers, count = plan.wanted.shape
    sizes = [*tokens_per_page, 1, 1, 1][:4]
    launch(
        _locate, (-(-count // _BLOCK),), plan.lists, plan.slot, plan.slot if plan.goes_to is None else plan.goes_to,
        plan.slot if plan.goes_at is None else plan.goes_at, first, entries, further if further.numel() else entries,
        page, inside, count, entries.shape[1], TIER=plan.tier, TIERS=tiers, MOVES=plan.goes_to is not None,
        NAMED=plan.goes_at is not None, T0=sizes[0], T1=sizes[1], T2=sizes[2], T3=sizes[3], BLOCK=_BLOCK,
    )  # fmt: skip
    return page, inside
