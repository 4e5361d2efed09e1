"""Repetition in a text: repeated n-grams, the longest loop in it, and whether it ends in one."""

from collections.abc import Sequence

import numpy as np

GRAM = 4
# Longer periods are no loop but a text told again, which the share of repeated n-grams shows.
MOST_PERIOD = 512
# Something said twice in a row may be meant so.
FEWEST_ROUNDS = 3
# A number may well end in three zeros, and a line in five dots.
FEWEST_TOKENS = 16


def repeated_share(ids: Sequence[int]) -> float:
    """Share of a text's n-grams of tokens that stand earlier in it, too; 0 for a text that has none.

    Source: Welleck et al. 2020 (arXiv 1908.04319), seq-rep-n.
    """
    grams = [tuple(ids[start : start + GRAM]) for start in range(len(ids) - GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens of the longest stretch in which the same tokens come at least three times in a row, with all rounds."""
    tokens, longest = np.asarray(ids), 0
    for period in range(1, min(MOST_PERIOD, len(tokens) // FEWEST_ROUNDS) + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        run = int((edges[1::2] - edges[::2]).max(initial=0))
        if run >= (FEWEST_ROUNDS - 1) * period:
            longest = max(longest, run + period)
    return longest


def ends_in_loop(ids: Sequence[int]) -> bool:
    """True if a text ends in a loop: the same 1 to 512 tokens three times in a row or more.

    The loop has at least 16 tokens in all; a last round that is cut short counts with its tokens.

    Source: Holtzman et al. 2020 (arXiv 1904.09751), repetition at the end of a generation.
    Differs: three rounds and 16 tokens; their code takes two rounds of three tokens or more, or 51 of fewer.
    """
    tokens = np.asarray(ids)
    for period in range(1, min(MOST_PERIOD, len(tokens) // FEWEST_ROUNDS) + 1):
        least = max(FEWEST_ROUNDS * period, FEWEST_TOKENS)  # tokens, of which the first round follows no other
        if len(tokens) >= least and (tokens[period - least :] == tokens[-least:-period]).all():
            return True
    return False
