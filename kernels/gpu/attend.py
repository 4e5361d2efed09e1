"""GPU backend: the kernels of decode attention over pages; `decode.py` launches them.

A list (one sequence, one KV head) is cut into parts of whole pages; `_attend` reduces each part to its maximum, its sum
of exponentials and its unnormalised output, for up to two tiers in one launch. `_finish` merges the parts exactly.
Scores need the final maximum and sum, so the exponentials are kept, each with the running maximum of its block, and
`_finish` turns them into probabilities, too. Exponentials are of base 2: logits carry a factor log2(e).

Where a list lies: in arrays that describe a step, sequence after sequence, with `per_row` lists each, of which `offset`
are of the layers before; in page tables (TABLED) they are found by the sequence's row.
"""

import triton
import triton.language as tl

from kvbench.kernels.gpu.parts import LOWEST, capped, elements
from kvbench.kernels.gpu.tiles import (
    add_ring_values,
    add_values,
    key_angles,
    key_logits,
    key_metadata,
    query_planes,
    ring_logits,
    rotated_logits,
    scaled_query,
    sum_channels,
    value_metadata,
    zero_planes,
)

# Arguments that vary by step or layer; compilation must not depend on them.
_COUNTS = ["offset", "num_parts", "per_row"]
_COUNTS += [f"{side}_{name}" for side in "ab" for name in ("parts", "columns", "entries")]
# Slots whose scores a program makes in a turn, which waits for what it reads: on an H100 and an H200 scores took about
# 1.1 us a turn, of 16 to 64 slots, and next to nothing else.
SCORED = tl.constexpr(256)


@triton.jit
def row_number(rows, pid, heads, NAMED: tl.constexpr):
    """The row of the sequence that program `pid` is about: the one that `rows` names, or the sequence's own number."""
    if NAMED:
        return tl.load(rows + pid // heads).to(tl.int64)
    else:
        return pid // heads


@triton.jit
def table_page(table, which, entries, index, live, REVERSED: tl.constexpr):
    """The id of page `index` of a list, 0 where not live; tier 1 fills its list's entries from the right."""
    if REVERSED:
        return tl.load(table + which * entries + (entries - 1 - index), mask=live, other=0).to(tl.int64)
    else:
        return tl.load(table + which * entries + index, mask=live, other=0).to(tl.int64)


@triton.jit
def _attend_block(
    top, norm, acc, index, start, q, query, q_sum, by, base, angles, frequencies, seen, weights, tops, ring_k, ring_v,
    held_k, held_v, total, pid, row, columns, heads, rk_row, rk_head, rv_row, rv_head, angle_row, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SIZE: tl.constexpr, OP: tl.constexpr,
    SCORES: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
    REST: tl.constexpr, CAP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The slots of a page from `start` on, of which a tile has SIZE: the maximum, the sum and the output so far."""
    g, t = tl.arange(0, GP), start + tl.arange(0, SIZE)
    token = index * T + t
    inside = t < T
    live_k = inside & (token < held_k)
    live_v = inside & (token < held_v) & (token < total)
    value_meta = value_metadata(base, t, live_v, D, T, V)  # ahead of all products: nothing waits for it later
    if TURN > 0:
        angle = key_angles(angles, frequencies, seen, pid // heads, held_k, token, live_k, angle_row, HALF, HP, TURN)
        logit = rotated_logits(q, pid * G * D, angle, base, t, live_k, G, GP, D, T, HALF, HP, REST, K)
    else:
        meta = key_metadata(base, start, held_k - index * T, D, T, SIZE, K)
        logit = key_logits(query, q_sum, base, start, held_k - index * T, meta, D, T, SIZE, OP, K)
    live = live_k
    if RK > 0:  # noqa: SIM102 - known when the kernel is compiled, unlike what follows
        if (index + 1) * T > held_k:
            in_ring = inside & (token >= held_k) & (token < total) & (token >= total - RK)
            at = row * rk_row + pid % heads * rk_head
            dots = ring_logits(query, ring_k, at, token, in_ring, GP, SIZE, OP, RK, D, K)
            logit = tl.where(live_k[:, None], logit, dots)
            live = live_k | in_ring
    logit = logit * by
    if CAP > 0:
        logit = capped(logit, CAP)
    logit = tl.where(live[:, None], logit, LOWEST)
    new_top = tl.maximum(top, tl.max(logit, 0))
    p = tl.where(live[:, None], tl.exp2(logit - new_top[None, :]), 0.0)
    shrink = tl.exp2(top - new_top)
    norm = norm * shrink + tl.sum(p, 0)
    acc = add_values(acc, shrink, tl.where(live_v[:, None], p, 0.0), base, t, live_v, value_meta, D, T, SIZE, OP, V)
    if RV > 0:  # noqa: SIM102
        if (index + 1) * T > held_v:
            in_ring = inside & (token >= held_v) & (token < total) & (token >= total - RV)
            at = row * rv_row + pid % heads * rv_head
            acc = add_ring_values(acc, p, ring_v, at, token, in_ring, OP, RV, D, V)
    if SCORES:
        at = (pid * (columns * T) + token) * G  # slot after slot: what is stored together lies together
        here = live_k[:, None] & (g < G)[None, :]
        tl.store(weights + at[:, None] + g[None, :], p.to(weights.dtype.element_ty), mask=here)
        if index < columns:
            BLOCKS: tl.constexpr = (T + BT - 1) // BT
            block = index * BLOCKS + start // BT
            tl.store(tops + (pid * G + g) * (columns * BLOCKS) + block, new_top, mask=g < G)
    return new_top, norm, acc


@triton.jit
def _attend_tier(
    q, pages, table, num_k, num_v, angles, frequencies, seen, weights, tops, ring_tokens, ring_k, ring_v, part_top,
    part_sum, part_out, pid, row, which, flat, part, parts, part_index, num_parts, scale2, page_bytes, columns, entries,
    heads, rk_row, rk_head, rv_row, rv_head, angle_row, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    T: tl.constexpr, BT: tl.constexpr, LAST: tl.constexpr, OP: tl.constexpr, SCORES: tl.constexpr, RK: tl.constexpr,
    RV: tl.constexpr, HELD: tl.constexpr, REVERSED: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, REST: tl.constexpr, CAP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One part of one list in one tier (and its residual buffer): maximum, sum, unnormalised output, exponentials.

    HELD: counts are those of the table; else they are the step's own. A page is read in blocks of BT slots, the last
    one in a tile of LAST. The blocks that a list really has are shared out evenly among its parts; of pages whose last
    block is smaller, whole pages are.
    """
    BLOCKS: tl.constexpr = (T + BT - 1) // BT  # blocks of slots per page
    ALIKE: tl.constexpr = BLOCKS if LAST == BT else 1  # of which one turn of the loop reads one, else a whole page
    counted = flat
    if HELD:
        counted = which
    held_k, held_v = tl.load(num_k + counted).to(tl.int32), tl.load(num_v + counted).to(tl.int32)
    total = held_k
    if RK > 0:
        total = tl.load(ring_tokens + flat).to(tl.int32)
    g = tl.arange(0, GP)
    query, by = query_planes(q, pid * G * D, G, GP, D, K), scale2
    if OP == tl.bfloat16 and K.BITS < 16 and TURN == 0:  # noqa: SIM300
        query, power = scaled_query(query, K)
        by = (scale2 * power)[None, :]
    q_sum = sum_channels(query, K)
    top = tl.full([GP], LOWEST, tl.float32)
    norm = tl.zeros([GP], tl.float32)
    acc = zero_planes(V, GP)
    PER: tl.constexpr = BT if ALIKE > 1 else T
    turns = total // T * ALIKE + (total % T + PER - 1) // PER
    share = (turns + parts - 1) // parts
    first = tl.minimum(part * share, turns)
    last = tl.minimum(first + share, turns)
    for turn in range(first, last):
        index = turn // ALIKE
        base = pages + table_page(table, which, entries, index, index < columns, REVERSED) * page_bytes
        EARLIER: tl.constexpr = BLOCKS - 1 if LAST != BT else 0
        for block in tl.static_range(EARLIER):
            top, norm, acc = _attend_block(
                top, norm, acc, index, block * BT, q, query, q_sum, by, base, angles, frequencies, seen, weights, tops,
                ring_k, ring_v, held_k, held_v, total, pid, row, columns, heads, rk_row, rk_head, rv_row, rv_head,
                angle_row, G, GP, D, T, BT, BT, OP, SCORES, RK, RV, TURN, HALF, HP, REST, CAP, K, V,
            )  # fmt: skip
        top, norm, acc = _attend_block(
            top, norm, acc, index, (turn % ALIKE + EARLIER) * BT, q, query, q_sum, by, base, angles, frequencies, seen,
            weights, tops, ring_k, ring_v, held_k, held_v, total, pid, row, columns, heads, rk_row, rk_head, rv_row,
            rv_head, angle_row, G, GP, D, T, BT, LAST, OP, SCORES, RK, RV, TURN, HALF, HP, REST, CAP, K, V,
        )  # fmt: skip
    at = (pid * num_parts + part_index) * G + g
    tl.store(part_top + at, top, mask=g < G)
    tl.store(part_sum + at, norm, mask=g < G)
    w = tl.arange(0, V.WP)
    if first < last:
        P: tl.constexpr = V.P
        for plane in tl.static_range(P):
            where = part_out + at[None, :] * D + (plane * V.W + w)[:, None]
            tl.store(where, acc[plane], mask=(w < V.W)[:, None] & (g < G)[None, :])


@triton.jit(do_not_specialize=[*_COUNTS, "first_part"])
def _attend(
    q, ring_tokens, ring_k, ring_v, rk_row, rk_head, rv_row, rv_head, scale2, offset, pages, rows, seen, frequencies,
    part_top, part_sum, part_out, page_bytes, num_parts, first_part, heads, per_row, a_table, a_num_k, a_num_v,
    a_angles, a_weights, a_tops, a_parts, a_columns, a_entries, a_angle_row, b_table, b_num_k, b_num_v, b_angles,
    b_weights, b_tops, b_parts, b_columns, b_entries, b_angle_row, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    OP: tl.constexpr, SCORES: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, NAMED: tl.constexpr,
    TABLED: tl.constexpr, HELD: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr,
    CAP: tl.constexpr, TWO: tl.constexpr, A_T: tl.constexpr, A_BT: tl.constexpr, A_LAST: tl.constexpr,
    A_REVERSED: tl.constexpr, A_TURN: tl.constexpr, AK: tl.constexpr, AV: tl.constexpr, B_T: tl.constexpr,
    B_BT: tl.constexpr, B_LAST: tl.constexpr, B_REVERSED: tl.constexpr, B_TURN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One part of one list of a layer: the first `a_parts` are of one tier, the others of a second one (TWO)."""
    pid, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = row_number(rows, pid, heads, NAMED)
    flat = (pid // heads) * per_row + offset + pid % heads
    which = flat
    if TABLED:
        which = row * per_row + offset + pid % heads
    if part < a_parts:
        _attend_tier(
            q, pages, a_table, a_num_k, a_num_v, a_angles, frequencies, seen, a_weights, a_tops, ring_tokens, ring_k,
            ring_v, part_top, part_sum, part_out, pid, row, which, flat, part, a_parts, first_part + part, num_parts,
            scale2, page_bytes, a_columns, a_entries, heads, rk_row, rk_head, rv_row, rv_head, a_angle_row, G,
            GP, D, A_T, A_BT, A_LAST, OP, SCORES, RK, RV, HELD, A_REVERSED, A_TURN, HALF, HP, REST, CAP, AK, AV,
        )  # fmt: skip
    elif TWO:
        _attend_tier(
            q, pages, b_table, b_num_k, b_num_v, b_angles, frequencies, seen, b_weights, b_tops, ring_tokens, ring_k,
            ring_v, part_top, part_sum, part_out, pid, row, which, flat, part - a_parts, b_parts, first_part + part,
            num_parts, scale2, page_bytes, b_columns, b_entries, heads, rk_row, rk_head, rv_row, rv_head,
            b_angle_row, G, GP, D, B_T, B_BT, B_LAST, OP, SCORES, 0, 0, HELD, B_REVERSED, B_TURN, HALF, HP, REST, CAP,
            BK, BV,
        )  # fmt: skip


@triton.jit
def _merge_head(part_top, part_sum, part_out, out, lse, sinks, row, head, g, num_parts, G: tl.constexpr,
                D: tl.constexpr, DP: tl.constexpr, BP: tl.constexpr, OUT: tl.constexpr,
                SINKS: tl.constexpr):  # fmt: skip
    """Merges the parts of one list for one query head, `g` of its group and `head` of the layers."""
    d = tl.arange(0, DP)
    top = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks + head) * 1.4426950408889634)
        total = tl.where(top > LOWEST, 1.0, 0.0)
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
    merged = tl.where(empty, float("nan"), acc / divisor)
    tl.store(out + (row * G + g) * D + d, elements(merged, OUT), mask=d < D)
    tl.store(lse + row * G + g, tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * 0.6931471805599453))


@triton.jit
def _reduce_part(
    weights, tops, part_top, part_sum, num_k, scores, sinks, pages, table, seen, pid, which, flat, head, part, parts,
    num_parts, page_bytes, columns, entries, heads, G: tl.constexpr, GP: tl.constexpr, BP: tl.constexpr,
    T: tl.constexpr, BT: tl.constexpr, POWER: tl.constexpr, RULE: tl.constexpr, TRACK: tl.constexpr,
    REPLACE: tl.constexpr, NEAR: tl.constexpr, POS: tl.constexpr, HELD: tl.constexpr, REVERSED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Probabilities of one of `parts` even shares of a list, SCORED slots at a time.

    They are raised to POWER and reduced over the query heads, then stored, or added to the tracked scores of pages.

    TRACK is the byte offset of the tracked scores, or -1 to write `scores`, of slots that hold nothing, too; POS that
    of the positions, where slots nearer to the query than NEAR get nothing.
    """
    BLOCKS: tl.constexpr = (T + BT - 1) // BT
    counted = flat
    if HELD:
        counted = which
    held = tl.load(num_k + counted).to(tl.int32)
    slots = held
    if TRACK < 0:
        slots = columns * T
    tiles = (slots + SCORED - 1) // SCORED
    share = (tiles + parts - 1) // parts
    first = tl.minimum(part * share, tiles)
    last = tl.minimum(first + share, tiles)
    if first < last:
        g = tl.arange(0, GP)
        row = pid * G + g
        top = tl.full([GP], LOWEST, tl.float32)
        total = tl.zeros([GP], tl.float32)
        if SINKS:
            top = tl.maximum(top, tl.load(sinks + head + g, mask=g < G, other=LOWEST) * 1.4426950408889634)
            total = tl.where(top > LOWEST, 1.0, 0.0)
        for begin in range(0, num_parts, BP):
            other = begin + tl.arange(0, BP)
            mask = (g < G)[:, None] & (other < num_parts)[None, :]
            at = (pid * num_parts + other)[None, :] * G + g[:, None]
            its_top = tl.load(part_top + at, mask=mask, other=LOWEST)
            its_sum = tl.load(part_sum + at, mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(its_top, 1))
            total = total * tl.exp2(top - new_top) + tl.sum(its_sum * tl.exp2(its_top - new_top[:, None]), 1)
            top = new_top
        by = 1.0 / tl.where(total == 0.0, 1.0, total)
        for tile in range(first, last):  # many slots in a turn, since each waits for what it reads
            token = tile * SCORED + tl.arange(0, SCORED)
            index, t = token // T, token % T
            live = token < held
            here = live[:, None] & (g < G)[None, :]
            at = (pid * (columns * T) + token) * G
            p = tl.load(weights + at[:, None] + g[None, :], mask=here, other=0.0).to(tl.float32)
            block = index * BLOCKS + t // BT
            its_top = tl.load(tops + row[None, :] * (columns * BLOCKS) + block[:, None], mask=here, other=LOWEST)
            p = p * (tl.exp2(its_top - top[None, :]) * by[None, :])
            if POWER == 2:
                p = p * p
            if RULE == 2:
                score = tl.max(p, 1)
            else:
                score = tl.sum(p, 1)
                if RULE == 1:
                    score = score / G
            if TRACK < 0:
                tl.store(scores + pid * (columns * T) + token, score, mask=token < columns * T)
            else:
                page = pages + table_page(table, which, entries, index, live, REVERSED) * page_bytes
                field = (page + TRACK).to(tl.pointer_type(tl.float32)) + t
                if NEAR > 0:
                    pos = tl.load((page + POS).to(tl.pointer_type(tl.int32)) + t, mask=live, other=0)
                    score = tl.where(tl.load(seen + pid // heads) - pos < NEAR, 0.0, score)
                if not REPLACE:
                    score += tl.load(field, mask=live, other=0.0)
                tl.store(field, score, mask=live)


@triton.jit(do_not_specialize=_COUNTS)
def _finish(
    out, a_scores, b_scores, offset, lse, part_top, part_sum, part_out, rows, seen, sinks, pages, page_bytes,
    num_parts, heads, per_row, a_weights, a_tops, a_num_k, a_table, a_parts, a_columns, a_entries,
    b_weights, b_tops, b_num_k, b_table, b_parts, b_columns, b_entries,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BP: tl.constexpr, MERGED: tl.constexpr,
    SCORES: tl.constexpr, TWO: tl.constexpr, POWER: tl.constexpr, RULE: tl.constexpr, REPLACE: tl.constexpr,
    NEAR: tl.constexpr, TABLED: tl.constexpr, HELD: tl.constexpr, OUT: tl.constexpr, SINKS: tl.constexpr,
    A_T: tl.constexpr, A_BT: tl.constexpr, A_TRACK: tl.constexpr, A_POS: tl.constexpr, A_REVERSED: tl.constexpr,
    B_T: tl.constexpr, B_BT: tl.constexpr, B_TRACK: tl.constexpr, B_POS: tl.constexpr, B_REVERSED: tl.constexpr,
):  # fmt: skip
    """Merges one list's parts for one query head (the first MERGED programs of the list), or scores a part of it.

    `a_parts` are of the first tier, the others of a second one (TWO).
    """
    pid, task = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = (offset + pid % heads) * G  # the list's first query head, counted through the layers
    if task < MERGED:
        _merge_head(
            part_top, part_sum, part_out, out, lse, sinks, pid, head + task, task, num_parts, G, D, DP, BP, OUT, SINKS
        )
    elif SCORES:
        flat = (pid // heads) * per_row + offset + pid % heads
        which = flat
        if TABLED:
            which = row_number(rows, pid, heads, True) * per_row + offset + pid % heads
        if task < MERGED + a_parts:
            _reduce_part(
                a_weights, a_tops, part_top, part_sum, a_num_k, a_scores, sinks, pages, a_table, seen, pid, which, flat,
                head, task - MERGED, a_parts, num_parts, page_bytes, a_columns, a_entries, heads, G, GP, BP, A_T, A_BT,
                POWER, RULE, A_TRACK, REPLACE, NEAR, A_POS, HELD, A_REVERSED, SINKS,
            )  # fmt: skip
        elif TWO:
            _reduce_part(
                b_weights, b_tops, part_top, part_sum, b_num_k, b_scores, sinks, pages, b_table, seen, pid, which, flat,
                head, task - MERGED - a_parts, b_parts, num_parts, page_bytes, b_columns, b_entries, heads, G, GP, BP,
                B_T, B_BT, POWER, RULE, B_TRACK, REPLACE, NEAR, B_POS, HELD, B_REVERSED, SINKS,
            )  # fmt: skip
