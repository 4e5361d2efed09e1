"""GPU backend: slots moved within a tier, and demoted into another one.

Page ids below 0 are passed over. Every function here is capture-safe once it was called for a format: the first call of
a format copies a small table to the device.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.codes import SCALE_BYTES
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.pages import _write_side


@triton.jit
def _move_bytes(
    pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes,
    BM: tl.constexpr, BB: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies bytes of BM slots, BB of each, or a column of BB where there are COLUMNS; byte j of slot i lies at map[j,
    0] + i * map[j, 1] in its page."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    j = tl.arange(0, BB)
    if COLUMNS > 0:
        j += tl.program_id(1) * BB
    target = tl.load(page + row, mask=row < count, other=-1).to(tl.int64)
    origin = tl.load(source_page + row, mask=row < count, other=-1).to(tl.int64)
    at = tl.load(slot + row, mask=row < count, other=0).to(tl.int32)
    there = tl.load(source_slot + row, mask=row < count, other=0).to(tl.int32)
    wanted = j < num_bytes
    mask = ((target >= 0) & (origin >= 0))[:, None] & wanted[None, :]
    source = (
        tl.load(source_map + 2 * j, mask=wanted, other=0)[None, :]
        + there[:, None] * tl.load(source_map + 2 * j + 1, mask=wanted, other=0)[None, :]
    )
    place = (
        tl.load(target_map + 2 * j, mask=wanted, other=0)[None, :]
        + at[:, None] * tl.load(target_map + 2 * j + 1, mask=wanted, other=0)[None, :]
    )
    moved = tl.load(pages + origin[:, None] * page_bytes + source, mask=mask, other=0)
    tl.store(pages + target[:, None] * page_bytes + place, moved, mask=mask)


@triton.jit
def _demote_both(
    pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes, BK: tl.constexpr,
    BV: tl.constexpr, D: tl.constexpr, META_FIRST: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, T: tl.constexpr,
    S_T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
):  # fmt: skip
    """Re-quantises the keys (programs of the first column), the values (of the second), or copies the tracked fields of
    some slots into another format."""
    part = tl.program_id(1)
    if part == 0:
        _write_side(
            pages, pages, source_page, source_slot, page, slot, pages, pages, count, page_bytes, count, 0, 0, BK, True,
            D, T, META_FIRST, 1, 0, K, S_T, SK,
        )  # fmt: skip
    elif part == 1:
        _write_side(
            pages, pages, source_page, source_slot, page, slot, pages, pages, count, page_bytes, count, 0, 0, BV, False,
            D, T, META_FIRST, 1, 0, V, S_T, SV,
        )  # fmt: skip
    else:
        _move_bytes(pages, source_page, source_slot, page, slot, source_map, target_map, count, num_bytes, page_bytes,
                    BM, BB, 0)  # fmt: skip


@cache
def byte_map(fmt: PageFormat, names: tuple[str, ...], device: torch.device) -> Tensor:
    """Where the bytes of a slot lie: int32 [bytes, 2], byte j of slot i at first[j] + i * step[j] within its page.

    Args:
        fmt: A format whose slots stand alone (no per-channel keys).
        names: Which of its regions.
        device: Where the table is wanted.
    """
    slot, table = fmt.slot, []
    for name in names:
        offset, length = fmt.regions[name]
        if not length:
            continue
        per_slot = length // fmt.tokens_per_page
        if name in ("v_codes", "score", "pos"):  # slot after slot
            table += [(offset + j, per_slot) for j in range(per_slot)]
            continue
        unit = 1 if name.endswith("where") else 2  # of zeros, most scales, and what is kept apart
        if name == "k_codes":
            unit = slot.dtype.itemsize if slot.k_bits >= 16 else 1
        elif name.endswith("scale"):
            code = slot.keys if name == "k_scale" else slot.values
            unit = SCALE_BYTES[code.scale] if code is not None else unit
        row = fmt.tokens_per_page * unit  # all slots' first element, then all slots' second, ..
        table += [(offset + j // unit * row + j % unit, unit) for j in range(per_slot)]
    return torch.tensor(table, dtype=torch.int32, device=device)
