"""Which samples a limit takes: a fixed random choice, or the first ones."""

import pytest

from kvbench.config.compose import compose
from kvbench.tasks.task import Limit


def test_a_limit_is_a_random_sample():
    """The same for every run, spread over the file, other samples in another subset, and part of a larger limit's."""
    few, many = Limit(30).of(1000, "trec"), Limit(200).of(1000, "trec")
    assert few == sorted(set(few)) and len(few) == 30 and set(few) < set(many)
    assert few == Limit(30).of(1000, "trec") != Limit(30).of(1000, "lcc")
    assert min(many) < 50 and max(many) > 950 and sum(at < 500 for at in many) in range(70, 131)


def test_the_first_ones_on_request():
    """`first:20` is the beginning of the file; a limit above the number of samples, and none, take all."""
    assert Limit.read("first:3").of(10, "x") == [0, 1, 2]
    assert Limit.read("first:30").of(4, "x") == Limit(4).of(4, "x") == [0, 1, 2, 3]
    assert compose(["limit=first:20"]).limit == "first:20"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "20 ", "first", "first:0", "last:3", "", [3], "first:-2"])
def test_what_is_no_number_of_samples_is_refused(value):
    """The message says how to write one."""
    with pytest.raises(ValueError, match="^limit=.* is no number of samples; write a whole number .* first:20"):
        Limit.read(value)
    assert Limit.read(None) is None and Limit.read(7) == Limit.read("7") == Limit(7)
