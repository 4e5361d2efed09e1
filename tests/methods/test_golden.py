"""Golden cases through a whole store: attention as wanted in, kept tokens, stored scores and bytes out.

tests/golden/cases.yaml lists, for every golden number, the tests that hold it; the audit is at the end of this file.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml
from golden_helpers import own_rows, read_prompt
from places import TESTS
from store_helpers import GOLDEN, filled, golden, held_positions, held_scores, make_store, prefill_view, watching

from kvbench.kernels.reference.quant import pack
from kvbench.methods.ada_snapkv import AdaSnapKV
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.kivi import Kivi
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.minikv import MiniKV
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.snapkv import SnapKV
from kvbench.policy import keep_blocks, shares_by_score

# Which heads decide ----


@pytest.mark.parametrize(("how", "granularity"), [("mean", "kv_head"), ("max", "kv_head"), ("per_query", "q_head")])
def test_golden_group_rules(how, granularity):
    """Two query heads of one KV head: their mean and maximum keep the golden tokens, and with KV heads repeated, as
    official code does, each query head keeps its own."""

    class Policy(SnapKV):
        def __post_init__(self):
            super().__post_init__()
            self.score = replace(self.score, group_reduce="max" if how == "max" else "mean")

    case, window = golden("gqa"), 6
    # Six window queries share the golden sums; what is left of each goes to token 4, the first of the window.
    asked = [[*(x / window for x in case[head]), 1 - sum(case[head]) / window] for head in ("a", "b")]
    policy = Policy(budget=2 + window, window=window, pool="none", pool_kernel=1, granularity=granularity)
    store = make_store(policy, num_q_heads=2, num_kv_heads=1, head_dim=16, track=("pos",))
    row = read_prompt(store, [own_rows(4) + [rows] * window for rows in asked])
    want = case[how] if how == "per_query" else [case[how]]
    assert held_positions(store, row) == [[*kept, *range(4, 10)] for kept in want]
    assert store.ledger.itemise(row)["payload_bytes"] == len(want) * 8 * 16 * 4


def test_golden_softmax():
    """A window of one query gives that query's golden probabilities, masked for the token after it; a window of both
    their sums, of which the golden tokens stay."""
    case = golden("snapkv_softmax")
    for length, window, wanted, kept in (
        (5, 1, case["P"][0][:5], None),
        (6, 1, case["P"][1], None),
        (6, 2, case["sum"], [*case["keep2"], 4, 5]),
    ):
        policy, seen = watching(SnapKV, budget=window + 2, window=window, pool="none", pool_kernel=1)
        q, k = torch.zeros(1, 6, 8), torch.zeros(1, 6, 8)
        k[0, :, :2], q[0, 4:, :2] = torch.tensor(case["K"]), torch.tensor(case["Q"])
        store, row = filled(policy, [(q, k, k)], length, 1 / math.sqrt(2), track=("pos",))
        assert seen[0].score[0, 0, : len(wanted)].tolist() == pytest.approx(wanted, abs=1e-6)
        assert kept is None or held_positions(store, row) == [kept]
    assert case["P"][0][5] == 0


def test_golden_averages():
    """A DiffKV slot's mean over later queries is the golden averaged score."""
    case = golden("h2o")
    store = make_store(DiffKV(alpha_h=0, alpha_l=0))
    row = read_prompt(store, [case["A"]])
    mean = store.view(torch.tensor([row])).mean_score(0)[0, 0, 0, :6]
    assert mean.tolist() == pytest.approx(case["averaged"], abs=1e-6)


# Budgets ----


def layer_budgets(policy, num_tokens: int, num_layers: int) -> list[int]:
    """Tokens that a plan keeps in each layer of a model with two heads; both heads keep the same number."""
    kept = []
    for layer in range(num_layers):
        view = prefill_view(torch.rand(2, num_tokens), num_tokens, 2, layers=[layer], num_layers=num_layers)
        counts = (policy.plan_prefill(view).tier_of >= 0).sum(-1)[0]
        assert counts[0] == counts[1]
        kept.append(int(counts[0]))
    return kept


@pytest.mark.parametrize(
    ("case", "capacity", "layers", "tokens"),
    [
        ("cap72_w8_L4_q1000", 72, 4, 1000),
        ("cap72_w8_L4_q130", 72, 4, 130),
        ("cap72_w8_L4_q100", 72, 4, 100),
        ("cap72_w8_L4_q60", 72, 4, 60),
        ("cap128_w8_L32_q8000", 128, 32, 8000),
        ("cap2048_w8_L32_q8000", 2048, 32, 8000),
    ],
)
def test_golden_pyramid(case, capacity, layers, tokens):
    """With the released rounding every layer keeps the golden number, window included; without it the total is the
    budget."""
    want = golden("pyramid")[case]
    got = layer_budgets(PyramidKV(budget=capacity, window=8, official_rounding=True), tokens, layers)
    assert sum(got) == want["total"]
    assert got[:4] == want["budgets"][:4] and got[-1] == want["budgets"][-1]
    exact = layer_budgets(PyramidKV(budget=capacity, window=8), tokens, layers)
    assert sum(exact) == min(want["nominal"], tokens * layers)
    assert all(a >= b for a, b in zip(exact, exact[1:], strict=False))


def test_golden_pyramid_of_adakv():
    """AdaKV's code has no uniform middle branch: with its rounding a prompt below twice the base gets a pyramid."""
    settings = {"budget": 72, "window": 8, "allocation": "ada_pyramid", "official_rounding": True}
    assert layer_budgets(AdaSnapKV(**settings, alpha=1.0), 100, 4) == golden("pyramid")["adakv_q100"]


@pytest.mark.parametrize("case", ["ada_a", "ada_b"])
def test_golden_ada(case):
    """Without a floor a head's budget is its golden number of tokens among the layer's best; with one and the released
    rounding it is the golden budget, and with largest remainders the total is exact."""
    data = golden(case)
    score, base = torch.tensor(data["s"])[None], torch.tensor([data["B"]])
    for key in (key for key in data if key.startswith("alpha")):
        alpha, (counts, want) = int(key[5:]) / 10, data[key]
        for rounding in (False, True):
            assert shares_by_score(score, base, 0.0, official_rounding=rounding)[0].tolist() == counts
        assert shares_by_score(score, base, alpha, official_rounding=True)[0].tolist() == want
        exact = shares_by_score(score, base, alpha)[0].tolist()
        assert sum(exact) == data["B"] * len(exact)
        assert all(abs(a - b) <= 1 for a, b in zip(exact, want, strict=True))


def test_golden_minikv_plans():
    """A plan keeps the golden number of heavy hitters in each of four layers, and the recent quarter."""
    for layer, count in enumerate(golden("minikv_counts_L4_n1000")):
        plan = MiniKV().plan_prefill(prefill_view(torch.rand(1000), 1000, layers=[layer], num_layers=4))
        kept = plan.tier_of[0, 0] >= 0
        assert int(kept[:750].sum()) == count and kept[750:].all()


# DiffKV ----

# Attention whose column sums over the last four queries are the golden S of the two query heads ...
LAST_FOUR = [
    [[1.0], [0.0, 1.0], [1.0], [0.6, 0.1, 0.3], [0.0, 0.0, 0.3, 0.6, 0.1], [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]],
    [[1.0], [0.0, 1.0], [1.0], [1.0], [0.4, 0.02, 0.3, 0.28], [0.0, 0.0, 0.0, 0.12, 0.5, 0.38]],
]
# ... and attention whose means over all later queries are the golden means, the maximum over the two heads.
ALL_LATER = [
    [
        [1.0],
        [0.875, 0.125],
        [0.4, 0.0, 0.6],
        [0.4, 0.0, 0.0, 0.6],
        [rest, 0.0, 0.0, 0.0, 1 - rest],
        [0.5, *[0.0] * 4, 0.5],
    ]
    for rest in (0.4, 0.425)
]


def classes(store, row) -> list[str]:
    """The golden letters of the tokens 0 .. 5: high, low, pruned."""
    high, low = (held_positions(store, row, tier)[0] for tier in (0, 1))
    return ["H" if token in high else "L" if token in low else "P" for token in range(6)]


@pytest.mark.parametrize("bug", [False, True])
def test_golden_released_prompt(bug):
    """The released rule, from the golden sums of two query heads: classes, stored scores, and the positions that the
    released code stores instead of the true ones, which are here the queries that count."""
    case = golden("diffkv_prompt")
    policy = DiffKV(alpha_h=1, alpha_l=0.2, window=2, queries=4, decode_rule="released", emulate_score_bug=bug)
    store = make_store(policy, num_q_heads=2)
    row = read_prompt(store, LAST_FOUR)
    assert classes(store, row) == [letter.rstrip("*") for letter in case["code_N"]]
    columns = [[sum(own[token] for own in rows[2:] if token < len(own)) for token in range(6)] for rows in LAST_FOUR]
    assert [pytest.approx(own) for own in columns] == case["S"]
    right = dict(enumerate(case["max"]))
    stored = {int(token): score for token, score in case["buggy_saved_score"].items()} if bug else right
    got = held_scores(store, row, 0)[0] | held_scores(store, row, 1)[0]
    assert got == pytest.approx({token: stored[token] for token in got}, abs=1e-5)
    view = store.view(torch.tensor([row]))
    for tier in (0, 1):
        arrays, mean = view.slots(tier), view.mean_score(tier)
        live = arrays.valid[0, 0, 0]
        count = (arrays.score / mean)[0, 0, 0][live]
        where = arrays.pos[0, 0, 0][live].tolist()
        assert (6 - count).tolist() == pytest.approx([case["cached_pos"][token] for token in where], abs=1e-4)
        assert count.tolist() == pytest.approx([case["count"][token] for token in where], abs=1e-4)
        if not bug:
            assert mean[0, 0, 0][live].tolist() == pytest.approx([case["mean"][token] for token in where], abs=1e-5)


def test_golden_rank_order_of_the_bug():
    """The slot of rank r gets the score of token r: in the golden order the stored scores are the right ones."""
    case = golden("diffkv_prompt")
    policy = DiffKV(alpha_h=1, alpha_l=0.2, window=2, queries=4, emulate_score_bug=True)
    plan = policy.plan_prefill(prefill_view(torch.tensor(case["max"]), 6))
    assert [plan.score[0, 0, token].item() for token in case["sorted_order"]] == pytest.approx(case["max"])


@pytest.mark.parametrize(("threshold", "letters"), [("N", "code_N"), ("i", "paper_i")])
def test_golden_paper_prompt(threshold, letters):
    """The paper's rule, over all later queries with the same golden means: the golden classes of both thresholds."""
    case = golden("diffkv_prompt")
    store = make_store(DiffKV(alpha_h=1, alpha_l=0.2, window=2, threshold=threshold), num_q_heads=2)
    row = read_prompt(store, ALL_LATER)
    assert classes(store, row) == [letter.rstrip("*") for letter in case[letters]]


# KV-Compress ----


def test_golden_schedule():
    """Freeing one block more each time takes the golden head's next block, at the golden cost: its last token's
    metric."""
    data, infinity = golden("kvc"), math.inf
    for case, first in (("E3", [5.0, 1.0, 4.0, 2.0, 9.0]), ("protect2", [5.0, 1.0, 4.0, infinity, infinity])):
        cost = torch.tensor([first, [3.0, 6.0, infinity, infinity, infinity]])
        before = torch.zeros_like(cost, dtype=torch.bool)
        for surplus, (price, head) in enumerate(data[case]["schedule"], 1):
            evict = ~keep_blocks(cost, torch.tensor([5, 2]), 2, surplus)
            new = evict & ~before
            assert new.any(1).nonzero()[:, 0].tolist() == [head]
            assert cost[head][evict[head]].max() == price
            before = evict
    cost = torch.tensor([[5.0, 1.0, 4.0, 2.0, 9.0], [3.0, 6.0, infinity, infinity, infinity]])
    for case in ("E1", "E2", "E3"):
        evict = ~keep_blocks(cost, torch.tensor([5, 2]), 2, int(case[1]))
        left = -(-(torch.tensor([5, 2]) - evict.sum(1)) // 2)
        assert (torch.tensor([3, 1]) - left).tolist() == data[case]["blocks"]


@pytest.mark.parametrize(("power", "name", "evicted"), [(1, "l1", 0), (2, "l2", 1)])
def test_golden_powers(power, name, evicted):
    """Of the golden pair, one query of .9 against four of .3 and .2, L1 evicts the first token and L2 the second."""
    policy, seen = watching(KVCompress, budget=6, variant="full", skip_near=1, power=power, protected=6, block=1)
    store = make_store(policy, track=("pos",))
    flat = [[0.0, p, *[0.0] * own, 1 - p] for own, p in enumerate((0.3, 0.3, 0.3, 0.2), 1)]
    row = read_prompt(store, [[[1.0], [0.0, 1.0], [0.9, 0.0, 0.1], *flat]])
    assert seen[0].score[0, 0, :2].tolist() == pytest.approx(golden("kvc")[name], abs=1e-6)
    assert held_positions(store, row) == [[token for token in range(7) if token != evicted]]


@pytest.mark.parametrize(("near", "name"), [(2, "full_v2_L2_colsum"), (0, "full_v0_L2_colsum")])
def test_golden_full_metric(near, name):
    """The full variant's metric of the golden attention, near queries left out or not."""
    policy, seen = watching(KVCompress, budget=6, variant="full", skip_near=near)
    read_prompt(make_store(policy), [golden("h2o")["A"]])
    assert seen[0].score[0, 0].tolist() == pytest.approx(golden("kvc")[name], abs=1e-6)


# Bytes and bits ----


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_golden_kivi_bytes(head_dim, bits, group):
    """Pages that hold 128 quantised tokens bill them at the golden bytes, key and value half each."""
    want = golden(f"bytes{head_dim}").get(f"kivi{bits}_g{group}")
    if want is None:
        assert group > head_dim
        return
    store = make_store(Kivi(bits=bits, group=group, residual_tokens=128), head_dim=head_dim)
    row = store.open_row()
    store.prefill_layer(row, 0, *torch.randn(3, 1, 256, head_dim), 0.125)
    items = store.ledger.itemise(row)
    assert items["payload_bytes"] + items["quant_meta_bytes"] == want * (256 + 128) / 2  # 256 keys, 128 values


def test_golden_words():
    """Codes packed from the low bits up give the golden words, taken plane by plane: byte w of W holds the codes w,
    w + W, ... where KIVI and DiffKV put neighbours together."""
    planes = torch.arange(4, dtype=torch.uint8).repeat_interleave(4)
    assert bytes(pack(planes, 2).tolist()) == int(golden("quant")["pack2"], 16).to_bytes(4, "little")
    codes = torch.tensor(golden("quant")["k4"]["codes"], dtype=torch.uint8)  # 0, 4, 8, 15
    word = bytes(pack(codes.view(2, 2).T.flatten(), 4).tolist())
    assert word == int(golden("quant")["pack4_u16"], 16).to_bytes(2, "little")


# The audit ----


def golden_cases() -> set[str]:
    """Every case: group, or group.name where a group holds several."""
    data = json.loads(GOLDEN.read_text())
    return {f"{group}.{name}" for group, cases in data.items() if isinstance(cases, dict) for name in cases} | {
        group for group, cases in data.items() if not isinstance(cases, dict)
    }


def test_every_golden_case_has_its_tests():
    """The list of cases is complete, and every test that it names exists and reads that group."""
    listed = yaml.safe_load((TESTS / "golden" / "cases.yaml").read_text())
    assert set(listed) == golden_cases()
    for case, tests in listed.items():
        for test in tests.split():
            path, _, function = test.partition("::")
            text = (TESTS / path).read_text()
            assert f"\ndef {function}(" in text, f"{case}: {test} does not exist"
            assert case.split(".")[0].rstrip("0123456789") in text, f"{case}: {test} never mentions the group"
