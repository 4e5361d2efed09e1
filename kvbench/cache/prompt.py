"""Writing prompts into the store: score, plan, and put every kept token into its tier."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache import scores
from kvbench.policy import PrefillPlan, PrefillView

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore


def prefill_layer(
    store: "CompressedStore", row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> None:
    """Scores, plans and writes one layer of a prompt; see `CompressedStore.prefill_layer`."""
    score = scores.of_prompt(store, q, store.at_granularity(k), scale)
    if store.recording is not None:
        store.recording.add(k, v, score)
    place_layer(store, row, layer, k, v, score)


def place_layer(store: "CompressedStore", row: int, layer: int, k: Tensor, v: Tensor, score: Tensor | None) -> None:
    """Plans and writes one layer of a prompt whose scores are known.

    Args:
        k, v: [KV heads of the model, N, D] post-RoPE keys and values, uncompressed.
        score: fp32 [heads of the store, N] as the policy's `ScoreSpec` says, or None when no query counts.
    """
    k, v = store.at_granularity(k), store.at_granularity(v)
    if store.policy.score.statistic == "key_norm":
        score = scores.of_keys(k)
    if store.policy.scope == "model":
        stash = store.stash.setdefault(row, [])
        stash.append((k, v, score))
        if layer + 1 < store.shape.num_layers:
            return
        layers = torch.arange(store.shape.num_layers, device=k.device)
        joined = None if score is None else torch.stack([s for _, _, s in stash])
        plan = _plan(store, layers, joined, k.shape[1])
        staging = sum(x.nbytes + y.nbytes for x, y, _ in stash)
        for index, (keys, values, _) in enumerate(store.stash.pop(row)):
            _write(store, row, index, keys, values, plan, joined, index)
    else:
        plan = _plan(store, torch.tensor([layer], device=k.device), None if score is None else score[None], k.shape[1])
        staging = k.nbytes + v.nbytes
        _write(store, row, layer, k, v, plan, None if score is None else score[None], 0)
    meter = store.meters[row]
    meter.staging_peak_bytes = max(meter.staging_peak_bytes, staging)
    meter.peak_bytes = max(meter.peak_bytes, staging + store.row_bytes(row))
    if layer + 1 == store.shape.num_layers:
        store.tokens_seen[row] = store.prompt_tokens[row] = k.shape[1]
        lists = store.lists_of(torch.tensor([row], device=k.device))
        counts = sum(store.slots_per_tier(lists))
        if store.prompt_slots.numel():
            store.prompt_slots[lists] = counts.to(torch.int32)
        meter.prompt_slots = {
            "prompt_tokens": k.shape[1],
            "prompt_slots_min": int(counts.min()),
            "prompt_slots_max": int(counts.max()),
            "prompt_slots": int(counts.sum()),
            "lists": len(counts),
            "page_tokens": store.formats[0].tokens_per_page,
            "slot_bytes": store.formats[0].slot.slot_bytes,
        }


def _plan(store: "CompressedStore", layers: Tensor, score: Tensor | None, num_tokens: int) -> PrefillPlan:
    view = PrefillView(
        num_tokens=num_tokens,
        num_layers=store.shape.num_layers,
        num_kv_heads=store.num_heads,
        layers=layers,
        score=score,
        token_bytes=tuple(fmt.slot.slot_bytes for fmt in store.formats),
    )
    plan = store.policy.plan_prefill(view)
    expected = (len(layers), store.num_heads, num_tokens)
    if tuple(plan.tier_of.shape) != expected:
        raise AssertionError(
            f"{type(store.policy).__name__}.plan_prefill returned {tuple(plan.tier_of.shape)}, not {expected}"
        )
    return plan


def _write(
    store: "CompressedStore",
    row: int,
    layer: int,
    k: Tensor,
    v: Tensor,
    plan: PrefillPlan,
    score: Tensor | None,
    index: int,
) -> None:
    """Writes the kept tokens of one layer, per tier in position order."""
    tier_of = plan.tier_of[index]
    if store.policy.position_mode == "pre_rope" and bool((tier_of != 0).any()):
        raise AssertionError("position_mode='pre_rope' keeps every token")
    stored = plan.score[index] if plan.score is not None else score[index] if score is not None else None
    paged_k = store.unrotate(k, torch.arange(k.shape[1], device=k.device))
    lists = store.layer_lists(torch.tensor([row], device=k.device), layer).flatten()
    for tier, fmt in enumerate(store.formats):
        chosen = tier_of == tier
        count = chosen.sum(1)
        head, token = chosen.nonzero(as_tuple=True)
        ordinal = torch.arange(len(head), device=k.device) - (count.cumsum(0) - count)[head]
        if store.residual is not None:
            _write_ring(store, row, layer, lists, k, paged_k, v, head, token, ordinal, count)
            continue
        store.table.reserve(lists, tier, count)
        page, slot = store.table.lookup(lists[head], tier, ordinal)
        store.backend.write_keys(store.pool.pages, fmt, page, slot, paged_k[head, token])
        store.backend.write_values(store.pool.pages, fmt, page, slot, v[head, token])
        if fmt.bounds:
            store.backend.widen_bounds(store.pool.pages, fmt, page, slot, paged_k[head, token], distinct=False)
        if fmt.slot.track:
            value = stored[head, token] if stored is not None else torch.zeros(len(head), device=k.device)
            store.backend.write_tracked(store.pool.pages, fmt, page, slot, value, token)


def _write_ring(
    store: "CompressedStore",
    row: int,
    layer: int,
    lists: Tensor,
    k: Tensor,
    paged_k: Tensor,
    v: Tensor,
    head: Tensor,
    token: Tensor,
    ordinal: Tensor,
    count: Tensor,
) -> None:
    """Prompt tokens behind a residual buffer: the oldest go to pages, the rest to the rings."""
    ring, fmt = store.residual, store.formats[0]
    num_k, num_v = ring.split_prompt(count)
    store.table.reserve(lists, 0, torch.maximum(num_k, num_v))
    for limit, source, paged_source, buffer, write in (
        (num_k, k, paged_k, ring.k, store.backend.write_keys),
        (num_v, v, v, ring.v, store.backend.write_values),
    ):
        paged = ordinal < limit[head]
        page, slot = store.table.lookup(lists[head[paged]], 0, ordinal[paged])
        write(store.pool.pages, fmt, page, slot, paged_source[head[paged], token[paged]])
        rest = ~paged
        where = ordinal[rest] % buffer.shape[3]
        buffer[row, layer, head[rest], where] = source[head[rest], token[rest]].to(buffer.dtype)
    ring.num_k[lists], ring.num_v[lists] = num_k.to(torch.int32), num_v.to(torch.int32)
    ring.num_tokens[lists] = count.to(torch.int32)


def append_chunk(
    store: "CompressedStore", row: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """Appends a segment; see `CompressedStore.append_chunk`."""
    k, v = store.at_granularity(k), store.at_granularity(v)
    rows, fmt = torch.tensor([row], device=k.device), store.formats[0]
    tiers, ring = store.layer_pages(rows, layer)
    history = tuple(x[0] for x in store.backend.gather_dense(store.pool.pages, tiers, ring))
    out = store.backend.chunk_attention(q, k, v, history, scale)
    lists, chunk = store.layer_lists(rows, layer).flatten(), k.shape[1]
    first = store.table.reserve(lists, 0, torch.full_like(lists, chunk))
    slots = (first[:, None] + torch.arange(chunk, device=k.device)).flatten()
    page, slot = store.table.lookup(lists.repeat_interleave(chunk), 0, slots)
    paged_k = store.unrotate(k, int(store.tokens_seen[row]) + torch.arange(chunk, device=k.device))
    store.backend.write_keys(store.pool.pages, fmt, page, slot, paged_k.flatten(0, 1))
    store.backend.write_values(store.pool.pages, fmt, page, slot, v.flatten(0, 1))
    if fmt.bounds:
        store.backend.widen_bounds(store.pool.pages, fmt, page, slot, paged_k.flatten(0, 1), distinct=False)
    if fmt.slot.track:
        position = int(store.tokens_seen[row]) + torch.arange(chunk, device=k.device)
        score = scores.of_keys(k).flatten() if store.policy.score.statistic == "key_norm" else 0.0
        store.backend.write_tracked(store.pool.pages, fmt, page, slot, score, position.repeat(store.num_heads))
    if layer + 1 == store.shape.num_layers:
        store.tokens_seen[row] += chunk
        store.meters[row].peak_bytes = max(store.meters[row].peak_bytes, store.row_bytes(row))
    return out
