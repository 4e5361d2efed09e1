"""Measures how much of a text repeats itself: a cache that forgets what was said makes models say it again."""

from collections.abc import Sequence

import numpy as np

GRAM = 4
# Longer periods are no loop but a text told again, which the share of repeated n-grams shows.
MOST_PERIOD = 512
# Something said twice in a row may be meant so.
FEWEST_ROUNDS = 3


def repeated_share(ids: Sequence[int], size: int = GRAM) -> float:
    """Share of the n-grams that stand earlier in the text, too.

    Args:
        ids: Token ids.
        size: Tokens of an n-gram.

    Returns:
        0 (every n-gram is new) to almost 1; 0 for a text that has none.

    Source: Welleck et al. 2020 (arXiv 1908.04319), seq-rep-n.
    """
    grams = [tuple(ids[place : place + size]) for place in range(len(ids) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens of the longest stretch in which the same tokens come at least three times in a row.

    Args:
        ids: Token ids.

    Returns:
        Its length with all rounds, 0 where there is none.
    """
    tokens, longest = np.asarray(ids), 0
    for period in range(1, min(MOST_PERIOD, len(tokens) // FEWEST_ROUNDS) + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        run = int((edges[1::2] - edges[::2]).max(initial=0))
        if run >= (FEWEST_ROUNDS - 1) * period:
            longest = max(longest, run + period)
    return longest
