"""KVQuant's codes, outliers and sinks: what lies in the pages, what attention sees of it, and what is billed."""

from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np
import pytest
import store_helpers
import torch
from open_settings import kvquant_books
from refusals import refused
from store_helpers import make_store, plain_attention, step_at

from kvbench.cache.options import StoreOptions
from kvbench.cache.ranks import Ranks
from kvbench.cache.store import CompressedStore
from kvbench.errors import NotForModel
from kvbench.methods.kvquant import KVQuant

DIM, HEADS, GROUP, LAYERS, SCALE = 16, 2, 3, 2, 0.25
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM)
BOOKS = kvquant_books(HEADS, DIM, LAYERS)
CASES = [(2, 0, 0), (3, 1, 1), (4, 3, 2)]  # bits, sinks, outliers


rotated = partial(store_helpers.rotated, positions=0, inv_freq=INV_FREQ)


def inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of all layers before any rotation, with a few that lie far from the others."""
    make = torch.Generator().manual_seed(num_tokens)
    q = torch.randn(LAYERS, HEADS * GROUP, num_tokens, DIM, generator=make)
    k, v = torch.randn(2, LAYERS, HEADS, num_tokens, DIM, generator=make)
    k[..., 5, 3] *= 9
    v[..., 7, 2] *= 9
    return q, k, v


def store_of(policy: KVQuant, backend: str = "torch", rows: int = 1, heads: int = HEADS) -> CompressedStore:
    """An empty store."""
    shape = {"num_layers": LAYERS, "num_q_heads": heads * GROUP, "num_kv_heads": heads, "head_dim": DIM}
    room = {"rows": rows, "max_tokens": 80, "new_tokens": 40}
    return make_store(policy, **shape, **room, inv_freq=INV_FREQ, backend=backend)


def read(store: CompressedStore, length: int, q, k, v) -> int:
    """A row that has read a prompt."""
    row = store.open_row()
    for layer in range(LAYERS):
        own = rotated(q[layer, :, :length]), rotated(k[layer, :, :length]), v[layer, :, :length]
        store.prefill_layer(row, layer, *own, SCALE)
    return row


def step(store: CompressedStore, row: int, at: int, q, k, v) -> torch.Tensor:
    """Feeds the token at a position; the output fp32 [L, Hq, D]."""
    layers = [(rotated(own_q), rotated(own_k), own_v) for own_q, own_k, own_v in zip(q, k, v, strict=True)]
    return torch.stack(step_at(store, row, layers, at, SCALE))


def nearest(x: float, table: list[float]) -> float:
    """The level that lies nearest, by trying all."""
    return min(table, key=lambda level: abs(level - x))


def slow(policy: KVQuant, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys and values [L, H, n, D] are stored as, number by number, from the lines of the books alone."""
    bits, count = policy.bits, policy.outliers
    first = {2: 0, 3: 8, 4: 24}[bits]
    stored_k, stored_v = k.half().float(), v.half().float()
    for layer in range(LAYERS):
        line, size = BOOKS[layer], 2**bits
        k_table, v_table = line[first : first + size], line[first + size : first + 2 * size]
        for head in range(HEADS):
            for token in range(policy.sinks, k.shape[2]):
                own = head * DIM
                by = np.float16(line[56 + own : 56 + own + DIM]).astype(float)
                zero = np.float16(line[56 + (HEADS + head) * DIM :][:DIM]).astype(float)
                levels = (k[layer, head, token].double().numpy() - zero) / by
                codes = np.array([float(nearest(x, k_table)) for x in levels])
                worst = sorted(range(DIM), key=lambda d, a=levels, b=codes: -abs(a[d] - b[d]))[:count]
                codes[worst] += np.float16((levels - codes)[worst])
                stored_k[layer, head, token] = torch.from_numpy(codes * by + zero)
                value = v[layer, head, token].double().numpy()
                worst = sorted(range(DIM), key=lambda d, a=value: -abs(a[d]))[:count]
                rest = [value[d] for d in range(DIM) if d not in worst]
                scale, low = float(np.float16((max(rest) - min(rest)) / 255)), float(np.float16(min(rest)))
                codes = np.array([nearest((x - low) / scale, v_table) for x in value]) * scale + low
                codes[worst] += np.float16((value - codes)[worst])
                stored_v[layer, head, token] = torch.from_numpy(codes)
    return stored_k, stored_v


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("bits", "sinks", "outliers"), CASES)
@pytest.mark.parametrize("length", [1, 2, 21])
def test_attention_sees_what_the_books_make_of_keys_and_values(backend, bits, sinks, outliers, length):
    """Every step behind a prompt, also of one that is all sinks, equals plain attention over keys that a slow oracle
    coded and transformers rotated to their true positions, in both layers, by the reference and by C++."""
    policy, total = KVQuant(bits=bits, books=BOOKS, sinks=sinks, outliers=outliers), length + 12
    q, k, v = inputs(total)
    want_k, want_v = slow(policy, k, v)
    for at in range(min(length, sinks), length):  # a short prompt has fewer sinks than the method would keep
        assert not torch.equal(want_k[:, :, at], k[:, :, at].half().float())
    if length < sinks:
        want_k, want_v = slow(KVQuant(bits=bits, books=BOOKS, sinks=length, outliers=outliers), k, v)
    store = store_of(policy, backend)
    row = read(store, length, q, k, v)
    for at in range(length, total):
        out = step(store, row, at, q, k, v)
        for layer in range(LAYERS):
            keys, values = rotated(want_k[layer])[:, : at + 1], want_v[layer, :, : at + 1]
            expected = plain_attention(rotated(q[layer])[:, at], keys, values, SCALE)
            assert (out[layer] - expected).abs().max() < 2e-3
    assert store.pages.backend.fallbacks == set()


@pytest.mark.parametrize(("bits", "sinks", "outliers"), CASES)
def test_a_later_segment_is_coded_as_it_comes(bits, sinks, outliers):
    """A segment behind a prompt attends to what the oracle stored of the prompt, and the step after it to all."""
    policy = KVQuant(bits=bits, books=BOOKS, sinks=sinks, outliers=outliers)
    q, k, v = inputs(30)
    want_k, want_v = slow(policy, k, v)
    store = store_of(policy)
    row = read(store, 17, q, k, v)
    assert store.takes_chunks
    for layer in range(LAYERS):
        rotated_q, rotated_k, coded = rotated(q[layer]), rotated(k[layer]), rotated(want_k[layer])
        out = store.append_chunk(row, layer, rotated_q[:, 17:29], rotated_k[:, 17:29], v[layer, :, 17:29], SCALE)
        for at in range(17, 29):
            keys = torch.cat([coded[:, :17], rotated_k[:, 17 : at + 1]], 1)
            values = torch.cat([want_v[layer, :, :17], v[layer, :, 17 : at + 1]], 1)
            assert (out[:, at - 17] - plain_attention(rotated_q[:, at], keys, values, SCALE)).abs().max() < 2e-3
    out = step(store, row, 29, q, k, v)
    for layer in range(LAYERS):
        expected = plain_attention(rotated(q[layer])[:, 29], rotated(want_k[layer]), want_v[layer], SCALE)
        assert (out[layer] - expected).abs().max() < 2e-3


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_outliers_leave_the_others_their_range(backend):
    """One element of thirty times the size: kept apart, it is as good as whole, and the others are over ten times
    nearer than with it in their range."""
    q, k, v = inputs(40)
    v[..., 4] = 30.0
    errors = []
    for outliers in (0, 1):
        store = store_of(KVQuant(bits=4, books=BOOKS, sinks=0, outliers=outliers), backend)
        row = read(store, 40, q, k, v)
        lists = store.pages.layer_lists(torch.tensor([row]), 0).flatten().repeat_interleave(40)
        page, slot = store.pages.table.lookup(lists, 0, torch.arange(40).repeat(HEADS))
        fmt = store.pages.codebooks.format(0, 0)
        _, values = store.pages.backend.read_slots(store.pages.pool.pages, fmt, page, slot)
        off = (values.unflatten(0, (HEADS, 40)) - v[0]).abs()
        off[:, 7, 2] = 0  # an outlier of the inputs
        errors.append((float(off[..., 4].max()), float(off[..., [d for d in range(DIM) if d != 4]].square().mean())))
    assert errors[1][0] < 0.02 and 10 * errors[1][1] < errors[0][1]


@pytest.mark.parametrize(("bits", "sinks", "outliers"), CASES)
def test_bytes_are_the_closed_formula(bits, sinks, outliers):
    """d * bits / 4 of codes, 4 of a value's scale and zero, 3 for each outlier of both sides; 4 d of a sink; and beside
    the pages, once, 2 tables of bytes for each layer and 4 bytes for each key channel, which all rows share."""
    policy = KVQuant(bits=bits, books=BOOKS, sinks=sinks, outliers=outliers)
    store, (q, k, v) = store_of(policy, rows=2), inputs(60)
    row = read(store, 53, q, k, v)
    for at in range(53, 60):
        step(store, row, at, q, k, v)
    items, lists = store.ledger.itemise(row), LAYERS * HEADS
    coded = 60 - sinks
    assert items["payload_bytes"] == lists * (coded * DIM * bits // 4 + sinks * 4 * DIM)
    assert items["quant_meta_bytes"] == lists * coded * (4 + 6 * outliers)
    assert items["book_bytes"] == LAYERS * (2 * 2**bits + 4 * HEADS * DIM) == store.pages.codebooks.nbytes
    formats, size = store.pages.formats, store.pages.pool.page_bytes
    pages = lists * (ceil(coded / formats[0].tokens_per_page) + bool(sinks))
    assert store.pages.pool.num_used == pages
    filled = items["payload_bytes"] + items["quant_meta_bytes"]
    assert items["slack_bytes"] == pages * size - filled and items["free_list_bytes"] == 4 * pages
    assert items["resident_bytes"] == sum(n for name, n in items.items() if name != "resident_bytes")
    (fixed, rings, books), (widest, _, _) = store.ledger.fixed_row_bytes(53, 40), store.ledger.fixed_row_bytes()
    assert (items["table_bytes"], rings, books) == (fixed, 0, items["book_bytes"])
    free, slack = store.pages.pool.num_free * (size + 4), store.ledger.table_slack_bytes
    assert slack == widest - fixed
    assert store.allocated_bytes == items["resident_bytes"] + slack + free + widest  # a row that nobody opened: tables
    other = read(store, 53, q, k, v)
    together = sum(store.ledger.itemise(each)["resident_bytes"] for each in (row, other)) - store.ledger.shared_bytes
    assert store.ledger.shared_bytes == books
    spare = store.pages.pool.num_free * (size + 4) + store.ledger.table_slack_bytes
    assert store.allocated_bytes == together + spare
    store.close_row(other)
    assert store.ledger.shared_bytes == 0


def test_heads_and_layers_have_their_own():
    """No two layers share a table, and no two heads a scale: swapping the lines of the books changes what is read."""
    q, k, v = inputs(20)
    found = []
    for books in (BOOKS, BOOKS[::-1]):
        store = store_of(KVQuant(bits=3, books=books))
        row = read(store, 19, q, k, v)
        found.append(step(store, row, 19, q, k, v))
    assert all((found[0][layer] - found[1][layer]).abs().max() > 0.01 for layer in range(LAYERS))


def test_processes_hold_the_books_of_their_heads():
    """Each has the scales of its own heads and all tables, and both are billed what one process would be."""
    lines = kvquant_books(4, DIM, LAYERS)
    whole = store_of(KVQuant(books=lines), heads=4)
    books = whole.pages.codebooks
    k, none = torch.ones(1, DIM), torch.tensor([0])
    for index in range(2):
        ranks = Ranks()
        ranks.size, ranks.index = 2, index
        shape, room = replace(whole.shape, ranks=ranks), {"rows": 1, "max_prompt_tokens": 80, "max_new_tokens": 40}
        store = CompressedStore(whole.policy, shape, **room, options=StoreOptions(), backend=whole.pages.backend)
        own = store.pages.codebooks
        for layer in range(LAYERS):
            found = own.levels(0, layer, none, k)
            assert torch.equal(found, books.levels(0, layer, none + 2 * index, k)) and not torch.equal(found, k)
        assert own.channel_bytes * 2 == books.channel_bytes and own.table_bytes == books.table_bytes
        assert store.ledger.book_bytes == whole.ledger.book_bytes == books.nbytes


@pytest.mark.parametrize("books", [None, kvquant_books(HEADS, DIM, 3), kvquant_books(3, 1, LAYERS)])
def test_a_model_without_its_books_is_refused(books):
    """None, those of three layers, and those of as few channels as no two heads share: the command makes them."""
    with pytest.raises(NotForModel, match=r"method.books has \d layers, but the model has 2.*what=books` measures"):
        KVQuant(books=books).check_model(LAYERS, HEADS)
    KVQuant(books=books, native=True).check_model(LAYERS, HEADS)


def test_books_of_other_heads_are_refused():
    """The width of a head shows only in the store."""
    with pytest.raises(
        NotForModel, match="the books have 16 key channels per layer, but the model has 2 KV heads of 16"
    ):
        store_of(KVQuant(books=kvquant_books(HEADS, 8, LAYERS)))


@pytest.mark.parametrize("books", [[[1.0] * 56], [[1.0] * 59], [[0.5] * 60], [[256.0] * 60], [[-1.0] * 60]])
def test_lines_that_are_no_books_are_refused(books):
    """Without scales, with an odd number of them, and with levels that are no whole numbers below 256."""
    with refused("setting-value", "method.books", "56", "255"):
        KVQuant(books=books)


def test_a_layer_may_have_one_channel():
    """The tables, and a scale and a zero: the shortest line there is."""
    line = [*range(56), 0.5, -1.0]
    policy = KVQuant(bits=2, books=[line, line])
    assert policy.codebooks.keys == ((0, 1, 2, 3),) * 2
    assert policy.codebooks.scale == ((0.5,),) * 2 and policy.codebooks.zero == ((-1.0,),) * 2


def test_levels_that_do_not_ascend_are_refused():
    """By the format, when the store is made."""
    books = [[*[9.0, 8.0, 7.0, 6.0], *line[4:]] for line in BOOKS]
    with pytest.raises(ValueError, match="a table of 2 bits has 4 whole numbers from 0 to 255 in ascending order"):
        store_of(KVQuant(bits=2, books=books))


def test_triton_takes_the_reference_and_says_so():
    """Without kernels for calibrated tables, the GPU backend gives the reference's output and names what it lacked."""
    pytest.importorskip("triton")
    policy, (q, k, v), found = KVQuant(bits=3, books=BOOKS, sinks=2), inputs(23), []
    for backend in ("torch", "triton"):
        store = store_of(policy, backend)
        row = read(store, 20, q, k, v)
        found.append([step(store, row, at, q, k, v) for at in range(20, 23)])
    assert store.pages.backend.fallbacks == {"paged_decode", "write_keys", "write_values"}
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-5
