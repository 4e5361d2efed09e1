"""The CPU backend: the C++ of csrc/, compiled on first use by the system's compiler and called through ctypes.

No torch headers, no Python headers, no build system: plain C functions that take pointers. Results do not depend on the
number of threads (torch.get_num_threads() are used) nor on the other sequences of a call.
"""

import ctypes
import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.backend import Backend, FusedStep
from kvbench.kernels.cpu.abi import (
    ELEMENT_KINDS,
    ColumnsStruct,
    Kept,
    SearchStruct,
    StepStruct,
    TierStruct,
    call_struct,
    check,
    chosen_isa,
    fill_tier,
    format_struct,
    load,
    plain,
)
from kvbench.kernels.cpu.products import RowProducts
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import (
    NO_SCORES,
    PLAIN,
    ColumnSums,
    Reduce,
    Ring,
    ScoreUpdate,
    SlotSearch,
    Softmax,
    StepRing,
    StepScores,
    StepTarget,
    TierPages,
)

MANY = 256  # slots from which a second thread pays
COLUMN_ROWS = 32  # queries of a prompt whose logits are made at a time
_UPDATE: dict[ScoreUpdate | None, int] = {None: 0, "add": 1, "replace": 2}


class Cpu(Backend):
    """C++ for pages in main memory.

    Raises:
        BuildError: See `cpu.abi.load`.
        ValueError: See `cpu.abi.load`.
    """

    name = "cpu"
    is_reference = False
    fuses_layers = True
    searches_slots = True
    rows_are_alone = True

    def __init__(self) -> None:
        super().__init__()
        load()  # fails here without a compiler, not at the first step
        self.isa = chosen_isa()

    def write_keys(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
        if not _covers(pages, fmt):
            super().write_keys(pages, fmt, page, slot, k)
            return
        checks.write(pages, fmt, page, slot, k, keys=True)
        _write(pages, fmt, page, slot, k, 1)

    def write_values(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
        if not _covers(pages, fmt):
            super().write_values(pages, fmt, page, slot, v)
            return
        checks.write(pages, fmt, page, slot, v, keys=False)
        _write(pages, fmt, page, slot, v, 0)

    def read_slots(self, pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        if not _covers(pages, fmt):
            return super().read_slots(pages, fmt, page, slot)
        checks.slots(pages, fmt, page, slot)
        where, count = [x.long().contiguous() for x in (page, slot)], len(page)
        k, v = (torch.empty(count, fmt.slot.head_dim) for _ in range(2))
        addresses = (x.data_ptr() for x in (*where, k, v))
        check(load().kvb_read(*_head(pages, fmt), count, *addresses, k.shape[1], _threads(count)))
        return k, v

    def move_slots(
        self, pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
    ) -> None:
        if not _covers(pages, fmt):
            super().move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)
            return
        checks.move(pages, fmt, src_page, src_slot, dst_page, dst_slot)
        where, count = [x.long().contiguous() for x in (src_page, src_slot, dst_page, dst_slot)], len(src_page)
        addresses = (x.data_ptr() for x in where)
        check(load().kvb_move(*_head(pages, fmt), count, *addresses, fmt.slot.head_dim, _threads(count)))

    def multiplier(self, matrix: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(RowProducts(), weight=matrix.T.contiguous())

    def slot_extreme(
        self, pages: Tensor, fmt: PageFormat, ids: Tensor, held: Tensor, search: SlotSearch
    ) -> tuple[Tensor, Tensor, Tensor]:
        checks.search(pages, fmt, ids, held, search)
        value = torch.empty(len(held))
        slot, pos = (torch.empty(len(held), dtype=torch.int64) for _ in range(2))
        per_list = (ids, held, search.seen, search.floor, search.before, search.exact)
        keep = [None if x is None else x.long().contiguous() for x in per_list]
        at = [None if x is None else x.data_ptr() for x in keep]
        tier = TierStruct.from_buffer_copy(format_struct(fmt))
        tier.num_columns, tier.ids, tier.num_k = ids.shape[1], at[0], at[1]
        struct = SearchStruct(
            seen=at[2],
            floor=at[3],
            before=at[4],
            exact=at[5],
            first=search.first,
            by=("mean", "score", "pos").index(search.by),
            num_threads=torch.get_num_threads(),
            value=value.data_ptr(),
            slot=slot.data_ptr(),
            pos=pos.data_ptr(),
        )
        pages_at = pages.data_ptr(), pages.shape[1], pages.shape[0], ctypes.addressof(tier)
        check(load().kvb_search(*pages_at, ctypes.addressof(struct), len(held)))
        return value, slot, pos

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
        """See `Backend.paged_decode`; dequantises on the fly.

        Source: kvbench's own; folding the scales into the products as in KIVI's and DiffKV's kernels.
        """
        covered = q.device.type == "cpu" and all(_has_code(tier.fmt) for tier in tiers)
        covered = covered and not any(tier.fmt.slot.keys_only and tier.channels for tier in tiers)
        covered = covered and all(tier.offset is None for tier in tiers)
        if not covered or (ring is not None and (tiers[0].rotation is not None or ring.k.dtype not in ELEMENT_KINDS)):
            return super().paged_decode(q, pages, tiers, ring, scale, power=power, group=group, softmax=softmax)
        checks.decode(q, pages, tiers, ring, power, group, softmax)
        q, pages, keep = plain(q), pages.contiguous(), Kept()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        widths = [tier.ids.shape[-1] * tier.fmt.tokens_per_page for tier in tiers] if group else []
        scores = [torch.empty(*tiers[0].num_k.shape, width) for width in widths]
        call = call_struct(
            pages,
            tiers,
            ring,
            keep,
            num_q_heads=q.shape[1],
            power=power,
            group=group,
            scores=scores or [None] * len(tiers),
            softmax=softmax,
        )
        call.q, call.out, call.lse, call.scale = q.data_ptr(), out.data_ptr(), lse.data_ptr(), scale
        check(load().kvb_paged_decode(ctypes.addressof(call)))
        return out, lse, scores

    def add_scores(self, pages: Tensor, tier: TierPages, scores: Tensor) -> None:
        if not pages.is_contiguous():  # a copy would take the sums and be thrown away
            super().add_scores(pages, tier, scores)
            return
        checks.scores(pages, tier, scores)
        keep, entry = Kept(), TierStruct()
        fill_tier(entry, tier, plain(scores), keep)
        where = pages.data_ptr(), pages.shape[1], pages.shape[0], ctypes.addressof(entry)
        check(load().kvb_add_scores(*where, tier.num_k.numel(), torch.get_num_threads()))

    def column_scores(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        columns: ColumnSums,
        lse: Tensor | None = None,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """See `Backend.column_scores`; the matrix products are torch's, all else is one pass in C++."""
        if q.device.type != "cpu" or columns.reduce != "sum":
            return super().column_scores(q, k, scale, columns, lse, softmax)
        checks.columns(q, k, columns, softmax)
        num_q_heads, length, head_dim = q.shape
        heads = k.shape[0]
        out = torch.zeros(num_q_heads, length)
        first = 0 if columns.queries < 0 else max(0, length - columns.queries)
        grouped, keys = q.view(heads, -1, length, head_dim), k.float().transpose(1, 2)
        room = torch.empty(num_q_heads * min(COLUMN_ROWS, length) * length)
        for begin in range(first, length, COLUMN_ROWS):
            end = min(length, begin + COLUMN_ROWS)
            rows = (grouped[:, :, begin:end].float() * scale).flatten(1, 2)
            logits = room[: num_q_heads * (end - begin) * end].view(heads, -1, end)
            torch.bmm(rows, keys[:, :, :end], out=logits)
            struct = ColumnsStruct(
                logits=logits.data_ptr(),
                sums=out.data_ptr(),
                sinks=None if softmax.sinks is None else softmax.sinks.data_ptr(),
                num_heads=num_q_heads,
                num_queries=end - begin,
                width=end,
                sum_stride=length,
                skip_near=columns.skip_near,
                power=columns.power,
                below=int(columns.below_uniform),
                num_threads=torch.get_num_threads(),
                cap=softmax.cap,
            )
            check(load().kvb_column_sums(ctypes.addressof(struct)))
        return out

    def open_step(
        self,
        pages: Tensor,
        tiers: list[TierPages],
        *,
        num_q_heads: int,
        seen: Tensor,
        target: StepTarget | None,
        ring: StepRing | None = None,
        scores: StepScores = NO_SCORES,
        softmax: Softmax = PLAIN,
    ) -> FusedStep | None:
        checks.step(
            pages, tiers, num_q_heads=num_q_heads, seen=seen, target=target, ring=ring, scores=scores, how=softmax
        )
        if not _covers(pages, tiers[0].fmt) or any(
            tier.channels is not None or tier.offset is not None for tier in tiers
        ):
            return None  # which are a layer's
        if ring is not None and not (
            ring.k.dtype in ELEMENT_KINDS and ring.k.is_contiguous() and ring.v.is_contiguous()
        ):
            return None
        keep, seen, group = Kept(), seen.long().contiguous(), scores.group if scores.update else None
        call = call_struct(
            pages,
            tiers,
            ring,
            keep,
            num_q_heads=num_q_heads,
            power=scores.power,
            group=group,
            scores=[None] * len(tiers),
            softmax=softmax,
        )
        call.seen, call.update, call.skip_near = seen.data_ptr(), _UPDATE[scores.update], scores.skip_near
        struct = StepStruct(call=call, num_layers=tiers[0].ids.shape[1])
        if ring is not None:
            where = [x.long().contiguous() for x in (*ring.before, *ring.after)]
            struct.old_k, struct.old_v, struct.new_k, struct.new_v = (x.data_ptr() for x in where)
            struct.flush_first = int(ring.flush_first)
        else:
            assert target is not None, "checks.step wants one of them"
            struct.tier, *location = target
            where = [x.long().contiguous() for x in location]
            struct.page, struct.slot = (x.data_ptr() for x in where)
        return CompiledStep(struct, [*keep, seen, *where])


class CompiledStep(FusedStep):
    """A prepared decode step.

    Args:
        struct: Description of the step for the C++ side.
        keep: Objects that the struct points at.
    """

    def __init__(self, struct: StepStruct, keep: Kept) -> None:
        self._struct, self._keep = struct, keep
        call = struct.call
        self._q = call.num_seq, call.num_heads * call.group_size, call.head_dim
        self._kv = call.num_seq, call.num_heads, call.head_dim
        self._address, self._call = ctypes.addressof(struct), load().kvb_step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        checks.layer(q, k, v, self._q, self._kv)
        q, k, v = plain(q), plain(k), plain(v)
        out = torch.empty_like(q)
        check(self._call(self._address, layer, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), scale))
        return out


def _covers(pages: Tensor, fmt: PageFormat) -> bool:
    """True if the C++ code covers these pages; a copy of them would take the bytes and be thrown away."""
    return pages.device.type == "cpu" and pages.is_contiguous() and _has_code(fmt)


def _has_code(fmt: PageFormat) -> bool:
    return fmt.slot.head_dim <= load().max_channels


def _head(pages: Tensor, fmt: PageFormat) -> tuple[int, int, int, int]:
    return pages.data_ptr(), pages.shape[1], pages.shape[0], ctypes.addressof(format_struct(fmt))


def _threads(count: int) -> int:
    return torch.get_num_threads() if count >= MANY else 1


def _write(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, key: int) -> None:
    page, slot, x, count = page.long().contiguous(), slot.long().contiguous(), x.float().contiguous(), len(page)
    addresses = (each.data_ptr() for each in (page, slot, x))
    check(load().kvb_write(*_head(pages, fmt), key, count, *addresses, x.shape[1], _threads(count)))


@cache
def warn_absent(reason: str) -> None:
    """Says once per reason that the reference stands in."""
    warnings.warn(
        f"no compiled CPU kernels: {reason}; going on with backend=torch, the plain reference, which is much slower",
        stacklevel=3,
    )
