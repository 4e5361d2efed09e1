"""The contract of a view: what is written is its frame, what is too wide goes on below, and nothing is read before the
settings are checked."""

import csv
import io

import pytest
from omegaconf import OmegaConf
from refusals import refused
from rich.text import Text
from stored import store

from kvbench.evidence.view import Grid, View, ViewResult, csv_of, frame_of, line, notes, show
from kvbench.show import terminal
from kvbench.show.formats import FORMATS, Sheet

ROWS = [{"run": "a", "n": 3, "value": 0.1}, {"run": "b", "n": None, "value": 1e-17}]


def settings(root, **more):
    """The settings of a view that has those."""
    names = dict.fromkeys(("tasks", "models", "methods", "where"))
    return OmegaConf.create({"results_dir": str(root), "code": "newest", "out": None, **names, **more})


def view(**more):
    """A view of the labels of all runs."""

    def compute(groups, cfg):
        labels = [run.label for group in groups for run in group.runs]
        table = Grid(title="all", names=labels, columns=[("n", ["1"] * len(labels))])
        draw = {"png": b"picture", "svg": None}.get
        return ViewResult(frame=frame_of(ROWS), parts=[table, *notes(["a note"])], figures=[("x with y", "_z", draw)])

    return View(name="mine", compute=compute, **more)


def test_a_frame_and_its_csv_hold_the_same():
    """Whole numbers stay whole beside a missing one, and nothing is rounded."""
    frame = frame_of(iter(ROWS))
    assert list(frame) == ["run", "n", "value"] and frame["n"].tolist() == [3, None]
    found = list(csv.reader(io.StringIO(csv_of(frame).decode())))
    assert found == [["run", "n", "value"], ["a", "3", "0.1"], ["b", "", "1e-17"]]


def test_figures_and_csv_lie_in_one_folder(tmp_path, capsys):
    """Where a view draws, below the results or in `out`; what has nothing to draw leaves no file."""
    store(tmp_path, "full", {"a": [1.0]})
    assert view()(settings(tmp_path, kinds=None)) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    assert written == {"mine.csv": csv_of(frame_of(ROWS)), "x_y_z.png": b"picture"}
    out = capsys.readouterr().out
    assert "\n! a note\n" in out and f"{tmp_path}/mine/mine.csv" in out
    with refused("name-unknown", "kinds", "kinds=gif"):
        view()(settings(tmp_path / "nowhere", kinds="gif"))


def test_without_figures_a_csv_is_written_where_it_is_wanted(tmp_path):
    """`out` is then its file."""
    store(tmp_path, "full", {"a": [1.0]})
    assert view()(settings(tmp_path)) == 0 and not (tmp_path / "mine").exists()
    assert view()(settings(tmp_path, out=str(tmp_path / "deep/x.csv"))) == 0
    assert (tmp_path / "deep/x.csv").read_bytes() == csv_of(frame_of(ROWS))


@pytest.mark.parametrize(
    ("width", "headings"), [(80, ["run b c d"]), (30, ["run b", "run c d"]), (20, ["run b", "run c", "run d"])]
)
def test_a_table_that_is_too_wide_goes_on_below(width, headings):
    """It is cut behind the headings that allow it, the first ones first; a line without breaks stays one."""
    columns = [(name, ["x" * 9]) for name in "bcd"]
    text = io.StringIO()
    show(
        [Grid(title=None, names=["me"], columns=columns, ends=("b", "c")), Text(), line("word " * 30)],
        terminal.console(width, file=text),
    )
    found = [" ".join(shown.split()) for shown in text.getvalue().splitlines()]
    assert [shown for shown in found if shown.startswith("run")] == headings
    assert found[-1] == ("word " * 30).strip() and "…" not in text.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sheet_says_the_same_in_every_format(kind):
    """Title, cells, what stands out and what must be known; no cell is markup."""
    rows = [[("run", False), ("a|b", False)], [("x_y", False), ("1.5", True)]]
    sheet = Sheet(title="A title", caption="A title: score.", rows=rows, legend=lambda mark: [f"{mark}: best"])
    found = FORMATS[kind](sheet, 60)
    best = {"txt": "1.5*", "md": "**1.5**", "tex": r"\textbf{1.5}"}[kind]
    assert best in found and "A title" in found and ": best" in found
    assert {"txt": "x_y", "md": r"x\_y", "tex": r"x\_y"}[kind] in found
