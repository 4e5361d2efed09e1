"""What tables on a device say, and the smallest numbers of lists found by a kernel, against plain loops."""

import itertools
import math

import pytest
import torch
from selection import in_turn

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from page_helpers import PAGE_BYTES, tier_format
from triton_helpers import DEVICE, poisoned_memory  # noqa: F401

from kvbench.kernels.dispatch import gpu_backend
from kvbench.kernels.operands import SlotSearch

SHAPE = (4, 2, 3)  # rows, layers, heads
ROWS, SEEN, FLOOR = [3, 1], [400, 300], [11, 0]
TRACK = ("score", "pos")


@pytest.fixture(scope="module")
def filled():
    """Tables of two tiers with lists of 0 to 260 slots, and by (tier, list) their tracked (score, position)."""
    make, backend = torch.Generator().manual_seed(3), gpu_backend(DEVICE)
    formats = [tier_format(bits, 64, track=TRACK) for bits in ("8,4", "4,2")]
    sizes = tuple(fmt.tokens_per_page for fmt in formats)
    pool, table = backend.tables(PAGE_BYTES, 200, sizes, SHAPE, 12, DEVICE)
    num_lists = math.prod(SHAPE)
    lists = torch.arange(num_lists, device=DEVICE)
    fields = {}
    for tier, fmt in enumerate(formats):
        counts = [0, 1, 260, 5] if tier == 0 else [3, 0, 80, 261]
        counts = [counts[i % 4] // (1 + i % 3) for i in range(num_lists)]
        table.reserve(lists, tier, torch.tensor(counts, device=DEVICE))
        for i, count in enumerate(counts):
            score = torch.randint(0, 4, (count,), generator=make).float()  # with ties
            pos = torch.randperm(300, generator=make)[:count]
            fields[tier, i] = list(zip(score.tolist(), pos.tolist(), strict=True))
            slot = torch.arange(count, device=DEVICE)
            page, inside = table.lookup(torch.full_like(slot, i), tier, slot)
            backend.write_tracked(pool.pages, fmt, page, inside, score.to(DEVICE), pos.to(DEVICE))
    return formats, table, fields


def slow_extreme(fields, tier, *, by, over_layer, floor, before, exact, first) -> list:
    """The same by loops over rows, lists and slots: (value, slot, position) per list."""
    found = []
    for (index, row), layer, head in itertools.product(enumerate(ROWS), range(SHAPE[1]), range(SHAPE[2])):
        base = (row * SHAPE[1] + layer) * SHAPE[2]

        def value(i, slot, index=index):
            score, pos = fields[tier, i][slot] if slot < len(fields[tier, i]) else (0.0, 0)
            if by == "pos":
                return float(pos)
            if by == "score":
                return score
            origin = pos if floor is None else max(pos, floor[index])
            return score / max(1, SEEN[index] - origin)

        best = (math.inf, -1, -1)
        for slot, (_, pos) in enumerate(fields[tier, base + head]):
            heads = range(SHAPE[2]) if over_layer else [head]
            mean = float(torch.tensor([value(base + h, slot) for h in heads]).mean())
            low = first[index] if isinstance(first, list) else first
            if pos < low or (before and pos >= before[index]) or (exact and pos != exact[index]):
                continue
            if best[1] < 0 or (mean, pos) < (best[0], best[2]):
                best = (mean, slot, pos)
        found.append(best)
    return found


CASES = {
    "score": {"by": "score"},
    "pos": {"by": "pos", "first": 7},
    "mean": {"by": "mean"},
    "mean-floor": {"by": "mean", "floor": FLOOR, "before": [90, 200]},
    "found": {"by": "mean", "exact": [120, 31]},
    "first-per-row": {"by": "score", "first": [50, 0], "before": [60, 4]},
    "nothing": {"by": "score", "before": [0, 0]},
    "layer": {"by": "score", "over_layer": True, "before": [250, 100]},
}


@pytest.mark.parametrize(("name", "tier"), in_turn([*CASES], [0, 1]))
def test_the_smallest_slot_of_every_list_is_the_one_that_loops_find(filled, name: str, tier: int):
    """Both ends of the tables, empty lists, ties, every condition; the mean over heads too."""
    case = CASES[name]
    formats, table, fields = filled
    how = {"over_layer": False, "floor": None, "before": None, "exact": None, "first": 0} | case
    want = slow_extreme(fields, tier, **how)
    given = {key: torch.tensor(x, device=DEVICE) if isinstance(x, list) else x for key, x in how.items()}
    del given["over_layer"]
    rows, seen = torch.tensor(ROWS, device=DEVICE), torch.tensor(SEEN, device=DEVICE)
    value, slot, pos = table.find_extreme(
        rows, tier, formats[tier], SlotSearch(seen=seen, **given), over_layer=case.get("over_layer", False)
    )
    assert value.shape == (len(ROWS), *SHAPE[1:])
    assert slot.flatten().tolist() == [each[1] for each in want]
    assert pos.flatten().tolist() == [each[2] for each in want]
    torch.testing.assert_close(value.flatten().cpu(), torch.tensor([each[0] for each in want]), rtol=1e-6, atol=0)


def test_a_search_without_scores_is_refused(filled):
    """A format that tracks positions alone has nothing to compare by."""
    _, table, _ = filled
    rows = torch.tensor(ROWS, device=DEVICE)
    with pytest.raises(AssertionError, match="a search by score needs scores"):
        table.find_extreme(rows, 0, tier_format("8,4", 64, track=("pos",)), SlotSearch(by="score", seen=rows))


@pytest.mark.parametrize("extra", [0, 700])
@pytest.mark.parametrize("tier", [0, 1])
def test_what_slots_track_is_read_list_by_list(filled, tier: int, extra: int):
    """Both ends of the tables, empty lists, lists of several blocks of slots, and slots that no list holds."""
    formats, table, fields = filled
    per_row = SHAPE[1] * SHAPE[2]
    lists = [row * per_row + i for row in ROWS for i in range(per_row)]
    width = max(len(fields[tier, each]) for each in lists) + extra
    given = torch.tensor(lists, device=DEVICE)
    score, pos, there, held = table.tracked_slots(given, tier, formats[tier], width)
    for index, each in enumerate(lists):
        want = fields[tier, each]
        count = len(want)
        assert held[index] == count and there[index].tolist() == [True] * count + [False] * (width - count)
        assert score[index].tolist() == [float(torch.tensor(x)) for x, _ in want] + [0.0] * (width - count)
        assert pos[index].tolist() == [place for _, place in want] + [-1] * (width - count)


def test_rows_are_counted_as_their_lists_say(filled):
    """Pages of all tiers, and the longest list of each."""
    formats, table, fields = filled
    got = table.count_rows(torch.tensor(ROWS, device=DEVICE)).tolist()
    per_row = SHAPE[1] * SHAPE[2]
    for index, row in enumerate(ROWS):
        held = [[len(fields[t, row * per_row + i]) for i in range(per_row)] for t in range(2)]
        pages = sum(-(-n // formats[t].tokens_per_page) for t in range(2) for n in held[t])
        assert [line[index] for line in got] == [pages, max(held[0]), max(held[1])]


def test_slots_are_looked_up_where_the_entries_say(filled):
    """Tier 1 reads its entries from the right; slot numbers below 0 give page -1."""
    formats, table, _ = filled
    for tier, fmt in enumerate(formats):
        held = table.num_slots[tier].tolist()
        lists = [i for i, count in enumerate(held) if count] + [0]
        slot = [held[i] - 1 for i in lists[:-1]] + [-1]
        page, inside = table.lookup(torch.tensor(lists, device=DEVICE), tier, torch.tensor(slot, device=DEVICE))
        entries = table.entries.tolist()
        for i, at, got_page, got_slot in zip(lists, slot, page.tolist(), inside.tolist(), strict=True):
            column = at // fmt.tokens_per_page
            want = -1 if at < 0 else entries[i][table.max_pages - 1 - column if tier else column]
            assert got_page == want and (at < 0 or got_slot == at % fmt.tokens_per_page)
