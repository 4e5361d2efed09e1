"""What a method's `ScoreSpec` asks for, computed for a prompt and kept up in decode steps."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.kernels.backend import TierPages

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore


def of_prompt(store: "CompressedStore", q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """Scores of one layer of a prompt.

    Args:
        q: [Hq, N, D]; k: [H, N, D], at the store's granularity.
        scale: Factor on the attention logits.

    Returns:
        fp32 [H, N], or None when the method asks for none.
    """
    spec = store.policy.score
    if not spec.prefill_queries:
        return None
    if spec.statistic == "below_uniform":
        return store.backend.prompt_low_counts(
            q, k, scale, queries=spec.prefill_queries, skip_near=spec.skip_near, group=spec.group_reduce
        )
    return store.backend.prompt_scores(
        q,
        k,
        scale,
        queries=spec.prefill_queries,
        skip_near=spec.skip_near,
        power=spec.power,
        pool=spec.pool,
        pool_kernel=spec.pool_kernel,
        pool_stage=spec.pool_stage,
        pool_region=spec.pool_region,
        group=spec.group_reduce,
    )


def of_keys(k: Tensor) -> Tensor:
    """Minus the Euclidean norms of keys [..., D], before or after their rotation; fp32 [...]."""
    return -torch.linalg.vector_norm(k.float(), dim=-1)


def add_step(store: "CompressedStore", rows: Tensor, tiers: list[TierPages], reduced: list[Tensor]) -> None:
    """Brings the stored scores of one layer up to date after a step.

    Args:
        rows: int64 [S].
        tiers: What was attended to.
        reduced: Per tier, fp32 [S, H, n] probabilities, the group reduced; empty when a step updates nothing.
    """
    spec, pages = store.policy.score, store.pool.pages
    if spec.statistic == "below_uniform" and reduced:
        num_keys = sum(tier.num_k for tier in tiers)[..., None]
        # The largest probability of a group is below the threshold where all of them are: no kernel has to count.
        reduced = [-(score < 1.0 / num_keys).float() for score in reduced]
    for tier, score in zip(tiers, reduced, strict=False):
        if spec.skip_near:  # as in the prompt, a query does not count for the keys just before it
            pos = store.backend.region(pages, tier.fmt, "pos")[tier.ids].flatten(-2)
            distance = store.tokens_seen[rows][:, None, None] - pos
            score = score.masked_fill(distance < spec.skip_near, 0.0)
        if spec.decode_replace:
            _clear(store, tier)
        store.backend.add_scores(pages, tier, score)


def restart(store: "CompressedStore", lists: Tensor) -> None:
    """Sets all scores of lists (int64 [M]) to 0."""
    for tier, fmt in enumerate(store.formats):
        held = store.table.num_slots[tier, lists].long()
        ids = store.table.page_ids(lists, tier, int(-(-held.max() // fmt.tokens_per_page)))
        _clear(store, TierPages(fmt, ids, held, held))


def _clear(store: "CompressedStore", tier: TierPages) -> None:
    """Sets the scores in a tier's live pages to 0."""
    first_slot = torch.arange(tier.ids.shape[-1], device=tier.ids.device) * tier.fmt.tokens_per_page
    store.backend.region(store.pool.pages, tier.fmt, "score")[tier.ids[first_slot < tier.num_k[..., None]]] = 0.0
