"""DiffKV as released: golden prompt classes, the score bug, and every golden decode action through the store."""

import pytest
import torch
from store_helpers import golden, held_positions, make_store, prefill_view

from kvbench.methods.diffkv import DiffKV

HIGH, LOW = 0, 1
# Score sums of the golden state after a prompt of 6 with 4 scored queries; means are over min(6 - j, 4) queries.
HIGH_SCORES = {0: 2.4, 3: 0.6, 4: 0.6, 5: 0.5}
LOW_SCORES = {2: 0.6}


def policy_of(alpha_h, alpha_l, **settings):
    """The golden setting: 4 queries, a window of 2."""
    released = {"queries": 4, "decode_rule": "released"}
    return DiffKV(alpha_h=alpha_h, alpha_l=alpha_l, window=2, **released, **settings)


def test_golden_prompt_classes():
    """Sums over the last queries, the maximum over the group, thresholds over N: the golden classes."""
    case = golden("diffkv_prompt")
    policy = policy_of(1.0, 0.2)
    plan = policy.plan_prefill(prefill_view(torch.tensor(case["max"]), 6))
    names = {HIGH: "H", LOW: "L", -1: "P"}
    assert [names[t] for t in plan.tier_of[0, 0].tolist()] == [name.rstrip("*") for name in case["code_N"]]
    assert plan.score is None
    assert (policy.score.prefill_queries, policy.score.group_reduce) == (4, "max")


def test_golden_score_bug():
    """With the bug emulated, every token is stored with the golden wrong score."""
    case = golden("diffkv_prompt")
    plan = policy_of(1.0, 0.2, emulate_score_bug=True).plan_prefill(prefill_view(torch.tensor(case["max"]), 6))
    want = {int(token): score for token, score in case["buggy_saved_score"].items()}
    assert dict(enumerate(plan.score[0, 0].tolist())) == pytest.approx(want)


def store_of(policy, high=HIGH_SCORES, low=LOW_SCORES):
    """A store that holds the golden state, each key and value its own position."""
    store = make_store(policy)
    row = store.open_row()
    lists = store.pages.lists_of(torch.tensor([row]))
    for tier, state in ((HIGH, high), (LOW, low)):
        store.pages.table.reserve(lists, tier, torch.tensor([len(state)]))
        pos = torch.tensor(list(state), dtype=torch.int64)
        where = store.pages.table.lookup(lists.repeat(len(state)), tier, torch.arange(len(state)))
        label = pos.float()[:, None].expand(-1, 8)
        store.pages.backend.write_keys(store.pages.pool.pages, store.pages.formats[tier], *where, label)
        store.pages.backend.write_values(store.pages.pool.pages, store.pages.formats[tier], *where, label)
        store.pages.backend.write_tracked(
            store.pages.pool.pages, store.pages.formats[tier], *where, torch.tensor(list(state.values())), pos
        )
    store.counters.tokens_seen[row] = store.counters.prompt_tokens[row] = 6
    return store, row


def expected(action: str, high, low):
    """The positions in each tier after a golden action, the new token 6 included."""
    high, low = set(high), set(low)
    words = action.split()
    if words[0] in ("demote", "prune"):
        high.remove(int(words[1]))
    if words[0] == "demote":
        low.add(int(words[1]))
        if words[2] == "over":
            low.remove(int(words[3]))
    return sorted(high | {6}), sorted(low)


@pytest.mark.parametrize(
    ("case", "alphas", "changes"),
    [
        ("ah1_al.2", (1.0, 0.2), {}),
        ("ah1.5_al.2", (1.5, 0.2), {}),
        ("ah1.5_al1", (1.5, 1.0), {}),
        ("ah1.5_al1.3", (1.5, 1.3), {}),
        ("ah1.5_al1.3_low.9", (1.5, 1.3), {"low": {2: 0.9}}),
        ("code_vs_alg1", (1.5, 0.2), {"high": HIGH_SCORES | {4: 0.44}}),
    ],
)
def test_golden_actions(case, alphas, changes):
    """Every golden state takes its golden action when a step begins."""
    high, low = changes.get("high", HIGH_SCORES), changes.get("low", LOW_SCORES)
    store, row = store_of(policy_of(*alphas), high, low)
    store.begin_step(torch.tensor([row]))
    held = sorted(held_positions(store, row, HIGH)[0]), sorted(held_positions(store, row, LOW)[0])
    assert held == expected(golden("diffkv_decode")[case]["action"], high, low)


def test_short_caches_only_append():
    """While a head holds fewer tokens than the window, nothing is demoted however small its score."""
    store, row = store_of(DiffKV(alpha_h=100, alpha_l=100, window=64, queries=4, decode_rule="released"))
    store.begin_step(torch.tensor([row]))
    assert sorted(held_positions(store, row, HIGH)[0]) == [0, 3, 4, 5, 6]


def test_bad_thresholds():
    """alpha_l above alpha_h is refused with both values."""
    with pytest.raises(ValueError, match=r"alpha_l=2.0 and alpha_h=1.0 must satisfy"):
        DiffKV(alpha_l=2.0)
