"""The numbers of a run: intervals against scipy and published examples, pairing, sums."""

import random
from types import SimpleNamespace

import pytest
import scipy.stats

from kvbench.results import summary
from kvbench.stats import intervals
from kvbench.stats.paired import paired_difference


def record(number: int, **changes) -> dict:
    """A journal record of sample `number`."""
    base = {"sample_id": f"a/{number}", "repeat": 0, "subset": "a", "status": "ok", "scores": {"exact": 1.0}}
    return base | {"ledger": {}, "timing": {}} | changes


def test_wilson_agrees_with_scipy():
    """The interval equals that of scipy, over all small counts."""
    for n in (1, 2, 7, 64):
        for k in range(n + 1):
            expected = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
            assert intervals.wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_estimate_over_subsets():
    """The mean has the task's weights, and what cannot be told is left open."""
    a, b = [0.1, 0.4, 0.3, 0.9, 0.2, 0.5], [0.5, 0.7]
    made = intervals.estimate({"a": a, "b": b})
    assert made.value == pytest.approx((sum(a) / 6 + sum(b) / 2) / 2)
    assert intervals.estimate({"a": a, "b": b}, weighting="sample").value == pytest.approx(sum(a + b) / 8)
    assert made.num_samples == 8 and made.interval == "studentised bootstrap" and made.low < made.value < made.high
    assert intervals.estimate({"a": [0.0, 1.0], "b": [1.0, 1.0]}).interval == "wilson"
    assert intervals.estimate({"a": a[:5], "b": b}).low is None  # seven samples
    assert intervals.estimate({"a": [0.3] * 9}).low is None
    assert intervals.estimate({"a": [0.3], "b": a + b}).low is None
    assert intervals.estimate({}).value is None


def test_newcombe_published_example():
    """The paired interval reproduces the worked example of the paper (36, 12, 2, 0), and has a width when nothing
    differs."""
    assert intervals.newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    low, high = intervals.newcombe(20, 0, 0, 4)
    assert low < 0 < high


def test_mixed_subsets_have_a_width():
    """Subsets that all succeeded still widen the interval, which is cut where scores end."""
    sure, graded = [1.0] * 6, [0.2, 0.6, 0.4, 0.5, 0.3, 0.7, 0.1, 0.9]
    made = intervals.estimate({"a": sure, "b": graded}, bounds=(0.0, 1.0))
    alone = intervals.estimate({"b": graded})
    wilson_below = 1 - intervals.wilson(6, 6)[0]
    below, above = alone.value - alone.low, alone.high - alone.value
    assert made.value - made.low == pytest.approx(((below / 2) ** 2 + (wilson_below / 2) ** 2) ** 0.5)
    assert made.high - made.value == pytest.approx(above / 2)
    wide = {"a": [0.01, 0.9, 0.02, 0.03, 0.8, 0.01, 0.02, 0.04]}
    assert intervals.estimate(wide, bounds=(0.0, 0.5)).high == 0.5 < intervals.estimate(wide).high


def test_intervals_cover_the_truth():
    """Over 150 simulated tasks of yes-or-no and graded subsets, about 95 % of the intervals hold the true value."""
    rng = random.Random(7)
    hits = {"mean": 0, "difference": 0}
    for _ in range(150):
        base = {"a": [rng.random() < 0.9 for _ in range(20)], "b": [rng.random() < 0.5 for _ in range(33)]}
        full = {name: [float(value) for value in values] for name, values in base.items()}
        full["c"] = [rng.betavariate(2, 3) for _ in range(15)]
        truth = (0.9 + 0.5 + 0.4) / 3
        made = intervals.estimate(full)
        hits["mean"] += made.low <= truth <= made.high
        lossy = {name: [value * (rng.random() < 0.8) for value in full[name]] for name in "ab"}
        lossy["c"] = [value * rng.uniform(0.6, 1.0) for value in full["c"]]
        pairs = {name: list(zip(lossy[name], full[name], strict=True)) for name in full}
        change = paired_difference(pairs)
        hits["difference"] += change.low <= -0.2 * truth <= change.high
    assert all(0.9 <= count / 150 <= 1 for count in hits.values()), hits


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
    weights = {"a": [(1.0, 0.0)] * 3 + [(1.0, 1.0)], "b": [(0.0, 1.0)]}
    assert paired_difference(weights).value == pytest.approx((0.75 - 1) / 2)
    assert paired_difference(weights, "sample").value == pytest.approx(2 / 5)
    flipped = summary.compare(mine, full, "exact", "there", higher_is_better=False)
    assert (flipped.num_worse, flipped.num_better) == (1, 2)
    graded = {f"a/{i}": 0.1 * i for i in range(9)}
    lower = summary.compare(scored({k: 0.9 * v for k, v in graded.items()}), scored(graded), "exact", "there")
    assert lower.difference.interval == "studentised bootstrap"
    same = summary.compare(scored(graded), scored(graded), "exact", "there")
    assert same.difference.interval == "clopper-pearson" and same.difference.value == 0.0
    assert same.difference.high == -same.difference.low == pytest.approx(1 - 0.025 ** (1 / 9))


def test_repeats_count_as_one_sample():
    """Several answers to one prompt are averaged first, so they do not make the interval narrower than the prompts
    allow."""
    rows = [
        record(i, repeat=k, scores={"exact": float(k < i)}, fidelity={"nll": None if i == 0 else 2.0})
        for i in range(3)
        for k in range(2)
    ]
    made = summary.metrics(rows, {"exact": SimpleNamespace(higher_is_better=True, description="")}, "exact")["exact"]
    assert (made.value, made.num_samples, made.interval) == (pytest.approx(0.5), 3, "")
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
