"""KV-Compress: golden schedules, evictions and moves through the real planner and table, and the metric."""

import math

import pytest
import torch
from store_helpers import golden, held_positions, held_scores, make_store

from kvbench.kernels.reference.attention import column_scores, reduce_scores
from kvbench.methods.kv_compress import KVCompress
from kvbench.policy import choose_blocks

METRICS = [[5.0, 1.0, 4.0, 2.0, 9.0], [3.0, 6.0]]


def padded(metrics):
    """Metrics as the planner gets them: +inf past a list's end."""
    cost = torch.full((len(metrics), 5), math.inf)
    for row, values in enumerate(metrics):
        cost[row, : len(values)] = torch.tensor(values)
    return cost, torch.tensor([len(values) for values in metrics])


@pytest.mark.parametrize("case", ["E1", "E2", "E3"])
def test_golden_blocks(case):
    """The cheapest blocks over both heads go first, and with them the golden slots."""
    evict = choose_blocks(*padded(METRICS), 2, int(case[1]))
    assert [row.nonzero()[:, 0].tolist() for row in evict] == golden("kvc")[case]["evicted"]


def test_golden_protected_slots():
    """Protected slots cannot go; asking for more blocks than are free frees what can be freed."""
    cost, held = padded([[5.0, 1.0, 4.0, math.inf, math.inf], METRICS[1]])
    evict = choose_blocks(cost, held, 2, 2)
    assert [row.nonzero()[:, 0].tolist() for row in evict] == golden("kvc")["protect2"]["evicted"]
    everything = choose_blocks(cost, held, 2, 4)
    assert [row.nonzero()[:, 0].tolist() for row in everything] == [[0, 1, 2], [0, 1]]  # three blocks, not four


def test_golden_moves():
    """Compaction fills the golden hole from the golden slot."""
    store = make_store(KVCompress(), track=("pos",))
    lists = store.pages.lists_of(torch.tensor([store.open_row()]))
    store.pages.table.reserve(lists, 0, torch.tensor([5]))
    keep = torch.ones(1, 5, dtype=torch.bool)
    keep[0, golden("kvc")["E2"]["evicted"][0]] = False
    owner, source, target, count = store.pages.table.plan_compaction(lists, 0, keep)
    assert [list(move) for move in zip(source.tolist(), target.tolist(), strict=True)] == [
        list(move) for move in golden("kvc")["moves_E2_head0"]
    ]
    assert owner.tolist() == [0] * len(source) and count.tolist() == [2]


@pytest.mark.parametrize("case", ["pool_then_sum", "sum_then_pool"])
def test_golden_pool_order(case):
    """Each query head is pooled before the group is summed; the other order gives the other golden numbers."""
    columns = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.6]])
    stage = "per_query_head" if case == "pool_then_sum" else "after_group"
    got = reduce_scores(
        columns, 1, queries=2, pool="max", pool_kernel=3, pool_stage=stage, pool_region="all", group="sum"
    )
    assert got[0].tolist() == pytest.approx(golden("kvc")[case])
    spec = KVCompress().score
    assert (spec.pool_stage, spec.pool_region, spec.group_reduce, spec.power) == ("per_query_head", "all", "sum", 2)


@pytest.mark.parametrize(("case", "near"), [("full_v2_L2_colsum", 2), ("full_v0_L2_colsum", 0)])
def test_golden_full_metric(case, near):
    """Squared column sums that leave out near queries are the golden ones."""
    matrix = torch.tensor(golden("h2o")["A"])
    q = torch.zeros(1, 6, 8)
    q[0, :, :6] = matrix.clamp(min=1e-30).log()
    got = column_scores(q, torch.eye(8)[None, :6], 1.0, queries=-1, skip_near=near, power=2)
    assert got[0].tolist() == pytest.approx(golden("kvc")[case], abs=1e-6)


def run_store(policy, prompt: int, steps: int):
    """A store of two layers and heads after a prompt and some steps."""
    torch.manual_seed(3)
    store = make_store(policy, num_layers=2, num_q_heads=2, num_kv_heads=2, head_dim=16, track=("pos",))
    row = store.open_row()
    for layer in range(2):
        store.prefill_layer(row, layer, 3 * torch.randn(2, prompt, 16), *torch.randn(2, 2, prompt, 16), 0.25)
    for _ in range(steps):
        store.begin_step(torch.tensor([row]))
        for layer in range(2):
            store.attend(layer, torch.randn(1, 2, 16), *torch.randn(2, 1, 2, 16), 0.25)
        store.end_step()
    return store, row


def test_prompt_keeps_whole_blocks_and_the_window():
    """After a prompt, what stays is the budget in whole blocks over all lists, and the last tokens are among it."""
    store, row = run_store(KVCompress(budget=64), 200, 0)
    held = held_positions(store, row)
    assert sum(-(-len(positions) // 16) for positions in held) == 64 * 4 // 16
    assert len({len(positions) for positions in held}) > 1  # heads differ: the ranking is global
    assert all(set(range(193, 200)) <= set(positions) for positions in held)


def test_continual_eviction_keeps_the_budget():
    """With `continual`, blocks never exceed the budget for longer than a block's worth of steps; without it the cache
    grows."""
    store, row = run_store(KVCompress(budget=64, continual=True), 200, 100)
    blocks = sum(-(-len(positions) // 16) for positions in held_positions(store, row))
    assert blocks <= 64 * 4 // 16 + 4
    grown, row = run_store(KVCompress(budget=64), 200, 100)
    assert sum(len(p) for p in held_positions(grown, row)) >= 64 * 4 - 4 * 16 + 400


def test_near_queries_do_not_count_in_decode():
    """In the full variant a step adds nothing to the keys within `skip_near` of it, the new one included."""
    policy = KVCompress(variant="full", skip_near=4, continual=True, budget=1000)
    store = make_store(policy, track=("pos",))
    row = store.open_row()
    store.prefill_layer(row, 0, torch.randn(1, 12, 8), *torch.randn(2, 1, 12, 8), 1.0)
    before = held_scores(store, row)[0]
    store.begin_step(torch.tensor([row]))
    store.attend(
        0, torch.zeros(1, 1, 8), *torch.zeros(2, 1, 1, 8), 1.0
    )  # a zero query spreads evenly: 1/13 squared each
    after = held_scores(store, row)[0]
    grown = {pos: after[pos] - before.get(pos, 0.0) for pos in after}
    assert grown == pytest.approx({pos: (1 / 13) ** 2 if pos <= 8 else 0.0 for pos in range(13)}, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"), [({"variant": "both"}, "variant='both' must be"), ({"block": 0}, "block=0")]
)
def test_bad_settings(settings, message):
    """A bad setting is named with its rule."""
    with pytest.raises(ValueError, match=message):
        KVCompress(**settings)
