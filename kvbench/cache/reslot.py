"""Slots of a prompt that is being read: which stay, in the order of their positions, which change their tier, which are
new. Positions are kept beside the pages meanwhile, int32 [H, slots] per tier with -1 past a list's end."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.cache.pages import Pages
from kvbench.policy import EVICT

SCRATCH_SLOTS = 256  # per list, which kept slots pass through on their way down

Arrivals = tuple[Tensor, Tensor, Tensor, Tensor]  # head and position int64 [M], keys and values [M, D]


def replan(
    pages: Pages,
    layer: int,
    lists: Tensor,
    tier_of: Tensor,
    pos: list[Tensor],
    k: Tensor,
    v: Tensor,
    peak: Callable[[], None],
) -> None:
    """Carries out a plan for one layer of a prompt, as `Paged.extend_prompt` describes it: what goes leaves, what
    changes its tier is encoded again, and the newest chunk is written. Lists int64 [H] share no page with others."""
    first = tier_of.shape[1] - k.shape[1]
    arrivals: list[list[Arrivals]] = [[] for _ in pages.formats]
    stays = [leaving(pages, tier, lists, tier_of, own, arrivals) for tier, own in enumerate(pos)]
    for tier, own in enumerate(stays):
        if bool((own != (pos[tier] >= 0)).any()):
            keep(pages, tier, lists, own, k.shape[1], peak)
            pos[tier] = packed(pos[tier], own)
    for tier in range(len(pages.formats)):
        head, token = (tier_of[:, first:] == tier).nonzero(as_tuple=True)
        chunk = head, first + token, k[head, token], v[head, token]
        pos[tier] = append(pages, tier, layer, lists, [*arrivals[tier], chunk], pos[tier])


def keep(pages: Pages, tier: int, lists: Tensor, stays: Tensor, room: int, peak: Callable[[], None]) -> None:
    """Closes the gaps that dropped slots leave in lists (int64 [H]), without changing the order of the others, and
    returns emptied pages. Bytes are moved as they are, through as many slots behind the list's end as it has `room`
    for, since a move must not write where another one reads; `peak` is called while these are taken. `stays` is bool
    [H, slots], False past a list's end."""
    table, before = pages.table, pages.held(tier, lists)
    slot = torch.arange(stays.shape[1], device=stays.device)
    target = stays.cumsum(1) - 1
    moves = stays & (target != slot)
    if bool(moves.any()):
        place, width = moves.cumsum(1) - 1, min(SCRATCH_SLOTS, room)
        most = moves.sum(1)
        table.reserve(lists, tier, most.clamp(max=width))
        peak()
        for first in range(0, int(most.max()), width):
            head, source = (moves & (place >= first) & (place < first + width)).nonzero(as_tuple=True)
            scratch = before[head] + place[head, source] - first
            for old, new in ((source, scratch), (scratch, target[head, source])):
                pages.backend.move_slots(
                    pages.pool.pages,
                    pages.formats[tier],
                    *table.lookup(lists[head], tier, old),
                    *table.lookup(lists[head], tier, new),
                )
    table.truncate(lists, tier, stays.sum(1))


def append(pages: Pages, tier: int, layer: int, lists: Tensor, arrivals: list[Arrivals], pos: Tensor) -> Tensor:
    """Writes tokens behind those that lists hold, in the order of their positions; int32 [H, slots] positions of what
    is there, and with what came."""
    head, position, k, v = (torch.cat([part[i] for part in arrivals]) for i in range(4))
    if not head.numel():
        return pos
    order = torch.argsort(head * (int(position.max()) + 1) + position)
    head, position, k, v = head[order], position[order], k[order], v[order]
    count = torch.bincount(head, minlength=len(lists))
    first = pages.table.reserve(lists, tier, count)
    ordinal = first[head] + torch.arange(len(head), device=head.device) - (count.cumsum(0) - count)[head]
    page, slot = pages.table.lookup(lists[head], tier, ordinal)
    pages.put(tier, page, slot, k, v, score=0.0, pos=position, of=(layer, head))
    width = int((first + count).max())
    grown = pos.new_full((len(lists), width), -1)
    grown[:, : pos.shape[1]] = pos[:, :width]
    grown[head, ordinal] = position.to(pos.dtype)
    return grown


def leaving(
    pages: Pages, tier: int, lists: Tensor, goes_to: Tensor, pos: Tensor, arrivals: list[list[Arrivals]]
) -> Tensor:
    """Takes out of a tier what goes to others or is dropped, by int8 [H, N] the new tier of each position; what goes to
    others is read, into their `arrivals`, before anything moves. Returns bool [H, slots] what stays."""
    wanted = goes_to.gather(1, pos.clamp(min=0).long()).masked_fill(pos < 0, EVICT)
    for other in range(len(pages.formats)):
        if other == tier:
            continue
        head, slot = (wanted == other).nonzero(as_tuple=True)
        if head.numel():
            k, v = pages.read(tier, *pages.table.lookup(lists[head], tier, slot))
            arrivals[other].append((head, pos[head, slot].long(), k, v))
    return wanted == tier


def packed(pos: Tensor, stays: Tensor) -> Tensor:
    """Positions of the slots that stay, in their order."""
    count = stays.sum(1)
    out = pos.new_full((len(pos), int(count.max()) if len(pos) else 0), -1)
    head, slot = stays.nonzero(as_tuple=True)
    out[head, (stays.cumsum(1) - 1)[head, slot]] = pos[head, slot]
    return out


def track(pages: Pages, lists: Tensor, pos: list[Tensor], score: Tensor | None) -> None:
    """Writes the tracked fields of everything that lists hold, by `pos` per tier and fp32 [H, N] scores by position, or
    None for 0."""
    for tier, own in enumerate(pos):
        fmt = pages.formats[tier]
        head, slot = (own >= 0).nonzero(as_tuple=True)
        if not fmt.slot.track or not head.numel():
            continue
        position = own[head, slot].long()
        given = 0.0 if score is None else score[head, position]
        page, place = pages.table.lookup(lists[head], tier, slot)
        pages.backend.write_tracked(pages.pool.pages, fmt, page, place, given, position)
