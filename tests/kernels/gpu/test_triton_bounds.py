"""The bounds of pages by the Triton kernel: against loops over channels, and what is chosen by them."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from selection import few
from triton_helpers import DEVICE, poisoned_memory, random_queries  # noqa: F401

from kvbench.kernels.backend import REFERENCE, Backend
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import bounds as triton_bounds
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.bounds import page_bounds
from kvbench.kernels.gpu.decode import Lists, ListTier
from kvbench.kernels.operands import TierPages
from kvbench.kernels.reference.attention import choose_by_bounds
from kvbench.kernels.reference.pages import region

HELD = torch.tensor([[16 * 36 + 3, 1], [16 * 2, 16 * 5 - 1]])  # slots of pages of 16; 37 pages need two blocks


def bounded(head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, TierPages]:
    """Pages with random bounds, low below high, in no order; nobody wrote those behind a list's end."""
    slot = SlotFormat(head_dim=head_dim, k_bits=16, v_bits=16, dtype=dtype)
    fmt = PageFormat(slot, -(-(16 * int(slot.slot_bytes) + 4 * head_dim) // 16) * 16, bounds=True)
    assert fmt.tokens_per_page == 16
    make, total = torch.Generator().manual_seed(0), 4 * 37 + 2
    pages = torch.zeros(total, fmt.page_bytes, dtype=torch.uint8)
    low = torch.randn(total, head_dim, generator=make)
    region(pages, fmt, "k_low")[:] = low.to(dtype)
    region(pages, fmt, "k_high")[:] = (low + torch.rand(total, head_dim, generator=make)).to(dtype)
    ids = torch.randperm(total, generator=make)[: 4 * 37].view(2, 2, 37)
    live = torch.arange(37) * 16 < HELD[..., None]
    region(pages, fmt, "k_low")[ids[~live]] = float("nan")
    return pages, TierPages(fmt, ids, HELD, HELD)


def moved(pages: torch.Tensor, tier: TierPages) -> tuple[torch.Tensor, TierPages]:
    """The same where the kernels run."""
    return pages.to(DEVICE), TierPages(tier.fmt, tier.ids.to(DEVICE), tier.num_k.to(DEVICE), tier.num_v.to(DEVICE))


@pytest.mark.parametrize(
    ("head_dim", "group_size", "rule", "dtype"),
    [(64, 3, "max", torch.float16), (80, 1, "mean", torch.bfloat16), (128, 20, "sum", torch.float16)],
)
def test_bounds_are_the_largest_products(head_dim: int, group_size: int, rule: str, dtype: torch.dtype):
    """Channel by channel the larger of q times low and q times high, summed, then the group reduced."""
    pages, tier = bounded(head_dim, dtype)
    q = random_queries(2, 2 * group_size, head_dim)
    pool, there = moved(pages, tier)
    got = page_bounds(q.to(DEVICE), pool, ListTier.of(there), Lists.of(there), rule).cpu()
    low, high = (region(pages, tier.fmt, name).double() for name in ("k_low", "k_high"))
    for s, h in ((0, 0), (0, 1), (1, 1)):
        group = q[s, h * group_size : (h + 1) * group_size].double()
        for column in range(-(-int(HELD[s, h]) // 16)):
            page = int(tier.ids[s, h, column])
            each = [float(torch.maximum(one * low[page], one * high[page]).sum()) for one in group]
            want = max(each) if rule == "max" else sum(each) / (len(each) if rule == "mean" else 1)
            assert float(got[s, h, column]) == pytest.approx(want, rel=1e-6, abs=1e-4)


def test_the_same_pages_are_chosen_as_by_the_reference():
    """More pages asked for than a list has, fewer, and the newest one always; plain torch did nothing in its place."""
    pages, tier = bounded(64, torch.float16)
    q, count = random_queries(2, 6, 64), torch.tensor([3, 7])
    want = REFERENCE.choose_pages(q, pages, tier, count, 7, "max")
    backend = Gpu()
    got = backend.choose_pages(q.to(DEVICE), *moved(pages, tier), count.to(DEVICE), 7, "max")
    assert torch.equal(got.num_k.cpu(), want.num_k) and got.ids.shape == (2, 2, 7)
    live = torch.arange(7) * 16 < want.num_k[..., None]
    assert torch.equal(got.ids.cpu()[live], want.ids[live])
    assert backend.fallbacks == set()


@pytest.mark.parametrize("at_once", few([8192, 16], 8192))
def test_ties_and_what_is_no_number_are_chosen_as_by_the_reference(at_once: int, monkeypatch: pytest.MonkeyPatch):
    """Bounds of few values, both zeros, infinities and NaN among them: of equal ones the first; also where a list's
    bounds do not fit into a program at once."""
    monkeypatch.setattr(triton_bounds, "_AT_ONCE", at_once)
    make = torch.Generator().manual_seed(3)
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, 1.0, 1.0, -2.0, -2.0, 3e-40, 7.5])
    bounds = values[torch.randint(len(values), (24, 2, 37), generator=make)]
    held = torch.randint(0, 16 * 37 + 1, (24, 2), generator=make)
    held[0] = torch.tensor([0, 1])
    count = torch.randint(1, 40, (24,), generator=make)
    fmt = bounded(64, torch.float16)[1].fmt
    tier = TierPages(fmt, torch.arange(24 * 2 * 37).view(24, 2, 37), held, held)
    pages = torch.zeros(2000, fmt.page_bytes, dtype=torch.uint8)
    want = choose_by_bounds(bounds, tier, count, 37)
    _, there = moved(pages, tier)
    ids, slots = triton_bounds.choose(bounds.to(DEVICE), ListTier.of(there), Lists.of(there), count.to(DEVICE), 37)
    assert torch.equal(slots.cpu(), want.num_k)
    live = torch.arange(37) * 16 < want.num_k[..., None]
    assert torch.equal(ids.cpu()[live], want.ids[live])


def keys_in_pages(head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> tuple:
    """Pages of 16 with bounds of before; keys for some of their slots, in no order; and one page that is passed over.

    Of page 0 all slots come, so that it begins anew; of page 1 those behind its first; of page 2 one; page 3 begins
    anew with its first slot alone.
    """
    bits, size = 8 * dtype.itemsize, head_dim * dtype.itemsize
    slots = SlotFormat(head_dim=head_dim, k_bits=bits, v_bits=bits, dtype=dtype)
    fmt = PageFormat(slots, 16 * 2 * size + 2 * size, bounds=True)
    assert fmt.tokens_per_page == 16
    pages = torch.zeros(5, fmt.page_bytes, dtype=torch.uint8)
    for name, sign in (("k_low", -1), ("k_high", 1)):
        region(pages, fmt, name)[:] = (sign * torch.rand(5, head_dim, generator=generator)).to(dtype)
    page = torch.tensor([0] * 16 + [1] * 9 + [2, 3])
    slot = torch.tensor([*range(16), *range(3, 12), 7, 0])
    mixed = torch.randperm(len(page), generator=generator)
    return pages, fmt, page[mixed], slot[mixed], torch.randn(len(page), head_dim, generator=generator)


def test_a_bound_that_is_no_number_stays_none():
    """Of a key among others, and of before; a page that begins anew forgets it. A NaN may have other bits."""
    pages, fmt, page, slot, k = keys_in_pages(64, torch.float16, torch.Generator().manual_seed(2))
    k[(page == 1) & (slot == 5), 3] = float("nan")
    region(pages, fmt, "k_high")[1, 2] = region(pages, fmt, "k_low")[0, 4] = float("nan")
    want, got = pages.clone(), pages.clone().to(DEVICE)
    Backend().widen_bounds(want, fmt, page, slot, k, distinct=False)
    Gpu().widen_bounds(got, fmt, page.to(DEVICE), slot.to(DEVICE), k.to(DEVICE), distinct=False)
    low, high = (region(got.cpu(), fmt, name) for name in ("k_low", "k_high"))
    for name, found in (("k_low", low), ("k_high", high)):
        torch.testing.assert_close(found, region(want, fmt, name), rtol=0, atol=0, equal_nan=True)
    assert low[:4].isnan().nonzero().tolist() == [[1, 3]]
    assert high[:4].isnan().nonzero().tolist() == [[1, 2], [1, 3]]
