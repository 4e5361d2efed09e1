"""The numbers of a run: intervals against scipy and published examples, pairing, sums."""

import random
from types import SimpleNamespace

import pytest
import scipy.stats

from kvbench.results import summary
from kvbench.stats import intervals


def record(number: int, **changes) -> dict:
    """A journal record of sample `number`."""
    base = {"sample_id": f"a/{number}", "repeat": 0, "subset": "a", "status": "ok", "scores": {"exact": 1.0}}
    return base | {"ledger": {}, "timing": {}} | changes


def test_wilson_and_t_agree_with_scipy():
    """The intervals equal those of scipy, over all small counts and a handful of random samples."""
    for n in (1, 2, 7, 64):
        for k in range(n + 1):
            expected = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
            assert intervals.wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    rng = random.Random(1)
    for n in (2, 5, 40):
        values = [rng.random() for _ in range(n)]
        made = intervals.estimate({"a": values})
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (made.low, made.high) == pytest.approx((expected.low, expected.high))
        assert made.interval == "t"


def test_estimate_over_subsets():
    """The mean is over subsets, the interval that of Welch for two of them, and what cannot be told is left open."""
    a, b = [0.1, 0.4, 0.3, 0.9], [0.5, 0.7]
    made = intervals.estimate({"a": a, "b": b})
    assert made.value == pytest.approx((sum(a) / 4 + sum(b) / 2) / 2)
    assert made.num_samples == 6
    welch = scipy.stats.ttest_ind(a, [-x for x in b], equal_var=False).confidence_interval(0.95)  # mean(a) + mean(b)
    assert (made.low, made.high) == pytest.approx((welch.low / 2, welch.high / 2))
    assert intervals.estimate({"a": [0.0, 1.0], "b": [1.0, 1.0]}).interval == "wilson"
    assert intervals.estimate({"a": [0.3, 0.3]}).low is None
    assert intervals.estimate({"a": [0.3], "b": [1.0, 0.0]}).low is None
    assert intervals.estimate({}).value is None


def test_newcombe_published_example():
    """The paired interval reproduces the worked example of the paper (36, 12, 2, 0), and has a width when nothing
    differs."""
    assert intervals.newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    low, high = intervals.newcombe(20, 0, 0, 4)
    assert low < 0 < high


def test_mixed_subsets_have_a_width():
    """Yes-or-no subsets that all succeeded still widen the interval, which is cut where scores end."""
    sure, graded = [1.0] * 6, [0.2, 0.6, 0.4, 0.5]
    made = intervals.estimate({"a": sure, "b": graded}, bounds=(0.0, 1.0))
    alone = intervals.estimate({"b": graded})
    half, wilson_below = (alone.high - alone.low) / 2, 1 - intervals.wilson(6, 6)[0]
    assert made.interval == "wilson+t"
    assert made.value - made.low == pytest.approx(((half / 2) ** 2 + (wilson_below / 2) ** 2) ** 0.5)
    assert made.high - made.value == pytest.approx(half / 2)
    assert intervals.estimate({"a": [0.1, 0.9]}, bounds=(0.0, 1.0)).low == 0.0
    assert intervals.estimate({"a": [0.1, 0.9]}).low < 0


def test_intervals_cover_the_truth():
    """Over 600 simulated tasks of yes-or-no and graded subsets, about 95 % of the intervals hold the true value."""
    rng = random.Random(7)
    hits = {"mean": 0, "difference": 0}
    for _ in range(600):
        base = {"a": [rng.random() < 0.9 for _ in range(20)], "b": [rng.random() < 0.5 for _ in range(33)]}
        full = {name: [float(value) for value in values] for name, values in base.items()}
        full["c"] = [rng.betavariate(2, 3) for _ in range(15)]
        truth = (0.9 + 0.5 + 0.4) / 3
        made = intervals.estimate(full)
        hits["mean"] += made.low <= truth <= made.high
        lossy = {name: [value * (rng.random() < 0.8) for value in full[name]] for name in "ab"}
        lossy["c"] = [value * rng.uniform(0.6, 1.0) for value in full["c"]]
        pairs = {name: list(zip(lossy[name], full[name], strict=True)) for name in full}
        change = intervals.paired_difference(pairs)
        hits["difference"] += change.low <= -0.2 * truth <= change.high
    assert all(0.92 <= count / 600 <= 0.99 for count in hits.values()), hits


def scored(values: dict[str, float], **changes) -> list[dict]:
    """Records of one subset with a score each."""
    return [record(0, sample_id=name, scores={"exact": value}, **changes) for name, value in values.items()]


def test_comparison_is_paired():
    """Only samples that ended well in both count; worse and better follow the metric's direction."""
    mine = scored({"a/0": 1.0, "a/1": 0.0, "a/2": 0.0, "a/3": 1.0}) + scored({"a/9": 1.0}, status="nan")
    full = scored({"a/0": 1.0, "a/1": 1.0, "a/2": 1.0, "a/9": 0.0, "a/3": 0.0})
    made = summary.compare(mine, full, "exact", "there")
    assert made.difference.value == pytest.approx(-0.25)
    assert (made.difference.num_samples, made.num_worse, made.num_better) == (4, 2, 1)
    assert made.difference.interval == "newcombe"
    assert (made.difference.low, made.difference.high) == pytest.approx(intervals.newcombe(1, 1, 2, 0))
    flipped = summary.compare(mine, full, "exact", "there", higher_is_better=False)
    assert (flipped.num_worse, flipped.num_better) == (1, 2)
    graded = summary.compare(scored({"x": 0.5, "y": 0.75}), scored({"x": 0.5, "y": 0.5}), "exact", "there")
    assert graded.difference.interval == "t"
    steps = summary.compare(scored({"x": 1.0, "y": 0.5}), scored({"x": 0.5, "y": 0.5}), "exact", "there")
    assert steps.difference.interval == "t"
    same = summary.compare(scored({"x": 0.25, "y": 0.5}), scored({"x": 0.25, "y": 0.5}), "exact", "there")
    assert (same.difference.value, same.difference.low) == (0.0, None)


def test_repeats_count_as_one_sample():
    """Several answers to one prompt are averaged first, so they do not make the interval narrower than the prompts
    allow."""
    rows = [
        record(i, repeat=k, scores={"exact": float(k < i)}, fidelity={"nll": None if i == 0 else 2.0})
        for i in range(3)
        for k in range(2)
    ]
    made = summary.metrics(rows, {"exact": SimpleNamespace(higher_is_better=True, description="")}, "exact")["exact"]
    assert (made.value, made.num_samples, made.interval) == (pytest.approx(0.5), 3, "t")
    nll = summary.fidelity(rows)["nll"]
    assert (nll.value, nll.num_samples, nll.num_nonfinite) == (2.0, 2, 2)


def test_ledger_and_timing_sums():
    """Ratios are sums over sums, failed samples are left out, and decode speed counts the rows that shared a step
    once."""
    rows = [
        record(0, ledger={"resident_bytes": 10, "peak_bytes": 40, "fp16_bytes": 100, "average_ratio": 0.1}),
        record(1, ledger={"resident_bytes": 90, "peak_bytes": 110, "fp16_bytes": 200, "average_ratio": 0.3}),
        record(2, status="oom"),
    ]
    made = summary.ledger(rows)
    assert made["resident_ratio"] == pytest.approx(100 / 300)
    assert made["peak_ratio"] == pytest.approx(150 / 300)
    assert made["average_ratio"] == pytest.approx(0.2)
    timed = {"prefill_s": 1.0, "decode_s": 2.0, "decode_share_s": 0.5, "decode_tokens": 8, "batch_rows": 4}
    speed = summary.timing([record(i, timing=timed) for i in range(4)] + [record(9, status="nan")], 5.0)
    assert (speed.prefill_s, speed.decode_tokens_per_s, speed.decode_tokens) == (1.0, 16.0, 32)
