"""Pages of lists of different lengths: what is cleared, counted and found is a list's own."""

import pytest
import torch

from kvbench.cache.async_counts import Rows
from kvbench.cache.pages import Pages
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.format import PageFormat, SlotFormat

ROWS, LAYERS, HEADS = 2, 2, 2
LISTS = ROWS * LAYERS * HEADS
COUNTS = [8, 17, 0, 1, 16, 9, 24, 8]  # in pages of 8


@pytest.fixture
def pages() -> Pages:
    """Lists of 0 to 24 slots, whose scores are 1 and whose positions count on from one list to the next."""
    slot = SlotFormat(head_dim=8, k_bits=8, v_bits=8, dtype=torch.float16, track=("score", "pos"))
    found = Pages(
        (PageFormat(slot, 8 * slot.quantum_bytes // slot.token_quantum),),
        (ROWS, LAYERS, HEADS),
        max_slots=24,
        backend=get_backend("torch"),
        device=torch.device("cpu"),
    )
    assert found.formats[0].tokens_per_page == 8
    lists, counts = torch.arange(LISTS), torch.tensor(COUNTS)
    found.table.reserve(lists, 0, counts)
    owner = lists.repeat_interleave(counts)
    ordinal = torch.cat([torch.arange(count) for count in COUNTS])
    page, slots = found.table.lookup(owner, 0, ordinal)
    number = torch.arange(len(owner))
    vectors = number[:, None].expand(-1, 8).float()
    found.put(0, page, slots, vectors, -vectors, score=torch.ones(len(owner)), pos=number)
    return found


def scores(pages: Pages) -> list[list[float]]:
    """The scores of every list, in slot order."""
    found = []
    for number, count in enumerate(COUNTS):
        page, slot = pages.table.lookup(torch.full((count,), number), 0, torch.arange(count))
        found.append(pages.field(0, "score")[page, slot].tolist())
    return found


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("chosen", [[0], [1, 0], [2, 6], [4, 6, 3], [2]])
def test_scores_are_cleared_in_the_lists_that_are_named(pages, chosen, on_device):
    """All their slots and nobody else's, although shorter lists are described with as many pages as the longest, or
    with more, as on a device."""
    pages.on_device = on_device
    pages.clear_scores(pages.tier(0, torch.tensor(chosen), width=pages.table.max_pages if on_device else None))
    assert scores(pages) == [[float(number not in chosen)] * count for number, count in enumerate(COUNTS)]


@pytest.mark.parametrize(("slots", "want"), [([0, 0], 0), ([8, 3], 1), ([9, 16], 2), ([24, 1], 3), ([25, 90], 3)])
def test_the_host_knows_how_wide_a_step_is(pages, slots, want):
    """On a device: pages of the longest list that it was told of, at most a table's; it asks where it was not told."""
    assert pages.width([0, 1], 0) is None
    pages.on_device = True
    pages.host.learner(Rows(torch.tensor([0, 1]), (0, 1)))(slots)
    assert pages.table.max_pages >= 3 and pages.width([0, 1], 0) == min(-(-max(slots) // 8), pages.table.max_pages)
    assert pages.width([0, 1], 0) == want or max(slots) > 24
    assert pages.width([0, 7], 0) is None and pages.width([], 0) is None


def test_lists_and_pages_are_counted(pages):
    """Lists by row, layer and head; pages per list, the last one perhaps part-filled."""
    assert pages.lists_of(torch.tensor([1, 0])).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert pages.layer_lists(torch.tensor([1, 0]), 1).tolist() == [[6, 7], [2, 3]]
    used = [-(-count // 8) for count in COUNTS]
    assert pages.num_pages(torch.tensor([1, 0])).tolist() == [sum(used[4:]), sum(used[:4])]
    lists = torch.arange(LISTS).view(ROWS, LAYERS, HEADS)
    assert pages.widths(lists) == [[3], [3]] and pages.widths(lists[:1]) == [[3], [1]]
    assert pages.tier(0, lists[0, 0]).ids.shape == (2, 3) and pages.tier(0, lists[:0]).ids.shape[-1] == 0
    assert pages.held(0, lists[1]).tolist() == [[16, 9], [24, 8]]
    assert (
        pages.allocated_bytes == pages.pool.allocated_bytes + pages.table.allocated_bytes > pages.pool.allocated_bytes
    )
