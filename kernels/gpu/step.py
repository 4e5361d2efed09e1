"""GPU backend: a decode step in which a layer is three launches, with everything else prepared once per step.

Kernels find pages and counts through the tables of all layers: no torch kernel runs between two launches, and the host
reads nothing back. A layer writes its token, attends, and merges what its parts found; where there are residual
buffers, what leaves them after attention is quantised for all layers at once, after the last one.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.backend import FusedStep
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.attend import table_page
from kvbench.kernels.gpu.bounds import choose, page_bounds, widen_by_one
from kvbench.kernels.gpu.cuda_decode import CudaAttention, Decoder
from kvbench.kernels.gpu.decode import Attention, Lists, ListTier
from kvbench.kernels.gpu.pages import _write_side, slots_per_program, write_part
from kvbench.kernels.gpu.parts import ELEMENT, launch, power_of_two, side_layout
from kvbench.kernels.gpu.rows import heads_at_once, turn_heads
from kvbench.kernels.operands import NO_SCORES, PLAIN, PageChoice, Ring, Softmax, StepRing, StepScores
from kvbench.kernels.reference.attention import rotate

_BLOCK = 256


@triton.jit(do_not_specialize=["count", "per_row", "offset"])
def _write_both(
    k, v, pages, page, slot, cos, sin, count, page_bytes, heads, per_row, offset, k_row, v_row, q, q_out, q_row,
    BK: tl.constexpr, BV: tl.constexpr, D: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, DP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BOUND: tl.constexpr, HQ: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Encodes new keys (first column of programs) and values of some lists into their slots.

    In a third column, one list's key widens the bounds of its page, or a sequence's HQ queries are rotated.
    """
    if tl.program_id(1) == 0:
        _write_side(
            k, pages, page, slot, page, slot, cos, sin, count, page_bytes, heads, per_row, offset, k_row, BK,
            True, D, T,
            False, 0, HALF, K, T, K,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        _write_side(
            v, pages, page, slot, page, slot, cos, sin, count, page_bytes, heads, per_row, offset, v_row, BV,
            False, D, T,
            False, 0, 0, V, T, V,
        )  # fmt: skip
    elif HQ > 0:
        parts: tl.constexpr = (HQ + BH - 1) // BH
        at = tl.program_id(0).to(tl.int64)
        if at < count // heads * parts:
            turn_heads(q, q_out, cos, sin, at // parts, q_row, at % parts * BH, HQ, BH, HALF, DP // 2)
    else:
        at = tl.program_id(0).to(tl.int64)
        if at < count:
            flat = at // heads * per_row + offset + at % heads
            widen_by_one(k, pages, page, slot, at, flat, page_bytes, D, DP, LOW, HIGH, BOUND)


@triton.jit(do_not_specialize=["count", "per_row", "offset"])
def _append_ring(
    k, v, ring_k, ring_v, num_tokens, rows, count, heads, per_row, offset, k_row, v_row, RK: tl.constexpr,
    RV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Puts the new key and value of BM lists into their buffers."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)[None, :]
    mask = (row < count)[:, None] & (d < D)
    head = row % heads
    flat = (row // heads) * per_row + offset + head
    token = tl.load(num_tokens + flat, mask=row < count, other=1).to(tl.int32) - 1
    seq = tl.load(rows + row // heads, mask=row < count, other=0).to(tl.int64)
    for_k = seq * k_row + (head * RK + token % RK) * D
    for_v = seq * v_row + (head * RV + token % RV) * D
    key = tl.load(k + row[:, None] * D + d, mask=mask, other=0.0)
    value = tl.load(v + row[:, None] * D + d, mask=mask, other=0.0)
    tl.store(ring_k + for_k[:, None] + d, key.to(ring_k.dtype.element_ty), mask=mask)
    tl.store(ring_v + for_v[:, None] + d, value.to(ring_v.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "num_seq", "layers", "most", "entries"])
def _find_leaving(
    before, after, rows, table, page, slot, ring_entry, count, num_seq, layers, heads, most, length, entries,
    T: tl.constexpr, TABLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Page (-1: it stays), slot and ring index of the `most` oldest tokens of every list's buffer, by layer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    each = i // most
    head, seq, layer = each % heads, each // heads % num_seq, each // heads // num_seq
    flat = (seq * layers + layer) * heads + head
    mine = (tl.load(rows + seq, mask=mask, other=0).to(tl.int64) * layers + layer) * heads + head
    which = flat
    if TABLED:
        which = mine
    token = tl.load(before + flat, mask=mask, other=0).to(tl.int64) + i % most
    leaves = mask & (token < tl.load(after + flat, mask=mask, other=0))
    page_id = table_page(table, which, entries, token // T, leaves, False)
    tl.store(page + i, tl.where(leaves, page_id, -1), mask=mask)
    tl.store(slot + i, token % T, mask=mask)
    tl.store(ring_entry + i, mine * length + token % length, mask=mask)


def _rows_are_whole(x: Tensor) -> bool:
    """True if the heads of each row of [S, H, D] are contiguous, as kernels read them."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


class DeviceStep(FusedStep):
    """A prepared decode step: `tiers` of all layers, `lists` of the first one.

    The target is format, page and slot (int64 [S, L, H]) of the new tokens, None with a ring. The other fields are as
    in `Backend.open_tables`.
    """

    def __init__(
        self, pages: Tensor, tiers: list[ListTier], lists: Lists, num_layers: int, seen: Tensor,
        target: tuple[PageFormat, Tensor, Tensor] | None, ring: StepRing | None, scores: StepScores,
        strip: tuple[Tensor, Tensor] | None = None, choice: PageChoice | None = None, softmax: Softmax = PLAIN,
        decoder: Decoder | None = None,
    ) -> None:  # fmt: skip
        self._decoder = decoder or Decoder()
        self._pages, self._tiers, self._lists, self._layers = pages, tiers, lists, num_layers
        self._seen, self._target, self._ring, self._strip = seen, target, ring, strip
        self._scores = scores if scores.update or scores.gives else NO_SCORES
        self.strips, self._choice, self._softmax = strip is not None, choice, softmax
        self.turns = ring is None and strip is None and choice is None  # the key is written to a page as it comes
        self._attention: Attention | CudaAttention | None = None  # once the first layer shows its queries
        if ring is not None:
            self._num_tokens = ring.num_tokens.contiguous()
            self._leaving = [self._find_leaving(ring, side) for side in (0, 1)]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, turn: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `FusedStep`; cosines and sines [S, D / 2] of `turn` rotate the query and the key first."""
        lists, ring = replace(self._lists, offset=layer * self._lists.heads), self._ring
        if ring is None:
            q = self._write(lists, q, k, v, turn)
            if self._choice is not None and layer >= self._choice.dense_layers and self._tiers[0].columns > 1:
                return self._attended_in_part(layer, lists, q, self._choice, scale)
            return self._attended(lists, q, None, scale)
        held = Ring(ring.k[:, layer], ring.v[:, layer], self._num_tokens)
        self._append(lists, held, ring.rows, k.contiguous(), v.contiguous())
        if ring.flush_first:
            self._flush(layer, layer + 1)
        out = self._attended(lists, q, held, scale)
        if not ring.flush_first and layer == self._layers - 1:
            self._flush(0, self._layers)
        return out

    def _attended(self, lists: Lists, q: Tensor, ring: Ring | None, scale: float) -> Tensor:
        if self._attention is None:
            how: dict = {"seen": self._seen, "out": q.dtype, "softmax": self._softmax}
            stored = q, self._pages, self._tiers, lists, ring, self._scores
            self._attention = self._decoder(*stored, layers=self._layers, **how)
        out, _, self.layer_scores = self._attention(q, ring, scale, lists.offset)
        return out

    def _attended_in_part(self, layer: int, lists: Lists, q: Tensor, choice: PageChoice, scale: float) -> Tensor:
        """Attention over the pages whose bounds are the largest; such a step makes no scores."""
        (tier,), width = self._tiers, min(choice.width, self._tiers[0].columns)
        bounds = page_bounds(q, self._pages, tier, lists, choice.group)
        ids, held = choose(bounds, tier, lists, choice.count, width)
        tier = ListTier(fmt=tier.fmt, table=ids, entries=width, columns=width, num_k=held, num_v=held)
        named = Lists(num_seq=lists.num_seq, heads=lists.heads, per_row=lists.heads)
        softmax = self._softmax.of_layer(layer)
        attention = self._decoder(q, self._pages, [tier], named, None, out=q.dtype, softmax=softmax)
        return attention(q, None, scale)[0]

    def _write(
        self, lists: Lists, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> Tensor:  # fmt: skip
        """Encodes the new keys and values [S, H, D] of a layer in one launch, bytes as of `write_keys`, `write_values`.

        Returns the queries, rotated with the keys where `turn` is set.
        """
        assert self._target is not None
        fmt, page, slot = self._target
        k, v = (x if not fmt.bounds and _rows_are_whole(x) else x.contiguous() for x in (k, v))
        programs, count = [slots_per_program(fmt, side) for side in "kv"], k.shape[0] * k.shape[1]
        cos, sin = turn or self._strip or (page, page)
        low, high = (fmt.regions[name][0] if fmt.bounds else 0 for name in ("k_low", "k_high"))
        rotated, heads, size = q, 0, 1
        blocks = max(-(-count // rows) for rows in programs)
        if turn is not None:
            q = q if _rows_are_whole(q) else q.contiguous()
            rotated, heads = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[1]
            size = heads_at_once(heads, cos.shape[1])
            blocks = max(blocks, len(q) * -(-heads // size))
        grid = (count, 3) if fmt.bounds else (blocks, 3 if heads else 2)
        launch(
            _write_both, grid, k, v, self._pages, page, slot, cos, sin,
            count, self._pages.shape[1], lists.heads, lists.per_row, lists.offset, k.stride(0), v.stride(0), q, rotated,
            q.stride(0), BK=programs[0], BV=programs[1],
            D=fmt.slot.head_dim, T=fmt.tokens_per_page, HALF=0 if cos is page else cos.shape[1],
            K=side_layout(fmt, "k", least=1), V=side_layout(fmt, "v", least=1),
            DP=power_of_two(fmt.slot.head_dim), LOW=low, HIGH=high, BOUND=ELEMENT[fmt.slot.dtype], HQ=heads, BH=size,
            enable_fp_fusion=False,
        )  # fmt: skip
        return rotated

    def _append(self, lists: Lists, ring: Ring, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts the new keys and values [S, H, D] of a layer into their buffers."""
        count, head_dim = k.shape[0] * k.shape[1], k.shape[2]
        launch(
            _append_ring, (-(-count // 16),), k, v, ring.k, ring.v, ring.num_tokens, rows, count, lists.heads,
            lists.per_row, lists.offset, ring.k.stride(0), ring.v.stride(0), RK=ring.k.shape[2], RV=ring.v.shape[2],
            D=head_dim, DP=power_of_two(head_dim), BM=16,
        )  # fmt: skip

    def _find_leaving(self, ring: StepRing, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Page, slot and place in the whole buffer of what leaves one side, int64 [L, M]; page -1 of what stays."""
        buffer, (tier,), lists = (ring.k, ring.v)[side], self._tiers, self._lists
        length = buffer.shape[3]
        most = ring.most_leaving[side] if ring.most_leaving is not None else length
        count = self._layers * lists.num_seq * lists.heads * most
        outputs = [torch.empty(self._layers, count // self._layers, dtype=torch.int64, device=buffer.device)
                 for _ in range(3)]  # fmt: skip
        launch(
            _find_leaving, (-(-count // _BLOCK),), ring.before[side].contiguous(), ring.after[side].contiguous(),
            ring.rows, tier.table, *outputs, count, lists.num_seq, self._layers, lists.heads, most, length,
            tier.entries, T=tier.fmt.tokens_per_page, TABLED=lists.in_table, BLOCK=_BLOCK,
        )  # fmt: skip
        return outputs[0], outputs[1], outputs[2]

    def _flush(self, first: int, end: int) -> None:
        """Quantises what leaves the buffers of some layers."""
        assert self._ring is not None
        for name, buffer, leaving in zip("kv", (self._ring.k, self._ring.v), self._leaving, strict=True):
            page, slot, ring_entry = (x[first:end].flatten() for x in leaving)
            fmt, x = self._tiers[0].fmt, buffer.view(-1, buffer.shape[-1])
            frequencies = self._ring.frequencies
            if name == "k" and frequencies is not None:  # these lose their positions
                token = self._ring.before[0][:, first:end].transpose(0, 1)[..., None]
                token = token + torch.arange(len(ring_entry) // token.numel(), device=token.device)
                x = rotate(x[ring_entry].float(), -token.flatten()[:, None].float() * frequencies)
                write_part(name, self._pages, fmt, page, slot, x)
            else:
                write_part(name, self._pages, fmt, page, slot, x, ring_entry)
