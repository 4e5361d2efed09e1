"""The frontier: which points count, and which beat which beyond chance."""

import csv
import io
from types import SimpleNamespace

import numpy as np
import pytest
from frontier_helpers import SCORES, figure_of, panel_of, settings
from places import need_extension
from stored import flips, store, yes_no

from kvbench.cli.main import main
from kvbench.evidence import frontier_figure, multiples
from kvbench.evidence.dominance import best_so_far, standing
from kvbench.evidence.drawing import Drawing, lines_of, short_label, ticks
from kvbench.evidence.frontier import averages, costs_of
from kvbench.evidence.load import load_groups
from kvbench.evidence.one_panel import HUES
from kvbench.evidence.pareto import panels_of, texts
from kvbench.evidence.view import show
from kvbench.results.measures import RESIDENT
from kvbench.show import terminal
from kvbench.show.picture import METHODS, method_style, spread


def places_of(panel):
    """Label -> standing by resident bytes."""
    return {panel.find(key).label: place for key, place in standing(panel, "resident").items()}


def test_points_and_their_standing(sweep):
    """Values are those of the samples; the dear bad method is beaten beyond chance, the close one only by chance."""
    panel = panel_of(sweep)
    points = {point.label: point for point in panel.points}
    # The second full cache is the noise band, not a point.
    assert sorted(points) == ["close", "dear", "fp8", "full", "good budget=0.2", "good budget=0.4"]
    low, high = panel.band
    assert low < -1 / 80 < high
    assert points["dear"].quality == pytest.approx(-24 / 80) and points["full"].quality == 0
    assert points["dear"].interval[0] < -24 / 80 < points["dear"].interval[1] < 0
    # No answer of fp8 differs, and that still leaves room for doubt.
    assert points["fp8"].interval[0] < 0 < points["fp8"].interval[1] and points["full"].interval is None
    assert points["fp8"].costs["resident"].value == pytest.approx(0.5)
    assert points["fp8"].costs["average"].value == pytest.approx(0.45)
    assert points["fp8"].costs["time"].value == pytest.approx(0.2 / 5)
    low, high = points["fp8"].costs["peak"].interval
    assert low < points["fp8"].costs["peak"].value < high
    assert places_of(panel) == {
        "good budget=0.2": "best estimate",
        "good budget=0.4": "best estimate",
        "close": "open",
        "fp8": "open",
        "full": "open",
        "dear": "dominated",
    }
    assert points["full"].family == "16 bits, keeps all" and points["fp8"].family == "quantises"
    assert points["good budget=0.4"].family == "quantises and evicts"


def test_bytes_have_the_interval_of_what_varies():
    """Ends are among the samples' own shares, of one group and of the mean over groups, where one sample of eight
    holds more than the others; no width where all hold the same share."""
    fp16 = [500.0, 510, 505, 498, 512, 508, 503, 120]
    held = [size / 2 for size in fp16]

    def cost_of(held):
        records = [
            {"subset": "s", "sample_id": f"{n}", "repeat": 0, "status": "ok",
             "ledger": {"resident_bytes": mine, "fp16_bytes": whole}}
            for n, (mine, whole) in enumerate(zip(held, fp16, strict=True))
        ]  # fmt: skip
        run = SimpleNamespace(samples={(record["sample_id"], 0): record for record in records})
        return costs_of(RESIDENT, [run], [[("s", record["sample_id"]) for record in records]])[0]

    assert cost_of(held).interval == (0.5, 0.5)
    held[2] += 15
    cost = cost_of(held)
    low, high = cost.interval
    assert 0.5 <= low < cost.value < high <= held[2] / fp16[2] and cost.within == (0.5, held[2] / fp16[2])


def test_dominance_needs_both_axes(tmp_path):
    """A method that is better but no cheaper, or cheaper but only as good, beats nothing."""
    store(tmp_path, "full", SCORES, ratio=1.0)
    store(tmp_path, "bad", flips(SCORES, 25, 0), ratio=0.3)
    store(tmp_path, "dearer", SCORES, ratio=0.5)
    store(tmp_path, "twin", flips(SCORES, 25, 0), ratio=0.2)
    panel = panel_of(tmp_path)
    assert places_of(panel) == {"full": "open", "bad": "open", "dearer": "best estimate", "twin": "best estimate"}


def test_lower_is_better_turns_everything_round(tmp_path):
    """With nll the run of the lower value is the best estimate, and the picture's axis points up to it."""
    noise = np.random.default_rng(0).random(80) / 10
    store(tmp_path, "full", SCORES, ratio=1.0)
    store(tmp_path, "worse", SCORES, ratio=0.6, nll=lambda number: 0.5 + noise[number])
    store(tmp_path, "better", SCORES, ratio=0.5, nll=lambda number: 0.2 + noise[-number])
    panel = panel_of(tmp_path, "metric=nll")
    assert places_of(panel) == {"full": "best estimate", "worse": "dominated", "better": "best estimate"}
    bottom, top = figure_of(panel).axes[0].get_ylim()
    assert bottom > top


def test_odd_runs_are_not_drawn(sweep):
    """Failed, incomplete, other-version and mostly broken runs are named and are no points; asked for, the incomplete
    one is drawn and all are put on its samples."""
    whole = panel_of(sweep)
    store(sweep, "broken", SCORES, ratio=0.1, status="failed", message="nothing done")
    store(sweep, "older", SCORES, ratio=0.1, harness="0" * 64, started="2025-01-01T00:00:00+00:00")
    store(sweep, "oom", SCORES, ratio=0.1, statuses=dict.fromkeys(range(20), "oom"))
    part = {"a": SCORES["a"], "b": SCORES["b"][:5]}
    store(sweep, "part", part, ratio=0.1, status="running")
    panel = panel_of(sweep)
    assert [point.quality for point in panel.points] == [point.quality for point in whole.points]
    said = "\n".join(panel.notes)
    for text in (
        "broken/",
        "FAILED and is left out: nothing done",
        "1 runs of another version of the code are left out (older",
        "oom is not drawn: only 60 of 80 samples ended well",
        "part is not drawn: it is incomplete (45 of 80 answers)",
    ):
        assert text in said, text
    with_part = panel_of(sweep, "incomplete=true")
    assert with_part.num_samples == 45 and "part" in [point.label for point in with_part.points]
    assert "every number here is over the 45 of 80 samples" in "\n".join(with_part.notes)


def test_one_sample_that_ran_out_of_memory_is_left_out_for_all(tmp_path):
    """Every drawn run is on the same samples, so that no method gains by failing on a hard one."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "x", SCORES, statuses={0: "oom"})
    panel = panel_of(tmp_path)
    assert panel.num_samples == 79 and all(point.quality == 0 for point in panel.points)


def test_without_the_full_cache_scores_are_drawn(tmp_path):
    """No reference: the quality is the score, and the notes say so; nothing at all is an error."""
    store(tmp_path, "x", SCORES)
    panel = panel_of(tmp_path)
    assert panel.reference is None and panel.points[0].quality == pytest.approx(panel.points[0].score) != 0
    assert "no complete run of the full cache" in "\n".join(panel.notes)


def test_shares_are_drawn_below_the_full_caches(sweep):
    """Of `score%` the full cache is 100 %, a run its ratio to it, and the axis says so; the order is as ever."""
    panel, whole = panel_of(sweep, "metric=score%"), panel_of(sweep)
    full = panel.find(panel.reference)
    assert full.quality == 1 and full.interval is None
    for point in panel.points:
        assert point.quality == pytest.approx(point.score / full.score)
        assert point is full or point.interval[0] <= point.quality <= point.interval[1]
    assert places_of(panel)["good budget=0.2"] == places_of(whole)["good budget=0.2"]
    labels = [axes.get_ylabel() for axes in figure_of(panel).axes if axes.get_ylabel()]
    assert labels == ["exact, % of the full cache's"]
    store(sweep / "alone", "good", SCORES, settings={"budget": 0.4})
    alone = panel_of(sweep / "alone", "metric=score%")
    assert alone.what.of is None and any("not shares of it" in note for note in alone.notes)


def test_small_multiples(tmp_path, capsys):
    """One small picture for each subset or category that is there, in the benchmark's order; the CSV has them."""
    scores = yes_no(0.7, {"lcc": 20, "trec": 20, "repobench-p": 20}, seed=3)
    store(tmp_path, "full", scores, task="longbench", ratio=1.0, tiers=(100,), bits=16)
    store(tmp_path, "snapkv", flips(scores, 4, 0), task="longbench", ratio=0.25, settings={"budget": 0.25})
    for by, titles in (("subset", ["TREC", "LCC", "RB-P"]), ("category", ["Few-shot learning", "Code"])):
        cfg = settings(tmp_path, "metric=score%", f"by={by}")
        (group,) = load_groups(cfg)
        panels = multiples.panels_of(group, cfg)
        assert [panel.what.short for panel in panels] == titles
        made = multiples.figure("x", panels, "resident")
        shown = [axes.get_title(loc="left").split(",")[0] for axes in made.axes if axes.get_visible()]
        assert shown == titles and [text.get_text() for text in made.legends[0].get_texts()] == ["snapkv"]
    out = tmp_path / "out"
    words = [f"results_dir={tmp_path}", "metric=score%", "by=subset", "resamples=200", "kinds=[png]", f"out={out}"]
    assert main(["pareto", *words]) == 0
    assert (out / "longbench_tiny_resident_by_subset.png").read_bytes().startswith(b"\x89PNG")
    metrics = {row["metric"] for row in csv.DictReader((out / "pareto.csv").open())}
    assert metrics == {"score:score%", "score:trec%", "score:lcc%", "score:repobench-p%"}
    assert main(["pareto", *words, "metric=code"]) == 2
    assert "metric=code is one category already; take metric=score%" in " ".join(capsys.readouterr().err.split())


def test_average_over_tasks(sweep):
    """With two tasks there is a third panel: the mean over both of the runs that both have, with narrower intervals."""
    for method, lost, ratio in (("full", 0, 1.0), ("good", 20, 0.4), ("dear", 0, 0.7)):
        budget = {"budget": 0.4} if method == "good" else None
        store(sweep, method, flips(SCORES, lost, 0), task="second", ratio=ratio, settings=budget)
    cfg = settings(sweep)
    second, toy, mean = panels_of(load_groups(cfg), cfg)
    assert (second.title, toy.title) == ("second with tiny", "toy with tiny")
    assert sorted(point.method for point in mean.points) == ["dear", "full", "good"]
    for point in mean.points:
        parts = [second.find(point.key), toy.find(point.key)]
        assert point.quality == pytest.approx(np.mean([part.quality for part in parts]))
        assert point.costs["resident"].value == pytest.approx(np.mean([p.costs["resident"].value for p in parts]))
    good = next(point for point in mean.points if point.method == "good")
    parts = [np.ptp(panel.find(good.key).interval) / 2 for panel in (second, toy)]
    assert np.ptp(good.interval) / 2 == pytest.approx(np.hypot(*parts) / 2, rel=0.05)
    assert mean.title == "mean over 2 groups with tiny" and averages([toy]) == []


def test_no_average_over_versions(sweep):
    """Groups of two versions of the code, or of two models, have no mean, and say why."""
    for method, ratio in (("full", 1.0), ("good", 0.4)):
        store(sweep, method, SCORES, task="second", ratio=ratio, harness="0" * 64)
    cfg = settings(sweep)
    panels = panels_of(load_groups(cfg), cfg)
    assert len(panels) == 2
    assert all("no mean over groups of different models or versions" in "".join(panel.notes) for panel in panels)


def test_command_writes_the_same_bytes_twice(sweep, capsys):
    """Pictures, table and CSV depend on the results only; the CSV holds every point unrounded."""
    words = ["pareto", f"results_dir={sweep}", "resamples=300", "axes=[resident]"]
    assert main([*words, f"out={sweep}/one"]) == 0
    first = capsys.readouterr().out
    assert main([*words, f"out={sweep}/two"]) == 0
    assert first.replace("/one/", "/two/") == capsys.readouterr().out
    names = sorted(path.name for path in (sweep / "one").iterdir())
    assert names == ["pareto.csv", "toy_tiny_resident.png", "toy_tiny_resident.svg"]
    for name in names:
        assert (sweep / "one" / name).read_bytes() == (sweep / "two" / name).read_bytes(), name
    rows = list(csv.DictReader((sweep / "one/pareto.csv").open()))
    assert len(rows) == 6 and {row["resident_standing"] for row in rows} == {"best estimate", "open", "dominated"}
    assert "dominated" in first and "-30.0 [" in first


def test_machines_are_not_mixed_on_the_time_axis(sweep):
    """Runs of two machines have no common time axis; bytes are the same everywhere."""
    assert "times with backend torch are no claim" in "\n".join(panel_of(sweep).notes)
    path = next((sweep / "toy/tiny/dear").iterdir()) / "run.json"
    path.write_text(path.read_text().replace("cpu (X)", "cpu (Y)"))
    panel = panel_of(sweep)
    assert all("time" not in point.costs and "peak" in point.costs for point in panel.points)
    assert "no time axis: the runs were made on 2 machines" in "\n".join(panel.notes)
    assert frontier_figure.render(panel, "time", "png") is None


def test_labels_keep_their_distance():
    """Labels end up apart, inside, in the order of their points; too many of them share the height evenly."""
    placed = spread([0.5, 0.5, 0.51, 0.0, 1.2], 0.1)
    assert sorted(placed) == pytest.approx([0.0, 0.5, 0.6, 0.7, 1.0])
    assert spread([0.99, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert np.diff(spread([0.5] * 30, 0.1)) == pytest.approx([1 / 29] * 29)
    assert spread([], 0.1) == [] and spread([0.3], 0.1) == [0.3]


def test_names_of_the_best_estimates_are_short():
    """Beside a point there is room for the method and its values only."""
    labels = ["full", "snapkv budget=0.25", "diffkv alpha_h=5.0 alpha_l=0.02", "full batch 8"]
    short = [short_label(label) for label in labels]
    assert short == ["full", "snapkv 0.25", "diffkv 5, 0.02", "full batch 8"]
    assert short_label("int4 pre_rope=True rotation=off key_offset=prompt") == "int4 pre_rope, rotation off, prompt"


def test_ticks_and_the_staircase():
    """Ticks are round and few; the staircase takes each cost's best, cheapest first, and drops ties of higher cost."""
    assert ticks(97, 106) == [98, 100, 102, 104, 106]
    assert ticks(9, 110) == [10, 20, 30, 50, 70, 100] and len(ticks(18, 36)) <= 6 and len(ticks(1e-3, 1e6)) <= 6
    assert best_so_far([1, 2, 2, 3, 4], [5, 6, 7, 7, 9], True) == [0, 2, 4]
    assert best_so_far([1, 2, 3], [5, 4, 6], False) == [0, 1]


@need_extension("papers")
def test_published_points_are_marked(tmp_path):
    """Asked for, what papers printed for the task is drawn as crosses with words that say it is not measured here."""
    store(tmp_path, "full", SCORES, task="gsm8k", ratio=1.0)
    store(tmp_path, "diffkv", SCORES, task="gsm8k", ratio=0.4)
    panel = panel_of(tmp_path, "published=true")
    found = Drawing(panel, "resident").printed("diffkv")
    assert any(x == 19.3 and y == pytest.approx(75.7 - 76.3) for x, y in found)
    assert "NOT measured here" in " ".join(frontier_figure.panels_words(Drawing(panel, "resident")))
    assert not panel_of(tmp_path).published and not Drawing(panel, "peak").printed("diffkv")


def test_lines_join_runs_that_differ_in_numbers_only(tmp_path):
    """Budgets of one tier are a line; another tier is another line; a budget that is not set is a number too."""
    for budget, tier in ((0.5, "fp16"), (0.6, "k8v4"), (None, "fp16")):
        store(tmp_path, "snapkv", SCORES, settings={"budget": budget, "tier": tier}, ratio=budget or 0.7)
    store(tmp_path, "kivi", SCORES, settings={"bits": 2})
    lines = lines_of(Drawing(panel_of(tmp_path), "resident").methods())
    held = {line.name: [round(point.costs["resident"].value, 9) for point in line.points] for line in lines}
    assert held == {"kivi": [0.5], "snapkv fp16": [0.5, 0.7], "snapkv k8v4": [0.6]}


def test_a_method_has_one_colour_in_every_picture(sweep):
    """In small panels every method has its colour, whatever else is drawn; in one panel every kind has."""
    panel = panel_of(sweep)
    for text in (text for axes in figure_of(panel).axes for text in axes.texts):
        method = text.get_text().split()[0]
        assert method == "full" or text.get_color() == method_style(method)[0]
    family = {point.method: point.family for point in panel.points}
    names = [text for text in figure_of(panel, "one").axes[0].texts if text.get_text()]
    assert len(names) == len(panel.points) and len(set(HUES.values())) == len(HUES)
    for text in names:
        method = text.get_text().split()[0]
        assert method == "full" or text.get_color() == HUES[family[method]]


def test_every_method_of_the_repository_looks_its_own_way():
    """No two have the same colour and marker, the first twelve not even the same colour; a method from elsewhere looks
    like none of them."""
    from kvbench.config import files

    names = set(files.options("method")) - {"full"}
    styles = {name: method_style(name) for name in [*METHODS, *names]}
    assert len(set(styles.values())) == len(styles) and method_style("full") not in styles.values()
    assert len({colour for colour, _ in map(method_style, METHODS[:12])}) == 12
    assert method_style("mine") == method_style("mine") and method_style("mine") not in map(method_style, METHODS)


def test_no_colour_is_twice_in_a_panel(tmp_path):
    """Methods that share a colour go to different panels."""
    few = {"a": [1, 0], "b": [1] * (1 + len(METHODS))}
    for place, method in enumerate(("full", *METHODS)):
        store(tmp_path, method, flips(few, place, 0), ratio=0.5, tiers=(40,), bits=16)
    parts = Drawing(panel_of(tmp_path), "resident").parts()
    assert sorted(method for _, methods in parts for method in methods) == sorted(METHODS)
    for _, methods in parts:
        colours = [method_style(method)[0] for method in methods]
        assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("width", [64, 80, 120])
def test_names_stay_whole_in_a_narrow_terminal(tmp_path, width):
    """Intervals go below their numbers before a name is broken; nothing is cut and no line is longer."""
    few = {"a": [1.0], "b": [0.0]}  # so few that each cell says that there is no interval
    store(tmp_path, "full", few)
    store(tmp_path, "keydiff", few, settings={"budget": 0.25})
    text = io.StringIO()
    show(texts(panel_of(tmp_path), "resident"), terminal.console(width, file=text))
    table = text.getvalue().split("!")[0].splitlines()
    assert max(map(len, table)) <= width and "…" not in text.getvalue()
    assert any(line.startswith("keydiff ") for line in table)
    assert any("[no" in line for line in table)
