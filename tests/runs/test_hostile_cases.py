"""Hostile input hurts nobody: random tampered folders, models, templates, methods, rows, files, paths and settings."""

import pytest
from selection import few

CASES = 300
QUICK = "0 6 9"  # of the default run: a model file, paths and settings, which need no run before


def seeds_of(text):
    """The seeds of a test's name."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(word) for word in text.split()]


@pytest.mark.parametrize("seeds", few([QUICK, *(f"{first}-{first + 9}" for first in range(0, CASES, 10))], QUICK))
def test_hostile_input_hurts_nobody(server, tmp_path, seeds):
    """Nothing is written elsewhere, hangs, ends in a traceback, or changes a number without a word."""
    answer = server("hostile", tmp_path, at=None, seeds=seeds_of(seeds))
    assert answer["ended"] == 0, answer["said"]
