"""A store without room says so in numbers and leaves everything as it was."""

from dataclasses import dataclass

import pytest
import torch
from refusals import refused
from store_helpers import make_store, read_random, step_random

from kvbench.cache import buffered
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore, PoolExhausted
from kvbench.kernels import memory
from kvbench.policy import DecodePlan, DecodeView, Policy, PrefillPlan, PrefillView, Residual, ScoreSpec, Tier

DIM, LAYERS, HEADS = 16, 2, 2
PAGE = 320  # 8 slots of k8v4 with score and position, 8 of k4v2


@dataclass(kw_only=True)
class TwoTiers(Policy):
    """All prompt tokens high but every third; a step may displace slot 0 of one list per head into the low tier."""

    displace: tuple = ()
    acts_in_decode = True

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """High and low."""
        return Tier(k_bits=8, v_bits=4), Tier(k_bits=4, v_bits=2)

    @property
    def score(self) -> ScoreSpec:
        """Scores and positions."""
        return ScoreSpec(decode_update=True, track=("score", "pos"))

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Every third token low."""
        tier_of = view.filled(0)
        tier_of[..., ::3] = 1
        return PrefillPlan(tier_of=tier_of)

    def plan_decode(self, view: DecodeView) -> DecodePlan:
        """The lists in `displace` demote slot 0, the others append."""
        slot, to = torch.full(view.shape, -1), torch.full(view.shape, -1)
        for layer, head in self.displace:
            slot[:, layer, head], to[:, layer, head] = 0, 1
        return DecodePlan(slot=slot, demote_to=to)


@dataclass(kw_only=True)
class Buffered(Policy):
    """Everything through a ring of 8."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Channel keys in groups of 8."""
        return (Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=8),)

    @property
    def residual(self) -> Residual:
        """KIVI's."""
        return Residual(num_tokens=8)


def store_of(policy: Policy, pages: int | None, rows: int = 2, max_new_tokens: int = 64, **options) -> CompressedStore:
    """A store of 2 layers x 2 heads, with a fixed number of pages unless `pages` is None."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
    limit = {} if pages is None else {"budget_bytes": pages * PAGE + 7}
    sizes = {"rows": rows, "max_tokens": 32, "new_tokens": max_new_tokens, "page_bytes": PAGE}
    return make_store(policy, **shape, **sizes, **limit, **options)


def fill(store: CompressedStore, length: int, seed: int = 0) -> int:
    """Prefills one row."""
    return read_random(store, length, torch.Generator().manual_seed(seed))


def step(store: CompressedStore, rows: list[int], seed: int = 0) -> None:
    """One decode step."""
    step_random(store, rows, torch.Generator().manual_seed(seed))


def state(store: CompressedStore) -> dict:
    """All that may not change: counters, the pages of every list with their bytes, free pages, rings, meters."""
    table, pool = store.pages.table, store.pages.pool
    lists, found = torch.arange(table.num_lists), {}
    for tier in range(table.num_tiers):
        counts = table.num_pages(tier)
        ids = table.page_ids(lists, tier, int(counts.max()))
        found[f"ids {tier}"] = [row[:n].tolist() for row, n in zip(ids, counts.tolist(), strict=True)]
        found[f"bytes {tier}"] = [pool.pages[row[:n]].tolist() for row, n in zip(ids, counts.tolist(), strict=True)]
    found["free"] = sorted(pool.free_ids().tolist())
    found["pool"] = (pool.num_pages, pool.num_free, pool.num_used, pool.allocated_bytes)
    for name in ("tokens_seen", "prompt_tokens"):
        found[name] = getattr(store.counters, name).tolist()
    found["slots"] = table.num_slots.tolist()
    found["meters"] = [vars(m).copy() for m in store.ledger.meters]
    found["ledgers"] = [store.ledger.itemise(row) for row in range(2)]
    if isinstance(store.holding, buffered.Buffered):
        ring = store.holding.ring
        found["ring"] = [t.tolist() for t in (ring.k, ring.v, ring.num_k, ring.num_v, ring.num_tokens)]
    return found


def fixed_store(share: float, free_bytes: int, monkeypatch: pytest.MonkeyPatch, **options) -> CompressedStore:
    """A store on a device that says how much memory it has left."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free_bytes)
    return store_of(TwoTiers(), None, memory_share=share, **options)


def test_on_a_gpu_the_pool_is_made_once_from_what_is_free(monkeypatch):
    """A share of the free memory, at most what all lists can need together; the pages never move, and a full pool says
    so. A budget in bytes goes before it, and in main memory the pool grows as ever."""
    store = fixed_store(0.5, 40 * PAGE + 1, monkeypatch)
    pool = store.pages.pool
    assert pool.num_pages == 20 and not pool.growable
    where = pool.pages.data_ptr()
    with pytest.raises(PoolExhausted, match="of 20 are free"):
        for seed in range(2):
            fill(store, 32, seed)
    assert pool.pages.data_ptr() == where and pool.num_pages == 20
    roomy = fixed_store(0.9, 2**40, monkeypatch)
    table = roomy.pages.table
    assert roomy.pages.pool.num_pages == table.num_lists * table.max_pages
    rows = [fill(roomy, 32, seed) for seed in range(2)]
    for seed in range(64):
        step(roomy, rows, seed)
    assert fixed_store(0.5, 1, monkeypatch).pages.pool.num_pages == 1
    assert fixed_store(0.5, 2**40, monkeypatch, budget_bytes=9 * PAGE).pages.pool.num_pages == 9
    monkeypatch.undo()
    assert memory.free_bytes("cpu") is None
    with refused("setting-value", "store.memory_share", "store.memory_share=0"):
        StoreOptions(memory_share=0)


def test_a_prompt_without_room_names_numbers_and_remedy():
    """The message says how many pages of what size are needed and free, and which settings help."""
    store = store_of(TwoTiers(), 7)
    message = (
        r"2 pages of 320 B are needed but 1 of 7 are free; "
        r"raise store.budget_bytes, lower batch_size, or choose a smaller method budget"
    )
    with pytest.raises(PoolExhausted, match=message):
        fill(store, 12)  # 2 lists a layer, a high and a low page each
    store.close_row(0)
    assert store.pages.pool.num_used == 0
    assert store.allocated_bytes == store.pages.pool.allocated_bytes + store.pages.table.allocated_bytes + 2 * 2 * 8


ALL = tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS))


def full_pages(free: int) -> tuple[CompressedStore, TwoTiers, int]:
    """A row whose lists hold one full high and one full low page each, and a store with `free` pages left."""
    policy = TwoTiers(displace=ALL)
    store = store_of(policy, 8 + free)
    row = fill(store, 12)  # 8 high and 4 low slots per list
    for seed in range(4):
        step(store, [row], seed)  # every list demotes one token
    assert store.pages.table.num_slots[:, :4].tolist() == [[8] * 4, [8] * 4]
    assert store.pages.pool.num_free == free
    return store, policy, row


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_a_step_without_room_changes_nothing(free: int):
    """Two lists append and two demote, each into a new page: the first or second reservation fails."""
    store, policy, row = full_pages(free)
    policy.displace = ((0, 0), (1, 1))
    before = state(store)
    for _ in range(3):
        with pytest.raises(PoolExhausted, match=rf"2 pages of 320 B are needed but {free % 2} of {8 + free} are free"):
            step(store, [row])
        assert state(store) == before
    if free == 3:  # nothing is spoilt: once there is room the next step goes through
        policy.displace = ALL
        store.pages.table.truncate(torch.tensor([3]), 1, torch.tensor([7]))
        step(store, [row])
        assert store.pages.table.num_slots[:, :4].tolist() == [[8] * 4, [9, 9, 9, 8]]


def test_a_step_with_just_enough_room_takes_all_of_it():
    """With four pages for four new pages the same step goes through."""
    store, policy, row = full_pages(4)
    policy.displace = ((0, 0), (1, 1))
    step(store, [row])
    assert store.pages.table.num_slots[:, :4].tolist() == [[8, 9, 9, 8], [9, 8, 8, 9]]
    assert store.pages.pool.num_free == 0


def test_a_full_table_row_undoes_the_step_too():
    """A sequence longer than the store was sized for is refused as a user's mistake, with nothing changed."""
    policy = TwoTiers()
    store = store_of(policy, 64, max_new_tokens=1)  # 32 + 1 tokens in pages of 8, and a page per tier: 7 entries
    row = fill(store, 32)
    policy.displace = ()
    for seed in range(19):
        step(store, [row], seed)
    assert store.pages.table.num_slots[:, 0].tolist() == [40, 11]
    policy.displace = ((0, 0), (0, 1), (1, 0))
    before = state(store)
    with pytest.raises(ValueError, match="a list needs 8 page-table entries but max_pages=7; the sequence is longer"):
        step(store, [row])
    assert state(store) == before


def test_a_ring_without_room_for_its_flush_changes_nothing():
    """The step in which the ring would leave needs pages; counters and ring contents stay until it gets them."""
    store = store_of(Buffered(), 4)
    first = fill(store, 9)  # one page per list; the ring holds one key, eight values
    second = store.open_row()
    assert store.pages.pool.num_free == 0
    assert store.pages.formats[0].tokens_per_page == 16
    for seed in range(14):  # 23 tokens: 16 keys in the page and 7 in the ring, which is full with the next
        step(store, [first], seed)
    before = state(store)
    with pytest.raises(PoolExhausted, match="4 pages of 320 B are needed but 0 of 4 are free"):
        step(store, [first])
    assert state(store) == before
    store.close_row(second)
    store.close_row(first)
    assert store.pages.pool.num_free == 4


@pytest.mark.parametrize("pages", [4, 7, 8])
def test_a_ring_that_leaves_into_shared_pages_takes_pages_of_its_own(pages):
    """The step in which the ring leaves writes behind the tokens that a fork shares: with four free pages to copy
    them, the other row's stay as they were; without, nothing changes at all."""
    store = store_of(Buffered(), pages)
    row = fill(store, 9)
    for seed in range(6):  # seven keys are in the ring: it is full with the next
        step(store, [row], seed)
    copy = store.fork_row(row)
    assert store.pages.pool.num_free == pages - 4
    before = state(store)
    if pages < 8:
        with pytest.raises(PoolExhausted, match=f"4 pages of 320 B are needed but {pages - 4} of {pages} are free"):
            step(store, [copy])
        assert state(store) == before
        return
    step(store, [copy])
    after, own = state(store), slice(0, LAYERS * HEADS)
    for name in ("ids 0", "bytes 0"):
        assert after[name][own] == before[name][own] and after[name] != before[name]
    assert store.pages.pool.num_free == 0 and store.pages.pool.others is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_bytes": 8}, ("setting-value", "store.page_bytes", "store.page_bytes=8", "16")),
        ({"page_bytes": "big"}, ("setting-value", "store.page_bytes", "store.page_bytes='big'", "16")),
        ({"budget_bytes": 0}, ("setting-value", "store.budget_bytes", "store.budget_bytes=0")),
        ({"track": ("age",)}, ("setting-value", "store.track", "store.track=('age'")),
    ],
)
def test_bad_options_are_refused(options: dict, message: tuple[str, ...]):
    """Every option names its value and its rule."""
    with refused(*message):
        StoreOptions(**options)
