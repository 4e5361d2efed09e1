"""One decode step of the store: plan once for all lists, apply in one batch, then attend layer by layer."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.cache import fused as layer_steps
from kvbench.cache import ledger, scores
from kvbench.cache.reads import StepReads
from kvbench.cache.view import StoreDecodeView
from kvbench.kernels.backend import Ring
from kvbench.kernels.pool import PoolExhausted
from kvbench.policy import APPEND, EVICT, DecodePlan

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore


@dataclass
class Step:
    """A step in progress.

    Args:
        rows: int64 [S] live rows.
        lists: int64 [M] their lists.
        view: What the policy planned from (behind a residual buffer: None).
        page: int64 [S, L, H] page that each layer writes the new token to (behind a residual buffer: unused).
        slot: int64 [S, L, H] slot in that page.
        tier: The new token's tier.
        width: Per layer and tier, pages to read.
        reads: Chooses what to read of each layer, and counts it; None = everything is read.
        flush: Behind a residual buffer: the counts (keys, values) in pages before and after this step, int64 [M] each.
        layers: Does a whole layer in one call, where the backend can; None = operation by operation.
    """

    rows: Tensor
    lists: Tensor
    view: StoreDecodeView | None = None
    page: Tensor | None = None
    slot: Tensor | None = None
    tier: int = 0
    width: list[list[int]] = field(default_factory=list)
    reads: StepReads | None = None
    flush: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    layers: Any | None = None


def begin(store: "CompressedStore", rows: Tensor) -> Step:
    """Plans and applies; see `CompressedStore.begin_step`."""
    step = Step(rows=rows, lists=store.lists_of(rows))
    if store.residual is not None:
        _begin_residual(store, step)
    else:
        _compact(store, rows)
        step.view = StoreDecodeView(store, rows)
        _apply(store, step, store.policy.plan_decode(step.view))
        step.reads = StepReads.begin(store, step.view)
    step.layers = layer_steps.prepare(store, step)
    if step.layers is not None:
        return step
    pages = [
        store.table.num_pages(tier)[step.lists].view(len(rows), store.shape.num_layers, -1)
        for tier in range(len(store.formats))
    ]
    step.width = torch.stack([p.amax((0, 2)) for p in pages], 1).tolist()
    return step


def attend(store: "CompressedStore", step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One layer's attention; see `CompressedStore.attend`."""
    if step.layers is not None:
        return step.layers.attend(layer, q, k, v, scale)
    spec, pool = store.policy.score, store.pool
    if store.residual is not None:
        return _attend_residual(store, step, layer, q, k, v, scale)
    fmt = store.formats[step.tier]
    page, slot = step.page[:, layer].flatten(), step.slot[:, layer].flatten()
    store.backend.write_keys(pool.pages, fmt, page, slot, k.flatten(0, 1))
    store.backend.write_values(pool.pages, fmt, page, slot, v.flatten(0, 1))
    if fmt.bounds:
        store.backend.widen_bounds(pool.pages, fmt, page, slot, k.flatten(0, 1), distinct=True)
    if spec.statistic == "key_norm" and "score" in fmt.slot.track:
        store.backend.region(pool.pages, fmt, "score")[page, slot] = scores.of_keys(k).flatten()
    tiers, _ = store.layer_pages(step.rows, layer, step.width[layer])
    if step.reads is not None:
        tiers = [step.reads.choose(store, layer, q, tiers[0])]
    if store.policy.position_mode == "cache_relative":
        _rotate_to_cache_positions(store, step, tiers)
    out, _, reduced = store.backend.paged_decode(
        q, pool.pages, tiers, None, scale, power=spec.power, group=spec.group_reduce if spec.decode_update else None
    )
    scores.add_step(store, step.rows, tiers, reduced)
    return out


def end(store: "CompressedStore", step: Step) -> None:
    """Counts the token and meters the bytes; see `CompressedStore.end_step`."""
    if step.flush is not None:
        _, _, new_k, new_v = step.flush
        store.residual.num_k[step.lists], store.residual.num_v[step.lists] = (
            new_k.to(torch.int32),
            new_v.to(torch.int32),
        )
    store.tokens_seen[step.rows] += 1
    if step.reads is not None:
        step.reads.meter([store.meters[row] for row in step.rows.tolist()])
    held = ledger.resident_bytes(store, step.rows).tolist()
    for row, seen, resident in zip(step.rows.tolist(), store.tokens_seen[step.rows].tolist(), held, strict=True):
        meter = store.meters[row]
        meter.peak_bytes = max(meter.peak_bytes, resident)
        meter.sum_bytes += resident
        meter.sum_ratio += resident / store.shape.fp16_bytes(seen)
        meter.steps += 1


def _apply(store: "CompressedStore", step: Step, plan: DecodePlan) -> None:
    """Makes room for the incoming tokens: reserves slots, demotes displaced tokens, and fixes the write position."""
    shape = (len(step.rows), *store.table.shape[1:])
    lists = step.lists
    step.tier = plan.tier
    slot = _flat(plan.slot, APPEND, lists)
    demote_to = _flat(plan.demote_to, EVICT, lists)
    demote_slot = _flat(plan.demote_slot, APPEND, lists)
    displaced = slot != APPEND
    fresh = (~displaced).nonzero()[:, 0]
    moving = (displaced & (demote_to != EVICT)).nonzero()[:, 0]
    if moving.numel() and not store.policy.tiers[plan.tier].evictable:
        raise AssertionError(
            f"tier {store.policy.tiers[plan.tier].name} holds immutable groups; its slots cannot be demoted"
        )
    target_slots = _reserve(store, lists, plan.tier, fresh, moving, demote_to, demote_slot, slot)
    if moving.numel():
        _demote(store, lists, plan.tier, moving, slot, demote_to, target_slots)
    page, index = store.table.lookup(lists, plan.tier, slot)
    fmt = store.formats[plan.tier]
    if fmt.slot.track:
        seen = store.tokens_seen[step.rows].repeat_interleave(store.lists_per_row)
        store.backend.write_tracked(store.pool.pages, fmt, page, index, 0.0, seen)
    step.page, step.slot = page.view(shape), index.view(shape)


def _reserve(
    store: "CompressedStore",
    lists: Tensor,
    tier: int,
    fresh: Tensor,
    moving: Tensor,
    demote_to: Tensor,
    demote_slot: Tensor,
    slot: Tensor,
) -> Tensor:
    """Takes all new slots of the step, or none: fills `slot` for appended tokens and returns the slots of demoted ones,
    int64 [moving]."""
    done: list[tuple[Tensor, int, Tensor]] = []
    targets = demote_slot[moving].clone()
    try:
        first = store.table.reserve(lists[fresh], tier, torch.ones_like(fresh))
        done.append((lists[fresh], tier, first))
        for other in range(len(store.formats)):
            new = ((demote_to[moving] == other) & (targets == APPEND)).nonzero()[:, 0]
            if new.numel():
                begin_slot = store.table.reserve(lists[moving[new]], other, torch.ones_like(new))
                done.append((lists[moving[new]], other, begin_slot))
                targets[new] = begin_slot
    except (PoolExhausted, ValueError):
        for owner, which, before in reversed(done):
            store.table.truncate(owner, which, before)
        raise
    slot[fresh] = first
    return targets


def _demote(
    store: "CompressedStore",
    lists: Tensor,
    tier: int,
    moving: Tensor,
    slot: Tensor,
    demote_to: Tensor,
    target_slots: Tensor,
) -> None:
    """Re-quantises displaced tokens into their new tier, score and position included; every read happens before any
    write."""
    pages, source = store.pool.pages, store.formats[tier]
    page, index = store.table.lookup(lists[moving], tier, slot[moving])
    keys, values = store.backend.read_slots(pages, source, page, index)
    score, pos = store.backend.read_tracked(pages, source, page, index)
    for other, fmt in enumerate(store.formats):
        chosen = (demote_to[moving] == other).nonzero()[:, 0]
        if not chosen.numel():
            continue
        page, index = store.table.lookup(lists[moving[chosen]], other, target_slots[chosen])
        store.backend.write_keys(pages, fmt, page, index, keys[chosen])
        store.backend.write_values(pages, fmt, page, index, values[chosen])
        if fmt.slot.track:
            kept = score[chosen] if score is not None else 0.0
            where = pos[chosen] if pos is not None else torch.zeros_like(chosen)
            store.backend.write_tracked(pages, fmt, page, index, kept, where)


def _compact(store: "CompressedStore", rows: Tensor) -> None:
    """Bulk eviction for the rows whose turn it is."""
    if not store.policy.compact_every:
        return
    due = rows[store.policy.compact_due(StoreDecodeView(store, rows))]
    if not due.numel():
        return
    lists, plan = store.lists_of(due), store.policy.plan_compact(StoreDecodeView(store, due))
    for tier, keep in enumerate(plan.keep):
        if keep is None:
            continue
        owner, source, target, count = store.table.plan_compaction(lists, tier, keep.flatten(0, 2))
        where = [store.table.lookup(lists[owner], tier, x) for x in (source, target)]
        store.backend.move_slots(store.pool.pages, store.formats[tier], *where[0], *where[1])
        store.table.truncate(lists, tier, count)
    if plan.restart_scores:
        scores.restart(store, lists)


def _rotate_to_cache_positions(store: "CompressedStore", step: Step, tiers: list) -> None:
    """Attaches the angles that put each stored key at its index in the cache, seen from the newest token."""
    if len(tiers) != 1:
        raise AssertionError("cache-relative positions are defined for one tier")
    tiers[0].rotation = layer_steps.cache_angles(store, step, tiers[0].num_k[:, 0], tiers[0])


# Behind a residual buffer ----


def _begin_residual(store: "CompressedStore", step: Step) -> None:
    ring = store.residual
    old_k, old_v = ring.num_k[step.lists].long(), ring.num_v[step.lists].long()
    new_k, new_v = ring.after_append(step.lists)
    held = store.table.num_slots[0, step.lists].long()
    store.table.reserve(step.lists, 0, (torch.maximum(new_k, new_v) - held).clamp(min=0))
    ring.num_tokens[step.lists] += 1
    step.flush = (old_k, old_v, new_k, new_v)


def _attend_residual(
    store: "CompressedStore", step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """Appends to the rings, then attends and flushes in the order the residual asks for."""
    ring, rows = store.residual, step.rows
    heads = torch.arange(store.num_heads, device=rows.device)
    tiers, view = store.layer_pages(rows, layer, step.width[layer])
    newest = view.num_tokens - 1
    for buffer, x in ((ring.k, k), (ring.v, v)):
        buffer[rows[:, None], layer, heads, newest % buffer.shape[3]] = x.to(buffer.dtype)
    counts = [x.view(len(rows), store.shape.num_layers, -1)[:, layer] for x in step.flush]
    view = Ring(*ring.of_layer(rows, layer), view.num_tokens)
    before = ring.spec.when == "before_attention"
    if before:
        _flush(store, step, layer, view, counts)
        tiers[0].num_k, tiers[0].num_v = counts[2], counts[3]
    out, _, _ = store.backend.paged_decode(q, store.pool.pages, tiers, view, scale)
    if not before:
        _flush(store, step, layer, view, counts)
    return out


def _flush(store: "CompressedStore", step: Step, layer: int, view: Ring, counts: list[Tensor]) -> None:
    """Quantises the tokens that leave the rings in this step into tier 0's pages."""
    lists = step.lists.view(len(step.rows), store.shape.num_layers, -1)[:, layer]
    old_k, old_v, new_k, new_v = counts
    for old, new, buffer, write in (
        (old_k, new_k, view.k, store.backend.write_keys),
        (old_v, new_v, view.v, store.backend.write_values),
    ):
        offset = torch.arange(buffer.shape[2], device=old.device)
        token = old[..., None] + offset
        row, head, index = (token < new[..., None]).nonzero(as_tuple=True)
        if not row.numel():
            continue
        ordinal = token[row, head, index]
        page, slot = store.table.lookup(lists[row, head], 0, ordinal)
        leaving = buffer[row, head, ordinal % buffer.shape[2]]
        if buffer is view.k:
            leaving = store.unrotate(leaving, ordinal)
        write(store.pool.pages, store.formats[0], page, slot, leaving)


def _flat(value: Tensor | None, default: int, lists: Tensor) -> Tensor:
    return torch.full_like(lists, default) if value is None else value.reshape(-1).long().clone()
