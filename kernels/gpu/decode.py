"""GPU backend: attention of one query token per sequence over pages, and the scores it gives.

The kernels are in `attend` beside this file: one launch attends over all tiers (two for three tiers), and one merges
its parts and makes the scores. How the work is cut depends on shapes alone, and each part's share on the device, from
how much its list holds: nothing is read back to the host, and a call can be captured in a CUDA graph.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.attend import _attend, _finish
from kvbench.kernels.gpu.parts import ELEMENT, INTERPRETED, LOG2_E, MIN_DOT, launch, power_of_two, side_layout
from kvbench.kernels.operands import NO_SCORES, KeyRotation, Reduce, Ring, StepScores, TierPages, TierTable

_REDUCE: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}


@triton.jit(do_not_specialize=["num_columns"])
def _add_scores(pages, ids, num_k, scores, page_bytes, num_columns, T: tl.constexpr, TP: tl.constexpr,
                TRACK: tl.constexpr):  # fmt: skip
    """Adds the scores of one page's live slots to what it tracks."""
    pid, index = tl.program_id(1).to(tl.int64), tl.program_id(0)
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
    """Slots that one step of the inner loop reads, a power of two; `wide`: products are of fp32 tiles.

    A step is taken to cost as much as 32 slots beside its own; where that is wrong on a GPU, it costs time only. More
    slots than are tried here do not fit into a thread's registers: compiled for sm_90, they spill.
    """
    slot, slots = fmt.slot, fmt.tokens_per_page
    most = 16 if wide else 32 if slot.head_dim <= 64 and (slot.k_coded or slot.v_coded) else 64
    if 3 in (slot.k_bits, slot.v_bits):  # eight planes, of three bytes each
        most = 16
    group = slot.k_channel_group if slot.channel_keys else 0
    if group >= MIN_DOT and group & (group - 1) == 0:
        return min(group, most)  # within one group of tokens, one scale per channel serves the block
    return min((size for size in (16, 32, 64) if size <= most), key=lambda size: -(-slots // size) * (size + 32))


def _operand(q: Tensor, formats: list[PageFormat], ring: Ring | None) -> tl.dtype:
    """Type of the matrix products' operands: the model's own 16-bit type where nothing is lost by it, else fp32."""
    held = {fmt.slot.dtype for fmt in formats if max(fmt.slot.k_bits, fmt.slot.v_bits) >= 16}
    held |= {ring.k.dtype, ring.v.dtype} if ring is not None else set()
    exact = held <= {q.dtype} and not (INTERPRETED and q.dtype == torch.bfloat16)
    return ELEMENT[q.dtype] if exact else tl.float32


def _num_parts(lists: int, pages: int, device: torch.device) -> int:
    """Parts that each list of so many pages at most is cut into, so that a few programs run on every multiprocessor."""
    return min(pages, max(1, 4 * _num_processors(device) // max(1, lists)))


@dataclass(frozen=True, kw_only=True)
class Lists:
    """The lists of one layer that a launch is about.

    Args:
        num_seq, heads: Sequences, and KV heads of the layer.
        rows: int64 [S] the sequences' rows in buffers and tables; None = their own numbers.
        per_row: Lists of one sequence: layers x heads.
        offset: Lists of the layers before.
        in_table: Page ids are looked up by row, not by the sequence's place in the step; and so is, where
            `counts_in_table`, how much a list holds.
    """

    num_seq: int
    heads: int
    rows: Tensor | None = None
    per_row: int
    offset: int = 0
    in_table: bool = False
    counts_in_table: bool = False

    @staticmethod
    def of(tier: TierPages) -> "Lists":
        """The lists of a tier that names its pages, list after list."""
        num_seq, heads = tier.num_k.shape
        return Lists(num_seq=num_seq, heads=heads, per_row=heads)


@dataclass(frozen=True, kw_only=True)
class ListTier:
    """One tier of lists as the kernels find it.

    Args:
        fmt: The tier's page format.
        table: Page ids, int32 or int64, `entries` per list.
        columns: Pages of a list at most.
        is_reversed: A list's entries are filled from the right.
        num_k, num_v: Keys and values held, whole numbers.
        angles: fp32 [S, n, D / 2] to rotate stored keys by, or None.
        rotation: How the angles follow from the slots, or None.
    """

    fmt: PageFormat
    table: Tensor
    entries: int
    columns: int
    is_reversed: bool = False
    num_k: Tensor
    num_v: Tensor
    angles: Tensor | None = None
    rotation: KeyRotation | None = None

    @staticmethod
    def of(tier: TierPages) -> "ListTier":
        """A tier that names its pages, list after list."""
        columns, angles = tier.ids.shape[-1], tier.angles
        return ListTier(
            fmt=tier.fmt, table=tier.ids.contiguous(), entries=columns, columns=columns, num_k=tier.num_k.contiguous(),
            num_v=tier.num_v.contiguous(), angles=None if angles is None else _angles(angles),
        )  # fmt: skip

    @staticmethod
    def in_table(tier: TierTable, held: tuple[Tensor, Tensor] | None) -> "ListTier":
        """A tier of the tables of all lists; `held` (keys, values) where the table does not say what a list holds."""
        num_k, num_v = (tier.num_slots, tier.num_slots) if held is None else (x.contiguous() for x in held)
        return ListTier(
            fmt=tier.fmt, table=tier.entries, entries=tier.entries.shape[1], columns=tier.width,
            is_reversed=tier.is_reversed, num_k=num_k, num_v=num_v, rotation=tier.rotation,
        )  # fmt: skip

    @property
    def half(self) -> int:
        """Angles per key; 0 where keys are not rotated."""
        turned = self.angles if self.rotation is None else self.rotation.frequencies
        return 0 if turned is None else turned.shape[-1]

    def in_kernels(self, prefix: str) -> dict[str, Any]:
        """Its compile-time constants in `_attend`."""
        turn = 0 if not self.half else 1 if self.rotation is None else 3 if self.rotation.ages is None else 2
        found = {"T": self.fmt.tokens_per_page, "REVERSED": self.is_reversed, "TURN": turn}
        sides = {prefix + side.upper(): side_layout(self.fmt, side) for side in "kv"}
        return {f"{prefix}_{name}": value for name, value in found.items()} | sides


def attend_lists(
    q: Tensor, pages: Tensor, tiers: list[ListTier], lists: Lists, ring: Ring | None, scale: float,
    how: StepScores = NO_SCORES, *, seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """As `Backend.paged_decode`, for lists whose pages are found through tables.

    Args:
        how: What happens to the scores; they are returned where they are neither added to what the pages track nor
            put there.
        seen: int64 [S] position of the queries, where near slots are skipped.

    Source: kvbench's own; split over the sequence with an exact merge as in FlashDecoding, scales folded into the
        products as in KIVI's and DiffKV's kernels.
    """
    num_seq, num_q_heads, head_dim = q.shape
    group = how.group
    count = num_seq * lists.heads
    group_size = num_q_heads // lists.heads
    lengths = (ring.k.shape[-2], ring.v.shape[-2]) if ring is not None else (0, 0)
    spans = [tier.columns + -(-max(lengths) // tier.fmt.tokens_per_page) for tier in tiers]
    parts = [_num_parts(count, span, q.device) for span in spans]
    q, operand = q.contiguous(), _operand(q, [tier.fmt for tier in tiers], ring)
    made: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    part_top, part_sum = (torch.empty(count, sum(parts), group_size, **made) for _ in range(2))
    part_out = torch.empty(count, sum(parts), group_size, head_dim, **made)
    out, lse = torch.empty(q.shape, **made), torch.empty(q.shape[:2], **made)
    ring_k, ring_v, ring_tokens, strides = _ring_arguments(ring, q)
    half = max(tier.half for tier in tiers)
    wide = half > 0 or operand == tl.float32
    blocks = [_block_slots(tier.fmt, wide) for tier in tiers]
    kept, scores = [], []
    for tier, block in zip(tiers, blocks, strict=True):
        slots, pair = tier.columns * tier.fmt.tokens_per_page, (part_top, part_top)
        if group:  # exponentials are at most 1: fp16 holds them as well as the products behind them
            kind = torch.float32 if operand == tl.float32 else torch.float16
            tops = torch.empty(count * group_size, tier.columns * -(-tier.fmt.tokens_per_page // block), **made)
            pair = torch.empty(count * group_size, slots, dtype=kind, device=q.device), tops
            if how.update is None:
                scores.append(torch.empty(num_seq, lists.heads, slots, **made))
        kept.append(pair)
    rows, seen = q if lists.rows is None else lists.rows, q if seen is None else seen
    shared: dict[str, Any] = {"G": group_size, "D": head_dim, "SCORES": bool(group)}
    shared |= {"TABLED": lists.in_table, "HELD": lists.counts_in_table}
    for begin in range(0, len(tiers), 2):
        pair_of = [begin, min(begin + 1, len(tiers) - 1)]
        given: list[Any] = []
        constants: dict[str, Any] = {}
        for index, prefix in zip(pair_of, "AB", strict=True):
            tier = tiers[index]
            angles = tier.angles if tier.rotation is None else tier.rotation.ages
            angles = q if angles is None else angles
            given += [tier.table, tier.num_k, tier.num_v, angles, *kept[index], parts[index], tier.columns]
            given += [tier.entries, angles.stride(0)]
            constants |= tier.in_kernels(prefix) | {f"{prefix}_BT": blocks[index]}
        turn = tiers[begin].rotation
        launch(
            _attend, (count, sum(parts[begin : begin + 2])), q, pages, rows, seen,
            q if turn is None else turn.frequencies, ring_tokens, ring_k, ring_v, part_top, part_sum, part_out, *given,
            scale * LOG2_E, pages.shape[1], sum(parts), sum(parts[:begin]), lists.heads, lists.per_row, lists.offset,
            *strides, **shared, GP=power_of_two(group_size, MIN_DOT), OP=operand, RK=lengths[0], RV=lengths[1],
            NAMED=lists.rows is not None, HALF=half, HP=power_of_two(half, MIN_DOT),
            REST=power_of_two(head_dim - 2 * half, MIN_DOT) if half and head_dim > 2 * half else 0,
            TWO=pair_of[0] != pair_of[1], **constants, num_warps=8 if wide else 4,
        )  # fmt: skip
    for begin in range(0, len(tiers) if group else 1, 2):
        pair_of, merged = [begin, min(begin + 1, len(tiers) - 1)], group_size if begin == 0 else 0
        given, constants, tasks = [], {}, []
        for index, prefix in zip(pair_of, "AB", strict=True):
            tier, block = tiers[index], blocks[index]
            tasks.append(tier.columns * -(-tier.fmt.tokens_per_page // block) if group else 0)
            given += [*kept[index], tier.num_k, scores[index] if scores else part_top, tier.table, tier.columns]
            given += [tier.entries, *(tasks if prefix == "A" else [])]
            found = {"T": tier.fmt.tokens_per_page, "BT": block, "TRACK": -1, "REVERSED": tier.is_reversed}
            found |= {"POS": tier.fmt.regions["pos"][0]} | ({"TRACK": score_offset(tier.fmt)} if how.update else {})
            constants |= {f"{prefix}_{name}": value for name, value in found.items()}
        two = pair_of[0] != pair_of[1]
        launch(
            _finish, (merged + tasks[0] + tasks[1] * two, count), part_top, part_sum, part_out, out, lse, rows, seen,
            pages, pages.shape[1], sum(parts), lists.heads, lists.per_row, lists.offset, *given, **shared,
            GP=power_of_two(group_size), DP=power_of_two(head_dim), BP=16, MERGED=merged, TWO=two, POWER=how.power,
            RULE=_REDUCE[group] if group else 0, REPLACE=how.update == "replace", NEAR=how.skip_near, **constants,
        )  # fmt: skip
    return out, lse, scores


def _angles(rotation: Tensor) -> Tensor:
    """The angles as the kernel reads them: all of one sequence in a row; sequences may share them."""
    is_row = rotation.stride(2) == 1 and rotation.stride(1) == rotation.shape[2]
    return rotation if is_row else rotation.contiguous()


def score_offset(fmt: PageFormat) -> int:
    """Where a page tracks scores."""
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
