"""KV-Compress: golden schedules, evictions and moves through the real planner and table, and the metric."""

import math

import pytest
import torch
from oracles.slow_kv_compress import evictions, step_metrics, surplus_blocks
from selection import few
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    held_positions,
    held_scores,
    make_store,
    random_layer,
    read_random,
    step_at,
    step_one,
)

from kvbench.kernels.operands import HeadScores
from kvbench.kernels.reference.prompts import reduce_scores
from kvbench.methods.kv_compress import KVCompress
from kvbench.policy import keep_blocks
from kvbench.runs.verdict import complaint

METRICS = [[5.0, 1.0, 4.0, 2.0, 9.0], [3.0, 6.0]]


def padded(metrics):
    """Metrics as the planner gets them, +inf past a list's end, and the lists' lengths."""
    cost = torch.full((len(metrics), 5), math.inf)
    for row, values in enumerate(metrics):
        cost[row, : len(values)] = torch.tensor(values)
    return cost, torch.tensor([len(values) for values in metrics])


def evicted(metrics, surplus: int) -> list[list[int]]:
    """The slots of each list that go when blocks of two become free."""
    return [row.nonzero()[:, 0].tolist() for row in ~keep_blocks(*padded(metrics), 2, surplus)]


def test_golden_blocks():
    """The cheapest blocks over both heads go first, and with them the golden slots."""
    for case in ("E1", "E2", "E3"):
        assert evicted(METRICS, int(case[1])) == golden("kvc")[case]["evicted"]


def test_golden_protected_slots():
    """Protected slots cannot go; asking for more blocks than are free frees what can be freed."""
    lists = [[5.0, 1.0, 4.0, math.inf, math.inf], METRICS[1]]
    assert evicted(lists, 2) == golden("kvc")["protect2"]["evicted"]
    assert evicted(lists, 4) == [[0, 1, 2], [0, 1]]  # three blocks, not four


@pytest.mark.parametrize("case", ["pool_then_sum", "sum_then_pool"])
def test_golden_pool_order(case):
    """Each query head is pooled before the group is summed; the other order gives the other golden numbers."""
    columns = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.6]])
    stage = "per_query_head" if case == "pool_then_sum" else "after_group"
    got = reduce_scores(columns, 1, 2, HeadScores(pool="max", pool_kernel=3, pool_stage=stage, group="sum"))
    assert got[0].tolist() == pytest.approx(golden("kvc")[case])
    spec = KVCompress().score
    assert (spec.pool_stage, spec.pool_region, spec.group_reduce, spec.power) == ("per_query_head", "all", "sum", 2)
    assert (spec.pool, spec.pool_kernel, KVCompress(variant="full").score.pool) == ("max", 7, "none")


def schedule(lists: list[dict[int, float]], block: int, surplus: int) -> list[dict[int, float]]:
    """Section 4.2.2 in lists: each head's metrics ascend, behind as many zeros as its last block has empty slots; of
    the blocks that they then make, the first `surplus` by their largest metric go."""
    blocks = []
    for head, metrics in enumerate(lists):
        empty = -len(metrics) % block
        slots = [(0.0, None)] * empty + sorted((x, pos) for pos, x in metrics.items())
        for number in range(len(slots) // block):
            part = slots[number * block : (number + 1) * block]
            blocks.append((part[-1][0], head, number, {pos for _, pos in part}))
    gone = [(head, part) for cost, head, _, part in sorted(blocks, key=lambda b: b[:3])[:surplus] if cost < math.inf]
    out = [set().union(*(part for h, part in gone if h == head)) for head in range(len(lists))]
    return [{pos: x for pos, x in metrics.items() if pos not in out[head]} for head, metrics in enumerate(lists)]


@pytest.mark.parametrize("seed", range(8))
def test_blocks_go_by_the_paper_s_schedule(seed):
    """Random lists of unequal lengths with ties and protected tokens, every number of blocks."""
    make = torch.Generator().manual_seed(seed)
    block, heads = (2, 3, 4, 16)[seed % 4], 1 + seed % 5
    held = torch.randint(block, 6 * block, (heads,), generator=make)
    cost = torch.full((heads, int(held.max())), math.inf)
    lists = []
    for head, number in enumerate(held.tolist()):
        cost[head, : number - 1] = torch.randint(1, 40, (number - 1,), generator=make) / 8  # the last is protected
        lists.append(dict(enumerate(cost[head, :number].tolist())))
    for surplus in range(int((-(-held // block)).sum()) + 1):
        keep = keep_blocks(cost, held, block, surplus)
        got = [row[:number].nonzero()[:, 0].tolist() for row, number in zip(keep, held.tolist(), strict=True)]
        assert got == [sorted(metrics) for metrics in schedule(lists, block, surplus)]


@pytest.mark.parametrize(("block", "budget", "power"), [(8, 32, 2), (5, 22, 1)])
def test_continual_compression_is_equation_20(block, budget, power):
    """A prompt's pooled metrics of the last queries, to which every step adds its own; before a step the sequence goes
    back to its blocks. Pooled per query head and then summed, as released; the equations pool the group's sum."""
    layers, heads, group, window, prompt, scale = 2, 2, 3, 6, 75, 0.25
    tensors = [random_layer(31 * layer, heads, group, prompt + 60, 16) for layer in range(layers)]
    tensors = [(2.5 * q, k, v) for q, k, v in tensors]
    policy = KVCompress(budget=budget, obs_window=window, block=block, power=power, continual=True, tier="native")
    store, row = filled(policy, tensors, prompt, scale)
    lists: list[dict[int, float]] = []
    for q, k, _ in tensors:
        seen = causal_probabilities(q[:, :prompt], k[:, :prompt], scale)[:, -window:].pow(power).sum(1)
        pooled = torch.nn.functional.max_pool1d(seen[:, None], 7, 1, 3)[:, 0].unflatten(0, (heads, group)).sum(1)
        lists += [dict(enumerate(metrics)) for metrics in pooled.tolist()]

    def compressed(tokens: int) -> list[dict[int, float]]:
        surplus = sum(-(-len(held) // block) for held in lists) - len(lists) * -(-budget // block)
        fixed = [{p: math.inf if p > tokens - window else x for p, x in held.items()} for held in lists]
        kept = schedule(fixed, block, max(0, surplus))
        return [{p: held[p] for p in own} for held, own in zip(lists, kept, strict=True)]

    lists = compressed(prompt)
    assert [set(held) for held in held_positions(store, row)] == [set(held) for held in lists]
    before = 0
    for at in range(prompt, prompt + 60):
        before += sum(map(len, lists))
        lists = compressed(at)
        before -= sum(map(len, lists))
        step_at(store, row, tensors, at, scale)
        for index, held in enumerate(lists):
            (q, k, _), head = tensors[index // heads], index % heads
            held[at] = 0.0
            own = q[group * head : group * (head + 1), at].double() @ k[head, list(held)].double().T * scale
            for pos, x in zip(list(held), torch.softmax(own, -1).pow(power).sum(0).tolist(), strict=True):
                held[pos] += x
        assert [set(held) for held in held_positions(store, row)] == [set(held) for held in lists]
    assert before > 40 * len(lists)  # tokens went while decoding


def run_store(policy, prompt: int, steps: int):
    """A store of two layers and heads after a prompt and some steps; also its row."""
    layers = [random_layer(3 + layer, 2, 1, 300, 16) for layer in range(2)]
    store, row = filled(policy, [(3 * q, k, v) for q, k, v in layers], prompt, 0.25, track=("pos",))
    for at in range(prompt, prompt + steps):
        step_at(store, row, layers, at, 0.25)
    return store, row


def test_prompt_keeps_whole_blocks_and_the_window():
    """After a prompt, what stays is the budget in whole blocks over all lists, and the last tokens are among it."""
    store, row = run_store(KVCompress(budget=64), 200, 0)
    held = held_positions(store, row)
    assert sum(-(-len(positions) // 16) for positions in held) == 64 * 4 // 16
    assert len({len(positions) for positions in held}) > 1  # heads differ: the ranking is global
    assert all(set(range(193, 200)) <= set(positions) for positions in held)


def test_only_continual_eviction_keeps_the_budget():
    """Without `continual` every list grows by every step."""
    store, row = run_store(KVCompress(budget=64), 200, 0)
    first = [len(positions) for positions in held_positions(store, row)]
    store, row = run_store(KVCompress(budget=64), 200, 100)
    assert [len(positions) - 100 for positions in held_positions(store, row)] == first


# (settings, the last tokens that stay, nearest tokens that a step adds no metric to)
VARIANTS = {
    "window": ({"variant": "window", "obs_window": 8}, 8, 0),
    "full": ({"variant": "full", "protected": 20, "skip_near": 10}, 20, 10),
}
LIMITS = [(1, 50), (8, 50), (16, 0.25)]


CASES = [(limits, variant) for limits in LIMITS for variant in VARIANTS]


@pytest.mark.parametrize(("limits", "variant"), few(CASES, (LIMITS[1], "full"), (LIMITS[2], "window")))
def test_continual_eviction_is_the_official_rule(limits, variant):
    """Over 300 steps each list loses, before every step, exactly the tokens that the released code evicts; the metrics
    that it goes by are the ones it would have recorded, to fp32's last digits; the number of blocks keeps to the limit
    from the first step on."""
    (settings, protected, buffer), (block, budget) = VARIANTS[variant], limits
    policy = KVCompress(continual=True, budget=budget, block=block, tier="native", **settings)
    prompt, (layers, heads, group, dim), scale = 200, (2, 2, 2, 16), 0.5
    limit = 50  # which is a quarter of the prompt, too
    tensors = [random_layer(block + layer, heads, group, prompt + 300, dim) for layer in range(layers)]
    store, row = filled(policy, tensors, prompt, scale, track=("pos",), max_tokens=400)
    metrics = [dict(scores) for scores in held_scores(store, row)]
    total = 0
    for seen in range(prompt, prompt + 300):
        before = held_scores(store, row)
        for stored, exact in zip(before, metrics, strict=True):
            assert all(math.isclose(x, exact[pos], rel_tol=1e-5, abs_tol=1e-6) for pos, x in stored.items())
        lists = [list(scores.items()) for scores in before]
        gone = evictions(lists, seen + 1, limit=limit, block=block, protected=protected)
        total += sum(map(len, gone))
        store.begin_step(torch.tensor([row]))
        held = held_positions(store, row)
        assert [set(positions) for positions in held] == [
            {*scores, seen} - out for scores, out in zip(before, gone, strict=True)
        ]
        counts = [len(positions) - 1 for positions in held]
        assert surplus_blocks(counts, limit, block) == 0
        for layer, (q, k, v) in enumerate(tensors):
            store.attend(layer, q[None, :, seen], k[None, :, seen], v[None, :, seen], scale)
            for head in range(heads):
                where = held[layer * heads + head]
                own = q[head * group : (head + 1) * group, seen]
                gain = step_metrics(own, k[head, where], where, scale, last=seen, buffer=buffer, power=2)
                exact = metrics[layer * heads + head]
                for pos, x in zip(where, gain, strict=True):
                    exact[pos] = exact.get(pos, 0.0) + x
        store.end_step()
    assert total > 250 * layers * heads  # about a token per list and step


def test_nothing_is_planned_while_the_budget_has_room():
    """A step that begins within the budget asks for no plan: nothing is gathered, ranked or moved."""

    class Watched(KVCompress):
        calls = 0

        def plan_compact(self, view):
            Watched.calls += 1
            return super().plan_compact(view)

    policy = Watched(budget=96, continual=True)
    run_store(policy, 40, 57)  # 97 tokens begin a seventh block, which the step after them would evict
    assert Watched.calls == 0
    run_store(policy, 40, 58)
    assert Watched.calls == 1


def test_a_sequence_is_ranked_alone():
    """Two sequences of unequal surplus in one batch lose what each of them loses alone."""
    policy = KVCompress(budget=32, block=4, continual=True)
    steps = torch.randn(40, 3, 2, 2, 2, 16, generator=torch.Generator().manual_seed(0))  # q, k, v; layer; sequence

    def run(chosen):
        store = make_store(policy, num_layers=2, num_q_heads=2, num_kv_heads=2, head_dim=16, rows=2, track=("pos",))
        rows = [read_random(store, (40, 90)[which], torch.Generator().manual_seed(which)) for which in chosen]
        for step in steps:
            store.begin_step(torch.tensor(rows))
            for layer in range(2):
                store.attend(layer, *step[:, layer, list(chosen)], 0.25)
            store.end_step()
        return [[sorted(positions) for positions in held_positions(store, row)] for row in rows]

    assert run((0, 1)) == [*run((0,)), *run((1,))]


@pytest.mark.parametrize("variant", ["window", "full"])
@pytest.mark.parametrize("steps", [0, 30])
def test_the_floor_is_kept(variant, steps):
    """Below `floor_tokens` no budget goes, after the prompt and while decoding, and the check knows; a budget above it
    is not touched."""
    for budget, tokens in ((16, 48), (0.01, 48), (80, 80)):
        policy = KVCompress(budget=budget, floor_tokens=40, variant=variant, continual=True)
        store, row = run_store(policy, 200, steps)
        held = [len(positions) for positions in held_positions(store, row)]
        assert tokens * 4 - 16 * 4 < sum(held) - 4 * (steps > 0) <= tokens * 4
        _, kept = store.ledger.report(row)
        assert complaint(policy, {"kept": kept}) is None


def test_near_queries_do_not_count_in_decode():
    """In the full variant a step adds nothing to the keys within `skip_near` of it, the new one included."""
    policy = KVCompress(variant="full", skip_near=4, continual=True, budget=1000)
    store, row = filled(policy, [random_layer(0, 1, 1, 12, 8)], track=("pos",))
    before, nothing = held_scores(store, row)[0], torch.zeros(1, 8)
    step_one(store, row, [(nothing, nothing, nothing)])  # a zero query spreads evenly: 1/13 squared each
    after = held_scores(store, row)[0]
    grown = {pos: after[pos] - before.get(pos, 0.0) for pos in after}
    assert grown == pytest.approx({pos: (1 / 13) ** 2 if pos <= 8 else 0.0 for pos in range(13)}, abs=1e-6)
