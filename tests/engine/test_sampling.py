"""Choosing tokens, and the rules that end an answer."""

import pytest
import torch
from engine_helpers import request

from kvbench.engine.answer import Answer
from kvbench.engine.rows import choose_token, nucleus, row_generator

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


class Words:
    """A tokenizer of a few pieces that need not be words; 9 is special and decodes to nothing."""

    pieces = ["", "He", "llo", " wor", "ld", "\n", "\n\n", "Q", ":", ""]

    def decode(self, token_ids, **settings):
        assert settings == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return "".join(self.pieces[token] for token in token_ids)


def answered(tokens, *, end_ids=(0,), **fields):
    """Feeds tokens until the answer is over; returns it and the number of tokens it took."""
    fields = {"max_new_tokens": 100, "min_new_tokens": 0} | fields
    answer = Answer(request("x", (1,), **fields), Words(), end_ids)
    for count, token in enumerate(tokens, 1):
        answer.add(token)
        if answer.finish:
            return answer, count
    return answer, len(tokens)


def shares(logits, num_draws=4000, banned=(), **fields):
    """How often each token is drawn."""
    generator = torch.Generator().manual_seed(0)
    asked = request("x", (1,), **fields)
    draws = torch.tensor([choose_token(logits, asked, generator, list(banned)) for _ in range(num_draws)])
    return (torch.bincount(draws, minlength=len(logits)) / num_draws).tolist()


def test_greedy_takes_the_largest_and_the_first_of_equals():
    """Temperature 0 draws nothing."""
    assert choose_token(LOGITS, request("x", (1,)), None, []) == 1
    assert choose_token(torch.tensor([0.0, 2.0, 2.0]), request("x", (1,)), None, []) == 1


def test_banned_tokens_never_come():
    """Neither greedily nor by chance, and the logits handed in stay as they are."""
    before = LOGITS.clone()
    assert choose_token(LOGITS, request("x", (1,)), None, [1]) == 3
    assert shares(LOGITS, 500, banned=[1, 3], temperature=1.0)[1::2] == [0.0, 0.0]
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize(
    ("temperature", "top_p", "want"),
    [
        (1.0, 1.0, [0.05, 0.5, 0.15, 0.3]),
        (0.5, 1.0, [0.0068, 0.6849, 0.0616, 0.2466]),  # squares, normalised
        (1.0, 0.8, [0.0, 0.625, 0.0, 0.375]),  # .5 alone is below .8, .5 + .3 reaches it
        (1.0, 0.81, [0.0, 0.5263, 0.1579, 0.3158]),  # the token that crosses the mass is kept
        (1.0, 0.1, [0.0, 1.0, 0.0, 0.0]),  # the first token is always kept
    ],
)
def test_sampling_follows_temperature_and_top_p(temperature, top_p, want):
    """Drawn shares are the tempered probabilities inside the nucleus (4,000 draws: standard error below 0.008)."""
    got = shares(LOGITS, temperature=temperature, top_p=top_p)
    assert got == pytest.approx(want, abs=0.03)
    assert [p == 0 for p in got] == [p == 0 for p in want]


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_the_nucleus_is_that_of_a_whole_sort(top_p, spread):
    """Flat and peaked distributions, within the first tokens that are sorted and beyond them, with many equals."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)).mul(8).round().div(8) * spread
    prob = torch.softmax(logits, -1)
    ordered, order = prob.sort(descending=True, stable=True)
    keep = ordered.cumsum(0) - ordered < top_p
    tokens, found = nucleus(prob, top_p)
    assert torch.equal(tokens, order[keep]) and torch.equal(found, ordered[keep])


def test_each_answer_has_its_own_random_numbers():
    """The same seed, sample and repeat give the same numbers; changing any of them gives others."""
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 10), (0, "a0", 0)]
    draws = [torch.rand(4, generator=row_generator(*key, torch.device("cpu"))).tolist() for key in keys]
    again = torch.rand(4, generator=row_generator(*keys[0], torch.device("cpu"))).tolist()
    assert again == draws[0]
    assert len({tuple(draw) for draw in draws}) == len(keys)


LINE, SHORT = {"stop": ("\n",)}, {"max_new_tokens": 3}
# What the model says, what the request asks for, how the answer ends, its text, its tokens, and tokens that it took.
ENDS = [
    ([1, 2, 3, 4], SHORT, "length", "Hello wor", 3, 3),
    ([1, 2, 0], {"stop_token_ids": (8,)}, "eos", "Hello", 2, 3),  # neither token is part of the answer
    ([1, 2, 8], {"stop_token_ids": (8,)}, "stop", "Hello", 2, 3),
    ([1, 0], {"stop_token_ids": (0,)}, "stop", "He", 1, 2),  # a token that is both is the request's
    ([1, 2, 5, 3], LINE, "stop", "Hello", 3, 3),
    ([1, 2, 3, 4], {"stop": ("llo wor",)}, "stop", "He", 3, 3),  # over two tokens
    ([1, 2, 3, 4], {"stop": ("lo w",)}, "stop", "Hel", 3, 3),  # begins and ends inside tokens
    ([1, 5, 5, 7, 8, 1], {"stop": ("\n\nQ:",)}, "stop", "He", 5, 5),  # over four tokens
    ([1, 7, 9, 8], {"stop": ("Q:",)}, "stop", "He", 4, 4),  # a special token in between decodes to nothing
    ([1, 2, 3, 4], {"stop": ("ld", "Hello w")}, "stop", "", 3, 3),  # whichever comes first
    ([1, 2, 3], {"stop": ("zzz",)}, "", "Hello wor", 3, 3),
    ([1, 2, 5], LINE | SHORT, "stop", "Hello", 3, 3),  # at the length limit the string still cuts the text
    # One that is complete before min_new_tokens neither ends the answer then nor later, nor cuts it; one that begins
    # there and is completed after it does.
    ([5, 1, 2, 5, 3], LINE | {"min_new_tokens": 1}, "stop", "\nHello", 4, 4),
    ([5, 1, 2], LINE | SHORT | {"min_new_tokens": 1}, "length", "\nHello", 3, 3),
    ([1, 5, 5, 3], {"stop": ("\n\n",), "min_new_tokens": 2}, "stop", "He", 3, 3),
]


@pytest.mark.parametrize(("tokens", "fields", "finish", "text", "kept", "taken"), ENDS)
def test_length_and_stop_rules_end_an_answer(tokens, fields, finish, text, kept, taken):
    """The text ends before a stop string, and the tokens with the one that completes it."""
    answer, count = answered(tokens, **fields)
    assert (answer.finish, answer.text, answer.token_ids, count) == (finish, text, tokens[:kept], taken)


def test_stop_tokens_are_banned_until_the_answer_is_long_enough():
    """With min_new_tokens=2 neither end nor stop tokens may be the first or second token."""
    answer, _ = answered([1], min_new_tokens=2, stop_token_ids=(8, 5), end_ids=(0, 8))
    assert answer.banned == [0, 5, 8]
    answer.add(2)
    assert answer.banned == []
