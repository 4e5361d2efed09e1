"""The last lines of a run: what it means, and what to type next."""

import pytest

from kvbench.results.record import Comparison, Metric, RunRecord
from kvbench.show import closing
from kvbench.stats.intervals import Estimate


def record(value, low, high, n=24, method="diffkv", higher=True, status="complete"):
    """A run with a difference to the full cache, which holds 39 % of the bytes."""
    found = Estimate(value=value, low=low, high=high, num_samples=n)
    return RunRecord(
        task="longctx",
        model="m",
        method=method,
        hash=f"{method}{value}",
        status=status,
        metrics={"score": Metric(value=0.5, num_samples=n, primary=True, higher_is_better=higher)},
        comparison=Comparison(difference=found),
        ledger={"resident_ratio": 0.39, "resident_bytes": 39.0},
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (record(-0.01, -0.09, 0.07), "diffkv: 39 % of the bytes; no loss shown at n=24, at most 9 points; about 126 "),
        (record(-0.5, -0.6, -0.4), "diffkv: 39 % of the bytes; it loses 50 points (n=24), at least 40"),
        (record(0.5, 0.4, 0.6, higher=False), "it loses 50 points (n=24), at least 40"),
        (record(0.0, -0.01, 0.01, n=2000), "at most 1 points"),
        (record(-0.01, None, None, n=2), "too few samples (n=2)"),
        (record(-0.01, -0.1, 0.1, status="failed"), "failed, and says nothing"),
    ],
)
def test_a_result_in_a_sentence(run, said):
    """Its bytes, its loss with the bound, and the samples that would show 5 points, where there are fewer."""
    text = closing.meaning(run, "diffkv", is_fit=True)
    assert said in text and ("would show" in text) == ("about" in said)


def test_nothing_is_said_of_a_score_that_has_no_standing():
    """Where the full cache's answers cannot be judged, no method's can."""
    assert "at most" not in closing.meaning(record(-0.01, -0.09, 0.07), "diffkv", is_fit=False)


def test_the_next_command_is_named():
    """With the folder of the results, where it is not the usual one; the full cache has no sentence."""
    found = closing.lines([record(0.0, 0.0, 0.0, method="full"), record(-0.01, -0.09, 0.07)], "elsewhere")
    assert len(found) == 2 and "kvbench compare results_dir=elsewhere" in found[1]
