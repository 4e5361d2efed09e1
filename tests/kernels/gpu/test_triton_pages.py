"""Writing, reading, demoting and moving slots by the Triton kernels: the same bytes as the torch reference."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from page_helpers import PAGE_BYTES, tier_format
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.device_inputs import hard_vectors
from kvbench.kernels.format import PageFormat
from kvbench.kernels.gpu.backend import Gpu

TRACK = ("score", "pos")
BOOKS = {"k_code": "book_channels", "v_code": "book", "k_apart": 2, "v_apart": 1}  # the reference codes these


def places(fmt: PageFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and slots of three runs of whole groups on different pages, one of them at the end of its page."""
    run, last = max(8, fmt.slot.group_tokens), fmt.tokens_per_page
    start = torch.tensor([0, last - run, 0]).repeat_interleave(run)
    return torch.tensor([4, 1, 3]).repeat_interleave(run), torch.arange(run).repeat(3) + start


def test_half_precision_vectors_and_one_by_one_writes_give_the_same_bytes():
    """bf16 and fp16 vectors are encoded from their fp32 values; appending one token at a time changes nothing."""
    fmt = tier_format("4,2", 64)
    page, slot = places(fmt)
    x = hard_vectors(len(page), 64).bfloat16()
    bulk, single = (torch.zeros(6, PAGE_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    Gpu().write_keys(bulk, fmt, page.to(DEVICE), slot.to(DEVICE), x.to(DEVICE))
    for i in range(len(page)):
        Gpu().write_keys(single, fmt, page[i : i + 1].to(DEVICE), slot[i : i + 1].to(DEVICE), x[i : i + 1].to(DEVICE))
    want = torch.zeros(6, PAGE_BYTES, dtype=torch.uint8)
    REFERENCE.write_keys(want, fmt, page, slot, x)
    assert torch.equal(bulk.cpu(), want) and torch.equal(single.cpu(), want)


def test_e4m3_rounds_like_torch():
    """Every e4m3 value, the midpoints between neighbours, both signs, zeros, what saturates, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    edge = torch.tensor([-0.0, 0.0, 449.0, -1e9, float("inf"), float("nan"), 2.0**-10, 2.0**-11, 1.1 * 2.0**-10])
    x = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, edge])
    x = torch.cat([x, torch.zeros(-len(x) % 64)]).view(-1, 64)
    fmt = tier_format("8,8", 64, fp8=True)
    page, slot = torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))
    want, got = (
        torch.zeros(1, PAGE_BYTES, dtype=torch.uint8),
        torch.zeros(1, PAGE_BYTES, dtype=torch.uint8, device=DEVICE),
    )
    REFERENCE.write_values(want, fmt, page, slot, x)
    Gpu().write_values(got, fmt, page.to(DEVICE), slot.to(DEVICE), x.to(DEVICE))
    assert torch.equal(got.cpu(), want)


def test_demotion_that_cannot_be_is_refused():
    """Into per-channel keys, and between tiers that track different fields."""
    pages = torch.zeros(1, PAGE_BYTES, dtype=torch.uint8)
    none = [torch.zeros(0, dtype=torch.int64)] * 4
    plain, channel = tier_format("8,4", 64), tier_format("2,2", 64, k_channel_group=32)
    with pytest.raises(ValueError, match=r"per-channel keys \(group 32\) one by one; give the lower tier k_axis=token"):
        Gpu().demote(pages, plain, channel, *none)
    with pytest.raises(ValueError, match="the same fields in both"):
        Gpu().demote(pages, plain, tier_format("4,2", 64, track=("pos",)), *none)
    book = tier_format("3,3", 64, **BOOKS)
    for pair in ((plain, book), (book, plain)):
        with pytest.raises(NotImplementedError, match="calibrated tables; use backend=torch"):
            Gpu().demote(pages, *pair, *none)


def test_slots_that_share_scales_or_bounds_do_not_move_alone():
    """As in the reference, with its remedy."""
    fmt = tier_format("2,2", 64, k_channel_group=32)
    none = [torch.zeros(0, dtype=torch.int64)] * 4
    with pytest.raises(ValueError, match="cannot move one by one; evict before quantising"):
        Gpu().move_slots(torch.zeros(1, PAGE_BYTES, dtype=torch.uint8), fmt, *none)
    bounded = PageFormat(tier_format("16,16", 64).slot, PAGE_BYTES, bounds=True)
    with pytest.raises(ValueError, match="bounds of their keys cannot move"):
        Gpu().move_slots(torch.zeros(1, PAGE_BYTES, dtype=torch.uint8), bounded, *none)
