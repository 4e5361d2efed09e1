"""The page manager on the device against the pool and tables of the reference, over random histories."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from page_helpers import PAGE_BYTES, tier_format
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu import table as device_table
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.table import PageTable

TRACK = ("score", "pos")


class Twins:
    """The reference and the device's manager, given the same calls; after each, all their state is compared."""

    def __init__(self, tokens: tuple[int, ...], num_lists: int, max_pages: int, num_pages: int, page_bytes: int = 32):
        self.pool = PagePool(page_bytes, num_pages, growable=False)
        self.table = PageTable(self.pool, tokens, num_lists, 1, 1, max_pages)
        pages, self.device = Gpu().tables(page_bytes, num_pages, tokens, (num_lists, 1, 1), max_pages, DEVICE)
        self.pool.pages.copy_(torch.randint(256, self.pool.pages.shape, dtype=torch.uint8))
        pages.pages.copy_(self.pool.pages)

    def reserve(self, lists: list[int], tier: int, counts: list[int]) -> str:
        """Both reserve; returns how it ended."""
        call = torch.tensor(lists), tier, torch.tensor(counts)
        first = self.device.reserve(call[0].to(DEVICE), tier, call[2].to(DEVICE), at_most=0).tolist()
        try:
            want = self.table.reserve(*call).tolist()
        except (PoolExhausted, ValueError) as error:
            kind, words = type(error), "were free of" if isinstance(error, PoolExhausted) else "page-table entries"
            with pytest.raises(kind, match=words):
                self.device.pool.check()
            assert first == [-1] * len(lists)
            self.agree()
            return kind.__name__
        self.device.pool.check()
        assert first == want
        self.agree()
        return "taken"

    def truncate(self, lists: list[int], tier: int, counts: list[int]) -> None:
        """Both truncate."""
        call = torch.tensor(lists), tier, torch.tensor(counts)
        self.table.truncate(*call)
        self.device.truncate(call[0].to(DEVICE), tier, call[2].to(DEVICE))
        self.device.pool.check()
        self.agree()

    def agree(self) -> None:
        """Free pages in order, counters, slot counts and every page that a list holds."""
        assert self.device.pool.free_ids().tolist() == self.pool.free_ids().tolist()
        assert (self.device.pool.num_free, self.device.pool.num_used) == (self.pool.num_free, self.pool.num_used)
        assert torch.equal(self.device.num_slots.cpu(), self.table.num_slots)
        every = torch.arange(self.table.num_lists)
        for tier in range(self.table.num_tiers):
            pages = self.table.num_pages(tier)
            width = int(pages.max())
            held = torch.arange(width) < pages[:, None]
            mine = self.device.page_ids(every.to(DEVICE), tier, width).cpu()
            assert torch.equal(mine[held], self.table.page_ids(every, tier, width)[held])


@pytest.mark.every(2)
@pytest.mark.parametrize("tokens", [(8,), (8, 16), (16, 8, 24)])
def test_random_histories_keep_the_reference_s_state(tokens: tuple, monkeypatch: pytest.MonkeyPatch):
    """Takes and returns on random lists, past the end of the free list, with refusals that change nothing."""
    monkeypatch.setattr(device_table, "BLOCK", 4)  # several blocks of lists, so that prefix sums cross them
    twins, draw, seen = Twins(tokens, 11, 6, 26), random.Random(len(tokens)), []
    for _ in range(28):
        tier = draw.randrange(len(tokens))
        lists = draw.sample(range(11), draw.choice([1, 5, 11]))
        if draw.random() < 0.6:
            seen.append(twins.reserve(lists, tier, [draw.randint(0, 2 * tokens[tier]) for _ in lists]))
        else:
            held = twins.table.num_slots[tier, lists].tolist()
            twins.truncate(lists, tier, [draw.choice([0, draw.randint(0, n)]) for n in held])
    assert {"taken", "PoolExhausted"} <= set(seen)
    assert twins.pool.end > twins.pool.num_pages  # the circular list has come around
    assert len(tokens) == 1 or "ValueError" in seen or twins.reserve([0], 0, [7 * tokens[0]]) == "ValueError"


def test_growing_by_truncation_is_noted_and_changes_nothing():
    """The note stays until it is read, whatever succeeds in between."""
    twins = Twins((8,), 3, 4, 9)
    twins.reserve([0, 1], 0, [9, 3])
    twins.device.truncate(torch.tensor([0, 1], device=DEVICE), 0, torch.tensor([2, 4], device=DEVICE))
    twins.agree()
    twins.device.truncate(torch.tensor([2], device=DEVICE), 0, torch.tensor([0], device=DEVICE))
    with pytest.raises(AssertionError, match="truncate would have grown a list"):
        twins.device.pool.check()
    twins.device.pool.check()


@pytest.mark.parametrize(("tier", "block"), [(0, 1024), (1, 16)])
def test_compaction_moves_the_same_slots_and_frees_the_same_pages(tier: int, block: int, monkeypatch):
    """Random evictions, none, all, and a mask that is narrower than a list; in one block of slots and in several."""
    monkeypatch.setattr(device_table, "power_of_two", lambda n, least=1: min(block, parts.power_of_two(n, least)))
    formats = [tier_format(bits, 64, track=TRACK) for bits in ("8,4", "4,2")]
    size = formats[tier].tokens_per_page
    twins = Twins(tuple(f.tokens_per_page for f in formats), 5, 4, 24, PAGE_BYTES)
    twins.reserve([0, 1, 2, 3, 4], 1 - tier, [3, 0, 1, 2, 0])
    counts = [size + 9, 0, size, 7, 2 * size]
    twins.reserve([4, 2, 0, 1, 3], tier, [counts[i] for i in (4, 2, 0, 1, 3)])
    lists, make = torch.tensor([4, 0, 3, 2, 1]), torch.Generator().manual_seed(7)
    keep = torch.rand(5, 2 * size - 3, generator=make) < 0.4
    keep[2], keep[3] = True, False
    owner, source, target, count = twins.table.plan_compaction(lists, tier, keep)
    where = [twins.table.lookup(lists[owner], tier, x) for x in (source, target)]
    assert owner.numel() > 10
    REFERENCE.move_slots(twins.pool.pages, formats[tier], *where[0], *where[1])
    twins.table.truncate(lists, tier, count)
    twins.device.compact(lists.to(DEVICE), tier, keep.to(DEVICE), formats[tier])
    twins.agree()
    assert torch.equal(twins.device.pool.pages.cpu(), twins.pool.pages)


def test_lookups_name_the_reference_s_pages_and_pass_over_refused_slots():
    """Both tiers of a row; slot numbers below 0 have no page."""
    twins = Twins((8, 16), 4, 5, 20)
    twins.reserve([2, 0], 0, [20, 3])
    twins.reserve([2, 1], 1, [17, 30])
    lists, slot = torch.tensor([2, 2, 1]), torch.tensor([9, 16, 29])
    for tier in (0, 1):
        want = twins.table.lookup(lists, tier, slot)
        got = twins.device.lookup(lists.to(DEVICE), tier, slot.to(DEVICE))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    page, _ = twins.device.lookup(lists.to(DEVICE), 0, torch.tensor([-1, 3, -1], device=DEVICE))
    assert page.tolist()[::2] == [-1, -1] and page[1] >= 0


def test_what_cannot_be_is_refused():
    """Slots with shared scales do not move alone; more lists than a call takes."""
    _, device = Gpu().tables(PAGE_BYTES, 2, (32,), (1, 1, 1), 2, DEVICE)
    with pytest.raises(ValueError, match="cannot move one by one; evict before quantising"):
        device.compact(
            torch.tensor([0], device=DEVICE),
            0,
            torch.ones(1, 3, dtype=torch.bool, device=DEVICE),
            tier_format("2,2", 64, k_channel_group=32),
        )
    with pytest.raises(ValueError, match="3000000 lists are more than the 2097152 that one call takes"):
        Gpu().tables(32, 1, (8,), (3_000_000, 1, 1), 1, DEVICE)
