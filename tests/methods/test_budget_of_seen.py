"""A share of all tokens seen: every method that has a budget keeps to it at every step, or refuses it."""

import pytest
import torch
from conformance_helpers import class_of, distinct, policy_of
from engine_helpers import answers, random_tokens, request

from kvbench.cache import ledger
from kvbench.policy import Budget
from kvbench.policy.budget import BudgetRule
from kvbench.rules import declared
from kvbench.runs.verdict import complaint

PROMPTS, NEW_TOKENS = (3, 33, 46), 17
BUDGETED = [
    (name, key)
    for name in distinct()
    for key, field in declared(class_of(name)).items()
    if isinstance(field.rule, BudgetRule)
]
# What cannot, and a word of its reason; h2o_factory and the last two can with another setting.
REFUSED = {
    "minikv": "keys of a group share their scales",
    "pyramid_infer": "scores no token behind it",
    "scissorhands": "by a budget that stands still",
    "h2o_factory": "set one_shot=false",
    "random_trace": "set protect to none",
    "triattention": "set protect to none",
}
READS = {"quest"}  # holds everything, and reads a share: see test_quest
KEEPS = [name for name, _ in BUDGETED if name not in REFUSED and name not in READS]


def of_seen(name: str, share: str, **changes):
    """The method at a share, with windows that a short prompt leaves room for."""
    small = {"window": 5, "obs_window": 4, "block": 4, "sinks": 2, "lag": 4}
    known = declared(class_of(name))
    return policy_of.__wrapped__(name, budget=share, **{k: v for k, v in small.items() if k in known} | changes)


def least(policy) -> int:
    """Tokens per list that stay whatever the share is, with those that come in before the next eviction."""
    window, sinks = getattr(policy, "window", 0), getattr(policy, "sinks", 0)
    if hasattr(policy, "obs_window"):
        return policy.fewest_tokens + 1
    if policy.compaction:
        return max(1, window - 1, sinks) + policy.compaction.every
    return max(window, sinks + 1)


def watched(loaded, policy, asked) -> tuple[dict, list]:
    """The answers, and of every step and row (row, tokens seen, positions that each list holds)."""
    found = []

    def look(running, step):
        store = running.store
        for row in range(store.pages.shape[0]):
            if (seen := store.counters.seen[row]) and row not in store._free_rows:
                slots = store.view(torch.tensor([row])).slots(0)
                lists = zip(slots.pos[0].flatten(0, 1), slots.valid[0].flatten(0, 1), strict=True)
                found.append((row, seen, [set(pos[valid].tolist()) for pos, valid in lists]))
                items = store.ledger.itemise(row)
                held = sum(len(held) for held in found[-1][2])
                assert items["track_bytes"] == held * 4 * len(policy.score.track)
                assert items["resident_bytes"] == sum(items[item] for item in ledger.ITEMS)

    return answers(loaded, policy, asked, on_step=look), found


def test_all_methods_with_a_budget_are_there():
    """Those that keep to a share, those that refuse it, and the one that reads one."""
    assert {name for name, _ in BUDGETED} >= {*REFUSED, *READS} and len(KEEPS) >= 20
    named = {"h2o", "snapkv", "pyramidkv", "ada_snapkv", "ada_pyramidkv", "kv_compress", "random", "streaming_llm"}
    assert named | {"chunkkv", "kvzip", "expected_attention", "tova"} <= set(KEEPS)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_keep_to_a_share_says_why(name):
    """Before anything is read, with the setting and the remedy."""
    with pytest.raises(ValueError, match=f"budget=50%seen is .*{REFUSED[name]}"):
        of_seen(name, "50%seen")


@pytest.mark.parametrize("share", ["50%seen", pytest.param("12.5%seen", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", KEEPS)
def test_a_share_of_what_was_seen_is_kept_to_at_every_step(tiny_model, name, share):
    """Prompts of several lengths in one batch: the mean list holds at most the share of prompt and answer, and hardly
    less at the end; what is gone stays gone; the ledger follows; each row is as it is alone."""
    if name == "kvpress":
        pytest.importorskip("kvpress")
    loaded, policy = tiny_model("llama", "gqa3", 64), of_seen(name, share)
    budget, floor = Budget.parse(share), least(policy)
    asked = [request(str(n), random_tokens(n), max_new_tokens=NEW_TOKENS) for n in PROMPTS]
    outcomes, steps = watched(loaded, policy, asked)
    before: dict[int, tuple[int, list]] = {}
    assert len(steps) >= len(PROMPTS) * (NEW_TOKENS - 1)
    for row, seen, lists in steps:
        allowed = budget.tokens(seen, 1, 1.0)
        assert sum(map(len, lists)) <= max(allowed, floor) * len(lists), (row, seen)
        if row in before and before[row][0] + 1 == seen:
            gained = [held - old for held, old in zip(lists, before[row][1], strict=True)]
            assert all(new <= {seen - 1} for new in gained)
        before[row] = (seen, lists)
    for outcome in outcomes.values():
        kept = outcome.kept
        assert outcome.status == "ok" and complaint(policy, vars(outcome)) is None
        held, allowed = sum(kept["slots_per_tier"]) / kept["lists"], budget.tokens(kept["tokens_seen"], 1, 1.0)
        block, coming = getattr(policy, "block", 0), policy.compaction.every if policy.compaction else 0
        assert held >= min(allowed, kept["tokens_seen"]) - 2 * block - max(coming, 1)
    (single,) = answers(loaded, policy, asked[1:2]).values()
    batched = outcomes[asked[1].sample_id, 0]
    assert single.token_ids == batched.token_ids and single.kept == batched.kept
