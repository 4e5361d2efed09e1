"""Choosing tokens, and the rules that end an answer."""

import math

import pytest
import torch
from engine_helpers import request

from kvbench.engine.answer import Answer
from kvbench.engine.runner import finite_rows
from kvbench.engine.sampling import (
    _needed,
    _pick,
    _weigh,
    answer_seed,
    choose,
    draw,
    draws_of,
    likeliest,
    nucleus,
    random_numbers,
)

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


def shares(logits, temperature, top_p=1.0, num_draws=4000):
    """How often each token is drawn."""
    draws = draws_of([(seed, 0, temperature, top_p) for seed in range(num_draws)], logits.device)
    return (torch.bincount(draws.next(logits.expand(num_draws, -1)), minlength=len(logits)) / num_draws).tolist()


def test_greedy_takes_the_largest_and_the_first_of_equals():
    """Temperature 0 draws nothing; each row has its own."""
    assert choose(torch.stack([LOGITS, torch.tensor([0.0, 2.0, 2.0, 1.0])]), [None, None]) == [1, 1]


@pytest.mark.parametrize("vocabulary", [1, 33, 96, 512, 1000, 1024])
def test_the_likeliest_is_found_part_by_part(vocabulary: int):
    """It is torch's argmax: the first of equals within a part and across parts, and what is not a number."""
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(5)).mul(2).round()
    logits[3, vocabulary // 2], logits[4] = float("nan"), float("-inf")
    assert torch.equal(likeliest(logits), logits.argmax(-1))
    assert torch.equal(likeliest(logits[::2]), logits[::2].argmax(-1))


def test_banned_tokens_never_come():
    """Neither greedily nor by chance, and the logits handed in stay as they are."""
    before = LOGITS.clone()
    assert choose(LOGITS[None], [None], [1]) == [3]
    drawn = choose(LOGITS.expand(500, -1), [(seed, 7, 1.0, 1.0) for seed in range(500)], [1, 3])
    assert drawn.count(0) + drawn.count(2) == 500
    assert drawn.count(0) == pytest.approx(125, abs=40)  # what is left keeps its shares: a quarter, sigma 9.7
    # It is a choice of its own, by the number that follows the first one's.
    number = random_numbers(torch.tensor([5]), torch.tensor([7]), retry=True)
    assert drawn[5] == (0 if number < 0.25 else 2)
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
    got = shares(LOGITS, temperature, top_p)
    assert got == pytest.approx(want, abs=0.03)
    assert [p == 0 for p in got] == [p == 0 for p in want]


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.999, 0.9999999, 1.0])
@pytest.mark.parametrize("largest", [0, 1, 40, 2**40])
def test_the_nucleus_is_that_of_a_whole_sort(top_p: float, largest: int):
    """Of equal weights the first are kept; of no weights nothing is."""
    weights = torch.randint(0, largest + 1, (3, 500), generator=torch.Generator().manual_seed(1))
    need = [math.ceil(int(row.sum()) * top_p) for row in weights]
    found = nucleus(weights, torch.tensor(need)[:, None])
    for row, least, kept in zip(weights, need, found, strict=True):
        ordered, order = row.sort(descending=True, stable=True)
        inside = order[ordered.cumsum(0) - ordered < least]
        assert torch.equal(kept, torch.zeros_like(row).index_copy_(0, inside, row[inside]))


def test_random_numbers_are_those_of_splitmix():
    """The published generator in plain Python, whose first numbers of seed 1234567 are known."""

    def splitmix(seed: int, index: int) -> int:
        x = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    assert [splitmix(1234567, index) for index in range(2)] == [6457827717110365317, 3203168211198807973]
    # Of a row's second choice of one token the number is one further.
    seeds, chosen = torch.tensor([1234567, -1, 0, 2**63 - 1, -(2**63)]), torch.tensor([0, 1, 7, 10**6, 2**40])
    for again in (False, True):
        want = [
            (splitmix(seed, 2 * n + again) >> 11) / 2**53
            for seed, n in zip(seeds.tolist(), chosen.tolist(), strict=True)
        ]
        assert random_numbers(seeds, chosen, retry=again).tolist() == want


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.2, 4.0])
def test_a_draw_depends_on_its_row_alone(top_p: float, spread: float):
    """Rows together, as a captured step draws them, give what they give where the host looks for the nuclei in the
    front first, together and alone: in it, beyond it, and among equals. Greedy rows beside them take the likeliest."""
    logits = spread * torch.randn(6, 9001, generator=torch.Generator().manual_seed(2)).mul(4).round().div(4)
    temperature = [0.7, 0.0, 1.5, 0.7, 1.0, 0.0]
    draws = None
    for step in range(3):
        rows = [(seed * 10**17, seed + step, t, top_p) if t else None for seed, t in enumerate(temperature)]
        draws = draws or draws_of(rows, torch.device("cpu"))
        found = draws.next(logits).tolist()
        assert choose(logits, rows) == found
        assert [choose(own[None], [row])[0] for own, row in zip(logits, rows, strict=True)] == found


@pytest.mark.parametrize("equal", [1, 1000, 1024, 1025, 8192, 8193, 9001])
def test_a_nucleus_is_looked_for_in_more_tokens_where_it_is_larger(equal: int):
    """Of equals at the end of a front the first count, in each row for itself; what has no weight is never drawn."""
    make = torch.Generator().manual_seed(4)
    logits = torch.full((3, 9001), -1000.0)
    for row, many in enumerate((equal, 5, equal)):
        logits[row, torch.randperm(9001, generator=make)[:many]] = 0.0
    weights, top_p = _weigh(logits, torch.ones(3)), torch.tensor([0.9, 0.5, 1.0], dtype=torch.float64)
    for at in (0.0, 0.3, 1 - 2**-53):
        numbers = torch.full((3,), at, dtype=torch.float64)
        found = draw(logits, torch.ones(3), top_p, numbers, waits=True)
        assert torch.equal(found, _pick(nucleus(weights, _needed(weights, top_p)), numbers))
        assert (weights.gather(-1, found[:, None]) > 0).all()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_last_bit_of_the_logits_moves_few_draws(top_p: float):
    """A batch rounds elsewhere than a row alone: of 2,000 draws hardly any lies within a millionth of a border."""
    make = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2000, 500, generator=make)
    rows = [(seed, 0, 1.0, top_p) for seed in range(len(logits))]
    found = [draws_of(rows, logits.device).next(x) for x in (logits, logits * (1 + 2e-7))]
    assert (found[0] != found[1]).sum() <= 4


def test_greedy_rows_have_nothing_that_draws():
    """A step of theirs is what it was; of rows that draw from all of the mass, no nucleus is looked for."""
    assert draws_of([None, None], torch.device("cpu")) is None
    assert draws_of([None, (1, 2, 0.5, 1.0)], torch.device("cpu")).top_p is None


def test_logits_that_are_not_finite_give_a_token():
    """What it is does not matter, but it must be one: the device reads its embedding before the host knows."""
    logits = torch.tensor([[float("nan"), 0.0, 1.0], [float("inf"), 0.0, 1.0], [float("-inf")] * 3])
    for top_p in (None, torch.full((3,), 0.5, dtype=torch.float64)):
        found = draw(logits, torch.ones(3), top_p, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
        assert ((found >= 0) & (found < 3)).all()


def test_each_answer_has_its_own_random_numbers():
    """The same seed, sample and repeat give the same numbers; changing any of them gives others."""
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 10), (0, "a0", 0)]
    assert len({answer_seed(*key) for key in keys}) == len(keys)
    assert answer_seed(*keys[0]) == answer_seed(*keys[0])
    assert all(-(2**63) <= answer_seed(*key) < 2**63 for key in keys)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_one_number_that_is_not_finite_is_found(value: float):
    """Wherever it lies; the largest finite numbers are finite."""
    logits = torch.randn(4, 1001, generator=torch.Generator().manual_seed(5))
    logits[0, 0] = logits[2, 500] = value
    logits[1, 1], logits[3, 1] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    assert finite_rows(logits, waits=True).tolist() == finite_rows(logits).tolist() == [False, True, False, True]


def test_a_sum_that_overflows_makes_no_row_infinite():
    """Numbers near fp32's largest are numbers; of both infinities the sum is none."""
    logits = torch.full((3, 40), 3e38)
    logits[1] = 1.0
    assert finite_rows(logits, waits=True).tolist() == finite_rows(logits).tolist() == [True] * 3
    logits[2, :2] = torch.tensor([float("inf"), -float("inf")])
    assert finite_rows(logits, waits=True).tolist() == finite_rows(logits).tolist() == [True, True, False]
