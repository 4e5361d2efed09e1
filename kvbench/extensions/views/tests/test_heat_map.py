"""Heat maps: what lies in which cell, differences to the full cache, samples that a run lacks, pictures and CSV."""

import csv
import itertools

import pytest
from refusals import refused
from stored import store

from kvbench.cli.commands import compose_command, run
from kvbench.cli.main import main
from kvbench.evidence.load import load_groups
from kvbench.extensions.views.heat_map import STYLE, figure, panels_of
from kvbench.show.picture import drawn

DEPTHS, LENGTHS, ITEMS = (0, 50, 100), (512, 1024), 2
CELLS = list(itertools.product(LENGTHS, DEPTHS, range(ITEMS)))  # in the order of the samples


def put(root, method, rule, **options):
    """A run whose scores are a rule of depth, length and item."""
    scores = {str(n): [float(rule(d, n, i)) for length, d, i in CELLS if length == n] for n in LENGTHS}
    where = [{"length": length, "depth": depth, "index": item} for length, depth, item in CELLS]
    store(root, method, scores, task="needle", meta=where.__getitem__, **options)


@pytest.fixture
def runs(tmp_path):
    """Three runs: the full cache finds all but the middle of the long prompts, one method only what lies at the end,
    another what the full cache does not."""
    put(tmp_path, "full", lambda d, n, i: not (d == 50 and n == 1024), ratio=1.0, tiers=(100,))
    put(tmp_path, "snapkv", lambda d, n, i: d == 100 or (d == 50 and i == 0))
    put(tmp_path, "kivi", lambda d, n, i: True)
    return tmp_path


def panels(root, *words):
    """The maps of the one group."""
    (group,) = load_groups(compose_command("heatmap", [f"results_dir={root}", *words]))
    return panels_of(group, "score")


def test_cells_and_differences(runs) -> None:
    """Every cell has the values of its own samples, and their differences to the full cache."""
    drawn = panels(runs)
    assert drawn.runs == ["full", "kivi", "snapkv"] and len(drawn.samples) == 3 * 12
    assert list(drawn.grid("full").index) == [0, 50, 100] and list(drawn.grid("full").columns) == [512, 1024]
    assert drawn.grid("full").to_numpy().tolist() == [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    assert drawn.grid("full", "difference").isna().all(axis=None)
    assert drawn.grid("snapkv").to_numpy().tolist() == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    assert drawn.grid("snapkv", "difference").to_numpy().tolist() == [[-1.0, -1.0], [-0.5, 0.5], [0.0, 0.0]]


def test_a_sample_that_one_run_lacks_is_drawn_for_none(runs) -> None:
    """Maps are compared by eye, so all are over the same samples; a cell without any is empty."""
    put(runs, "tova", lambda d, n, i: False, statuses={0: "oom", 1: "nan", 4: "oom"})
    drawn_panels = panels(runs)
    assert len(drawn_panels.samples) == 4 * 9 and any(
        "9 of 12 samples that every run has" in note for note in drawn_panels.notes
    )
    assert drawn_panels.grid("full").isna().to_numpy().tolist() == [[True, False], [False, False], [False, False]]
    assert len(drawn_panels.samples.query("run == 'full' and depth == 100 and length == 512")) == 1
    assert drawn(lambda: figure(drawn_panels), "png", STYLE).startswith(b"\x89PNG")


@pytest.mark.smoke
def test_command_writes_pictures_and_csv(runs, capsys) -> None:
    """A picture of each kind, the same bytes twice, and a row for each cell; only tasks that have depths."""
    store(runs, "full", {"a": [1.0, 0.0]}, task="toy")
    assert main(["heatmap", f"results_dir={runs}"]) == 0
    folder = runs / "heatmap"
    assert {path.suffix for path in folder.iterdir()} == {".png", ".svg", ".csv"} and len(list(folder.iterdir())) == 3
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["heatmap", f"results_dir={runs}", "kinds=[svg]"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    rows = list(csv.DictReader((folder / "heatmap.csv").read_text().splitlines()))
    assert len(rows) == 3 * 6
    row = next(r for r in rows if (r["run"], r["depth_percent"], r["length_tokens"]) == ("snapkv", "50", "1024"))
    assert (row["n"], float(row["value"]), float(row["difference"])) == ("2", 0.5, 0.5)
    assert 0 < float(row["low"]) < 0.5 < float(row["high"]) < 1
    assert "50.0 (+50.0)" in capsys.readouterr().out


def test_nothing_to_draw_is_an_error(tmp_path) -> None:
    """A folder without such runs, and a picture kind that there is not."""
    store(tmp_path, "full", {"a": [1.0, 0.0]}, meta={"depth": "deep", "length": 3})
    for words, error in (
        ([], ("results-missing", None, "task=needle")),
        (["kinds=[gif]"], ("name-unknown", "kinds", "kinds=gif")),
    ):
        with refused(*error):
            run("heatmap", [f"results_dir={tmp_path}", *words])
