"""GPU backend: attention of one query token per sequence over pages, and the scores it gives.

A list (one sequence, one KV head) is cut into parts of whole pages; `_attend_part` reduces each part to its maximum,
its sum of exponentials and its unnormalised output, tier after tier, and `_merge_parts` merges them exactly. Scores
need the final maximum and sum, so the exponentials are kept, each with the running maximum of its block, and
`_reduce_scores` turns them into probabilities. Exponentials are of base 2: logits carry a factor log2(e).

How the work is cut depends on shapes alone, never on how many slots a list holds: nothing is read back to the host, and
a call can be captured in a CUDA graph.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import Reduce, Ring, TierPages
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.parts import (
    ELEMENT,
    INTERPRETED,
    LOG2_E,
    LOWEST,
    MIN_DOT,
    launch,
    power_of_two,
    side_constants,
)
from kvbench.kernels.gpu.tiles import (
    add_ring_values,
    add_values,
    key_logits,
    query_planes,
    ring_logits,
    rotated_logits,
    sum_channels,
    zero_planes,
)

_REDUCE: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}


@triton.jit
def _row_of_ring(rows, pid, heads, NAMED: tl.constexpr):
    """Where the sequence of a list lies in the residual buffers."""
    if NAMED:
        return tl.load(rows + pid // heads).to(tl.int64)
    else:
        return pid // heads


@triton.jit
def _attend_part(
    q, pages, ids, num_k, num_v, ring_tokens, ring_rows, ring_k, ring_v, part_top, part_sum, part_out, weights, tops,
    angles, scale2, page_bytes, num_columns, num_parts, first_part, pages_per_part, heads, rk_row, rk_head, rv_row,
    rv_head, angle_row,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr,
    SCORES: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, NAMED: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, REST: tl.constexpr,
    K_BITS: tl.constexpr, K_P: tl.constexpr, K_W: tl.constexpr, K_WP: tl.constexpr, K_OFF: tl.constexpr,
    K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_GROUPS: tl.constexpr, K_CHANNEL: tl.constexpr, K_CODE: tl.constexpr,
    K_ELEM: tl.constexpr,
    V_BITS: tl.constexpr, V_P: tl.constexpr, V_W: tl.constexpr, V_WP: tl.constexpr, V_OFF: tl.constexpr,
    V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_GROUPS: tl.constexpr, V_CHANNEL: tl.constexpr, V_CODE: tl.constexpr,
    V_ELEM: tl.constexpr,
):  # fmt: skip
    """One part of one list in one tier (and its residual buffer): maximum, sum, unnormalised output, exponentials."""
    pid, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCKS: tl.constexpr = (T + BT - 1) // BT  # blocks of slots per page
    held_k, held_v = tl.load(num_k + pid).to(tl.int32), tl.load(num_v + pid).to(tl.int32)
    total = held_k
    if RK > 0:
        total = tl.load(ring_tokens + pid).to(tl.int32)
    g = tl.arange(0, GP)
    query = query_planes(q, pid * G * D, G, GP, D, K_P, K_W, K_WP)
    q_sum = sum_channels(query, K_P)
    top = tl.full([GP], LOWEST, tl.float32)
    norm = tl.zeros([GP], tl.float32)
    acc = zero_planes(V_P, GP, V_WP)
    num_pages = (total + T - 1) // T
    first = tl.minimum(part * pages_per_part, num_pages)
    last = tl.minimum(first + pages_per_part, num_pages)
    for block in range(first * BLOCKS, last * BLOCKS):
        index = block // BLOCKS
        start = (block % BLOCKS) * BT
        t = start + tl.arange(0, BT)
        token = index * T + t
        inside = t < T
        live_k = inside & (token < held_k)
        page = tl.load(ids + pid * num_columns + index, mask=index < num_columns, other=0).to(tl.int64)
        base = pages + page * page_bytes
        if HALF > 0:
            logit = rotated_logits(
                q, pid * G * D, angles + (pid // heads) * angle_row, base, t, live_k, token, G, GP, D, T, HALF, HP,
                REST, K_BITS, K_W, K_OFF, K_SCALE, K_ZERO, K_GROUPS, K_CHANNEL, K_CODE, K_ELEM,
            )  # fmt: skip
        else:
            logit = key_logits(
                query, q_sum, base, start, held_k - index * T, D, T, BT, OP, K_BITS, K_P, K_W, K_WP, K_OFF, K_SCALE,
                K_ZERO, K_GROUPS, K_CHANNEL, K_CODE, K_ELEM,
            )  # fmt: skip
        live = live_k
        if RK > 0:
            row = _row_of_ring(ring_rows, pid, heads, NAMED)
            if (index + 1) * T > held_k:
                in_ring = inside & (token >= held_k) & (token < total) & (token >= total - RK)
                at = row * rk_row + pid % heads * rk_head
                dots = ring_logits(query, ring_k, at, token, in_ring, GP, BT, OP, RK, D, K_P, K_W, K_WP)
                logit = tl.where(live_k[None, :], logit, dots)
                live = live_k | in_ring
        logit = tl.where(live[None, :], logit * scale2, LOWEST)
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.where(live[None, :], tl.exp2(logit - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(p, 1)
        live_v = inside & (token < held_v) & (token < total)
        acc = add_values(
            acc, shrink, tl.where(live_v[None, :], p, 0.0), base, t, live_v, D, T, BT, OP, V_BITS, V_P, V_W, V_WP,
            V_OFF, V_SCALE, V_ZERO, V_GROUPS, V_CODE, V_ELEM,
        )  # fmt: skip
        if RV > 0:
            row = _row_of_ring(ring_rows, pid, heads, NAMED)
            if (index + 1) * T > held_v:
                in_ring = inside & (token >= held_v) & (token < total) & (token >= total - RV)
                at = row * rv_row + pid % heads * rv_head
                acc = add_ring_values(acc, p, ring_v, at, token, in_ring, OP, RV, D, V_P, V_W, V_WP)
        top = new_top
        if SCORES:
            at = (pid * G + g) * (num_columns * T)
            here = (g < G)[:, None] & live_k[None, :]
            tl.store(weights + at[:, None] + token[None, :], p.to(weights.dtype.element_ty), mask=here)
            if index < num_columns:
                tl.store(tops + (pid * G + g) * (num_columns * BLOCKS) + block, top, mask=g < G)
    at = (pid * num_parts + first_part + part) * G + g
    tl.store(part_top + at, top, mask=g < G)
    tl.store(part_sum + at, norm, mask=g < G)
    w = tl.arange(0, V_WP)
    if first < last:
        for plane in tl.static_range(V_P):
            place = part_out + at[:, None] * D + (plane * V_W + w)[None, :]
            tl.store(place, acc[plane], mask=(g < G)[:, None] & (w < V_W)[None, :])


@triton.jit
def _merge_parts(
    part_top, part_sum, part_out, out, lse, all_top, all_sum, num_parts, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one list for one query head; all_top and all_sum are the merged maximum and sum."""
    pid = tl.program_id(0).to(tl.int64)
    row, g = pid // G, pid % G
    d = tl.arange(0, DP)
    top = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DP], tl.float32)
    for begin in range(0, num_parts, BP):
        part = begin + tl.arange(0, BP)
        at = (row * num_parts + part) * G + g
        its_top = tl.load(part_top + at, mask=part < num_parts, other=LOWEST)
        its_sum = tl.load(part_sum + at, mask=part < num_parts, other=0.0)
        filled = its_sum != 0.0  # an empty part never wrote its output
        new_top = tl.maximum(top, tl.max(its_top, 0))
        factor = tl.where(filled, tl.exp2(its_top - new_top), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(its_sum * factor, 0)
        tile = tl.load(part_out + at[:, None] * D + d[None, :], mask=filled[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(tile * factor[:, None], 0)
        top = new_top
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    tl.store(out + pid * D + d, tl.where(empty, float("nan"), acc / divisor), mask=d < D)
    tl.store(lse + pid, tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * 0.6931471805599453))
    tl.store(all_top + pid, top)
    tl.store(all_sum + pid, divisor)


@triton.jit
def _reduce_scores(
    weights, tops, all_top, all_sum, num_k, scores, pages, ids, seen, page_bytes, num_columns, heads, G: tl.constexpr,
    GP: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, POWER: tl.constexpr, RULE: tl.constexpr, TRACK: tl.constexpr,
    REPLACE: tl.constexpr, NEAR: tl.constexpr, POS: tl.constexpr,
):  # fmt: skip
    """Probabilities of one block of slots, raised, reduced over the query heads; stored, or added to what pages track.

    TRACK is the byte offset of the tracked scores, or -1 to write `scores`; POS that of the positions, where slots
    nearer to the query than NEAR get nothing.
    """
    pid, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCKS: tl.constexpr = (T + BT - 1) // BT
    g = tl.arange(0, GP)
    index = block // BLOCKS
    t = (block % BLOCKS) * BT + tl.arange(0, BT)
    token = index * T + t
    held = tl.load(num_k + pid).to(tl.int32)
    live = (t < T) & (token < held)
    rows = tl.where(index * T + (block % BLOCKS) * BT < held, G, 0)  # a block past the end was never written
    at = pid * G + g
    here = (g < G)[:, None] & live[None, :]
    p = tl.load(weights + at[:, None] * (num_columns * T) + token[None, :], mask=here, other=0.0).to(tl.float32)
    its_top = tl.load(tops + at * (num_columns * BLOCKS) + block, mask=g < rows, other=LOWEST)
    top = tl.load(all_top + at, mask=g < G, other=0.0)
    p = p * (tl.exp2(its_top - top) / tl.load(all_sum + at, mask=g < G, other=1.0))[:, None]
    if POWER == 2:
        p = p * p
    if RULE == 2:
        score = tl.max(p, 0)
    else:
        score = tl.sum(p, 0)
        if RULE == 1:
            score = score / G
    if TRACK < 0:
        tl.store(scores + pid * (num_columns * T) + token, score, mask=t < T)
    else:
        page = tl.load(ids + pid * num_columns + index).to(tl.int64)
        field = (pages + page * page_bytes + TRACK).to(tl.pointer_type(tl.float32)) + t
        if NEAR > 0:
            pos = tl.load((pages + page * page_bytes + POS).to(tl.pointer_type(tl.int32)) + t, mask=live, other=0)
            score = tl.where(tl.load(seen + pid // heads) - pos < NEAR, 0.0, score)
        if not REPLACE:
            score += tl.load(field, mask=live, other=0.0)
        tl.store(field, score, mask=live)


@triton.jit
def _add_scores(pages, ids, num_k, scores, page_bytes, num_columns, T: tl.constexpr, TP: tl.constexpr,
                TRACK: tl.constexpr):  # fmt: skip
    """Adds the scores of one page's live slots to what it tracks."""
    pid, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, TP)
    token = index * T + t
    live = (t < T) & (token < tl.load(num_k + pid).to(tl.int32))
    page = tl.load(ids + pid * num_columns + index).to(tl.int64)
    field = (pages + page * page_bytes + TRACK).to(tl.pointer_type(tl.float32)) + t
    score = tl.load(scores + pid * (num_columns * T) + token, mask=live, other=0.0)
    tl.store(field, tl.load(field, mask=live, other=0.0) + score, mask=live)


@cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors (NVIDIA) or compute units (AMD) of a device; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _block_slots(fmt: PageFormat, wide: bool) -> int:
    """Slots that one step of the inner loop reads, a power of two.

    A step is taken to cost as much as 32 slots beside its own; where that is wrong on a GPU, it costs time only. More
    slots than are tried here do not fit into a thread's registers: compiled for sm_90, they spill.

    Args:
        fmt: The page format.
        wide: Products are of fp32 tiles.
    """
    slot, slots = fmt.slot, fmt.tokens_per_page
    most = 16 if wide else 32 if slot.head_dim <= 64 and (slot.k_coded or slot.v_coded) else 64
    if 3 in (slot.k_bits, slot.v_bits):  # eight planes, of three bytes each
        most = 16
    group = slot.k_channel_group if slot.channel_keys else 0
    if group >= MIN_DOT and group & (group - 1) == 0:
        return min(group, most)  # within one group of tokens, one scale per channel serves the block
    return min((size for size in (16, 32, 64) if size <= most), key=lambda size: -(-slots // size) * (size + 32))


def _operand(q: Tensor, tiers: list[TierPages], ring: Ring | None) -> tl.dtype:
    """Type of the matrix products' operands: the model's own 16-bit type where nothing is lost by it, else fp32."""
    held = {tier.fmt.slot.dtype for tier in tiers if max(tier.fmt.slot.k_bits, tier.fmt.slot.v_bits) >= 16}
    held |= {ring.k.dtype, ring.v.dtype} if ring is not None else set()
    exact = held <= {q.dtype} and not (INTERPRETED and q.dtype == torch.bfloat16)
    return ELEMENT[q.dtype] if exact else tl.float32


def _cut(lists: int, pages: int, device: torch.device) -> int:
    """Pages per part, at least one, so that a few programs run on every multiprocessor; a tier may hold no page."""
    wanted = max(1, min(pages, 4 * _num_processors(device) // max(1, lists)))
    return max(1, -(-pages // wanted))


def paged_decode(
    q: Tensor, pages: Tensor, tiers: list[TierPages], ring: Ring | None, scale: float, *, power: int = 1,
    group: Reduce | None = None, accumulate: bool = False, replace: bool = False, seen: Tensor | None = None,
    skip_near: int = 0, ring_rows: Tensor | None = None, pages_per_part: int | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Attention of one query token per sequence over all tiers and the residual buffer, dequantising as it goes.

    Arguments and results are those of `Backend.paged_decode`. Keys that are rotated when they are read give logits in
    fp32. fp32 queries are computed in fp32 throughout; fp16 and bf16 queries with products in that type, sums in fp32.
    Capture-safe: no host synchronisation, and every allocation has a size that shapes alone give.

    Args:
        accumulate: Add the scores to what the pages track, instead of returning them; `replace` puts them there.
        seen: int64 [S] position of the queries; with `skip_near`, slots nearer than that get no score.
        ring_rows: int64 [S] rows of the buffers [rows, H, R, D]; None = they hold those of the call, in order.
        pages_per_part: Pages per part; chosen from the number of lists and multiprocessors when absent.

    Source: kvbench's own; split over the sequence with an exact merge as in FlashDecoding, scales folded into the
        products as in KIVI's and DiffKV's kernels.
    """
    checks.decode(q, pages, tiers, ring if ring_rows is None else None, power, group)
    num_seq, num_q_heads, head_dim = q.shape
    heads = tiers[0].ids.shape[1]
    lists, group_size = num_seq * heads, num_q_heads // heads
    lengths = (ring.k.shape[2], ring.v.shape[2]) if ring is not None else (0, 0)
    spans = [tier.ids.shape[-1] + -(-max(lengths) // tier.fmt.tokens_per_page) for tier in tiers]
    cuts = [pages_per_part or _cut(lists, span, q.device) for span in spans]
    parts = [-(-span // cut) for span, cut in zip(spans, cuts, strict=True)]
    num_parts = sum(parts)
    q, operand = q.contiguous(), _operand(q, tiers, ring)
    rows = lists * group_size
    part_top, part_sum, part_out = (
        torch.empty(lists, num_parts, group_size, *tail, device=q.device) for tail in ((), (), (head_dim,))
    )
    out, lse = torch.empty(q.shape, device=q.device), torch.empty(q.shape[:2], device=q.device)
    top, total = torch.empty(rows, device=q.device), torch.empty(rows, device=q.device)
    ring_k, ring_v, ring_tokens, strides = _ring_arguments(ring, q)
    group_pad = power_of_two(group_size, MIN_DOT)
    kept, first = [], 0
    for tier, cut, count in zip(tiers, cuts, parts, strict=True):
        fmt, columns, angles, half = tier.fmt, tier.ids.shape[-1], q, 0
        if tier.rotation is not None:
            angles, half = _angles(tier.rotation), tier.rotation.shape[-1]
        wide = half > 0 or operand == tl.float32
        block = _block_slots(fmt, wide)
        slots = fmt.tokens_per_page
        weights = tops = part_top
        if group:  # exponentials are at most 1: fp16 holds them as well as the products behind them
            kind = torch.float32 if operand == tl.float32 else torch.float16
            weights = torch.empty(rows, columns * slots, dtype=kind, device=q.device)
            tops = torch.empty(rows, columns * -(-slots // block), device=q.device)
            kept.append((tier, weights, tops, block))
        launch(
            _attend_part, (lists, count), q, pages, tier.ids.contiguous(), tier.num_k.contiguous(),
            tier.num_v.contiguous(), ring_tokens, ring_tokens if ring_rows is None else ring_rows, ring_k, ring_v,
            part_top, part_sum, part_out, weights, tops, angles, scale * LOG2_E, pages.shape[1], columns, num_parts,
            first, cut, heads, *strides, angles.stride(0), G=group_size, GP=group_pad, D=head_dim, T=slots, BT=block,
            OP=operand, SCORES=bool(group), RK=lengths[0], RV=lengths[1], NAMED=ring_rows is not None, HALF=half,
            HP=power_of_two(half, MIN_DOT),
            REST=power_of_two(head_dim - 2 * half, MIN_DOT) if half and head_dim > 2 * half else 0,
            **side_constants(fmt, "k", "K_"), **side_constants(fmt, "v", "V_"), num_warps=8 if wide else 4,
        )  # fmt: skip
        first += count
    launch(
        _merge_parts, (rows,), part_top, part_sum, part_out, out, lse, top, total, num_parts, G=group_size, D=head_dim,
        DP=power_of_two(head_dim), BP=16,
    )  # fmt: skip
    if group is None:
        return out, lse, []
    scores = []
    for tier, weights, tops, block in kept:
        columns, slots = tier.ids.shape[-1], tier.fmt.tokens_per_page
        if not accumulate:
            scores.append(torch.empty(num_seq, heads, columns * slots, device=q.device))
        launch(
            _reduce_scores, (lists, columns * -(-slots // block)), weights, tops, top, total, tier.num_k.contiguous(),
            weights if accumulate else scores[-1], pages, tier.ids.contiguous(), weights if seen is None else seen,
            pages.shape[1], columns, heads, G=group_size, GP=power_of_two(group_size), T=slots, BT=block, POWER=power,
            RULE=_REDUCE[group], TRACK=_score_offset(tier.fmt) if accumulate else -1, REPLACE=replace,
            NEAR=0 if seen is None else skip_near, POS=tier.fmt.regions["pos"][0],
        )  # fmt: skip
    return out, lse, scores


def add_scores(pages: Tensor, tier: TierPages, scores: Tensor) -> None:
    """Adds fp32 [S, H, m * T] to the tracked scores of a tier's live slots, in place; capture-safe."""
    checks.scores(pages, tier, scores)
    lists, columns, slots = tier.num_k.numel(), tier.ids.shape[-1], tier.fmt.tokens_per_page
    launch(
        _add_scores, (lists, columns), pages, tier.ids.contiguous(), tier.num_k.contiguous(),
        scores.float().contiguous(), pages.shape[1], columns, T=slots, TP=power_of_two(slots),
        TRACK=_score_offset(tier.fmt),
    )  # fmt: skip


def _angles(rotation: Tensor) -> Tensor:
    """The angles as the kernel reads them: all of one sequence in a row; sequences may share them."""
    is_row = rotation.stride(2) == 1 and rotation.stride(1) == rotation.shape[2]
    return rotation if is_row else rotation.contiguous()


def _score_offset(fmt: PageFormat) -> int:
    offset, length = fmt.regions["score"]
    if not length:
        raise ValueError("the format tracks no scores to add to; track score, or take the scores as a result")
    return offset


def _ring_arguments(ring: Ring | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Buffers, token counts and the strides between rows and heads; only [R, D] of a list must be contiguous."""
    if ring is None:
        return q, q, q, (0, 0, 0, 0)
    k, v = (x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in (ring.k, ring.v))
    return k, v, ring.num_tokens.contiguous(), (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
