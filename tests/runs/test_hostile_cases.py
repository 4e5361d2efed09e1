"""Hostile input hurts nobody: random tampered folders, models, templates, methods, rows, files, paths and settings."""

import pytest
from selection import few

CASES = 300
QUICK = "0 6 13"  # of the default run: a model file, paths and settings, which need no run before
# A draw of each family whose cases once gave wrong numbers without a word, or lost data.
SILENT = {
    "words": 42,  # a metric whose direction is turned round
    "golds": 1,  # articles and Unicode forms
    "fields": 1,  # a misspelt `turns`
    "formats": 10,  # a packed file that is not the one that is looked for
    "config_json": 45,  # windows that a family has by default
    "foreign": 34,  # the folder of another run
    "helpers": 3,  # a module that a grader imports
}


def seeds_of(text):
    """The seeds of a test's name."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(word) for word in text.split()]


@pytest.mark.parametrize("seeds", few([QUICK, *(f"{first}-{first + 9}" for first in range(0, CASES, 10))], QUICK))
def test_hostile_input_hurts_nobody(server, tmp_path, seeds):
    """Nothing is written elsewhere, hangs, ends in a traceback, or changes a number without a word."""
    answer = server("hostile", tmp_path, at=None, seeds=seeds_of(seeds))
    assert answer["ended"] == 0, answer["said"]


@pytest.mark.parametrize("family", SILENT)
def test_a_family_that_once_fell_silently_holds(server, tmp_path, family):
    """The judge of each sees the answer that is wrong, the line that is lost or the field that is passed over."""
    answer = server("hostile", tmp_path, at=None, seeds=[SILENT[family]], only=family)
    assert answer["ended"] == 0, answer["said"]
