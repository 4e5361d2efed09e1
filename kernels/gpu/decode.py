"""GPU backend: attention of one query token per sequence over pages, and the scores it gives.

The kernels are in `attend`: one launch attends over all tiers (two for three), and one merges parts and makes scores.
How the work is cut depends on shapes alone, and each part's share on the device, from how much its list holds: nothing
is read back to the host, and a call can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.attend import SCORED, _attend, _finish
from kvbench.kernels.gpu.parts import (
    ELEMENT,
    INTERPRETED,
    LOG2_E,
    MIN_COLUMNS,
    MIN_DOT,
    launch,
    power_of_two,
    ptx_level,
    side_layout,
    tuning,
)
from kvbench.kernels.operands import (
    NO_SCORES,
    PLAIN,
    KeyRotation,
    Reduce,
    Ring,
    Softmax,
    StepScores,
    TierPages,
    TierTable,
)

_REDUCE: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2}
# Programs on a multiprocessor: so many that attend where it is not known how many fit, and small ones that make scores.
_ATTENDING, _SCORING = 4, 16
_MOST_WAVES = 8  # parts of a list that are tried where all lists together need more than one wave of programs
_MOST_PARTS, _LEAST_SLOTS = 64, 64  # of a list, and of each of its parts: what merges them is a program for each head
_FEW_PARTS, _MERGED = 16, 8192  # parts that are merged at a time where there are few; else numbers of their outputs
_STAGES = 3  # of loads under way: more hold shared memory that other programs need


@triton.jit(do_not_specialize=["num_columns"])
def _add_scores(pages, ids, num_k, scores, page_bytes, num_columns, T: tl.constexpr, TP: tl.constexpr,
                TRACK: tl.constexpr):  # fmt: skip
    """Adds the scores of one page's live slots to what it tracks."""
    program = tl.program_id(0).to(tl.int64)
    pid, index = program // num_columns, program % num_columns
    t = tl.arange(0, TP)
    token = index * T + t
    live = (t < T) & (token < tl.load(num_k + pid).to(tl.int32))
    page = tl.load(ids + pid * num_columns + index).to(tl.int64)
    field = (pages + page * page_bytes + TRACK).to(tl.pointer_type(tl.float32)) + t
    score = tl.load(scores + pid * (num_columns * T) + token, mask=live, other=0.0)
    tl.store(field, tl.load(field, mask=live, other=0.0) + score, mask=live)


@cache
def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_processors(device: torch.device) -> int:
    """Multiprocessors (NVIDIA) or compute units (AMD) of a device.

    1 in the interpreter, and an H100's where kernels are compiled without a GPU.
    """
    return _processors_of(device) if device.type == "cuda" else 132 if ptx_level() else 1


@cache
def _block_slots(fmt: PageFormat, wide: bool, scores: bool) -> int:
    """Slots that one step of the inner loop reads, a power of two; `wide`: products are of fp32 tiles.

    On an H100, one warp that reads 64 slots of codes of 4 bits at a time was faster than more warps, or fewer slots.
    More do not fit into a thread's registers: compiled for sm_90, they spill, and so do 64 with scores, of 8 bits, or
    of 256 channels (`python -m kvbench.kernels.gpu.registers` counts registers).
    """
    slot, slots = fmt.slot, fmt.tokens_per_page
    is_coded = slot.k_coded or slot.v_coded
    few = slot.head_dim > 128 or (is_coded and (slot.head_dim <= 64 or scores or 8 in (slot.k_bits, slot.v_bits)))
    most = 16 if wide else 32 if few else 64
    if 3 in (slot.k_bits, slot.v_bits):  # eight planes, of three bytes each
        most = 16
    group = slot.k_channel_group if slot.channel_keys else 0
    if group >= MIN_DOT and group & (group - 1) == 0:
        return min(group, most)  # within one group of tokens, one scale per channel serves the block
    # The rest of a page is read in a separate tile.
    return max(size for size in (16, 32, 64) if size <= max(16, min(most, slots)))


def _operand(q: Tensor, tiers: list["ListTier"], ring: Ring | None) -> tl.dtype:
    """Type of the matrix products' operands: the model's own 16-bit type where nothing is lost by it, else fp32."""
    slots = [tier.fmt.slot for tier in tiers]
    held = {slot.dtype for slot in slots if max(slot.k_bits, slot.v_bits) >= 16}
    held |= {ring.k.dtype, ring.v.dtype} if ring is not None else set()
    exact = held <= {q.dtype} and not (INTERPRETED and q.dtype == torch.bfloat16)
    return ELEMENT[q.dtype] if exact else tl.float32


def _num_parts(lists: int, most: int, at_once: int) -> int:
    """Parts that each list of at most `most` pages or blocks is cut into, with `at_once` concurrent programs.

    Those of one wave, or as many as end soonest: a nearly empty wave takes as long as a full one.
    """
    lists = max(1, lists)
    tried = range(1, min(most, max(at_once // lists, _MOST_WAVES)) + 1)
    return min(tried, key=lambda parts: (-(-lists * parts // at_once) / parts, parts), default=1)


_REGISTERS = 65_536  # of a multiprocessor, on every NVIDIA GPU that triton compiles for
_WARP = 32  # threads of a warp, on the same GPUs
_resident: dict[tuple, int] = {}  # programs of a compiled kernel that one multiprocessor holds


def programs_by_size(registers: int, shared_bytes: int, warps: int, has_bytes: int, threads: int = 2048) -> int:
    """Programs that a multiprocessor of NVIDIA's holds, by registers per thread and shared memory per program.

    `has_bytes` is the multiprocessor's shared memory.
    """
    quarters, granule = 4, 256
    # Registers lie in quarters, of which each holds whole warps.
    in_quarter = _REGISTERS // quarters // (-(-_WARP * registers // granule) * granule)
    by_shared = has_bytes // (shared_bytes + 1024)  # which the system takes of each
    return max(1, min(quarters * in_quarter // warps, by_shared, threads // (_WARP * warps), 32))


def programs_per_processor(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> int:
    """Programs of a kernel that fit on a multiprocessor of NVIDIA's, by its compiled registers and shared memory.

    Source: Triton's tutorial 2 (fused softmax), which reads both from a compiled kernel.
    """
    kinds = tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in arguments)
    key = (arguments[0].device, kernel.__name__, tuple(constants.items()), kinds)
    if key not in _resident:
        built = kernel.warmup(*arguments, grid=(1,), **constants)
        built._init_handles()
        device = torch.cuda.get_device_properties(arguments[0].device)
        shared, warps = device.shared_memory_per_multiprocessor, constants["num_warps"]
        threads = device.max_threads_per_multi_processor
        _resident[key] = programs_by_size(built.n_regs, built.metadata.shared, warps, shared, threads)
    return _resident[key]


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
        rotation: Source of the angles of slots, or None.
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
        angles = self.angles if self.rotation is None else self.rotation.frequencies
        return 0 if angles is None else angles.shape[-1]

    def in_kernels(self, prefix: str) -> dict[str, Any]:
        """Its compile-time constants in `_attend`."""
        turn = 0 if not self.half else 1 if self.rotation is None else 3 if self.rotation.ages is None else 2
        constants = {"T": self.fmt.tokens_per_page, "REVERSED": self.is_reversed, "TURN": turn}
        sides = {prefix + side.upper(): side_layout(self.fmt, side) for side in "kv"}
        return {f"{prefix}_{name}": value for name, value in constants.items()} | sides


@dataclass(frozen=True)
class _Launch:
    """Shared part of a kernel's launches: its grid, the arguments after a layer's own, and its constants."""

    grid: tuple[int, int]
    operands: list[Any]
    constants: dict[str, Any]


class Attention:
    """Attention of one query token per sequence over lists of pages, prepared once for equal layers.

    As `Backend.paged_decode`. A call is two launches (four for three tiers) and allocates nothing but its results.

    Buffers between the launches of a layer are reused by the next one.

    Args:
        q: [S, Hq, D] queries of the first layer; those of others are alike.
        pages: The pool.
        tiers: One to four.
        lists: The first layer's lists, which a call moves to its own.
        ring: The first layer's residual buffers, or None.
        how: Use of the scores; they are returned where they are neither added to what the pages track nor put there.
        seen: int64 [S] position of the queries, where near slots are skipped.
        out: Type of the output.
        softmax: Caps and sinks; of a step those of all layers, from the first of its lists' table on.

    Source: kvbench's own; split over the sequence with an exact merge as in FlashDecoding, scales folded into the
        products as in KIVI's and DiffKV's kernels.
    """

    def __init__(
        self, q: Tensor, pages: Tensor, tiers: list[ListTier], lists: Lists, ring: Ring | None,
        how: StepScores = NO_SCORES, *, seen: Tensor | None = None, out: torch.dtype = torch.float32,
        softmax: Softmax = PLAIN,
    ) -> None:  # fmt: skip
        num_seq, num_q_heads, head_dim = q.shape
        count, group_size, operand = num_seq * lists.heads, num_q_heads // lists.heads, _operand(q, tiers, ring)
        lengths = (ring.k.shape[-2], ring.v.shape[-2]) if ring is not None else (0, 0)
        half = max(tier.half for tier in tiers)
        wide = half > 0 or operand == tl.float32
        slots = [tier.columns * tier.fmt.tokens_per_page + max(lengths) for tier in tiers]
        spans = [min(_MOST_PARTS, -(-count // _LEAST_SLOTS)) for count in slots]
        self._block_slots = [tuning().block_slots or _block_slots(tier.fmt, wide, bool(how.group)) for tier in tiers]
        made: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
        self._lse = torch.empty(count, 1, group_size, **made)
        self._absent = absent = self._lse  # where a kernel does not look at a tensor
        self._tiers, self._out, self._lists = tiers, out, lists
        self._sinks = absent if softmax.sinks is None else softmax.sinks
        # Exponentials are at most 1: fp16 holds them as well as the products after them.
        kind = torch.float32 if operand == tl.float32 else torch.float16
        self._kept = [(absent, absent)] * len(tiers)
        if how.group:
            self._kept = [
                (torch.empty(count * group_size, tier.columns * tier.fmt.tokens_per_page, dtype=kind, device=q.device),
                 torch.empty(count * group_size, blocks, **made))
                for tier, blocks in zip(tiers, self._blocks, strict=True)
            ]  # fmt: skip
        returned = tiers if how.group and how.update is None else []
        self._returned = [(num_seq, lists.heads, tier.columns * tier.fmt.tokens_per_page) for tier in returned]
        step = (pages, *(absent if x is None else x for x in (lists.rows, seen)))
        shared: dict[str, Any] = {
            "G": group_size, "D": head_dim, "SCORES": bool(how.group), "TABLED": lists.in_table,
            "HELD": lists.counts_in_table,
        }  # fmt: skip
        reading = shared | {
            "GP": power_of_two(group_size, MIN_COLUMNS if ptx_level() else MIN_DOT), "OP": operand,
            "RK": lengths[0], "RV": lengths[1], "NAMED": lists.rows is not None, "HALF": half,
            "HP": power_of_two(half, MIN_DOT),
            "REST": power_of_two(head_dim - 2 * half, MIN_DOT) if half and head_dim > 2 * half else 0,
            "CAP": softmax.cap * LOG2_E,
            "num_warps": tuning().warps or (8 if wide else 4 if not ptx_level() else 2 if head_dim > 128 else 1),
            "num_stages": tuning().stages or _STAGES,
        }  # fmt: skip
        merging = shared | {
            "GP": power_of_two(group_size), "DP": power_of_two(head_dim), "POWER": how.power,
            "RULE": _REDUCE[how.group] if how.group else 0, "REPLACE": how.update == "replace", "NEAR": how.skip_near,
            "OUT": ELEMENT[out], "SINKS": softmax.sinks is not None,
        }  # fmt: skip
        pairs = [(begin, min(begin + 1, len(tiers) - 1)) for begin in range(0, len(tiers), 2)]
        self._cut([1] * len(tiers), count, group_size, head_dim)
        at_once = _num_processors(q.device) * _ATTENDING
        if q.device.type == "cuda" and ptx_level():
            first, buffers = self._reads(pairs[0], count, step, reading), _ring_arguments(ring, absent)
            operands = [q, buffers[2], *buffers[:2], *buffers[3], LOG2_E, lists.offset, *first.operands]
            at_once = _num_processors(q.device) * programs_per_processor(_attend, operands, first.constants)
        self._cut([_num_parts(count, span, at_once) for span in spans], count, group_size, head_dim)
        self._reading = [self._reads(pair, count, step, reading) for pair in pairs]
        self._merging = [self._merges(pair, count, step, merging, how) for pair in (pairs if how.group else pairs[:1])]

    def _cut(self, parts: list[int], count: int, group_size: int, head_dim: int) -> None:
        """Cuts the lists of each tier into so many parts, whose results lie between the launches."""
        self._parts = parts
        made: dict[str, Any] = {"device": self._lse.device, "dtype": torch.float32}
        shape = (count, sum(parts), group_size)
        self._partial = [torch.empty(shape, **made), torch.empty(shape, **made), torch.empty(*shape, head_dim, **made)]

    @property
    def _blocks(self) -> list[int]:
        """Blocks of slots that a list has in each tier at most."""
        sizes = zip(self._tiers, self._block_slots, strict=True)
        return [tier.columns * -(-tier.fmt.tokens_per_page // size) for tier, size in sizes]

    def _merged_at_once(self, padded: int) -> int:
        """Parts that a turn of a merge reads, of outputs of so many channels: a turn waits for what it reads."""
        return _FEW_PARTS if sum(self._parts) <= _FEW_PARTS else min(_MOST_PARTS, _MERGED // padded)

    def _reads(self, pair: tuple[int, int], count: int, step: tuple[Tensor, ...], constants: dict) -> _Launch:
        """Arguments of `_attend`, over one tier or two."""
        (first, second), (pages, rows, seen) = pair, step
        rotation = self._tiers[first].rotation
        operands: list[Any] = [pages, rows, seen, self._absent if rotation is None else rotation.frequencies]
        operands += [*self._partial, pages.shape[1], sum(self._parts), sum(self._parts[:first])]
        operands += [self._lists.heads, self._lists.per_row]
        constants = constants | {"TWO": first != second}
        for index, prefix in zip(pair, "AB", strict=True):
            tier = self._tiers[index]
            angles = tier.angles if tier.rotation is None else tier.rotation.ages
            angles = self._absent if angles is None else angles
            operands += [tier.table, tier.num_k, tier.num_v, angles, *self._kept[index], self._parts[index]]
            operands += [tier.columns, tier.entries, angles.stride(0)]
            size = self._block_slots[index]
            rest = power_of_two((tier.fmt.tokens_per_page - 1) % size + 1, MIN_DOT)
            constants |= tier.in_kernels(prefix) | {f"{prefix}_BT": size, f"{prefix}_LAST": rest}
        return _Launch((count, sum(self._parts[first : second + 1])), operands, constants)

    def _merges(
        self, pair: tuple[int, int], count: int, step: tuple[Tensor, ...], constants: dict, how: StepScores
    ) -> _Launch:
        """Arguments of `_finish`; the first one merges the parts, too."""
        (first, second), pages = pair, step[0]
        operands: list[Any] = [self._lse, *self._partial, *step[1:], self._sinks, pages, pages.shape[1]]
        operands += [sum(self._parts)]
        operands += [self._lists.heads, self._lists.per_row]
        merged = constants["G"] if first == 0 else 0
        constants = constants | {"TWO": first != second, "MERGED": merged, "BP": self._merged_at_once(constants["DP"])}
        scoring = _SCORING * _num_processors(pages.device)
        tiles = [-(-tier.columns * tier.fmt.tokens_per_page // SCORED.value) for tier in self._tiers]
        tasks = [min(most, max(1, scoring // max(1, count))) if how.group else 0 for most in tiles]
        for index, prefix in zip(pair, "AB", strict=True):
            tier = self._tiers[index]
            operands += [*self._kept[index], tier.num_k, tier.table, tasks[index], tier.columns, tier.entries]
            extra = {"T": tier.fmt.tokens_per_page, "BT": self._block_slots[index], "REVERSED": tier.is_reversed}
            extra |= {"TRACK": score_offset(tier.fmt) if how.update else -1, "POS": tier.fmt.regions["pos"][0]}
            constants |= {f"{prefix}_{name}": value for name, value in extra.items()}
        return _Launch((count, merged + sum(tasks[first : second + 1])), operands, constants)

    def __call__(
        self, q: Tensor, ring: Ring | None, scale: float, offset: int | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Attends one layer, whose lists are `offset` lists into each sequence; see `Backend.paged_decode`.

        The next call overwrites the log-sum-exp.
        """
        q, offset = q.contiguous(), self._lists.offset if offset is None else offset
        out = torch.empty(q.shape, dtype=self._out, device=q.device)
        scores = [torch.empty(shape, device=q.device) for shape in self._returned]
        k, v, num_tokens, strides = _ring_arguments(ring, self._absent)
        for made in self._reading:
            launch(
                _attend, made.grid, q, num_tokens, k, v, *strides, scale * LOG2_E, offset, *made.operands,
                **made.constants,
            )  # fmt: skip
        for index, made in enumerate(self._merging):
            tier_scores = [*scores[2 * index : 2 * index + 2], self._absent, self._absent][:2]
            launch(_finish, made.grid, out, *tier_scores, offset, *made.operands, **made.constants)
        return out, self._lse.view(q.shape[:2]), scores


def _angles(rotation: Tensor) -> Tensor:
    """The angles as the kernel reads them: all of one sequence in a row; sequences may share them."""
    is_row = rotation.stride(2) == 1 and rotation.stride(1) == rotation.shape[2]
    return rotation if is_row else rotation.contiguous()


def score_offset(fmt: PageFormat) -> int:
    """Offset of tracked scores in a page."""
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
