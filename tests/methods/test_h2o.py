"""H2O: the golden prompt and steps through the real kernels, and its one-shot variant."""

import math
from types import SimpleNamespace

import pytest
import torch
from store_helpers import golden, held_positions, held_scores, make_store, prefill_view

from kvbench.methods.h2o import H2O
from kvbench.policy import Extreme


def log_query(row: list[float], positions: list[int]) -> torch.Tensor:
    """A query [1, 8] whose softmax over keys that are unit vectors at `positions` is `row`."""
    query = torch.full((8,), -60.0)
    query[positions] = torch.tensor(row).log()
    return query[None]


def golden_store(policy):
    """A store that has read the golden prompt: key j is unit vector j, query i the logarithm of row i."""
    matrix = torch.tensor(golden("h2o")["A"])
    store = make_store(policy, track=("pos",))
    row = store.open_row()
    q = torch.zeros(1, 6, 8)
    q[0, :, :6] = matrix.clamp(min=1e-30).log()
    k = torch.eye(8)[None, :6]
    store.prefill_layer(row, 0, q, k, torch.zeros(1, 6, 8), 1.0)
    return store, row


def test_golden_prompt():
    """Column sums choose the golden heavy hitters; the stored scores are the golden ones."""
    case = golden("h2o")
    store, row = golden_store(H2O(budget=4))
    assert held_positions(store, row) == [case["kept"]]
    expected = dict(zip(case["kept"], case["kept_scores"], strict=True))
    assert held_scores(store, row)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("step", ["step_a", "step_b"])
def test_golden_step(step):
    """The first step appends and adds its probabilities; the next one evicts the golden token, whose slot the new one
    takes."""
    case = golden("h2o")[step]
    store, row = golden_store(H2O(budget=4))
    rows, kept = torch.tensor([row]), [*golden("h2o")["kept"], 6]
    store.begin_step(rows)
    assert held_positions(store, row) == [kept]
    store.attend(0, log_query(case["row"], kept)[None], torch.eye(8)[None, None, 6], torch.zeros(1, 1, 8), 1.0)
    store.end_step()
    scores = held_scores(store, row)[0]
    assert {p: scores[p] for p in case["ids"]} == pytest.approx(
        dict(zip(case["ids"], case["scores"], strict=True)), abs=1e-5
    )
    store.begin_step(rows)
    assert sorted(held_positions(store, row)[0]) == [*case["ids"], 7]


def test_one_shot_variant():
    """KVCache-Factory's H2O with w=2, C=4 keeps {0,2,4,5} and only grows afterwards."""
    store, row = golden_store(H2O(budget=4, one_shot=True, window=2))
    assert held_positions(store, row) == [[0, 2, 4, 5]]
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 2, 4, 5, 6]]


@pytest.mark.parametrize("how", ["mean", "max"])
def test_group_reduction(how):
    """The golden group scores choose the golden tokens under the mean and under the maximum."""
    case = golden("gqa")
    both = torch.tensor([case["a"], case["b"]])
    score = both.mean(0) if how == "mean" else both.amax(0)
    plan = H2O(budget=2, recent_share=0, group=how).plan_prefill(prefill_view(score, 4))
    assert (plan.tier_of[0, 0] >= 0).nonzero()[:, 0].tolist() == case[how]


def test_size_stays_put_while_decoding():
    """After any number of steps a head holds heavy + recent + 1 tokens, the last `recent` of them the newest."""
    torch.manual_seed(0)
    store = make_store(H2O(budget=20), num_q_heads=2, head_dim=16, track=("pos",))
    row = store.open_row()
    store.prefill_layer(row, 0, torch.randn(2, 50, 16), torch.randn(1, 50, 16), torch.randn(1, 50, 16), 0.25)
    for _ in range(40):
        store.begin_step(torch.tensor([row]))
        store.attend(0, torch.randn(1, 2, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16), 0.25)
        store.end_step()
    held = sorted(held_positions(store, row)[0])
    assert len(held) == 21 and held[-11:] == list(range(79, 90))


def test_lossless_with_room():
    """A budget above the sequence keeps every token."""
    store = make_store(H2O(budget=1000), track=("pos",))
    row = store.open_row()
    store.prefill_layer(row, 0, torch.randn(1, 9, 8), torch.randn(1, 9, 8), torch.randn(1, 9, 8), 1.0)
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [list(range(10))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recent_share": 1.5}, "recent_share=1.5 must be a number in"),
        ({"window": -1}, "window=-1 must be a whole number of tokens from 0"),
    ],
)
def test_bad_settings(settings, message):
    """A bad setting is named with its rule."""
    with pytest.raises(ValueError, match=message):
        H2O(**settings)


def test_scores_of_log_queries():
    """The construction itself: the softmax of a log query is the wanted row."""
    assert torch.softmax(log_query([0.25, 0.75], [0, 2])[0], -1)[2].item() == pytest.approx(0.75)
    assert math.isclose(sum(golden("h2o")["A"][3]), 1.0)


def test_the_recent_window_of_a_step_is_that_of_the_prompt():
    """For every share in percent, as many tokens as the prompt's plan protects: 0.29 x 100 is 28 in fp64, as Python
    has it, and 29 in fp32."""
    nothing = torch.full((1, 1, 1), -1)
    before: list[int] = []

    def argmin(tier: int, **asked: torch.Tensor) -> Extreme:
        before.append(int(asked["before"]))
        return Extreme(value=nothing, slot=nothing, pos=nothing)

    view = SimpleNamespace(
        budget_tokens=lambda budget: torch.tensor([100]),
        tokens_seen=torch.tensor([400]),
        prompt_tokens=torch.tensor([400]),
        num_slots=lambda tier: torch.full((1, 1, 1), 100),
        argmin=argmin,
    )
    prompt = prefill_view(torch.arange(400.0).flip(0)[None], 400)
    for percent in range(101):
        policy = H2O(budget=100, recent_share=percent / 100)
        assert policy.plan_decode(view).slot.tolist() == [[[-1]]]
        recent = int((policy.plan_prefill(prompt).tier_of[0, 0, 200:] >= 0).sum())
        assert 400 - before[-1] == recent
