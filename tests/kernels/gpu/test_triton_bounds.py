"""The bounds of pages by the Triton kernel: against loops over channels, and what is chosen by them."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from triton_helpers import DEVICE, poisoned_memory, random_queries  # noqa: F401

from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.bounds import page_bounds
from kvbench.kernels.operands import TierPages
from kvbench.kernels.reference.attention import choose_pages
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
    there = moved(pages, tier)
    got = page_bounds(q.to(DEVICE), *there, rule).cpu()
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
    want = choose_pages(q, pages, tier, count, 7, "max")
    backend = Gpu()
    got = backend.choose_pages(q.to(DEVICE), *moved(pages, tier), count.to(DEVICE), 7, "max")
    assert torch.equal(got.num_k.cpu(), want.num_k) and got.ids.shape == (2, 2, 7)
    live = torch.arange(7) * 16 < want.num_k[..., None]
    assert torch.equal(got.ids.cpu()[live], want.ids[live])
    assert backend.fallbacks == set()
