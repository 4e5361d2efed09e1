"""Scissorhands: hand-counted low probabilities of a prompt and of steps, and drops of many tokens when the budget is
full."""

from types import SimpleNamespace

import pytest
import torch
from golden_helpers import attend_as, read_prompt
from store_helpers import (
    causal_probabilities,
    filled,
    held_positions,
    held_scores,
    make_store,
    random_layer,
    step_at,
    step_random,
)

from kvbench.kernels.backend import REFERENCE
from kvbench.methods.scissorhands import Scissorhands

DIM = 16

# Rows of a prompt of 6 tokens. Against 1 / (i + 1), low are: row 1 none, row 2 {1}, row 3 {1, 3}, row 4 {1, 3, 4},
# row 5 {1, 3, 5}: minus the counts of all rows is [0, -4, 0, -3, -1, -1], of the last two [0, -2, 0, -2, -1, -1].
PROMPT = [
    [1.0],
    [0.5, 0.5],
    [0.6, 0.05, 0.35],
    [0.4, 0.1, 0.3, 0.2],
    [0.45, 0.05, 0.25, 0.1, 0.15],
    [0.2, 0.05, 0.35, 0.1, 0.18, 0.12],
]


def after_prompt(policy):
    """A store that has read the prompt above."""
    store = make_store(policy, head_dim=DIM)
    return store, read_prompt(store, [PROMPT])


@pytest.mark.parametrize(
    ("normalize", "history", "recent", "kept", "counts"),
    [
        (False, 400, 1, [0, 2, 4, 5], [0.0, 0.0, -1.0, -1.0]),
        (False, 2, 0, [0, 2, 4, 5], [0.0, 0.0, -1.0, -1.0]),
        (False, 400, 3, [0, 3, 4, 5], [0.0, -3.0, -1.0, -1.0]),
        # Shares of the queries that saw a token: [0, -4/5, 0, -1, -1/2, -1]; of the last two [0, -1, 0, -1, -1/2, -1].
        (True, 400, 1, [0, 2, 4, 5], [0.0, 0.0, -1.0, -1.0]),
        (True, 400, 0, [0, 1, 2, 4], [0.0, -4.0, 0.0, -1.0]),
        (True, 2, 0, [0, 1, 2, 4], [0.0, -2.0, 0.0, -1.0]),
    ],
)
def test_the_prompt_is_cut_by_its_counts(normalize, history, recent, kept, counts):
    """Those least often low stay, and the recent ones; ties go to the earlier token. Counts themselves are stored."""
    store, row = after_prompt(Scissorhands(budget=4, history=history, recent=recent, normalize=normalize))
    assert held_positions(store, row) == [kept]
    assert held_scores(store, row)[0] == pytest.approx(dict(zip(kept, counts, strict=True)))


def test_half_of_a_full_budget_goes_at_once_and_counts_start_again():
    """Full after the prompt: two of four go before the first step; three steps later two of four go by new counts."""
    store, row = after_prompt(Scissorhands(budget=4, recent=1, drop=0.5))
    attend_as(store, row, 6, [{0: 0.3, 5: 0.3, 6: 0.4}])  # low against 1/3: tokens 0 and 5
    assert held_positions(store, row) == [[0, 5, 6]]  # 5 is recent; 0 and 2 were never low, and the earlier stays
    assert held_scores(store, row)[0] == pytest.approx({0: -1.0, 5: -1.0, 6: 0.0})
    attend_as(store, row, 7, [{0: 0.1, 5: 0.4, 6: 0.4, 7: 0.1}])  # low against 1/4: tokens 0 and 7
    assert held_scores(store, row)[0] == pytest.approx({0: -2.0, 5: -1.0, 6: 0.0, 7: -1.0})
    store.begin_step(torch.tensor([row]))
    assert sorted(held_positions(store, row)[0]) == [6, 7, 8]
    assert set(held_scores(store, row)[0].values()) == {0.0}


def test_a_short_prompt_fills_the_budget_first():
    """Of 6 prompt tokens and a budget of 8, nothing goes until 8 are held, then a quarter of the budget each time."""
    make = torch.Generator().manual_seed(0)
    store, row = after_prompt(Scissorhands(budget=8, recent=2, drop=0.25))
    counts = []
    for position in range(6, 14):
        step_random(store, [row], make)
        held = set(held_positions(store, row)[0])
        counts.append(len(held))
        assert {position - 1, position} <= held
    assert counts == [7, 8, 7, 8, 7, 8, 7, 8]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_tokens", "history"), [(40, 400), (40, 7), (9, 400)])
def test_long_random_steps_follow_a_plain_list(normalize, num_tokens, history):
    """60 steps with three query heads per KV head: held sets are those of lists that count and drop by themselves."""
    policy = Scissorhands(budget=16, history=history, recent=3, drop=0.4, normalize=normalize, tier="native")
    total = num_tokens + 60
    q, k, v = random_layer(num_tokens + history, 2, 3, total, DIM)
    q = 3 * q
    store, row = filled(policy, [(q, k, v)], num_tokens, 0.25)
    prob = causal_probabilities(q[:, :num_tokens], k[:, :num_tokens], 0.25)
    heads = []
    for head in range(2):
        low, saw = {}, {}
        for j in range(num_tokens):
            queries = range(max(j, num_tokens - history), num_tokens)
            low[j] = min(sum(float(prob[3 * head + g, i, j]) < 1 / (i + 1) for i in queries) for g in range(3))
            saw[j] = len(queries)
        heads.append((low, saw))
        drop_to(low, saw, 16, num_tokens, normalize)
    for position in range(num_tokens, total):
        step_at(store, row, [(q, k, v)], position, 0.25)
        for head, (low, saw) in enumerate(heads):
            if len(low) == 16:
                drop_to(low, saw, 10, position, normalize)
                low |= dict.fromkeys(low, 0)
                saw |= dict.fromkeys(saw, 0)
            low[position] = saw[position] = 0
            held = sorted(low)
            logits = torch.einsum("gd,nd->gn", q[3 * head : 3 * head + 3, position].double(), k[head, held].double())
            best = torch.softmax(logits * 0.25, -1).amax(0)
            for j, p in zip(held, best.tolist(), strict=True):
                low[j] += p < 1 / len(held)
                saw[j] += 1
            assert sorted(held_positions(store, row)[head]) == held


def drop_to(low: dict, saw: dict, count: int, seen: int, normalize: bool) -> None:
    """Drops the tokens that were low most often, but for the last three, until `count` are left."""
    share = {j: low[j] / saw[j] if normalize else low[j] for j in low}
    order = sorted(low, key=lambda j: (j < seen - 3, -j if j >= seen - 3 else share[j], j))
    for j in order[count:]:
        del low[j], saw[j]


def test_a_group_is_low_where_all_its_query_heads_are():
    """With two query heads per KV head, a step counts a token as low only when neither head reaches the threshold."""
    store = make_store(Scissorhands(budget=8), num_q_heads=2, head_dim=DIM)
    row = read_prompt(store, [[[1.0], [0.5, 0.5]]] * 2)
    attend_as(store, row, 2, [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
    assert held_scores(store, row)[0] == pytest.approx({0: 0.0, 1: -1.0, 2: 0.0})


@pytest.mark.parametrize(("queries", "skip_near"), [(-1, 0), (5, 0), (1, 0), (-1, 3)])
def test_prompt_counts_are_those_of_the_whole_matrix(queries, skip_near):
    """In blocks or at once: the same counts, per KV head the least of its query heads."""
    q, k, _ = random_layer(0, 2, 3, 130, DIM)
    q = 2 * q
    prob = causal_probabilities(q, k, 0.25)
    i, j = torch.arange(130)[:, None], torch.arange(130)
    low = (prob < 1.0 / (i + 1)) & (j <= i - skip_near) & (i >= (0 if queries < 0 else 130 - queries))
    want = -low.sum(1).view(2, 3, 130).amin(1).float()
    assert torch.equal(REFERENCE.prompt_low_counts(q, k, 0.25, queries=queries, skip_near=skip_near, group="max"), want)


@pytest.mark.parametrize(("drop", "dropped"), [(0.1, 1), (0.25, 1), (0.5, 2), (1.0, 4)])
@pytest.mark.parametrize("prompt", [2, 4, 9])
def test_a_drop_is_due_when_the_budget_is_full(prompt, drop, dropped):
    """Not one step before it is, and then whenever as many tokens have come in as a drop takes away."""
    seen = torch.arange(prompt, prompt + 20)
    view = SimpleNamespace(
        tokens_seen=seen,
        prompt_tokens=torch.full_like(seen, prompt),
        budget_tokens=lambda budget: torch.full_like(seen, int(budget.value)),
    )
    held, due = min(prompt, 4), []
    for _ in range(20):
        due.append(held == 4)
        held = held - dropped + 1 if held == 4 else held + 1
    assert Scissorhands(budget=4, drop=drop).compaction.due(view).tolist() == due
