"""H2O: the golden prompt and steps through the real kernels, and its one-shot variant."""

from types import SimpleNamespace

import pytest
import torch
from golden_helpers import attend_as, read_prompt
from store_helpers import golden, held_positions, held_scores, make_store, prefill_view

from kvbench.methods.h2o import H2O
from kvbench.policy import Extreme


def golden_store(policy):
    """A store that has read the golden prompt; also its row."""
    store = make_store(policy, track=("pos",))
    return store, read_prompt(store, [golden("h2o")["A"]])


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
    kept = [*golden("h2o")["kept"], 6]
    attend_as(store, row, 6, [dict(zip(kept, case["row"], strict=True))])
    assert held_positions(store, row) == [kept]
    scores, wanted = held_scores(store, row)[0], dict(zip(case["ids"], case["scores"], strict=True))
    assert {p: scores[p] for p in case["ids"]} == pytest.approx(wanted, abs=1e-5)
    store.begin_step(torch.tensor([row]))
    assert sorted(held_positions(store, row)[0]) == [*case["ids"], 7]


def test_one_shot_variant():
    """KVCache-Factory's H2O with w=2, C=4 keeps {0,2,4,5} and only grows afterwards."""
    store, row = golden_store(H2O(budget=4, one_shot=True, window=2))
    assert held_positions(store, row) == [[0, 2, 4, 5]]
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 2, 4, 5, 6]]


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
