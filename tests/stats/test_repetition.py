"""Repeated n-grams and loops, against plain counts."""

import random

import pytest

from kvbench.stats.repetition import FEWEST_TOKENS, MOST_PERIOD, ends_in_loop, longest_loop, repeated_share


def slow_loop(ids) -> int:
    """The longest stretch of three rounds or more, by trying every place, period and length."""
    best = 0
    for begin in range(len(ids)):
        for period in range(1, (len(ids) - begin) // 3 + 1):
            end = begin + period
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            if end - begin >= 3 * period:
                best = max(best, end - begin)
    return best


def test_loops_and_repeated_n_grams() -> None:
    """Against plain counts on random texts of few tokens, and by hand."""
    rng = random.Random(0)
    for size in (0, 1, 2, 3, 7, 30, 60):
        for letters in (2, 3, 12):
            ids = [rng.randrange(letters) for _ in range(size)]
            assert longest_loop(ids) == slow_loop(ids), ids
            seen, again = [], 0
            for place in range(len(ids) - 3):
                again += ids[place : place + 4] in seen
                seen.append(ids[place : place + 4])
            assert repeated_share(ids) == pytest.approx(again / len(seen) if seen else 0.0)
    assert longest_loop([9, *[1, 2, 3] * 4, 1, 8]) == 13 and longest_loop([1, 2, 1, 2]) == 0


def slow_end(ids) -> bool:
    """Whether some last part of 16 tokens or more is a phrase of up to 512 tokens over and over, thrice at least."""
    for begin in range(len(ids) - FEWEST_TOKENS + 1):
        part = ids[begin:]
        for period in range(1, min(MOST_PERIOD, len(part) // 3) + 1):
            if part == (part[:period] * (len(part) // period + 1))[: len(part)]:
                return True
    return False


def test_an_answer_that_ends_in_a_loop() -> None:
    """Against a plain search on random texts whose end repeats some phrase, cut anywhere, and by hand."""
    rng, seen = random.Random(1), set()
    for _ in range(150):
        period, rounds = rng.randint(1, 9), rng.randint(1, 20)
        phrase = [rng.randrange(3) for _ in range(period)]
        ids = [rng.randrange(3) for _ in range(rng.randint(0, 12))] + phrase * rounds
        ids = ids[: len(ids) - rng.randint(0, period - 1)] + [7] * rng.randint(0, 1)
        assert ends_in_loop(ids) == slow_end(ids), ids
        seen.add(ends_in_loop(ids))
    assert seen == {True, False}
    assert not ends_in_loop([]) and not ends_in_loop([5] * 15) and ends_in_loop([5] * 16)  # 1000000 is no loop
    assert not ends_in_loop([1, 2, 3] * 9 + [4]) and ends_in_loop([4] + [1, 2, 3] * 6 + [1])
    long = list(range(MOST_PERIOD))
    assert ends_in_loop(long * 3) and not ends_in_loop(long * 2) and not ends_in_loop([*long, -1] * 3)
