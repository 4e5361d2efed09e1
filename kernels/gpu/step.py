"""GPU backend: a decode step in which a layer is a few launches, with everything else prepared once per step.

What a step looks up is looked up for all layers at once and laid out layer by layer, so that a layer's part is a view:
no torch kernel runs between two launches, and the host asks for nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.backend import FusedStep, Reduce, Ring, ScoreUpdate, StepRing, StepTarget, TierPages
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.decode import paged_decode
from kvbench.kernels.gpu.pages import _write_side, slots_per_program, write_part
from kvbench.kernels.gpu.parts import launch, power_of_two, side_constants


@triton.jit
def _write_both(
    k, v, pages, page, slot, count, page_bytes, BK: tl.constexpr, BV: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    K_BITS: tl.constexpr, K_P: tl.constexpr, K_W: tl.constexpr, K_WP: tl.constexpr, K_OFF: tl.constexpr,
    K_SCALE: tl.constexpr, K_ZERO: tl.constexpr, K_GROUPS: tl.constexpr, K_CHANNEL: tl.constexpr, K_CODE: tl.constexpr,
    K_ELEM: tl.constexpr,
    V_BITS: tl.constexpr, V_P: tl.constexpr, V_W: tl.constexpr, V_WP: tl.constexpr, V_OFF: tl.constexpr,
    V_SCALE: tl.constexpr, V_ZERO: tl.constexpr, V_GROUPS: tl.constexpr, V_CHANNEL: tl.constexpr, V_CODE: tl.constexpr,
    V_ELEM: tl.constexpr,
):  # fmt: skip
    """Encodes the new key (programs of the first column) or the new value of some lists into their slots."""
    if tl.program_id(1) == 0:
        _write_side(
            k, pages, page, slot, page, slot, count, page_bytes, BK, True, D, T, False, 0, K_BITS, K_P, K_W, K_WP,
            K_OFF, K_SCALE, K_ZERO, K_GROUPS, K_CHANNEL, K_CODE, K_ELEM, T, K_BITS, K_P, K_W, K_WP, K_OFF, K_SCALE,
            K_ZERO, K_GROUPS, K_CHANNEL, K_CODE, K_ELEM,
        )  # fmt: skip
    else:
        _write_side(
            v, pages, page, slot, page, slot, count, page_bytes, BV, False, D, T, False, 0, V_BITS, V_P, V_W, V_WP,
            V_OFF, V_SCALE, V_ZERO, V_GROUPS, V_CHANNEL, V_CODE, V_ELEM, T, V_BITS, V_P, V_W, V_WP, V_OFF, V_SCALE,
            V_ZERO, V_GROUPS, V_CHANNEL, V_CODE, V_ELEM,
        )  # fmt: skip


def write_slots(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, v: Tensor) -> None:
    """Encodes keys and values [M, D] into their slots in one launch; the bytes are those of `write_keys` and
    `write_values`. Keys have scales of their own; a page below 0 is passed over."""
    sides = [slots_per_program(fmt, side) for side in "kv"]
    launch(
        _write_both, (max(-(-len(page) // rows) for rows in sides), 2), k.contiguous(), v.contiguous(), pages, page,
        slot, len(page), pages.shape[1], BK=sides[0], BV=sides[1], D=fmt.slot.head_dim, T=fmt.tokens_per_page,
        **side_constants(fmt, "k", "K_", least=1), **side_constants(fmt, "v", "V_", least=1), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _append_ring(
    k, v, ring_k, ring_v, num_tokens, rows, count, heads, k_row, v_row, RK: tl.constexpr, RV: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Puts the new key and value of BM lists into their buffers."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)[None, :]
    mask = (row < count)[:, None] & (d < D)
    token = tl.load(num_tokens + row, mask=row < count, other=1) - 1
    seq = tl.load(rows + row // heads, mask=row < count, other=0).to(tl.int64)
    head = row % heads
    for_k = seq * k_row + (head * RK + token % RK) * D
    for_v = seq * v_row + (head * RV + token % RV) * D
    key = tl.load(k + row[:, None] * D + d, mask=mask, other=0.0)
    value = tl.load(v + row[:, None] * D + d, mask=mask, other=0.0)
    tl.store(ring_k + for_k[:, None] + d, key.to(ring_k.dtype.element_ty), mask=mask)
    tl.store(ring_v + for_v[:, None] + d, value.to(ring_v.dtype.element_ty), mask=mask)


def _by_layer(x: Tensor) -> Tensor:
    """[S, L, ...] as [L, S, ...], so that a layer's part is one array."""
    return x.transpose(0, 1).contiguous()


@dataclass(kw_only=True)
class _Scores:
    """What a step does to tracked scores; arguments as of `Backend.open_step`."""

    power: int
    group: Reduce | None
    update: ScoreUpdate | None
    skip_near: int


class DeviceStep(FusedStep):
    """A prepared decode step; arguments as of `Backend.open_step`.

    Args:
        pages: The pool.
        tiers: Of all layers, ids [S, L, H, m].
        seen: int64 [S].
        target: Where the new token goes, or None behind a ring.
        ring: Residual buffers, or None.
        scores: What happens to tracked scores.
    """

    def __init__(
        self, pages: Tensor, tiers: list[TierPages], seen: Tensor, target: StepTarget | None, ring: StepRing | None,
        scores: _Scores,
    ) -> None:  # fmt: skip
        self._pages, self._seen, self._scores, self._ring = pages, seen, scores, ring
        self._rotations = [tier.rotation for tier in tiers]
        self._tiers = [
            (tier.fmt, _by_layer(tier.ids), num_k := _by_layer(tier.num_k),
             num_k if tier.num_v is tier.num_k else _by_layer(tier.num_v))
            for tier in tiers
        ]  # fmt: skip
        self._fmt = tiers[target[0] if target is not None else 0].fmt
        if target is not None:
            self._page, self._slot = (_by_layer(x).flatten(1) for x in target[1:])
        if ring is not None:
            self._num_tokens = _by_layer(ring.num_tokens)
            self._flushes = [self._flush_of(ring, tiers[0].ids, side) for side in (0, 1)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        if self._ring is None:
            write_slots(self._pages, self._fmt, self._page[layer], self._slot[layer], k, v)
            return self._attended(layer, q, None, scale)
        ring = self._ring
        rings = ring.k[:, layer], ring.v[:, layer]
        lists, head_dim, heads = k.shape[0], k.shape[1], ring.k.shape[2]
        launch(
            _append_ring, (-(-lists // 16),), k.contiguous(), v.contiguous(), *rings, self._num_tokens[layer],
            ring.rows, lists, heads, ring.k.stride(0), ring.v.stride(0), RK=ring.k.shape[3], RV=ring.v.shape[3],
            D=head_dim, DP=power_of_two(head_dim), BM=16,
        )  # fmt: skip
        if ring.flush_first:
            self._flush(layer)
        out = self._attended(layer, q, Ring(*rings, self._num_tokens[layer]), scale)
        if not ring.flush_first:
            self._flush(layer)
        return out

    def _attended(self, layer: int, q: Tensor, ring: Ring | None, scale: float) -> Tensor:
        tiers = [
            TierPages(fmt, ids[layer], num_k[layer], num_v[layer], rotation)
            for (fmt, ids, num_k, num_v), rotation in zip(self._tiers, self._rotations, strict=True)
        ]
        how = self._scores
        out, _, _ = paged_decode(
            q, self._pages, tiers, ring, scale, power=how.power, group=how.group if how.update else None,
            accumulate=how.update is not None, replace=how.update == "replace", seen=self._seen,
            skip_near=how.skip_near, ring_rows=None if self._ring is None else self._ring.rows,
        )  # fmt: skip
        return out

    def _flush_of(self, ring: StepRing, ids: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Page, slot and place in the whole buffer of what leaves one side, int64 [L, M]; page -1 of what stays."""
        old, new, buffer, size = ring.before[side], ring.after[side], (ring.k, ring.v)[side], self._fmt.tokens_per_page
        most = ring.most_leaving[side] if ring.most_leaving is not None else buffer.shape[3]
        token = old[..., None] + torch.arange(most, device=old.device)
        column = (token // size).clamp(max=max(0, ids.shape[-1] - 1))
        page = torch.where(token < new[..., None], ids.gather(-1, column), -1)
        layers, heads, length = buffer.shape[1:4]
        each = torch.arange(layers * heads, device=old.device).view(layers, heads)
        lists = ring.rows[:, None, None] * (layers * heads) + each
        place = lists[..., None] * length + token % length
        return tuple(_by_layer(x).flatten(1) for x in (page, token % size, place))  # type: ignore[return-value]

    def _flush(self, layer: int) -> None:
        """Quantises what leaves the buffers of a layer."""
        assert self._ring is not None
        (page, slot, place), (v_page, v_slot, v_place) = self._flushes
        keys, values = (x.view(-1, x.shape[-1]) for x in (self._ring.k, self._ring.v))
        write_part("k", self._pages, self._fmt, page[layer], slot[layer], keys, place[layer])
        write_part("v", self._pages, self._fmt, v_page[layer], v_slot[layer], values, v_place[layer])


def open_step(
    pages: Tensor,
    tiers: list[TierPages],
    *,
    seen: Tensor,
    target: StepTarget | None,
    ring: StepRing | None,
    power: int,
    group: Reduce | None,
    update: ScoreUpdate | None,
    skip_near: int,
) -> DeviceStep:
    """Prepares one decode step for all layers; arguments as `Backend.open_step`."""
    how = _Scores(power=power, group=group, update=update, skip_near=skip_near)
    return DeviceStep(pages, tiers, seen, target, ring, how)
