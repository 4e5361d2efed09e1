"""Memory that pages are kept in."""

from pathlib import Path

import pytest
import torch

from kvbench.kernels import memory
from kvbench.kernels.pool import PagePool

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address is in no mapping")


def test_empty_has_the_asked_shape_and_type():
    """Below and above the size from which huge pages matter."""
    for shape in ((3, 5), (memory.SMALLEST // 4 + 7,)):
        made = memory.empty(*shape, dtype=torch.float32)
        assert made.shape == shape and made.dtype == torch.float32
        made.fill_(2.5)
        assert float(made.sum()) == 2.5 * made.numel()


@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="no huge pages on demand here",
)
def test_a_large_pool_asks_for_huge_pages_also_after_it_grew():
    """The kernel's flag `hg` is on the middle of the pages; a small tensor's mapping need not have it."""
    pool = PagePool(4096, 4096)
    middle = pool.pages[2048].data_ptr()
    assert "hg" in flags_at(middle)
    pool.allocate(torch.tensor([4097]))
    assert pool.num_pages > 4096
    assert "hg" in flags_at(pool.pages[pool.num_pages // 2].data_ptr())
