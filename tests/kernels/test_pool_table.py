"""The page pool and the page tables against a plain model of lists and a queue, over long random histories."""

import random
from collections import deque
from itertools import chain

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracles.slow_store import two_pointer_moves
from store_helpers import golden

from kvbench.kernels.pool import PagePool, PoolExhausted
from kvbench.kernels.table import PageTable

OPERATIONS = 100
SEEDS = st.integers(0, 2**31)


class TableMachine(RuleBasedStateMachine):
    """Random operations on a table, mirrored by Python lists (page ids per list and tier) and a queue of free pages."""

    operations = 0
    exhausted = 0
    refused = 0
    wrapped = 0

    @initialize(
        tokens=st.sampled_from([(8,), (8, 16), (16, 8, 24), (1, 3, 2), (8, 16, 24, 8)]),
        max_pages=st.sampled_from([3, 3, 4, 6, 9]),  # tables that are soon full, most often
        num_pages=st.integers(1, 20),
        growable=st.booleans(),
    )
    def start(self, tokens: tuple, max_pages: int, num_pages: int, growable: bool) -> None:
        """A table of 2 rows, 2 layers and 3 heads."""
        self.tokens, self.max_pages = tokens, max_pages
        self.pool = PagePool(32, num_pages, growable=growable)
        self.table = PageTable(self.pool, tokens, 2, 2, 3, max_pages)
        self.free = deque(range(num_pages))
        self.count = {(n, t): 0 for n in range(12) for t in range(len(tokens))}
        self.owned = {key: [] for key in self.count}
        self.pool.pages[:] = 0

    def pages(self, count: int, tier: int) -> int:
        return -(-count // self.tokens[tier])

    @rule(size=st.integers(0, 6), seed=SEEDS)
    def reserve(self, size: int, seed: int) -> None:
        """Appends slots; too much of anything is refused and leaves all as it was."""
        draw = random.Random(seed)
        lists, tier = draw.sample(range(12), size), draw.randrange(len(self.tokens))
        counts = [draw.randint(0, 3 * self.tokens[tier]) for _ in lists]
        need = [
            self.pages(self.count[n, tier] + c, tier) - len(self.owned[n, tier])
            for n, c in zip(lists, counts, strict=True)
        ]
        other_tier = {0: 1, 1: 0, 2: 3, 3: 2}[tier]  # the other end of the same table
        other = [len(self.owned[n, other_tier]) if other_tier < len(self.tokens) else 0 for n in lists]
        full = any(
            len(self.owned[n, tier]) + k + o > self.max_pages for n, k, o in zip(lists, need, other, strict=True)
        )
        call = torch.tensor(lists, dtype=torch.int64), tier, torch.tensor(counts, dtype=torch.int64)
        TableMachine.operations += 1
        if full:
            with pytest.raises(ValueError, match=r"page-table entries but max_pages=\d+; the sequence is longer"):
                self.table.reserve(*call)
            TableMachine.refused += 1
            return
        if sum(need) > len(self.free):
            if not self.pool.growable:
                message = f"{sum(need)} pages of 32 B are needed but {len(self.free)} of {self.pool.num_pages} are free"
                with pytest.raises(PoolExhausted, match=message + "; raise store.budget_bytes"):
                    self.table.reserve(*call)
                TableMachine.exhausted += 1
                return
            old, want = self.pool.num_pages, sum(need) - len(self.free)
            self.pool.pages[:, 0] = torch.arange(old, dtype=torch.uint8)  # growth must carry contents along
            self.table.reserve(*call)
            assert self.pool.num_pages >= old + want
            assert self.pool.pages[:old, 0].tolist() == [i % 256 for i in range(old)]
            self.free.extend(range(old, self.pool.num_pages))
        else:
            first = self.table.reserve(*call)
            assert first.tolist() == [self.count[n, tier] for n in lists]
        for n, c, k in zip(lists, counts, need, strict=True):
            self.owned[n, tier] += [self.free.popleft() for _ in range(k)]
            self.count[n, tier] += c

    @rule(size=st.integers(0, 8), seed=SEEDS)
    def truncate(self, size: int, seed: int) -> None:
        """Drops slots from the end; growing that way is an error."""
        TableMachine.operations += 1
        draw = random.Random(seed)
        lists, tier = draw.sample(range(12), size), draw.randrange(len(self.tokens))
        counts = [draw.choice([0, draw.randint(0, self.count[n, tier])]) for n in lists]
        self._truncate(lists, tier, counts)
        if lists:
            one = torch.tensor(lists[:1])
            with pytest.raises(AssertionError, match="truncate would grow a list"):
                self.table.truncate(one, tier, torch.tensor([counts[0] + 1]))

    def _truncate(self, lists: list[int], tier: int, counts: list[int]) -> None:
        self.table.truncate(torch.tensor(lists, dtype=torch.int64), tier, torch.tensor(counts, dtype=torch.int64))
        for n, c in zip(lists, counts, strict=True):
            keep = self.pages(c, tier)
            self.free.extend(self.owned[n, tier][keep:])
            del self.owned[n, tier][keep:]
            self.count[n, tier] = c

    @rule(row=st.integers(0, 1), seed=SEEDS, share=st.sampled_from([0.1, 0.5, 0.9]))
    def compact(self, row: int, seed: int, share: float) -> None:
        """Plans the moves that close the gaps of a random eviction in a whole row, then frees the tail."""
        TableMachine.operations += 1
        lists, make = list(range(6 * row, 6 * row + 6)), torch.Generator().manual_seed(seed)
        for tier in range(len(self.tokens)):
            width = max(self.count[n, tier] for n in lists) + 2
            keep = torch.rand(6, width, generator=make) < share
            owner, source, target, count = self.table.plan_compaction(torch.tensor(lists), tier, keep)
            got = {n: [] for n in range(6)}
            for o, s, d in zip(owner.tolist(), source.tolist(), target.tolist(), strict=True):
                got[o].append((s, d))
            for i, n in enumerate(lists):
                kept = keep[i, : self.count[n, tier]].tolist()
                assert got[i] == two_pointer_moves(kept)
                assert int(count[i]) == sum(kept)
            self._truncate(lists, tier, count.tolist())

    @invariant()
    def agrees(self) -> None:
        """Counts, page ids, free pages in order, byte sums: all as the model says; no page has two owners."""
        if not hasattr(self, "table"):
            return
        pool, table = self.pool, self.table
        used = list(chain.from_iterable(self.owned.values()))
        assert pool.num_used == len(used)
        assert pool.num_free == len(self.free) == pool.num_pages - len(used)
        assert pool.free_ids().tolist() == list(self.free)
        assert sorted(used + list(self.free)) == list(range(pool.num_pages))
        assert sorted(table.used_page_ids().tolist()) == sorted(used)
        assert pool.end - pool.start == pool.num_free
        TableMachine.wrapped += pool.end > pool.num_pages
        assert pool.allocated_bytes == pool.num_pages * 36
        assert table.allocated_bytes == 12 * 4 * (
            self.max_pages * (2 if len(self.tokens) > 2 else 1) + len(self.tokens)
        )
        lists = torch.arange(12)
        for tier in range(len(self.tokens)):
            counts = [self.count[n, tier] for n in range(12)]
            assert table.num_slots[tier].tolist() == counts
            assert table.num_pages(tier).tolist() == [len(self.owned[n, tier]) for n in range(12)]
            width = max(len(self.owned[n, tier]) for n in range(12))
            ids = table.page_ids(lists, tier, width)
            assert all(ids[n, : len(self.owned[n, tier])].tolist() == self.owned[n, tier] for n in range(12))
            assert not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < pool.num_pages
            last = [n for n in range(12) if counts[n]]
            final = torch.tensor([counts[n] - 1 for n in last], dtype=torch.int64)
            page, slot = table.lookup(torch.tensor(last, dtype=torch.int64), tier, final)
            for n, p, s in zip(last, page.tolist(), slot.tolist(), strict=True):
                assert (p, s) == (self.owned[n, tier][-1], (counts[n] - 1) % self.tokens[tier])
        if len(self.tokens) > 1:
            assert all(len(self.owned[n, 0]) + len(self.owned[n, 1]) <= self.max_pages for n in range(12))


@pytest.mark.parametrize(("examples", "often"), [(15, 2), pytest.param(100, 100, marks=pytest.mark.exhaustive)])
def test_random_histories_agree_with_the_model(examples, often):
    """A hundred operations an example, with exhaustion, full tables, growth and wrap-around among them."""
    for name in ("operations", "exhausted", "refused", "wrapped"):
        setattr(TableMachine, name, 0)
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=120,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )
    assert TableMachine.operations >= OPERATIONS * examples
    assert min(TableMachine.exhausted, TableMachine.refused, TableMachine.wrapped) > often


def test_allocation_is_grouped_by_list_and_wraps_around():
    """One prefix sum hands pages to all lists in order, across the end of the circular list."""
    pool = PagePool(16, 6, growable=False)
    first, offsets = pool.allocate(torch.tensor([2, 0, 3]))
    assert (first.tolist(), offsets.tolist()) == ([0, 1, 2, 3, 4], [0, 2, 2])
    pool.release(torch.tensor([3, 0, 4]))
    again, offsets = pool.allocate(torch.tensor([1, 3]))
    assert (again.tolist(), offsets.tolist()) == ([5, 3, 0, 4], [0, 1])
    assert (pool.num_free, pool.start % 6, pool.end % 6) == (0, 3, 3)
    with pytest.raises(PoolExhausted, match="1 pages of 16 B are needed but 0 of 6 are free"):
        pool.allocate(torch.tensor([1]))
    assert pool.free_ids().tolist() == []
    pool.release(again)
    assert pool.free_ids().tolist() == [5, 3, 0, 4]


def test_returning_more_than_is_in_use_is_noticed():
    """A page freed twice raises once more pages come back than are out."""
    pool = PagePool(16, 4)
    ids, _ = pool.allocate(torch.tensor([2]))
    pool.release(ids)
    with pytest.raises(AssertionError, match="1 pages returned but only 0 are in use: a page was freed twice"):
        pool.release(ids[:1])


def test_growing_keeps_order_and_adds_at_least_half():
    """Old free pages are handed out before new ones; growth is by half of what exists, at least 64 pages."""
    pool = PagePool(16, 3)
    pool.allocate(torch.tensor([2]))
    ids, _ = pool.allocate(torch.tensor([3]))
    assert ids.tolist() == [2, 3, 4]
    assert pool.num_pages == 3 + 64
    pool.allocate(torch.tensor([pool.num_free]))
    pool.allocate(torch.tensor([1]))
    assert pool.num_pages == 67 + 64
    big = PagePool(16, 1000)
    big.allocate(torch.tensor([1001]))
    assert big.num_pages == 1500


def test_compaction_moves_are_golden():
    """KV-Compress's case: eviction of slots 1, 2, 3 of five moves slot 4 into slot 1."""
    case = golden("kvc")
    table = PageTable(PagePool(16, 8), (2,), 1, 1, 2, 4)
    table.reserve(torch.arange(2), 0, torch.tensor([5, 2]))
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, case["E2"]["evicted"][0]] = False
    owner, source, target, count = table.plan_compaction(torch.arange(2), 0, keep)
    assert [[s, t] for s, t in zip(source.tolist(), target.tolist(), strict=True)] == case["moves_E2_head0"]
    assert (owner.tolist(), count.tolist()) == ([0], [2, 2])


def test_a_million_operations_keep_every_page_accounted_for():
    """10^6 allocations and returns of 500 lists in batches: no page has two owners, none is lost, refusals change
    nothing."""
    make = torch.Generator().manual_seed(0)
    lists, pages, done, refused = 500, 4000, 0, 0
    pool = PagePool(16, pages, growable=False)
    owner = torch.full((pages,), -1)
    while done < 1_000_000:
        need = torch.randint(0, 5, (lists,), generator=make)
        if int(need.sum()) <= pool.num_free:
            ids, _ = pool.allocate(need)
            assert (owner[ids] == -1).all() and ids.unique().numel() == ids.numel() == int(need.sum())
            owner[ids] = torch.repeat_interleave(torch.arange(lists), need)
            done += lists
        else:
            before = pool.start, pool.end, pool.num_free
            with pytest.raises(PoolExhausted):
                pool.allocate(need)
            assert (pool.start, pool.end, pool.num_free) == before
            leaving = torch.rand(lists, generator=make) < 0.6
            ids = ((owner >= 0) & leaving[owner.clamp(min=0)]).nonzero()[:, 0]
            pool.release(ids[torch.randperm(len(ids), generator=make)])
            owner[ids] = -1
            done, refused = done + int(leaving.sum()), refused + 1
        free = pool.free_ids()
        assert free.numel() == free.unique().numel() == pool.num_free
        assert (owner[free] == -1).all() and int((owner == -1).sum()) == pool.num_free
    assert refused > 100 and pool.end > 100 * pages


def test_a_pool_grows_where_it_is():
    """Memory behind it is asked for at once and taken as it is written to: what pages hold is copied seldom."""
    pool, places = PagePool(4096, 64), set()
    for number in range(40):
        taken, _ = pool.allocate(torch.tensor([50]))
        pool.pages[taken] = number + 1
        places.add(pool.pages.data_ptr())
    assert pool.num_used == 2000 <= pool.num_pages == pool.allocated_bytes // (4096 + 4)
    assert len(places) <= 3
    assert pool.pages[:2000, 7].view(40, 50).eq(torch.arange(1, 41)[:, None]).all()


def test_a_pool_that_gets_no_memory_ahead_takes_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    """As under a limit of addresses."""
    own, asked = PagePool._make_pages, []

    def make(pool: PagePool, num_pages: int, device: torch.device) -> torch.Tensor:
        asked.append(num_pages)
        if num_pages > 200:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return own(pool, num_pages, device)

    monkeypatch.setattr(PagePool, "_make_pages", make)
    pool = PagePool(16, 64)
    pool.allocate(torch.tensor([100]))
    assert asked == [64, 8 * 128, 128]
    assert pool.num_pages == 128
    with pytest.raises(RuntimeError, match="allocate memory"):
        pool.allocate(torch.tensor([110]))
    assert (pool.num_pages, pool.num_used) == (128, 100)
