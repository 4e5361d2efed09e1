"""Layers and heads of different precision: each list is what it would be in a cache of its format alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from selection import in_turn
from store_helpers import make_store, read_random, step_random

from kvbench.kernels.pool import PoolExhausted
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant_style import KVQuantStyle
from kvbench.methods.quest import Quest
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.uniform import Uniform
from kvbench.sizing.project import project, project_shares

LAYERS, HEADS, GROUP, DIM, SCALE = 3, 2, 3, 32, 0.2
PROMPTS, STEPS = (37, 50), 40


def store_of(policy, backend="torch", rows=3, **options):
    """A store of a small model."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
    inv_freq = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    sizes = {"rows": rows, "max_tokens": 64, "new_tokens": 96, "inv_freq": inv_freq}
    return make_store(policy, **shape, **sizes, backend=backend, **options)


def run(policy, backend="torch", **options):
    """Two prompts, a question for the first where the store takes one at once, and steps of both; every output of
    attention, [LAYERS, Hq, n, D] each, and the store."""
    make = torch.Generator().manual_seed(0)
    store = store_of(policy, backend, **options)
    rows, outputs = [], []

    def vectors(heads, n):
        return torch.randn(heads, n, DIM, generator=make)

    for n in PROMPTS:
        rows.append(store.open_row())
        for layer in range(LAYERS):
            store.prefill_layer(rows[-1], layer, vectors(HEADS * GROUP, n), vectors(HEADS, n), vectors(HEADS, n), SCALE)
    chunk = [[vectors(HEADS * GROUP, 5), vectors(HEADS, 5), vectors(HEADS, 5)] for _ in range(LAYERS)]
    if store.takes_chunks:
        out = [store.append_chunk(rows[0], layer, *chunk[layer], SCALE) for layer in range(LAYERS)]
        outputs.append(torch.stack(out))
    rows.append(store.fork_row(rows[0]))
    for _ in range(STEPS):
        q, k, v = vectors(3, HEADS * GROUP * LAYERS), vectors(3, HEADS * LAYERS), vectors(3, HEADS * LAYERS)
        q, k, v = (x.view(3, LAYERS, -1, DIM) for x in (q, k, v))
        store.begin_step(rows)
        outputs.append(torch.stack([store.attend(n, q[:, n], k[:, n], v[:, n], SCALE) for n in range(LAYERS)]))
        outputs[-1] = outputs[-1].transpose(1, 2)  # [LAYERS, Hq, rows, D]
        store.end_step()
    return SimpleNamespace(store=store, rows=rows, outputs=outputs)


CASES = {
    "protected": (lambda **more: Uniform(tier="int4", **more), {"protect_layers": [0, -1]}, "fp16 int4 fp16"),
    "four formats, by head": (
        lambda **more: Uniform(tier="int4", **more),
        {"tiers_by_layer": "fp16/k2v2 int8/int4 k2v2/fp16"},
        "fp16/k2v2 int8/int4 k2v2/fp16",
    ),
    "a choice of tokens": (
        lambda **more: SnapKV(budget=0.5, window=4, tier="int4", **more),
        {"tiers_by_layer": "1:fp16 2:turboquant_k8v4"},
        "int4 fp16 turboquant_k8v4",
    ),
    "a residual buffer": (
        lambda **more: Kivi(bits=2, group=8, residual_tokens=16, **more),
        {"tiers_by_layer": "0:k4v4 1:int8"},
        "k4v4 int8 k2v2",
    ),
    "before the rotary embedding": (
        lambda **more: KVQuantStyle(group=16, **more),
        {"tiers_by_layer": "0:k2v2", "protect_layers": [2], "protect_tier": "int8"},
        "k2v2 int4 int8",
    ),
}


@pytest.fixture(scope="module")
def alone():
    """What a method gives when all layers have one format; made once."""
    made = {}

    def get(case, tier, backend):
        if (case, tier, backend) not in made:
            made[case, tier, backend] = run(CASES[case][0](tiers_by_layer=f"{LAYERS}*{tier}"), backend)
        return made[case, tier, backend]

    return get


@pytest.mark.every(2)
@pytest.mark.parametrize(("case", "backend"), in_turn([*CASES], ["torch", "cpu"]))
def test_each_list_is_as_in_a_cache_of_its_format(alone, case, backend):
    """Outputs of prompts, questions, forks and steps are those of caches that have one format in all layers, head by
    head, and so are the bytes of what is held."""
    make, settings, written = CASES[case]
    mixed = run(make(**settings), backend)
    rows = [(row.split("/") * HEADS)[:HEADS] for row in written.split()]
    for layer, row in enumerate(rows):
        for head, tier in enumerate(row):
            own = slice(head * GROUP, (head + 1) * GROUP)
            for got, want in zip(mixed.outputs, alone(case, tier, backend).outputs, strict=True):
                torch.testing.assert_close(got[layer, own], want[layer, own], rtol=1e-5, atol=1e-5)
    for row in mixed.rows:
        got = mixed.store.ledger.itemise(row)
        for item in ("payload_bytes", "quant_meta_bytes", "track_bytes", "residual_bytes"):
            parts = [alone(case, tier, backend) for tiers in rows for tier in tiers]
            each = [part.store.ledger.itemise(row)[item] / (LAYERS * HEADS) for part in parts]
            assert got[item] == pytest.approx(sum(each)), item
        kept = mixed.store.ledger.report(row)[1]
        one = alone(case, rows[0][0], backend).store.ledger.report(row)[1]
        assert sum(kept["slots_per_tier"]) == sum(one["slots_per_tier"])
        assert len(kept["slots_per_tier"]) == len(mixed.store.policy.tiers) + ("buffer" in case or "rotary" in case)
    for row in mixed.rows:
        mixed.store.close_row(row)
    assert mixed.store.used_bytes == 0


def run_in_chunks(policy, backend, length=50, size=16):
    """A prompt that is read in chunks and three steps; every output of attention, [LAYERS, Hq, n, D] each."""
    make, store = torch.Generator().manual_seed(4), store_of(policy, backend)
    row, outputs = store.open_row(), []
    q, k, v = (torch.randn(LAYERS, n, length, DIM, generator=make) for n in (HEADS * GROUP, HEADS, HEADS))
    store.open_chunks(row, length)
    for begin in range(0, length, size):
        own = [x[:, :, begin : begin + size] for x in (q, k, v)]
        out = [store.read_chunk(row, layer, *(x[layer] for x in own), SCALE) for layer in range(LAYERS)]
        outputs.append(torch.stack(out))
    for token in range(3):
        store.begin_step([row])
        own = [x[:, None, :, token] for x in (q, k, v)]
        outputs.append(torch.stack([store.attend(n, *(x[n] for x in own), SCALE)[0, :, None] for n in range(LAYERS)]))
        store.end_step()
    return SimpleNamespace(store=store, rows=[row], outputs=outputs)


@pytest.mark.every(2)
@pytest.mark.parametrize(("case", "backend"), in_turn([*CASES], ["torch", "cpu"]))
def test_each_list_of_a_prompt_in_chunks_is_as_in_a_cache_of_its_format(case, backend):
    """Outputs of chunks and of the steps behind them, head by head, and the bytes of what is held."""
    make, settings, written = CASES[case]
    mixed = run_in_chunks(make(**settings), backend)
    rows = [(row.split("/") * HEADS)[:HEADS] for row in written.split()]
    alone = {tier: run_in_chunks(make(tiers_by_layer=f"{LAYERS}*{tier}"), backend) for row in rows for tier in row}
    items = {name: found.store.ledger.itemise(found.rows[0]) for name, found in alone.items()}
    for layer, row in enumerate(rows):
        for head, tier in enumerate(row):
            own = slice(head * GROUP, (head + 1) * GROUP)
            for got, want in zip(mixed.outputs, alone[tier].outputs, strict=True):
                torch.testing.assert_close(got[layer, own], want[layer, own], rtol=1e-5, atol=1e-5)
    for item in ("payload_bytes", "quant_meta_bytes", "track_bytes", "residual_bytes"):
        each = [items[tier][item] / (LAYERS * HEADS) for row in rows for tier in row]
        assert mixed.store.ledger.itemise(mixed.rows[0])[item] == pytest.approx(sum(each)), item
    mixed.store.close_row(mixed.rows[0])
    assert mixed.store.used_bytes == 0


def test_keys_and_values_that_left_a_buffer_are_billed_apart():
    """Keys leave in groups and values one by one, so that a list has fewer keys in pages than values, or more."""
    store = run(Kivi(group=8, residual_tokens=16, tiers_by_layer="k4v4 k2v2 k4v4")).store
    part = store.holding.parts[0]
    for row in range(2):
        lists = part.lists(row).view(LAYERS, HEADS)
        keys, values = (count[lists].sum(1).tolist() for count in (part.ring.num_k, part.ring.num_v))
        assert all(k != v for k, v in zip(keys, values, strict=True))
        want = sum((k + v) * DIM * bits // 8 for k, v, bits in zip(keys, values, (4, 2, 4), strict=True))
        assert store.ledger.itemise(row)["payload_bytes"] == want


def test_pages_are_those_of_each_format():
    """Resident bytes are whole pages of each list's own format, with tables of both halves, to the byte."""
    found = run(Uniform(tier="int4", tiers_by_layer="fp16/k2v2 int8/int4 k2v2/fp16"))
    store, row = found.store, found.rows[1]
    seen = PROMPTS[1] + STEPS
    slot = {"fp16": 4 * DIM, "int8": 2 * DIM + 8, "int4": DIM + 8, "k2v2": DIM / 2 + 8}
    page = store.pages.pool.page_bytes
    pages = sum(
        math.ceil(seen / (int(page // (8 * slot[tier])) * 8)) for tier in "fp16 k2v2 int8 int4 k2v2 fp16".split()
    )
    tables = LAYERS * HEADS * 4 * (2 * store.pages.table.max_pages + 4)  # two rows of entries, four counts of slots
    assert store.ledger.row_bytes(row) == pages * (page + 4) + tables + store.counters.row_bytes


def test_a_planned_slot_has_the_mean_bytes_of_all_lists():
    """Of layers, and of heads."""
    for table in ("fp16,int4,int4", "fp16/int4,int4,int4/fp16"):
        store = store_of(SnapKV(budget=0.5, window=4, tiers_by_layer=table))
        each = [part.split("/") * (HEADS // len(part.split("/"))) for part in table.split(",")]
        slot = {"fp16": 2 * 2 * DIM, "int4": 2 * (DIM // 2 + 4)}
        want = sum(slot[name] for row in each for name in row) / (LAYERS * HEADS)
        assert store.pages.planned_bytes == (want,)


def test_a_budget_in_bytes_counts_each_layer():
    """The whole budget is spent with the formats that the layers have, and a few tokens more would not fit."""
    policy = SnapKV(budget="40KiB", window=4, tier="int4", protect_layers=[0])
    store = store_of(policy)
    make = torch.Generator().manual_seed(1)
    row = read_random(store, 64, make, SCALE, row=store.open_row(new_tokens=8))
    for _ in range(8):
        step_random(store, [row], make, SCALE)
    tokens = int(store.budget.tokens[row])
    assert store.ledger.row_bytes(row) <= 40 * 1024 < store.budget.bytes_of(tokens + 1, 64, 8)
    assert tokens > store_of(SnapKV(budget="40KiB", window=4, tier="fp16")).budget.solve(64, 8)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (H2O(budget=0.5, protect_layers=[0]), ("settings-conflict", "method.tiers_by_layer", "H2O")),
        (
            SnapKV(window=4, decode_every=4, tiers_by_layer="3*int4"),
            ("settings-conflict", "method.tiers_by_layer", "SnapKV"),
        ),
        (
            Kivi(group=8, residual_tokens=16, tiers_by_layer="2*k4v4 k4v4/k2v2"),
            ("settings-conflict", "method.tiers_by_layer", "Kivi"),
        ),
    ],
)
def test_what_needs_one_precision_says_so(policy, message):
    """A method that looks at single slots later, and a buffer whose heads would part."""
    with refused(*message):
        store_of(policy)


def test_methods_without_the_settings_refuse_them():
    """Quest has pages of its own; it has no such setting."""
    with pytest.raises(TypeError, match="protect_layers"):
        Quest(protect_layers=[0])


@pytest.mark.parametrize("case", ["four formats, by head", "a residual buffer"])
def test_a_step_that_does_not_fit_changes_nothing(case):
    """The pool is full in the middle of a step's reservations: what was taken before is given back."""
    make, settings, _ = CASES[case]
    store = store_of(make(**settings), budget_bytes=120_000)
    row, generator = store.open_row(), torch.Generator().manual_seed(2)

    def vectors(heads):
        return torch.randn(1, heads, DIM, generator=generator)

    for layer in range(LAYERS):
        q, k = (
            torch.randn(HEADS * GROUP, 40, DIM, generator=generator),
            torch.randn(HEADS, 40, DIM, generator=generator),
        )
        store.prefill_layer(row, layer, q, k, k, SCALE)
    held = [store.fork_row(row, share=False) for _ in range(2)]
    spare = store.pages.pool.num_free
    store.pages.pool.allocate(torch.tensor([spare]))  # nothing is left
    with pytest.raises(PoolExhausted):
        for _ in range(96):
            before = store.pages.table.num_slots.clone(), store.pages.pool.num_free
            store.begin_step([row, *held])
            for layer in range(LAYERS):
                q = torch.cat([vectors(HEADS * GROUP)] * 3)
                store.attend(layer, q, q[:, :HEADS], q[:, :HEADS], SCALE)
            store.end_step()
    assert torch.equal(store.pages.table.num_slots, before[0]) and store.pages.pool.num_free == before[1]


def test_stored_shares_are_projected_on_lists_at_home():
    """What a stored run says of each tier is put into the lists that are at home in it; a tier at home nowhere has
    none."""
    policy = Uniform(tier="int8", tiers_by_layer="fp16/k2v2 2*int4")
    shape = store_of(policy).shape
    found = project_shares(policy, shape, 2040, 8, [1 / 6, 1 / 6, 4 / 6])
    least, most = project(policy, shape, 2040, 8)
    assert least.resident_bytes == most.resident_bytes
    for item in ("payload_bytes", "quant_meta_bytes"):
        assert found.items[item] == pytest.approx(most.items[item], rel=0.05)  # lists are spread around the mean
    everywhere = Uniform(tier="int8", protect_layers=[0, 1, 2])
    assert project(everywhere, shape, 60, 4)[0].items["payload_bytes"] == 64 * LAYERS * HEADS * DIM * 4
    assert project_shares(everywhere, shape, 60, 4, [0.0, 1.0]).items["payload_bytes"] > 0
