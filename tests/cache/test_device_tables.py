"""Stores whose pages and tables lie on a device against stores in main memory: the same tokens in the same bytes."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from selection import few
from store_helpers import make_store

from kvbench.cache.layout import DeviceSpan
from kvbench.cache.store import CompressedStore, PoolExhausted
from kvbench.runs.choices import make_method

DIM, HEADS, GROUP = 32, 2, 2
# Appends; overwrites, and adds to every score, or replaces them; turns keys; demotes; flushes rings; evicts in bulk;
# has several formats.
METHODS = (
    "full",
    "h2o budget=12",
    "tova budget=12",
    "streaming_llm sinks=2 budget=12",
    "diffkv window=8",
    "kivi residual_tokens=8 group=8",
    "kv_compress budget=16 block=8 continual=true",
    "int4 tiers_by_layer=fp16",  # whose layers differ, and then heads
    "int4 tiers_by_layer=fp16/int4",
    "kivi residual_tokens=8 group=8 tiers_by_layer=k4v4",
    "qaq key_error=100.0",  # four tiers
    "think window=4",  # keys of fewer channels, and an order of channels for each list
    "scissorhands budget=12 recent=4",  # counts what probabilities are, of all layers at once
    "kvquant_style group=8",  # takes the position off keys that leave a ring
    "quest page_tokens=8 read_budget=8 min_pages=1 dense_layers=0",  # reads some pages, by bounds of their keys
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what empty slots hold


class Twins:
    """One store per backend; both get the same tokens, and after each call they hold the same. With two layers, the
    device's store has each in a place of its own."""

    def __init__(
        self, method: str, pages: int | None = None, page_bytes: int | str = "auto", num_layers: int = 1
    ) -> None:
        self.layers = range(num_layers)
        places = tuple(DeviceSpan(torch.device("cpu"), 1) for _ in self.layers)
        shape = {"num_layers": num_layers, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
        shape |= {"rows": 3, "max_tokens": 24, "new_tokens": 16, "inv_freq": torch.ones(DIM // 2)}

        def made(backend: str, budget_bytes: int | None) -> CompressedStore:
            own = places if backend == "triton" and num_layers > 1 else ()
            options = {"budget_bytes": budget_bytes, "page_bytes": page_bytes, "device_spans": own}
            return make_store(make_method(method), **shape, **options, backend=backend)

        budget = None if pages is None else pages * made("torch", None).pages.pool.page_bytes
        self.stores = [made(backend, budget) for backend in ("torch", "triton")]
        self.make = torch.Generator().manual_seed(4)

    def random(self, *shape: int) -> torch.Tensor:
        """Random vectors."""
        return torch.randn(*shape, DIM, generator=self.make)

    def read(self, length: int) -> int:
        """Reads a prompt into a row of both."""
        given = [[self.random(n, length) for n in (HEADS * GROUP, HEADS, HEADS)] for _ in self.layers]
        rows = set()
        for store in self.stores:
            rows.add(row := store.open_row())
            for layer in self.layers:
                store.prefill_layer(row, layer, *given[layer], 0.2)
        (row,) = rows
        return row

    def step(self, rows: list[int]) -> None:
        """One token for each of the rows."""
        given = [[self.random(len(rows), n) for n in (HEADS * GROUP, HEADS, HEADS)] for _ in self.layers]
        outs = []
        for store in self.stores:
            store.begin_step(rows)
            outs.append(torch.stack([store.attend(layer, *given[layer], 0.2) for layer in self.layers]))
            store.end_step()
        torch.testing.assert_close(*outs, rtol=0, atol=2e-5)

    def agree(self, rows: list[int]) -> None:
        """Bytes of every row, of what they share, and of the pool; averages and peaks over steps."""
        host, device = self.stores
        for row in rows:
            assert device.ledger.report(row) == host.ledger.report(row)
        assert device.ledger.shared_bytes == host.ledger.shared_bytes
        assert device.used_bytes == host.used_bytes
        for part in device.holding.parts:
            assert len(set(part.pages.pool.free_ids().tolist())) == part.pages.pool.num_free

    def each(self, act) -> list:
        """What a call gives on both."""
        return [act(store) for store in self.stores]


@pytest.mark.every(2)
@pytest.mark.parametrize("method", few(METHODS, *(METHODS[i] for i in (1, 3, 6, 14))))
def test_rows_hold_the_same_whoever_keeps_the_tables(method: str):
    """Prompts, steps, a fork that shares pages until they are written to, rows that end and come again."""
    twins = Twins(method)
    first = twins.read(21)
    twins.step([first])
    copies = twins.each(lambda store: store.fork_row(first))
    assert copies[0] == copies[1]
    assert twins.stores[1].ledger.shared_bytes > 0
    copy = copies[1]
    for _ in range(2):
        twins.step([copy, first])
    twins.agree([first, copy])
    twins.each(lambda store: store.close_row(first))
    twins.step([copy])
    again = twins.read(5)
    twins.step([again, copy])
    twins.agree([again, copy])
    twins.each(lambda store: [store.close_row(row) for row in (again, copy)])
    assert [store.pages.pool.num_used for store in twins.stores] == [0, 0]


# Its lists compete over the layers, and what is due follows from all of them; and layers of several formats.
PLACED = ("kv_compress budget=20 block=8 continual=true", "int4 tiers_by_layer=fp16,int4")


@pytest.mark.parametrize(("method", "steps"), few([(PLACED[0], 3), (PLACED[0], 10), (PLACED[1], 10)], (PLACED[0], 3)))
def test_two_places_on_a_device_hold_what_one_does(method: str, steps: int):
    """Each place keeps tables of its own layer, and is told what one plan for both of them says."""
    twins = Twins(method, num_layers=2)
    rows = [twins.read(21), twins.read(12)]
    device = twins.stores[1]
    assert [part.pages.shape[1] for part in device.holding.parts] == [1, 1]
    for _ in range(steps):
        twins.step(rows)
    twins.agree(rows)
    twins.each(lambda store: [store.close_row(row) for row in rows])
    assert [part.pages.pool.num_used for part in device.holding.parts] == [0, 0]


# Pages of 16 tokens each.
FULL_STORES = [("full", 2048), ("kivi residual_tokens=8 group=8", 768)]


@pytest.mark.parametrize(("method", "page_bytes"), few(FULL_STORES, FULL_STORES[0]))
def test_a_step_that_finds_no_page_is_refused_before_it_begins(method: str, page_bytes: int):
    """With few pages left the host asks the device first; both stores end at the same token and go on once there is
    room."""
    twins = Twins(method, pages=9, page_bytes=page_bytes)
    rows = [twins.read(22), twins.read(24)]
    steps = 0
    while steps < 40:
        ended = twins.each(lambda store: _refused(store, rows))
        assert ended[0] == ended[1]
        if ended[0]:
            break
        twins.step(rows)
        steps += 1
    assert 0 < steps < 40
    twins.agree(rows)
    twins.each(lambda store: store.close_row(rows[0]))
    twins.step(rows[1:])
    twins.agree(rows[1:])


def _refused(store: CompressedStore, rows: list[int]) -> bool:
    """Whether a step cannot begin; one that could is begun anew by the caller."""
    held = store.pages.table.num_slots.clone()
    try:
        store.begin_step(rows)
    except PoolExhausted:
        assert torch.equal(store.pages.table.num_slots, held)
        return True
    for tier, before in enumerate(held):
        store.pages.table.truncate(torch.arange(len(before)), tier, before.long())
    if store.pages.table.num_lists and (ring := getattr(store.holding, "ring", None)) is not None:
        ring.num_tokens[store.pages.lists_of(torch.tensor(rows))] -= 1
    return False
