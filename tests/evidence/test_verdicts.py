"""Verdicts that the data do not support are not given: each case here was given once."""

import numpy as np
import pytest
import verdict_simulation
from selection import few
from stored import command_settings, flips, store, yes_no

from kvbench.cli.main import main
from kvbench.evidence import compare, frontier_figure
from kvbench.evidence.budget_curves import series_of
from kvbench.evidence.dominance import standing
from kvbench.evidence.frontier import averages
from kvbench.evidence.load import load_groups
from kvbench.evidence.pareto import panels_of, records
from kvbench.evidence.view import frame_of
from kvbench.results import summary


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Tables and words alone: tests/evidence/test_pareto.py looks at the pictures."""
    monkeypatch.setattr(frontier_figure, "render", lambda *given, **named: b"")


def rows_of(root, *words):
    """The rows of `kvbench compare`, by label, and its notes."""
    cfg = command_settings("compare", root, "resamples=999", *words)
    (group,) = load_groups(cfg)
    rows, notes = compare.compare_group(group, cfg)
    return {row.label: row for row in rows}, notes


def panels(root, *words):
    """The panels of `kvbench report view=pareto`."""
    cfg = command_settings("pareto", root, "resamples=999", *words)
    return panels_of(load_groups(cfg), cfg)


def places_of(panel, axis="resident"):
    """Label -> standing."""
    return {panel.find(key).label: place for key, place in standing(panel, axis).items()}


def test_significantly_more_lost_is_never_better(tmp_path):
    """34 of 200 lost and 10 gained, and 5 of 10 gained in the other subset: the mean over subsets rises, McNemar's
    pooled p is 0.009 for a loss. The table said better. If the task says that samples weigh alike, the same runs are
    worse: value, interval and p are pooled."""
    full = {"big": [1] * 100 + [0] * 100, "small": [0] * 10}
    mine = {"big": [0] * 34 + [1] * 66 + [1] * 10 + [0] * 90, "small": [1] * 5 + [0] * 5}
    paths = [store(tmp_path, name, scores) / "run.json" for name, scores in (("full", full), ("snapkv", mine))]
    row = rows_of(tmp_path)[0]["snapkv"]
    assert (row.num_lost, row.num_gained) == (34, 15) and row.value == pytest.approx(0.19)
    assert row.verdict == "cannot tell" and row.interval[0] <= 0
    for path in paths:
        path.write_text(path.read_text().replace('"weighting": "subset"', '"weighting": "sample"'))
    row = rows_of(tmp_path)[0]["snapkv"]
    assert row.value == pytest.approx(-19 / 210) and row.verdict == "worse" and row.difference.test == "mcnemar"


def test_missing_answers_are_no_proof_of_equality(tmp_path):
    """400 samples of which 20 ran out of memory and none of the others differs: that is equal only if the missing 20
    are; they could all be wrong. The table said equal even with 100 missing."""
    full = yes_no(0.7, {"a": 800})
    store(tmp_path, "full", full)
    store(tmp_path, "whole", full, settings={"budget": 1})
    store(tmp_path, "some", full, statuses=dict.fromkeys(range(40), "oom"))
    store(tmp_path, "many", full, statuses=dict.fromkeys(range(200), "nan"))
    rows, _ = rows_of(tmp_path)
    assert rows["whole"].verdict == "equal" and rows["whole"].worst == rows["whole"].value == 0
    some = rows["some"]
    assert some.verdict == "cannot tell" and (some.pairs.num_samples, some.pairs.total) == (760, 800)
    assert some.worst == pytest.approx(-sum(full["a"][:40]) / 800) and some.p_equal > 0.5
    assert rows["many"].verdict == "too few answers"
    kl, _ = rows_of(tmp_path, "metric=kl")
    assert kl["some"].worst is None and kl["some"].verdict != "equal"


def test_a_verdict_survives_the_missing_answers(tmp_path):
    """30 gained and none lost is better; with 8 % of the answers missing it is not, since those could be lost."""
    full = {"a": [1] * 250 + [0] * 250}
    store(tmp_path, "full", full)
    store(tmp_path, "good", flips(full, 0, 30))
    store(tmp_path, "lucky", flips(full, 0, 30), statuses=dict.fromkeys(range(40), "oom"))
    rows, _ = rows_of(tmp_path)
    assert rows["good"].verdict == "better"
    assert rows["lucky"].p_holm < 0.05 and rows["lucky"].worst < 0 and rows["lucky"].verdict == "cannot tell"


def test_equality_is_corrected_for_the_number_of_rows(tmp_path):
    """One run of 400 equal answers is equal within a point; each of four is not proven to be."""
    full = yes_no(0.7, {"a": 400})
    store(tmp_path, "full", full)
    store(tmp_path, "m0", full)
    assert rows_of(tmp_path)[0]["m0"].verdict == "equal"
    for index in range(1, 4):
        store(tmp_path, f"m{index}", full)
    rows, _ = rows_of(tmp_path)
    assert {row.verdict for row in rows.values()} == {"cannot tell"}
    assert rows["m0"].p_equal_holm == pytest.approx(4 * rows["m0"].p_equal)


def test_being_farther_from_the_full_cache_than_itself_is_no_loss(tmp_path):
    """KL to the full cache is never below the full cache's own. Within the margin it is equal, however sure it is that
    it is not zero; beyond it worse. Differences as small as noise are no lost answers."""
    rng = np.random.default_rng(0)
    scores = yes_no(0.7, {"a": 40})
    small, large, tiny = rng.lognormal(-5, 0.5, 40), rng.lognormal(-1, 0.5, 40), rng.random(40) * 1e-3
    store(tmp_path, "full", scores, nll=0.1)
    for name, extra in (("fp8", small), ("bad", large), ("noise", tiny)):
        store(tmp_path, name, scores, nll=lambda number, extra=extra: 0.1 + float(extra[number]))
    for metric in ("kl", "nll"):
        rows, notes = rows_of(tmp_path, f"metric={metric}")
        assert rows["fp8"].interval[0] > 0 and rows["fp8"].verdict == "equal" and rows["fp8"].p == 1
        assert rows["bad"].verdict == "worse" and rows["bad"].num_lost == 40
        assert rows["noise"].verdict == "equal" and rows["noise"].num_lost == 0
        assert "count as noise" in " ".join(notes) and rows["bad"].null == 0.05
    store(tmp_path, "full", scores, nll=lambda number: 0.1 + 0.02 * (number % 2), batch_size=9)
    rows, notes = rows_of(tmp_path, "metric=nll")
    assert "measured" in " ".join(notes) and rows["fp8"].num_lost < 5


def test_time_is_no_evidence(tmp_path, capsys):
    """An A/A pair timed an hour apart: no interval, no standing, and no column in the CSV."""
    scores = yes_no(0.8, {"a": 60})
    store(tmp_path, "full", scores, ratio=1.0)
    store(tmp_path, "minikv", scores, ratio=0.25, seconds=lambda n: 0.1 + n / 1e4, settings={"budget": 0.5})
    store(tmp_path, "minikv", flips(scores, 20, 0), ratio=0.26, seconds=lambda n: 0.2 + n / 1e4)
    (panel,) = panels(tmp_path)
    assert all(point.costs["time"].interval is None for point in panel.points) and standing(panel, "time") == {}
    assert not any("time" in column for column in frame_of(records([panel])))
    assert main(["pareto", f"results_dir={tmp_path}", "axes=[time]", "resamples=200", "kinds=[png]"]) == 0
    shown = capsys.readouterr().out
    assert "times are no evidence" in shown
    lines = [line for line in shown.splitlines() if line.startswith("minikv")]
    assert len(lines) == 2 and not any("dominated" in line or "best estimate" in line for line in lines)


def test_the_same_questions_again_are_no_more_questions(tmp_path):
    """Four identical runs under four seeds: the mean has one run's interval and n = 30, not half of it and n = 120.
    Another task's questions do count."""
    full = yes_no(0.7, {"a": 30}, seed=3)
    mine = flips(full, 5, 0)
    for seed in range(4):
        store(tmp_path, "full", full, seed=seed)
        store(tmp_path, "half", mine, seed=seed)
    *each, mean = panels(tmp_path)
    one, four = (next(p for p in panel.points if p.method == "half") for panel in (each[0], mean))
    assert mean.num_samples == 30 and four.quality == pytest.approx(one.quality)
    assert four.interval == pytest.approx(one.interval) and four.score_interval == pytest.approx(one.score_interval)
    assert "30 distinct questions in 120 answers" in " ".join(mean.notes)
    for name, scores in (("full", full), ("half", mine)):
        store(tmp_path, name, scores, task="other")
    five = averages(panels(tmp_path)[:-1])[0]
    assert five.num_samples == 60


def test_dominance_is_corrected_and_has_a_tie(tmp_path):
    """Twelve runs of equal quality: none is dominated. A run that is cheaper by half a percent dominates nothing, and
    one that is better by less than the margin is a best estimate within the margin only."""
    rng = np.random.default_rng(8)
    base = rng.lognormal(0, 1, 24)
    scores = {"a": [1] * 24}
    for index in range(12):
        values = base + 0.5 * rng.lognormal(0, 1, 24)
        store(tmp_path / "equal", f"m{index:02}", scores, ratio=0.1 + 0.05 * index, nll=lambda n, v=values: float(v[n]))
    (panel,) = panels(tmp_path / "equal", "metric=nll")
    assert "dominated" not in places_of(panel).values()
    better = base + 0.01 * rng.random(24)
    for name, ratio, values in (
        ("cheap", 0.4975, better),
        ("same", 0.5, better + 2 + 0.1 * rng.random(24)),
        ("dear", 0.9, better + 2 + 0.1 * rng.random(24)),
        ("twin", 0.5, better + 3 + 0.1 * rng.random(24)),
        ("dearest", 0.95, better - 0.004 + 0.001 * rng.random(24)),
    ):
        store(tmp_path / "tie", name, scores, ratio=ratio, nll=lambda n, v=values: float(v[n]))
    (panel,) = panels(tmp_path / "tie", "metric=nll")
    expected = {
        "cheap": "best estimate",
        "same": "open",
        "twin": "open",
        "dear": "dominated",
        "dearest": "within margin",
    }
    assert places_of(panel) == expected


@pytest.mark.parametrize("sizes", few([((2,),), ((1, 1),), ((3, 3),), ((9, 1),)], ((3, 3),), ((9, 1),)))
def test_no_standing_without_an_interval(tmp_path, capsys, sizes):
    """One or two samples per subset: no run is dominated, and the table says why. Once that was certainty."""
    scores = {name: [1] * size for name, size in zip("ab", sizes, strict=False)}
    store(tmp_path, "full", scores, ratio=1.0, nll=0.9)
    store(tmp_path, "bad", scores, ratio=0.9, nll=0.8)
    store(tmp_path, "good", scores, ratio=0.5, nll=lambda number: 0.1 + number / 100)
    (panel,) = panels(tmp_path, "metric=nll")
    assert set(places_of(panel).values()) == {"n too small"} and "n too small" in " ".join(panel.notes)
    assert main(["pareto", f"results_dir={tmp_path}", "metric=nll", "kinds=[svg]"]) == 0
    assert "[no interval]" in capsys.readouterr().out
    rows, _ = rows_of(tmp_path, "metric=nll")
    assert {row.verdict for row in rows.values()} == {"cannot tell"} and rows["good"].interval is None


def test_one_number_has_one_interval(tmp_path):
    """The run's own record, compare and pareto print the same interval for the difference to the full cache."""
    rng = np.random.default_rng(0)
    for scores in ({"a": rng.random(20), "b": rng.random(12)}, yes_no(0.6, {"a": 25, "b": 11})):
        root = tmp_path / str(len(scores["a"]))
        store(root, "full", scores)
        store(root, "half", {name: np.roll(values, 3) for name, values in scores.items()}, ratio=0.4)
        cfg = command_settings("compare", root)
        (group,) = load_groups(cfg)
        ((row,), _) = compare.compare_group(group, cfg)
        full, half = (list(run.samples.values()) for run in group.runs)
        own = summary.compare(half, full, "exact", "there").difference
        cfg = command_settings("pareto", root)
        (panel,) = panels_of(load_groups(cfg), cfg)
        point = next(point for point in panel.points if point.method == "half")
        assert own.ends == pytest.approx(row.interval, abs=1e-12) and point.interval == row.interval
        assert own.interval == row.difference.interval[1]
        assert own.value == pytest.approx(row.value) == pytest.approx(point.quality)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_false_verdicts_are_rare(kind):
    """A short `make simulate`: of 120 tables of twelve equal methods, in two unequal subsets of 24 samples, at most 5 %
    (and three standard errors) hold a false worse, better, equal or dominated, and intervals cover."""
    found = verdict_simulation.graded(kind, (16, 8), 120)
    most = 0.05 + 3 * np.sqrt(0.05 * 0.95 / 120)
    assert all(found[name] <= most for name in ("compare", "equal", "dominated")), found
    assert 0.93 <= found["covered"] <= 0.985


def curves(root, *, sizes):
    """Two methods at three budgets; `thick` holds 1.5 times the bytes of a budget."""
    rng = np.random.default_rng(0)
    base = {name: rng.uniform(0.5, 0.9, size) for name, size in sizes.items()}
    store(root, "full", base, ratio=1.0)
    for method, factor in (("thin", 1.0), ("thick", 1.5)):
        for budget in (0.125, 0.25, 0.5):
            share = budget * factor
            scores = {n: np.clip(v + 0.1 * np.log(share) + rng.normal(0, 0.02, len(v)), 0, 1) for n, v in base.items()}
            store(root, method, scores, settings={"budget": budget}, ratio=share, tiers=(int(100 * budget),))


def test_equal_bytes_are_compared_by_interpolation(tmp_path, capsys):
    """Both methods lie on one curve of quality over bytes. At equal budgets the thick one looks better; at equal bytes
    neither is. What no run spans is not guessed."""
    sizes = {"a": 60, "b": 30}
    curves(tmp_path, sizes=sizes)
    rows, _ = rows_of(tmp_path, "against=thin", "where={budget:0.25}")
    assert rows["thick"].verdict == "better" if "thick" in rows else rows["thick budget=0.25"].verdict == "better"
    rows, _ = rows_of(tmp_path, "against=thin", "at_bytes=30")
    (row,) = rows.values()
    assert row.label == "thick at 30 %" and row.pairs.theirs.label == "thin at 30 %"
    assert row.interval[0] < 0 < row.interval[1] and row.verdict != "better" and abs(row.value) < 0.01
    rows, _ = rows_of(tmp_path, "at_bytes=25")
    assert rows["thin at 25 %"].value == pytest.approx(0.1 * np.log(0.25), abs=0.02)
    rows, _ = rows_of(tmp_path, "at_bytes=[20,45]", "against=thin")
    (row,) = rows.values()
    assert row.verdict != "better" and abs(row.value) < 0.01
    rows, notes = rows_of(tmp_path, "at_bytes=60")
    assert list(rows) == ["thick at 60 %"] and "thin was run from 12.5 to 50.0 % of the bytes" in " ".join(notes)
    assert main(["compare", f"results_dir={tmp_path}", "at_bytes=25", "resamples=200", f"out={tmp_path}/x.csv"]) == 0
    assert "thin at 25 %" in capsys.readouterr().out
    for word in ("at_bytes=0", "at_bytes=[5,2]", "at_bytes=x"):
        assert main(["compare", f"results_dir={tmp_path}", word]) == 2


def test_a_share_of_a_prompt_and_one_of_all_tokens_seen_are_two_series(tmp_path):
    """No line joins them, so that nothing is interpolated between the two meanings of a budget."""
    for budget in (0.25, 0.5, "25%seen", "50%seen"):
        store(tmp_path, "thin", {"a": [0.5, 0.6]}, settings={"budget": budget}, ratio=0.3)
    (group,) = load_groups(command_settings("compare", tmp_path))
    found = series_of([run for run in group.runs if run.method == "thin"])
    assert {name: len(runs) for name, runs in found.items()} == {"thin": 2, "thin budget=%seen": 2}


def test_areas_are_trapezoids_and_bytes_have_their_part(tmp_path):
    """The mean over a range is numpy's trapezoid of the means over log bytes, and the interval is that of a plain joint
    bootstrap in which the bytes vary too."""
    curves(tmp_path, sizes={"a": 40})
    cfg = command_settings("compare", tmp_path, "at_bytes=[20,40]")
    (group,) = load_groups(cfg)
    ((thick, thin), _) = compare.compare_group(group, cfg)
    runs = series_of([run for run in group.runs if run.method == "thin"])["thin"]
    full = np.array([group.reference.samples[f"a/{i}", 0]["scores"]["exact"] for i in range(40)])
    values = np.array([[run.samples[f"a/{i}", 0]["scores"]["exact"] for run in runs] for i in range(40)])
    held = np.array([[[run.samples[f"a/{i}", 0]["ledger"][k] for k in ("resident_bytes", "fp16_bytes")]
                      for run in runs] for i in range(40)])  # fmt: skip

    def area(rows):
        x = np.log(held[rows].sum(axis=0)[:, 0] / held[rows].sum(axis=0)[:, 1])
        knots = np.concatenate([[np.log(0.2)], x[(x > np.log(0.2)) & (x < np.log(0.4))], [np.log(0.4)]])
        mean = np.trapezoid(np.interp(knots, x, values[rows].mean(axis=0)), knots) / np.log(2)
        return mean - full[rows].mean()

    assert thin.value == pytest.approx(area(np.arange(40)), abs=1e-9)
    rng = np.random.default_rng(0)
    draws = [area(rng.integers(0, 40, 40)) for _ in range(1500)]
    assert np.ptp(thin.interval) == pytest.approx(np.ptp(np.percentile(draws, [2.5, 97.5])), rel=0.12)
    assert thick.label == "thick, 20 to 40 %"
