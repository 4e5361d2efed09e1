"""TOVA: hand-computed prompts and steps through the real store, per layer and per head."""

import pytest
import torch
from store_helpers import causal_probabilities, held_positions, held_scores, make_store, plain_attention

from kvbench.methods.tova import TOVA
from kvbench.policy import ScoreSpec

DIM = 16  # key of token j is unit vector j, so that a query can ask for any probabilities of up to 16 tokens


def asking(rows: list[dict[int, float]]) -> torch.Tensor:
    """Queries [heads, 16] whose softmax over the unit keys is, per head, the given position -> probability."""
    query = torch.full((len(rows), DIM), -80.0)
    for head, row in enumerate(rows):
        for position, probability in row.items():
            query[head, position] = torch.tensor(probability).log()
    return query


def after_prompt(policy, last: list[list[float]], num_kv_heads: int = 1):
    """A store that has read a prompt whose last query has the given probabilities in each query head."""
    length = len(last[0])
    store = make_store(policy, num_q_heads=len(last), num_kv_heads=num_kv_heads, head_dim=DIM)
    row = store.open_row()
    q = torch.zeros(len(last), length, DIM)
    q[:, -1] = asking([dict(enumerate(p)) for p in last])
    k = torch.eye(DIM)[:length].expand(num_kv_heads, -1, -1)
    store.prefill_layer(row, 0, q, k, torch.zeros(num_kv_heads, length, DIM), 1.0)
    return store, row


def step(store, row, position: int, rows: list[dict[int, float]]) -> None:
    """One decode step in which the heads attend as given; the new token's key is unit vector `position`."""
    heads = store.pages.shape[2]
    store.begin_step(torch.tensor([row]))
    key = torch.eye(DIM)[position].expand(1, heads, -1)
    store.attend(0, asking(rows)[None], key, torch.zeros(1, heads, DIM), 1.0)
    store.end_step()


def test_the_last_query_chooses_the_prompt():
    """Of [.2 .05 .35 .1 .2 .1] the four largest stay; of the two equal ones the earlier."""
    store, row = after_prompt(TOVA(budget=4), [[0.2, 0.05, 0.35, 0.1, 0.2, 0.1]])
    assert held_positions(store, row) == [[0, 2, 3, 4]]
    assert held_scores(store, row)[0] == pytest.approx({0: 0.2, 2: 0.35, 3: 0.1, 4: 0.2}, abs=1e-6)


def test_a_step_replaces_the_scores_and_its_lightest_token_goes():
    """The first step only adds a token; what it attends to least is overwritten by the next token, and so on."""
    store, row = after_prompt(TOVA(budget=4), [[0.2, 0.05, 0.35, 0.1, 0.2, 0.1]])
    step(store, row, 6, [{0: 0.3, 2: 0.04, 3: 0.31, 4: 0.15, 6: 0.2}])
    assert held_positions(store, row) == [[0, 2, 3, 4, 6]]
    # Added up, token 3 would be ahead of token 4 by 0.06 only; replaced, token 2 is the lightest despite its 0.35.
    assert held_scores(store, row)[0] == pytest.approx({0: 0.3, 2: 0.04, 3: 0.31, 4: 0.15, 6: 0.2}, abs=1e-6)
    step(store, row, 7, [{0: 0.05, 7: 0.5, 3: 0.15, 4: 0.1, 6: 0.2}])
    assert held_positions(store, row) == [[0, 7, 3, 4, 6]]
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[8, 7, 3, 4, 6]]  # the sink goes like any other token


def test_the_newest_token_can_be_the_one_to_go():
    """A token that attends to everything but itself is dropped after its own step."""
    store, row = after_prompt(TOVA(budget=3), [[0.4, 0.3, 0.3]])
    step(store, row, 3, [{0: 0.5, 1: 0.2, 2: 0.25, 3: 0.05}])
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 1, 2, 4]]


# Two KV heads of one query head each. Mean of the prompt: [.35 .25 .2 .2]; of the step: [.25 .2 . .25 .3].
TWO_HEADS = [[0.6, 0.1, 0.1, 0.2], [0.1, 0.4, 0.3, 0.2]]
TWO_STEPS = [{0: 0.1, 1: 0.35, 2: 0.15, 4: 0.4}, {0: 0.4, 1: 0.05, 2: 0.35, 4: 0.2}]


def test_all_heads_of_a_layer_drop_the_same_token():
    """The mean over heads decides: {0, 1, 2} stay of the prompt, and token 1 makes room after the step."""
    store, row = after_prompt(TOVA(budget=3), TWO_HEADS, num_kv_heads=2)
    assert held_positions(store, row) == [[0, 1, 2]] * 2
    step(store, row, 4, TWO_STEPS)
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[0, 5, 2, 4]] * 2


def test_per_head_each_head_drops_its_own():
    """With per_head=true the heads keep {0, 1, 3} and {1, 2, 3}, and drop tokens 0 and 1."""
    store, row = after_prompt(TOVA(budget=3, per_head=True), TWO_HEADS, num_kv_heads=2)
    assert held_positions(store, row) == [[0, 1, 3], [1, 2, 3]]
    step(store, row, 4, [{0: 0.1, 1: 0.35, 3: 0.15, 4: 0.4}, {1: 0.05, 2: 0.35, 3: 0.4, 4: 0.2}])
    store.begin_step(torch.tensor([row]))
    assert held_positions(store, row) == [[5, 1, 3, 4], [5, 2, 3, 4]]


@pytest.mark.parametrize(("budget", "num_tokens"), [(12, 40), (0.3, 40), (40, 12), (1.0, 25)])
def test_long_random_steps_follow_a_plain_list(budget, num_tokens):
    """30 steps with three query heads per KV head: sets and outputs are those of a list that drops its lightest."""
    torch.manual_seed(num_tokens)
    store = make_store(TOVA(budget=budget, tier="native"), num_q_heads=6, num_kv_heads=2, head_dim=DIM)
    row, total = store.open_row(), num_tokens + 30
    q, k, v = 2 * torch.randn(6, total, DIM), *torch.randn(2, 2, total, DIM)
    store.prefill_layer(row, 0, q[:, :num_tokens], k[:, :num_tokens], v[:, :num_tokens], 0.25)
    allowed = int(budget * num_tokens) if isinstance(budget, float) else budget
    mean = causal_probabilities(q[:, :num_tokens], k[:, :num_tokens], 0.25)[:, -1].mean(0)
    held = sorted(sorted(range(num_tokens), key=lambda j: (-mean[j], j))[:allowed])
    for position in range(num_tokens, total):
        held.append(position)
        store.begin_step(torch.tensor([row]))
        out = store.attend(0, q[None, :, position], k[None, :, position], v[None, :, position], 0.25)[0]
        store.end_step()
        assert [sorted(h) for h in held_positions(store, row)] == [sorted(held)] * 2
        assert (out - plain_attention(q[:, position], k[:, held], v[:, held], 0.25)).abs().max() < 1e-5
        both = torch.einsum("hd,hnd->hn", q[:, position].double(), k[:, held].double().repeat_interleave(3, 0))
        weight = torch.softmax(both * 0.25, -1).mean(0)
        if len(held) > allowed:
            del held[int(weight.argmin())]


def test_replacing_needs_an_update():
    """A ScoreSpec that replaces scores without ever updating them is refused."""
    with pytest.raises(ValueError, match="decode_replace=True needs decode_update=True"):
        ScoreSpec(decode_replace=True)
