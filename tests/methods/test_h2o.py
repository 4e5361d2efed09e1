"""H2O: the golden prompt and steps through the real kernels, and its one-shot variant."""

from types import SimpleNamespace

import pytest
import torch
from golden_helpers import attend_as, read_prompt
from store_helpers import (
    causal_probabilities,
    filled,
    golden,
    held_positions,
    held_scores,
    make_store,
    plain_attention,
    prefill_view,
    random_layer,
    step_at,
)

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


@pytest.mark.parametrize(("budget", "share", "num_tokens"), [(21, 0.5, 67), (0.3, 0.25, 40), (17, 0.0, 33)])
def test_a_long_decode_equals_the_paper_in_dicts(budget, share, num_tokens):
    """In float64 and dicts: of a prompt the recent tokens and those with the largest column sums stay; a step attends
    to what is held and its own token, adds its probabilities, and then drops the lightest token that is not recent."""
    heads, group, scale, steps = 2, 3, 0.25, 40
    q, k, v = random_layer(num_tokens, heads, group, num_tokens + steps, 16)
    q = 2 * q
    store, row = filled(H2O(budget=budget, recent_share=share), [(q, k, v)], num_tokens, scale)
    room = budget if isinstance(budget, int) else int(budget * num_tokens)
    recent = int(room * share)
    sums = causal_probabilities(q[:, :num_tokens], k[:, :num_tokens], scale).sum(1).unflatten(0, (heads, group)).sum(1)

    def dropped(score: dict[int, float]) -> dict[int, float]:
        newest = sorted(score)[len(score) - recent :]
        heavy = sorted((p for p in score if p not in newest), key=lambda p: (-score[p], p))[: room - recent]
        return {p: score[p] for p in (*heavy, *newest)}

    score = [dropped(dict(enumerate(sums[head].tolist()))) for head in range(heads)]
    assert [set(held) for held in held_positions(store, row)] == [set(held) for held in score]
    for at in range(num_tokens, num_tokens + steps):
        (out,) = step_at(store, row, [(q, k, v)], at, scale)
        for head in range(heads):
            held, members = sorted([*score[head], at]), slice(group * head, group * (head + 1))
            want = plain_attention(q[members, at], k[head : head + 1, held], v[head : head + 1, held], scale)
            assert (out[members] - want).abs().max() < 5e-3  # pages hold fp16
            added = torch.softmax(q[members, at].double() @ k[head, held].double().T * scale, -1).sum(0)
            grown = {p: score[head].get(p, 0.0) + x for p, x in zip(held, added.tolist(), strict=True)}
            assert held_scores(store, row)[head] == pytest.approx(grown, abs=5e-3)
            score[head] = dropped(grown)
