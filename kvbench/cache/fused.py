"""Prepares a decode step for backends that do a whole layer of it in one call: write, attend, update scores, flush."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.kernels.backend import FusedStep, StepRing, TierPages

if TYPE_CHECKING:
    from kvbench.cache.step import Step
    from kvbench.cache.store import CompressedStore


def prepare(store: "CompressedStore", step: "Step") -> FusedStep | None:
    """What the backend's `open_step` returns for this step, once its plan is applied.

    Returns:
        An object with `attend(layer, q, k, v, scale)`, or None where the backend has no such operation or does not
        cover the step: the layers then go through the single operations.
    """
    spec, backend = store.policy.score, store.backend
    if not backend.fuses_layers or (spec.statistic != "probability" and (spec.decode_update or spec.track)):
        return None
    # No such operation rotates keys between buffer and page, nor chooses the pages that it reads.
    if store.policy.position_mode == "pre_rope" or store.policy.reading is not None:
        return None
    shape = (len(step.rows), *store.table.shape[1:])
    tiers, ring = _tiers(store, step, shape), None
    if store.residual is not None:
        counts = [x.view(shape) for x in step.flush]
        buffers = store.residual
        ring = StepRing(
            k=buffers.k,
            v=buffers.v,
            rows=step.rows,
            num_tokens=buffers.num_tokens[step.lists].view(shape),
            before=tuple(counts[:2]),
            after=tuple(counts[2:]),
            flush_first=buffers.spec.when == "before_attention",
        )
    elif store.policy.position_mode == "cache_relative" and not _rotate(store, step, tiers):
        return None
    update = ("replace" if spec.decode_replace else "add") if spec.decode_update else None
    return backend.open_step(
        store.pool.pages,
        tiers,
        num_q_heads=store.shape.num_q_heads,
        seen=store.tokens_seen[step.rows],
        ring=ring,
        target=None if ring else (step.tier, step.page, step.slot),
        power=spec.power,
        group=spec.group_reduce,
        update=update,
        skip_near=spec.skip_near,
    )


def _tiers(store: "CompressedStore", step: "Step", shape: tuple[int, int, int]) -> list[TierPages]:
    """All layers of every tier; ids [S, L, H, m]."""
    tiers = []
    for tier, fmt in enumerate(store.formats):
        held = store.table.num_slots[tier, step.lists].long()
        width = int(-(-held.max() // fmt.tokens_per_page))
        ids = store.table.page_ids(step.lists, tier, width).view(*shape, width)
        num_k, num_v = held, held
        if step.flush is not None:
            first = store.residual.spec.when == "before_attention"
            num_k, num_v = step.flush[2:] if first else step.flush[:2]
        tiers.append(TierPages(fmt, ids, num_k.view(shape), num_v.view(shape)))
    return tiers


def _rotate(store: "CompressedStore", step: "Step", tiers: list[TierPages]) -> bool:
    """Attaches the angles of `store_step.cache_angles`; False where the layers hold unequal counts and need their
    own."""
    held = tiers[0].num_k
    if len(tiers) != 1 or not bool((held == held[:, :1, :1]).all()):
        return False
    tiers[0].rotation = cache_angles(store, step, held[:, 0, 0], tiers[0])
    return True


def cache_angles(store: "CompressedStore", step: "Step", held: Tensor, tier: TierPages) -> Tensor:
    """The angles that put each stored key at its index in the cache, seen from the newest token.

    The query keeps its true position; keys move so that the distances are those in the cache.

    Args:
        held: int64 [S] slots per list, the newest token's included.
        tier: The tier.

    Returns:
        fp32 [S, m * T, D_rot / 2].
    """
    width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
    age = store.policy.cache_positions(step.view, width)
    shift = step.view.tokens_seen - (held - 1)
    return (age + shift[:, None])[..., None].float() * store.shape.inv_freq.to(torch.float32)
