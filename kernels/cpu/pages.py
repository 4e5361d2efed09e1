"""CPU backend: writing, reading, moving and searching slots of pages in C++; the bytes are the reference's."""

import ctypes

import torch
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.cpu.abi import SearchStruct, TierStruct, check, format_struct, load
from kvbench.kernels.format import PageFormat
from kvbench.kernels.reference import pages as torch_pages
from kvbench.kernels.tier_table import ExtremeOf

MANY = 256  # slots from which a second thread pays


def _covers(pages: Tensor, fmt: PageFormat) -> bool:
    """Whether the C++ code covers these pages; a copy of them would take the bytes and be thrown away."""
    return pages.device.type == "cpu" and pages.is_contiguous() and fmt.slot.head_dim <= load().max_channels


def _head(pages: Tensor, fmt: PageFormat) -> tuple[int, int, int, int]:
    return pages.data_ptr(), pages.shape[1], pages.shape[0], ctypes.addressof(format_struct(fmt))


def _threads(count: int) -> int:
    return torch.get_num_threads() if count >= MANY else 1


def _write(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, key: int) -> None:
    page, slot, x = page.long().contiguous(), slot.long().contiguous(), x.float().contiguous()
    count = len(page)
    check(
        load().kvb_write(
            *_head(pages, fmt), key, count, page.data_ptr(), slot.data_ptr(), x.data_ptr(), x.shape[1], _threads(count)
        )
    )


def write_keys(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor) -> None:
    """Encodes keys and writes them to their slots; the bytes are the reference's."""
    checks.write(pages, fmt, page, slot, k, keys=True)
    if not _covers(pages, fmt):
        torch_pages.write_keys(pages, fmt, page, slot, k)
        return
    _write(pages, fmt, page, slot, k, 1)


def write_values(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, v: Tensor) -> None:
    """Encodes values and writes them to their slots; the bytes are the reference's."""
    checks.write(pages, fmt, page, slot, v, keys=False)
    if not _covers(pages, fmt):
        torch_pages.write_values(pages, fmt, page, slot, v)
        return
    _write(pages, fmt, page, slot, v, 0)


def read_slots(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantises single slots; the bits are the reference's."""
    checks.slots(pages, fmt, page, slot)
    if not _covers(pages, fmt):
        return torch_pages.read_slots(pages, fmt, page, slot)
    page, slot = page.long().contiguous(), slot.long().contiguous()
    k, v = (torch.empty(len(page), fmt.slot.head_dim) for _ in range(2))
    check(
        load().kvb_read(
            *_head(pages, fmt),
            len(page),
            page.data_ptr(),
            slot.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.shape[1],
            _threads(len(page)),
        )
    )
    return k, v


def move_slots(
    pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
) -> None:
    """Copies the bytes of slots as they are.

    Raises:
        ValueError: See `checks.movable`.
    """
    checks.move(pages, fmt, src_page, src_slot, dst_page, dst_slot)
    if not _covers(pages, fmt):
        torch_pages.move_slots(pages, fmt, src_page, src_slot, dst_page, dst_slot)
        return
    where = [x.long().contiguous() for x in (src_page, src_slot, dst_page, dst_slot)]
    count = len(where[0])
    check(
        load().kvb_move(*_head(pages, fmt), count, *(x.data_ptr() for x in where), fmt.slot.head_dim, _threads(count))
    )


def slot_extreme(
    pages: Tensor,
    fmt: PageFormat,
    ids: Tensor,
    held: Tensor,
    *,
    by: ExtremeOf,
    seen: Tensor,
    floor: Tensor | None = None,
    before: Tensor | None = None,
    exact: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of every list with the smallest value; arguments and results as `Backend.slot_extreme`."""
    per_list = {"seen": seen, "floor": floor, "before": before, "exact": exact}
    checks.search(pages, fmt, ids, held, by, per_list, first)
    value = torch.empty(len(held))
    slot, pos = torch.empty(len(held), dtype=torch.int64), torch.empty(len(held), dtype=torch.int64)
    keep = [None if x is None else x.long().contiguous() for x in (ids, held, seen, floor, before, exact)]
    at = [None if x is None else x.data_ptr() for x in keep]
    tier = TierStruct.from_buffer_copy(format_struct(fmt))
    tier.num_columns, tier.ids, tier.num_k = ids.shape[1], at[0], at[1]
    search = SearchStruct(
        seen=at[2],
        floor=at[3],
        before=at[4],
        exact=at[5],
        first=first,
        by=("mean", "score", "pos").index(by),
        num_threads=torch.get_num_threads(),
        value=value.data_ptr(),
        slot=slot.data_ptr(),
        pos=pos.data_ptr(),
    )
    pages_at = pages.data_ptr(), pages.shape[1], pages.shape[0], ctypes.addressof(tier)
    check(load().kvb_search(*pages_at, ctypes.addressof(search), len(held)))
    return value, slot, pos
