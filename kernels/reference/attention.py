"""Reference backend: attention over pages, prefill attention and column scores, in plain torch.

Arguments and results of functions that `Backend` has as methods are described there.

Legend: S sequences, H KV heads, G query heads per KV head, Hq = H * G, D head dim, N prompt tokens, T slots per page, m
pages per list.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import Pool, PoolRegion, PoolStage, Reduce, Ring, TierPages
from kvbench.kernels.reference.pages import read_pages, region

CHUNK_ROWS = 64  # queries of a chunk whose mask lies in memory at once


def reduce_group(x: Tensor, how: Reduce, dim: int) -> Tensor:
    """Reduces the query heads of a KV head along `dim`."""
    return x.sum(dim) if how == "sum" else x.mean(dim) if how == "mean" else x.amax(dim)


def rotate(x: Tensor, angle: Tensor, dim: int = -1) -> Tensor:
    """Rotary rotation of the leading 2 * angle.shape[dim] channels along `dim`, halves paired (the Llama layout)."""
    half = angle.shape[dim]
    first, second = x.narrow(dim, 0, half), x.narrow(dim, half, half)
    rest = x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim)


def _of_channels(tier: TierPages, keys: Tensor) -> Tensor:
    """Keys [S, H, m, D, T] with the scales of their channels, where those lie beside the pages."""
    if tier.channels is None:
        return keys
    scale, zero = (x[:, None, :, None] for x in (tier.channels.scale, tier.channels.zero))
    return keys * scale + zero


def _ring_ordinals(num_tokens: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Which token each ring entry holds, int64 [S, H, R], and whether it is live (bool)."""
    last = num_tokens[..., None] - 1
    entry = torch.arange(length, device=num_tokens.device)
    ordinal = last - (last - entry) % length
    return ordinal, (ordinal >= start[..., None]) & (ordinal >= 0)


def paged_decode(
    q: Tensor,
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | None,
    scale: float,
    *,
    power: int = 1,
    group: Reduce | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of one query token per sequence over all tiers and the residual buffer, computed in fp32."""
    checks.decode(q, pages, tiers, ring, power, group)
    num_seq, _, head_dim = q.shape
    num_heads = tiers[0].ids.shape[1]
    q = q.float().view(num_seq, num_heads, -1, head_dim)
    logits, values, widths = [], [], []
    for tier in tiers:
        keys, vals = read_pages(pages, tier.fmt, tier.ids.flatten())
        keys = _of_channels(tier, keys.unflatten(0, tier.ids.shape))  # [S, H, m, D, T]
        width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        slot = torch.arange(width, device=q.device)
        if (angles := tier.angles) is None:
            part = torch.matmul(q[:, :, None], keys).transpose(2, 3).flatten(-2)
        else:
            dense = keys.transpose(2, 3).flatten(-2)  # [S, H, D, m * T]
            part = torch.matmul(q, rotate(dense, angles.transpose(1, 2)[:, None], dim=2))
        logits.append((part * scale).masked_fill(slot >= tier.num_k[:, :, None, None], float("-inf")))
        vals = vals.view(num_seq, num_heads, width, head_dim)
        values.append(vals.masked_fill((slot >= tier.num_v[..., None])[..., None], 0.0))
        widths.append(width)
    if ring is not None:
        k_ordinal, k_live = _ring_ordinals(ring.num_tokens, tiers[0].num_k, ring.k.shape[2])
        part = torch.matmul(q, ring.k.float().masked_fill(~k_live[..., None], 0.0).transpose(2, 3)) * scale
        logits.append(part.masked_fill(~k_live[:, :, None], float("-inf")))
        widths.append(ring.k.shape[2])
    joined = torch.cat(logits, -1)
    lse = joined.logsumexp(-1)
    parts = list(joined.softmax(-1).split(widths, -1))  # exp(x - lse) would carry the rounding of lse into every weight
    if ring is None:
        out = sum((torch.matmul(p, v) for p, v in zip(parts, values, strict=True)), start=q.new_zeros(()))
    else:
        out = _ring_output(parts[0], parts.pop(), values[0], ring, tiers[0], k_ordinal, k_live)
    scores = [reduce_group(p**power, group, 2) for p in parts] if group else []
    return out.flatten(1, 2), lse.flatten(1, 2), scores


def _ring_output(
    p_pages: Tensor, p_ring: Tensor, v_pages: Tensor, ring: Ring, tier: TierPages, k_ordinal: Tensor, k_live: Tensor
) -> Tensor:
    """Weighted values when keys and values leave the buffer at different times: probabilities are first put in token
    order."""
    width = max(p_pages.shape[-1], int(ring.num_tokens.max()))
    by_token = F.pad(p_pages, (0, width - p_pages.shape[-1]))
    index = k_ordinal.clamp(min=0)[:, :, None].expand_as(p_ring)
    by_token = by_token.scatter_add(-1, index, p_ring.masked_fill(~k_live[:, :, None], 0.0))
    v_ordinal, v_live = _ring_ordinals(ring.num_tokens, tier.num_v, ring.v.shape[2])
    p_values = by_token.gather(-1, v_ordinal.clamp(min=0)[:, :, None].expand(*p_pages.shape[:3], -1))
    p_values = p_values.masked_fill(~v_live[:, :, None], 0.0)
    ring_v = ring.v.float().masked_fill(~v_live[..., None], 0.0)
    return torch.matmul(by_token[..., : v_pages.shape[2]], v_pages) + torch.matmul(p_values, ring_v)


def page_bounds(q: Tensor, pages: Tensor, tier: TierPages, group: Reduce) -> Tensor:
    """What no logit in a page exceeds, the query heads of a group reduced; anything past a list's end.

    Args:
        q: [S, Hq, D].
        tier: All pages of each list, with bounds.
        group: How the query heads of a KV head are reduced.

    Returns:
        fp32 [S, H, m].
    """
    num_seq, num_heads = tier.ids.shape[:2]
    q = q.float().view(num_seq, num_heads, -1, q.shape[-1])
    low, high = (region(pages, tier.fmt, name)[tier.ids].float().transpose(2, 3) for name in ("k_low", "k_high"))
    return reduce_group(torch.matmul(q.clamp(min=0), high) + torch.matmul(q.clamp(max=0), low), group, 2)


def choose_pages(
    q: Tensor,
    pages: Tensor,
    tier: TierPages,
    count: Tensor,
    width: int,
    group: Reduce,
    bounds: Callable[[Tensor, Tensor, TierPages, Reduce], Tensor] = page_bounds,
) -> TierPages:
    """The pages of each list that can hold the largest logits, in slot order; the newest page is always one of them.

    Args:
        bounds: Finds the bounds, as `page_bounds`. The others as for `Backend.choose_pages`.

    Source: mit-han-lab/Quest evaluation/quest_attention.py and quest/utils/controller.py.
    """
    checks.choose(q, pages, tier, count, width, group)
    num_columns, tokens = tier.ids.shape[2], tier.fmt.tokens_per_page
    bound = bounds(q, pages, tier, group)
    column, last = torch.arange(num_columns, device=q.device), (tier.num_k - 1)[..., None] // tokens
    bound = bound.masked_fill(column > last, float("-inf")).masked_fill(column == last, float("inf"))
    order = bound.argsort(dim=-1, descending=True, stable=True)
    best = (column < count[:, None, None]).expand_as(order)
    chosen = torch.zeros_like(best).scatter_(-1, order, best) & (column <= last)
    first = torch.where(chosen, column, num_columns).sort(-1).values[..., :width].clamp(max=num_columns - 1)
    held = (chosen.sum(-1) - 1) * tokens + tier.num_k - last[..., 0] * tokens
    return TierPages(tier.fmt, tier.ids.gather(-1, first), held, held)


def add_scores(pages: Tensor, tier: TierPages, scores: Tensor) -> None:
    """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots."""
    checks.scores(pages, tier, scores)
    tokens = tier.fmt.tokens_per_page
    page_index, slot = (
        torch.arange(tier.ids.shape[-1], device=scores.device),
        torch.arange(tokens, device=scores.device),
    )
    live = (page_index[:, None] * tokens + slot) < tier.num_k[..., None, None]
    view = region(pages, tier.fmt, "score")
    chosen = live.nonzero(as_tuple=True)
    where = tier.ids[chosen[0], chosen[1], chosen[2]], chosen[3]
    view[where] = view[where] + scores.unflatten(-1, (-1, tokens))[chosen]


def gather_dense(
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | None,
    read: Callable[[Tensor, PageFormat, Tensor], tuple[Tensor, Tensor]] = read_pages,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dequantises everything a layer holds, padded; with a ring, in token order. `read` reads whole pages."""
    checks.dense(pages, tiers, ring)
    keys, values, live = [], [], []
    for tier in tiers:
        k, v = read(pages, tier.fmt, tier.ids.flatten())
        k = _of_channels(tier, k.unflatten(0, tier.ids.shape)).transpose(3, 4).flatten(2, 3)
        v = v.unflatten(0, tier.ids.shape).flatten(2, 3)
        slot = torch.arange(k.shape[2], device=k.device)
        if (angles := tier.angles) is not None:
            k = rotate(k, angles[:, None])
        held_k, held_v = slot < tier.num_k[..., None], slot < tier.num_v[..., None]
        keys.append(k.masked_fill(~held_k[..., None], 0.0))
        values.append(v.masked_fill(~held_v[..., None], 0.0))
        live.append(held_k)
    if ring is None:
        return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(live, 2)
    width = max(keys[0].shape[2], int(ring.num_tokens.max()))
    token = torch.arange(width, device=keys[0].device).expand(*keys[0].shape[:2], -1)
    dense = []
    for paged, buffer, held in ((keys[0], ring.k, tiers[0].num_k), (values[0], ring.v, tiers[0].num_v)):
        from_ring = buffer.float().gather(2, (token % buffer.shape[2])[..., None].expand(-1, -1, -1, buffer.shape[3]))
        padded = F.pad(paged, (0, 0, 0, width - paged.shape[2]))
        dense.append(torch.where((token < held[..., None])[..., None], padded, from_ring))
    alive = token < ring.num_tokens[..., None]
    return dense[0].masked_fill(~alive[..., None], 0.0), dense[1].masked_fill(~alive[..., None], 0.0), alive


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a whole prompt on uncompressed keys and values."""
    checks.prompt(q, k, v)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)[0]


def chunk_attention(q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """Attention of a chunk of tokens over a dequantised history and over itself, causally.

    It goes by blocks of queries, since a mask is as large as the product of queries and keys.
    """
    checks.chunk(q, k, v, history)
    past_k, past_v, live = history
    heads, chunk, head_dim = k.shape
    keys, values = (torch.cat([past, own.float()], 1)[:, None] for past, own in ((past_k, k), (past_v, v)))
    grouped = q.view(heads, -1, chunk, head_dim)
    out = torch.empty(grouped.shape, device=q.device)
    for begin in range(0, chunk, CHUNK_ROWS):
        end = min(chunk, begin + CHUNK_ROWS)
        rows, shape = end - begin, (-1, grouped.shape[1], -1, -1)
        causal = torch.ones(rows, end, dtype=torch.bool, device=q.device).tril(begin)
        mask = torch.cat([live[:, None].expand(-1, rows, -1), causal.expand(heads, -1, -1)], -1)
        seen = past_k.shape[1] + end
        out[:, :, begin:end] = F.scaled_dot_product_attention(
            grouped[:, :, begin:end].float(),
            keys[:, :, :seen].expand(shape),
            values[:, :, :seen].expand(shape),
            attn_mask=mask[:, None],
            scale=scale,
        )
    return out.flatten(0, 1)


def column_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int = 0,
    power: int = 1,
    block: int = 64,
    below_uniform: bool = False,
    reduce: Reduce = "sum",
) -> Tensor:
    """How much attention each key of a prompt receives, reduced over queries, in O(N) memory.

    `out[h, j] = sum over counted queries i >= j + skip_near of softmax_j(scale * q_i k_j)^power`, the softmax over keys
    0..i.

    Args:
        q: [Hq, N, D]; k: [H, N, D].
        queries: The last `queries` tokens count; -1 = all.
        skip_near: Query i does not count for key j when i - j < skip_near.
        power: 1 or 2.
        block: Queries per block; memory is Hq * block * N fp32.
        below_uniform: Instead of probabilities, sum minus 1 for every counted query with probability < 1 / (i + 1).
        reduce: `sum`; `mean` over the queries that count for the key, 0 where none does; or `max`.

    Returns:
        fp32 [Hq, N].
    """
    checks.columns(q, k, queries, skip_near, power)
    num_q_heads, length, head_dim = q.shape
    heads = k.shape[0]
    out = torch.zeros(heads, num_q_heads // heads, length, device=q.device)
    first = 0 if queries < 0 else max(0, length - queries)
    grouped = (q.float() * scale).view(heads, -1, length, head_dim)
    keys = k.float().transpose(1, 2)
    for begin in range(first, length, block):
        end = min(length, begin + block)
        logits = torch.matmul(grouped[:, :, begin:end].flatten(1, 2), keys[:, :, :end])
        logits = logits.unflatten(1, (-1, end - begin))
        near = max(0, begin - skip_near)  # only keys from here on can be ahead of a query or too near to it
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(near, end, device=q.device)
        logits[..., near:].masked_fill_(distance < 0, float("-inf"))
        prob = logits.softmax(-1)
        if below_uniform:
            seen = torch.arange(begin + 1, end + 1, device=q.device)
            prob = -(prob < 1.0 / seen[:, None]).float()
            prob[..., near:].masked_fill_(distance < 0, 0.0)
        if power == 2:
            prob = prob.square_()
        if skip_near:
            prob[..., near:].masked_fill_(distance < skip_near, 0.0)
        if reduce == "max":
            out[..., :end] = torch.maximum(out[..., :end], prob.amax(2))
        else:
            out[..., :end] += prob.sum(2)
    if reduce == "mean":
        position = torch.arange(length, device=q.device)
        out /= (length - (position + skip_near).clamp(min=first)).clamp(min=1)
    return out.flatten(0, 1)


def reduce_columns(prob: Tensor, counts: Tensor, reduce: Reduce) -> Tensor:
    """Reduces probabilities [..., w, n], 0 where a query does not count for a key, over the queries.

    Args:
        prob: fp32.
        counts: bool, broadcastable to `prob`: the query counts.
        reduce: As for `column_scores`.
    """
    if reduce == "max":
        return prob.amax(-2)
    return prob.sum(-2) / (counts.sum(-2).clamp(min=1) if reduce == "mean" else 1)


def pool_scores(score: Tensor, kind: Literal["avg", "max"], kernel: int) -> Tensor:
    """Centred pooling along the last axis, stride 1; `avg` counts padding as zeros, `max` ignores it. Any leading
    shape."""
    rows = score.reshape(-1, 1, score.shape[-1])
    op = F.avg_pool1d if kind == "avg" else F.max_pool1d
    return op(rows, kernel, stride=1, padding=kernel // 2).view(score.shape)


def prompt_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int,
    power: int,
    pool: Pool,
    pool_kernel: int,
    pool_stage: PoolStage,
    pool_region: PoolRegion,
    group: Reduce,
    columns: Callable[..., Tensor] = column_scores,
) -> Tensor:
    """The score of every prompt key per KV head: column sums, pooling and group reduction in the stated order.

    Args:
        columns: What sums the columns: `column_scores`, or a backend's own. The others as for `Backend.prompt_scores`.

    Returns:
        fp32 [H, N].
    """
    return reduce_scores(
        columns(q, k, scale, queries=queries, skip_near=skip_near, power=power),
        k.shape[0],
        queries=queries,
        pool=pool,
        pool_kernel=pool_kernel,
        pool_stage=pool_stage,
        pool_region=pool_region,
        group=group,
    )


def prompt_low_counts(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    queries: int,
    skip_near: int,
    group: Reduce,
    columns: Callable[..., Tensor] = column_scores,
) -> Tensor:
    """Minus the number of counted queries that attend to a prompt key with less than 1 / (keys they see), per KV head.

    Args:
        columns: As for `prompt_scores`. The others as for `Backend.prompt_low_counts`.

    Returns:
        fp32 [H, N].
    """
    counts = columns(q, k, scale, queries=queries, skip_near=skip_near, below_uniform=True)
    return reduce_group(counts.view(k.shape[0], -1, k.shape[1]), group, 1)


def reduce_scores(
    columns: Tensor,
    heads: int,
    *,
    queries: int,
    pool: Pool,
    pool_kernel: int,
    pool_stage: PoolStage,
    pool_region: PoolRegion,
    group: Reduce,
) -> Tensor:
    """Pools and group-reduces column sums fp32 [Hq, N] to [H, N]."""
    checks.reduction(pool, pool_kernel, pool_stage, pool_region, group)
    columns = columns.view(heads, -1, columns.shape[-1])

    def pooled(x: Tensor) -> Tensor:
        cut = x.shape[-1] if pool_region == "all" or queries < 0 else max(0, x.shape[-1] - queries)
        if pool == "none" or cut == 0:
            return x
        return torch.cat([pool_scores(x[..., :cut], pool, pool_kernel), x[..., cut:]], -1)

    if pool_stage == "per_query_head":
        return reduce_group(pooled(columns), group, 1)
    return pooled(reduce_group(columns, group, 1))
