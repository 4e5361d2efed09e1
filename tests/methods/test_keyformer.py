"""Keyformer: H2O without noise and temperature, its formula with them, and what its noise is."""

import math

import pytest
import torch
from store_helpers import filled, held_positions, random_layer, step_one

from kvbench.methods import keyformer
from kvbench.methods.h2o import H2O
from kvbench.methods.keyformer import Keyformer, gumbel

HEADS, GROUP, LENGTH, DIM = 2, 2, 25, 8


def answer(policy, steps: int) -> list[list[int]]:
    """What is held after a random prompt and some random steps, each of which attends to few tokens."""
    store, row = filled(policy, [random_layer(0, HEADS, GROUP, LENGTH, DIM)], scale=0.5)
    torch.manual_seed(0)
    for _ in range(steps):
        step_one(store, row, [(8 * torch.randn(HEADS * GROUP, DIM), *torch.randn(2, HEADS, DIM))], 0.5)
    return [sorted(positions) for positions in held_positions(store, row)]


def test_without_noise_and_temperature_it_is_h2o(monkeypatch):
    """The same tokens after the prompt and along steps, with the group's mean; with noise other ones. Late steps tell
    whether what a step adds counts."""
    monkeypatch.setattr(keyformer, "ROWS", 7)
    for steps in (0, 1, 10, 40):
        want = answer(H2O(budget=10, recent_share=0.3, group="mean"), steps)
        assert answer(Keyformer(budget=10, noise=0.0, tau_delta=0.0), steps) == want
        assert answer(Keyformer(budget=10), steps) != want


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_the_prompt_s_scores_are_softmaxes_of_noisy_logits(tau):
    """Sums over queries of softmax((logit + noise) / tau), in loops; the heaviest stay beside the recent ones."""
    q, k, _ = random_layer(0, HEADS, GROUP, LENGTH, DIM)
    score = torch.zeros(HEADS, LENGTH, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        for query in range(LENGTH):
            logits = (k[head // GROUP, : query + 1] @ q[head, query]).double() * 0.5
            noise = gumbel(4, torch.tensor(query), torch.arange(query + 1)).double()
            score[head // GROUP, : query + 1] += ((logits + noise) / tau).softmax(0) / GROUP
    want = [sorted([*own[:22].topk(7).indices.tolist(), 22, 23, 24]) for own in score]
    assert answer(Keyformer(budget=10, tau_init=tau, seed=4), 0) == want


def slow_noise(seed: int, *place: int) -> float:
    """The noise of one place, by Python's whole numbers cut to 64 bits."""
    mixed, most = seed, 2**64 - 1
    for number in place:
        mixed = (mixed + number + 1) * 0x5851F42D4C957F2D & most
        mixed ^= mixed >> 29
        mixed = mixed * 0x2545F4914F6CDD1D & most
        mixed ^= mixed >> 32
    return -math.log(-math.log(((mixed & 0xFFFFFF) + 0.5) / 2**24))


def test_noise_is_the_same_wherever_it_is_made():
    """A function of seed and place, which no batch, device or version changes."""
    query, token = torch.arange(5)[:, None] * 1000, torch.arange(7)
    want = [[slow_noise(3, each, other) for other in range(7)] for each in range(0, 5000, 1000)]
    torch.testing.assert_close(gumbel(3, query, token), torch.tensor(want), rtol=1e-4, atol=1e-5)


def test_a_step_adds_noisy_attention_at_a_rising_temperature():
    """From the probabilities of a step, not its logits, and nothing for slots that are not there."""
    statistic = Keyformer(tau_init=1.5, tau_delta=0.25, seed=9).score.statistic
    logits = torch.tensor([[[0.3, 2.0, -1.0, 0.5]], [[1.0, 0.0, 0.0, -torch.inf]]])
    step = torch.tensor([3, 0])[:, None, None]
    found = statistic.of_step(logits.softmax(-1), torch.tensor([4, 3])[:, None, None], step)
    for row, tau in ((0, 1.5 + 4 * 0.25), (1, 1.5 + 0.25)):
        noise = gumbel(10, step[row, 0, 0], torch.arange(4))
        torch.testing.assert_close(found[row, 0], ((logits[row, 0] + noise) / tau).softmax(0))
    assert found[1, 0, 3] == 0


def test_noise_is_gumbel_s_and_depends_on_its_place_alone():
    """Mean, variance and tail of the distribution, no correlation along either axis, and the same in any width."""
    noise = gumbel(0, torch.arange(400)[:, None], torch.arange(500))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - 1.6449) < 0.03
    assert abs((noise > 3).float().mean() - (1 - torch.exp(-torch.exp(torch.tensor(-3.0))))) < 0.002
    for one, other in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.01
    assert torch.equal(gumbel(0, torch.arange(3)[:, None], torch.arange(7)), noise[:3, :7])
    assert not torch.equal(gumbel(1, torch.arange(3)[:, None], torch.arange(7)), noise[:3, :7])
