"""Pictures of the frontier: every name at its point, none over another, in one panel or in several."""

import itertools

import pytest
from frontier_helpers import SCORES, boxes_of, figure_of, overlap, panel_of
from matplotlib.text import Text
from stored import flips, store

from kvbench.cli.main import main
from kvbench.evidence import frontier_figure
from kvbench.evidence.one_panel import CROWD, MOST, WHISKERS, Look
from kvbench.show.picture import method_style


def test_names_in_the_picture_do_not_overlap(tmp_path):
    """With 20 methods at three budgets each, no two names of a panel touch, and all are inside the picture."""
    few = {"a": [1] * 6, "b": [1] * 8}
    store(tmp_path, "full", few, ratio=1.0)
    for index in range(20):
        for budget in (0.125, 0.25, 0.5):
            scores, ratio = flips(few, int(8 * (1 - budget)), 0), budget + index / 1000
            store(tmp_path, f"method_number_{index}", scores, settings={"budget": budget}, ratio=ratio)
    made = figure_of(panel_of(tmp_path))
    for axes in made.axes:
        boxes = boxes_of(axes)
        assert all(box.x1 < made.bbox.x1 and box.y0 > 0 for box in boxes) and not overlap(boxes)
    assert sum(len(axes.texts) for axes in made.axes[1:]) == 20


@pytest.mark.parametrize("kinds", [1, 7], ids=["one panel", "several"])
def test_no_name_is_cut_off_at_the_edge(tmp_path, kinds):
    """A long name makes the picture wider, in both kinds of panels."""
    for place in range(2 * kinds):
        words = {"variant": f"window_of_the_last_queries_{place}", "budget": 0.5}
        store(tmp_path, "kv_compress", SCORES, settings=words, ratio=0.3 + place / 100)
    for layout in frontier_figure.LAYOUTS:
        made = figure_of(panel_of(tmp_path), layout)
        assert len(made.axes) > 1 or kinds == 1 or layout == "one"
        assert max(box.x1 for axes in made.axes for box in boxes_of(axes)) <= made.bbox.x1


@pytest.mark.parametrize("width", [None, 3.3], ids=["as it comes", "a column"])
def test_one_panel_names_every_setting_at_its_point(sweep, width):
    """No name covers another or is cut, whatever the width, also of points that coincide; the legend is one line."""
    scores = flips(SCORES, 2, 1)
    for method in ("twin_a", "twin_b"):
        store(sweep, method, scores, ratio=0.45)
    made = figure_of(panel_of(sweep), "one", Look(width=width))
    (axes,) = made.axes
    assert made.get_figwidth() == pytest.approx(width or 6.4)
    names = {text.get_text(): Text.get_window_extent(text) for text in axes.texts if text.get_text()}
    assert set(names) == {"close", "dear", "fp8", "full", "good 0.2", "good 0.4", "twin_a", "twin_b"}
    for one, two in itertools.combinations(names.values(), 2):
        across = min(one.x1, two.x1) - max(one.x0, two.x0)
        assert across < 1 or min(one.y1, two.y1) - max(one.y0, two.y0) < 1
    legend = axes.get_legend()
    every = [*names.values(), axes.xaxis.label.get_window_extent(), axes.yaxis.label.get_window_extent()]
    for box in (*every, *(text.get_window_extent() for text in made.texts), legend.get_window_extent()):
        assert box.x0 >= 0 and box.x1 <= made.bbox.x1 + 1 and box.y0 >= -1 and box.y1 <= made.bbox.y1 + 1
    if width is None:
        heights = {round(text.get_window_extent().y0) for text in legend.get_texts()}
        assert len(heights) == 1


@pytest.mark.parametrize("number", [CROWD - 1, CROWD])
def test_a_crowd_on_one_spot_shares_a_text(tmp_path, number):
    """Points that cover one another have a name each up to a few, and one text for all names from there on."""
    store(tmp_path, "full", SCORES, ratio=1.0)
    names = [f"kind_{index}" for index in range(number)]
    for index, name in enumerate(names):
        store(tmp_path, name, flips(SCORES, 30, 0), ratio=0.5 + 0.001 * index)
    (axes,) = figure_of(panel_of(tmp_path), "one").axes
    found = sorted(text.get_text() for text in axes.texts)
    assert found == ["full", *(names if number < CROWD else ["kind_0, kind_1, kind_2,\nkind_3"])]


def test_names_sizes_and_whiskers_of_a_picture_are_settings(sweep, tmp_path, monkeypatch, capsys):
    """Labels of methods and of settings, widths and whiskers reach the picture; what is out of range is named."""
    seen = []
    monkeypatch.setattr(frontier_figure, "render", lambda *args, **named: seen.append(named["look"]) or b"")
    words = ["report", "view=pareto", f"results_dir={sweep}", f"out={tmp_path}", "kinds=[pdf]", "resamples=100"]
    wanted = ["figure.width=3.3", "figure.size=8", "figure.whiskers=all", 'labels.good="Good (ours)"']
    assert main([*words, *wanted]) == 0
    assert (seen[0].width, seen[0].size, seen[0].whiskers) == (3.3, 8, "all")
    assert seen[0].name("good budget=0.4") == "Good (ours) 0.4" and seen[0].name("dear") == "dear"
    assert Look(labels={"good budget=0.4": "Ours"}).name("good budget=0.4") == "Ours"
    for word, named in (("figure.width=0", "figure.width"), ("figure.whiskers=most", "figure.whiskers")):
        assert main([*words, word]) == 2
        assert named in capsys.readouterr().err
    bars = {kind: len(figure_of(panel_of(sweep), "one", Look(whiskers=kind)).axes[0].collections) for kind in WHISKERS}
    assert bars["none"] == 0 < bars["frontier"] < bars["all"]


def test_an_interval_that_is_not_drawn_takes_no_room(tmp_path):
    """The upright axis ends behind the whiskers that are drawn; a dear, bad point with a wide interval has none."""
    scores = {"a": [1] * 40}
    store(tmp_path, "full", scores, ratio=1.0)
    store(tmp_path, "good", flips(scores, 1, 0), ratio=0.3)
    store(tmp_path, "bad", flips(scores, 8, 0), ratio=0.6)
    ends = {}
    for kind in WHISKERS:
        axes = figure_of(panel_of(tmp_path), "one", Look(whiskers=kind)).axes[0]
        ends[kind] = axes.get_ylim()[0]
        bars = [path.vertices[:, 1].min() for bars in axes.collections for path in bars.get_paths()]
        assert all(ends[kind] < low for low in bars)
    assert ends["all"] < ends["frontier"] <= ends["none"]


def test_many_settings_have_small_panels(tmp_path, monkeypatch):
    """Up to `MOST` runs stand in one panel, and more in small ones; the setting chooses otherwise."""
    few = {"a": [1] * 6, "b": [1] * 8}
    for index in range(MOST + 1):
        store(tmp_path, f"method_{index}", flips(few, 1, 0), ratio=0.3 + index / 100)
    many, less = panel_of(tmp_path), panel_of(tmp_path, "methods=[method_1*]")
    drawn = []
    for name, draw in dict(frontier_figure.LAYOUTS).items():

        def noted(drawing, look, name=name, draw=draw):
            drawn.append(name)
            return draw(drawing, look)

        monkeypatch.setitem(frontier_figure.LAYOUTS, name, noted)
    for panel, layout in ((many, None), (less, None), (many, "one"), (less, "panels")):
        assert frontier_figure.render(panel, "resident", "png", layout)
    assert drawn == ["panels", "one", "one", "panels"]


def test_a_few_runs_have_one_panel_that_names_all(sweep):
    """The same points are not drawn again in panels of their own: one panel as wide as the picture names every method,
    also those that are beaten, and the foot speaks of no other panel."""
    made = figure_of(panel_of(sweep))
    (axes,) = made.axes
    assert sorted(text.get_text() for text in axes.texts) == ["close", "dear", "fp8", "full", "good"]
    boxes = boxes_of(axes)
    assert all(box.x1 <= made.bbox.x1 for box in boxes) and not overlap(boxes)
    assert axes.bbox.width > 0.6 * made.bbox.width
    assert not any("First panel" in text.get_text() for text in made.texts)
    for method in ("snapkv", "expected_attention"):
        store(sweep, method, SCORES)
    assert method_style("snapkv")[0] == method_style("expected_attention")[0]
    assert len(figure_of(panel_of(sweep)).axes) > 1  # of which no two methods may share a colour


def test_long_names_stay_inside_the_picture_of_a_column(tmp_path):
    """layout=one takes the width that its names need, and the panel keeps its own."""
    widths = []
    for folder, name in (("short", "snap"), ("long", "a_method_with_a_long_name_and_more_$words$")):
        store(tmp_path / folder, "full", SCORES, ratio=1.0)
        store(tmp_path / folder, name, flips(SCORES, 10, 0), ratio=0.25)
        (axes,) = figure_of(panel_of(tmp_path / folder), "one").axes
        boxes = boxes_of(axes)
        assert boxes and all(box.x1 < axes.figure.bbox.x1 for box in boxes)
        widths.append(axes.get_window_extent().width)
    assert widths[0] == pytest.approx(widths[1])


def test_vector_pictures_are_the_same_twice(sweep, tmp_path, capsys):
    """layout=one writes a PDF that is one page of vectors; the same results give the same bytes."""
    for name in ("x", "y"):
        words = ["layout=one", "kinds=[pdf]", f"out={tmp_path / name}", "resamples=300"]
        assert main(["pareto", f"results_dir={sweep}", *words]) == 0
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("?/toy_tiny_resident_one.pdf")))
    assert first == second and first.startswith(b"%PDF") and b"/Subtype /Image" not in first
    assert main(["pareto", f"results_dir={sweep}", "layout=two"]) == 2
    assert "layout=two does not exist. Known: one, panels" in capsys.readouterr().err
