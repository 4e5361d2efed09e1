"""Attention over pages in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import PLAIN, Reduce, Ring, Softmax, TierPages
from kvbench.kernels.reference.pages import PageOperations, in_plain_torch, read_pages, region


class DecodeOperations(PageOperations):
    """Operations of a decode step on pages; `Backend` has the legend."""

    @in_plain_torch
    def paged_decode(
        self,
        q: Tensor,
        pages: Tensor,
        tiers: list[TierPages],
        ring: Ring | None,
        scale: float,
        *,
        power: int = 1,
        group: Reduce | None = None,
        softmax: Softmax = PLAIN,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attention of one query token per sequence over all tiers and the residual buffer, under one exact softmax.

        Args:
            q: [S, Hq, D], any float dtype.
            tiers: One to four tiers; with a ring, only tier 0.
            ring: Residual buffer or None.
            power: Probabilities are raised to this power (1 or 2) before the group is reduced.
            group: Reduction of the query heads of a KV head into scores; None = no scores.
            softmax: Caps and sinks of the layer.

        Returns:
            out fp32 [S, Hq, D]; lse fp32 [S, Hq], the log-sum-exp of the logits and of sinks, with which partial
            results can be merged; scores per tier, fp32 [S, H, m * T] (0 past a list's end), empty without `group`.

        Raises:
            MemoryError: No room for the partial results.
        """
        checks.decode(q, pages, tiers, ring, power, group, softmax)
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
            logits.append(softmax.capped(part * scale).masked_fill(slot >= tier.num_k[:, :, None, None], float("-inf")))
            vals = vals.reshape(num_seq, num_heads, width, head_dim)
            values.append(vals.masked_fill((slot >= tier.num_v[..., None])[..., None], 0.0))
            widths.append(width)
        if ring is not None:
            k_ordinal, k_live = _ring_ordinals(ring.num_tokens, tiers[0].num_k, ring.k.shape[2])
            part = torch.matmul(q, ring.k.float().masked_fill(~k_live[..., None], 0.0).transpose(2, 3)) * scale
            logits.append(softmax.capped(part).masked_fill(~k_live[:, :, None], float("-inf")))
            widths.append(ring.k.shape[2])
        if softmax.sinks is not None:
            logits.append(softmax.sinks.view(num_heads, -1, 1).expand(num_seq, -1, -1, -1))
            widths.append(1)
        all_logits = torch.cat(logits, -1)
        lse = all_logits.logsumexp(-1)
        # exp(x - lse) would carry the rounding of lse into every weight
        parts = list(all_logits.softmax(-1).split(widths, -1))
        if softmax.sinks is not None:
            parts.pop()
        if ring is None:
            out = sum((torch.matmul(p, v) for p, v in zip(parts, values, strict=True)), start=q.new_zeros(()))
        else:
            out = _ring_output(parts[0], parts.pop(), values[0], ring, tiers[0], k_ordinal, k_live)
        scores = [reduce_group(p**power, group, 2) for p in parts] if group else []
        return out.flatten(1, 2), lse.flatten(1, 2), scores

    @in_plain_torch
    def choose_pages(
        self, q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce
    ) -> TierPages:
        """Pages of each list that can hold the largest logits, in slot order; always includes the newest page.

        A page's bound for a query is the sum over channels of max(q * low, q * high), which no logit in it exceeds.

        Args:
            q: [S, Hq, D].
            tier: All pages of each list, with bounds.
            count: int64 [S] pages to choose per list, >= 1; fewer where a list has fewer.
            width: The largest of `count`, as a number.
            group: Reduction of the bounds of the query heads of a KV head.

        Returns:
            The tier with only the chosen pages: ids [S, H, min(width, m)], and the slots that they hold.

        Source: mit-han-lab/Quest evaluation/quest_attention.py and quest/utils/controller.py.
        """
        checks.choose(q, pages, tier, count, width, group)
        return choose_by_bounds(page_bounds(q, pages, tier, group), tier, count, width)

    @in_plain_torch
    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots, in place."""
        checks.scores(pages, tier, scores)
        tokens = tier.fmt.tokens_per_page
        page_index, slot = (
            torch.arange(tier.ids.shape[-1], device=scores.device),
            torch.arange(tokens, device=scores.device),
        )
        live = (page_index[:, None] * tokens + slot) < tier.num_k[..., None, None]
        view = self.region(pages, tier.fmt, "score")
        chosen = live.nonzero(as_tuple=True)
        where = tier.ids[chosen[0], chosen[1], chosen[2]], chosen[3]
        view[where] = view[where] + scores.unflatten(-1, (-1, tokens))[chosen]

    @in_plain_torch
    def gather_dense(self, pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> tuple[Tensor, Tensor, Tensor]:
        """Dequantises everything a layer holds, padded.

        Args:
            tiers, ring: As for `paged_decode`.

        Returns:
            keys and values fp32 [S, H, n, D], and bool [S, H, n]: the entry is live. With a ring, entries are in token
            order.
        """
        checks.dense(pages, tiers, ring)
        return dense_of(pages, tiers, ring, read_pages)


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
    """Keys [S, H, m, D, T] with per-channel scales and offsets applied, where those lie outside the pages."""
    if tier.channels is not None:
        scale, zero = (x[:, None, :, None] for x in (tier.channels.scale, tier.channels.zero))
        keys = keys * scale + zero
    return keys if tier.offset is None else keys + tier.offset[:, None, :, None]


def _ring_ordinals(num_tokens: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Token of each ring entry, int64 [S, H, R], and whether it is live (bool)."""
    last = num_tokens[..., None] - 1
    entry = torch.arange(length, device=num_tokens.device)
    ordinal = last - (last - entry) % length
    return ordinal, (ordinal >= start[..., None]) & (ordinal >= 0)


def _ring_output(
    p_pages: Tensor, p_ring: Tensor, v_pages: Tensor, ring: Ring, tier: TierPages, k_ordinal: Tensor, k_live: Tensor
) -> Tensor:
    """Weighted values when keys and values leave the buffer at different times.

    Probabilities are first put in token order.
    """
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
    """Upper bound of the logits in a page, fp32 [S, H, m], over the query heads (q [S, Hq, D]) of a group.

    Arbitrary past a list's end.
    """
    num_seq, num_heads = tier.ids.shape[:2]
    q = q.float().view(num_seq, num_heads, -1, q.shape[-1])
    low, high = (region(pages, tier.fmt, name)[tier.ids].float().transpose(2, 3) for name in ("k_low", "k_high"))
    return reduce_group(torch.matmul(q.clamp(min=0), high) + torch.matmul(q.clamp(max=0), low), group, 2)


def choose_by_bounds(bound: Tensor, tier: TierPages, count: Tensor, width: int) -> TierPages:
    """The pages of each list with the largest bounds, fp32 [S, H, m]; the others as for `Backend.choose_pages`."""
    num_columns, tokens = tier.ids.shape[2], tier.fmt.tokens_per_page
    column, last = torch.arange(num_columns, device=bound.device), (tier.num_k - 1)[..., None] // tokens
    bound = bound.masked_fill(column > last, float("-inf")).masked_fill(column == last, float("inf"))
    order = bound.argsort(dim=-1, descending=True, stable=True)
    best = (column < count[:, None, None]).expand_as(order)
    chosen = torch.zeros_like(best).scatter_(-1, order, best) & (column <= last)
    first = torch.where(chosen, column, num_columns).sort(-1).values[..., :width].clamp(max=num_columns - 1)
    held = (chosen.sum(-1) - 1) * tokens + tier.num_k - last[..., 0] * tokens
    return TierPages(tier.fmt, tier.ids.gather(-1, first), held, held)


def dense_of(
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | None,
    read: Callable[[Tensor, PageFormat, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Result of `Backend.gather_dense`, where `read` reads whole pages."""
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
