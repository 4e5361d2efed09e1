"""TOVA: hand-computed prompts and steps through the real store, per layer and per head."""

import pytest
import torch
from golden_helpers import attend_as, own_rows, read_prompt
from store_helpers import (
    causal_probabilities,
    filled,
    held_positions,
    held_scores,
    make_store,
    plain_attention,
    random_layer,
    step_at,
)

from kvbench.methods.tova import TOVA


def after_prompt(policy, last: list[list[float]], num_kv_heads: int = 1):
    """A store that has read a prompt whose last query has the given probabilities in each query head."""
    length = len(last[0])
    store = make_store(policy, num_q_heads=len(last), num_kv_heads=num_kv_heads, head_dim=16)
    return store, read_prompt(store, [[*own_rows(length - 1), own] for own in last], num_kv_heads)


def test_the_last_query_chooses_the_prompt():
    """Of [.2 .05 .35 .1 .2 .1] the four largest stay; of the two equal ones the earlier."""
    store, row = after_prompt(TOVA(budget=4), [[0.2, 0.05, 0.35, 0.1, 0.2, 0.1]])
    assert held_positions(store, row) == [[0, 2, 3, 4]]
    assert held_scores(store, row)[0] == pytest.approx({0: 0.2, 2: 0.35, 3: 0.1, 4: 0.2}, abs=1e-6)


def test_a_step_replaces_the_scores_and_its_lightest_token_goes():
    """The first step only adds a token; what it attends to least is overwritten by the next token, and so on."""
    store, row = after_prompt(TOVA(budget=4), [[0.2, 0.05, 0.35, 0.1, 0.2, 0.1]])
    attend_as(store, row, 6, [{0: 0.3, 2: 0.04, 3: 0.31, 4: 0.15, 6: 0.2}])
    assert held_positions(store, row) == [[0, 2, 3, 4, 6]]
    # Added up, token 3 would be ahead of token 4 by 0.06 only; replaced, token 2 is the lightest despite its 0.35.
    assert held_scores(store, row)[0] == pytest.approx({0: 0.3, 2: 0.04, 3: 0.31, 4: 0.15, 6: 0.2}, abs=1e-6)
    attend_as(store, row, 7, [{0: 0.05, 7: 0.5, 3: 0.15, 4: 0.1, 6: 0.2}])
    assert held_positions(store, row) == [[0, 7, 3, 4, 6]]
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[8, 7, 3, 4, 6]]  # the sink goes like any other token


def test_the_newest_token_can_be_the_one_to_go():
    """A token that attends to everything but itself is dropped after its own step."""
    store, row = after_prompt(TOVA(budget=3), [[0.4, 0.3, 0.3]])
    attend_as(store, row, 3, [{0: 0.5, 1: 0.2, 2: 0.25, 3: 0.05}])
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 1, 2, 4]]


# Two KV heads of one query head each. Mean of the prompt: [.35 .25 .2 .2]; of the step: [.25 .2 . .25 .3].
TWO_HEADS = [[0.6, 0.1, 0.1, 0.2], [0.1, 0.4, 0.3, 0.2]]
TWO_STEPS = [{0: 0.1, 1: 0.35, 2: 0.15, 4: 0.4}, {0: 0.4, 1: 0.05, 2: 0.35, 4: 0.2}]


def test_all_heads_of_a_layer_drop_the_same_token():
    """The mean over heads decides: {0, 1, 2} stay of the prompt, and token 1 makes room after the step."""
    store, row = after_prompt(TOVA(budget=3), TWO_HEADS, num_kv_heads=2)
    assert held_positions(store, row) == [[0, 1, 2]] * 2
    attend_as(store, row, 4, TWO_STEPS)
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 5, 2, 4]] * 2


def test_per_head_each_head_drops_its_own():
    """With per_head=true the heads keep {0, 1, 3} and {1, 2, 3}, and drop tokens 0 and 1."""
    store, row = after_prompt(TOVA(budget=3, per_head=True), TWO_HEADS, num_kv_heads=2)
    assert held_positions(store, row) == [[0, 1, 3], [1, 2, 3]]
    attend_as(store, row, 4, [{0: 0.1, 1: 0.35, 3: 0.15, 4: 0.4}, {1: 0.05, 2: 0.35, 3: 0.4, 4: 0.2}])
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[5, 1, 3, 4], [5, 2, 3, 4]]


def test_one_set_of_a_layer_or_of_the_model():
    """Heads of a layer share a set, and layers share one where they are to decide together."""
    assert TOVA(budget=4).scope == "layer"
    assert TOVA(budget=4, allocation="pyramid").scope == "layer"
    assert TOVA(budget=4, per_head=True).scope == "layer"


@pytest.mark.parametrize(("budget", "num_tokens"), [(12, 40), (0.3, 40), (40, 12), (1.0, 25)])
def test_long_random_steps_follow_a_plain_list(budget, num_tokens):
    """30 steps with three query heads per KV head: sets and outputs are those of a list that drops its lightest."""
    q, k, v = random_layer(num_tokens, 2, 3, num_tokens + 30, 16)
    q = 2 * q
    store, row = filled(TOVA(budget=budget, tier="native"), [(q, k, v)], num_tokens, 0.25)
    allowed = int(budget * num_tokens) if isinstance(budget, float) else budget
    mean = causal_probabilities(q[:, :num_tokens], k[:, :num_tokens], 0.25)[:, -1].mean(0)
    held = sorted(sorted(range(num_tokens), key=lambda j: (-mean[j], j))[:allowed])
    for position in range(num_tokens, num_tokens + 30):
        held.append(position)
        (out,) = step_at(store, row, [(q, k, v)], position, 0.25)
        assert [sorted(h) for h in held_positions(store, row)] == [sorted(held)] * 2
        assert (out - plain_attention(q[:, position], k[:, held], v[:, held], 0.25)).abs().max() < 1e-5
        both = torch.einsum("hd,hnd->hn", q[:, position].double(), k[:, held].double().repeat_interleave(3, 0))
        weight = torch.softmax(both * 0.25, -1).mean(0)
        if len(held) > allowed:
            del held[int(weight.argmin())]
