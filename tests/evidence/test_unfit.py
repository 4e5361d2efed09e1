"""Where the full cache's answers are no ground, no reader judges a run, and each says why before its table."""

import pytest
from stored import store

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.evidence import frontier_figure
from kvbench.evidence.compare import compare_group
from kvbench.evidence.dominance import standing
from kvbench.evidence.drawing import Drawing
from kvbench.evidence.frontier_figure import panels_words
from kvbench.evidence.load import load_groups
from kvbench.evidence.pareto import panels_of

rankings = pytest.importorskip("kvbench.extensions.views.ranks").rankings

WHY = "NO STANDING by exact: of the full cache, 24 of 24 answers were cut by the length limit of 128 tokens"
CUT = {"finish": "length", "protocol": {"max_new_tokens": 128}}


@pytest.fixture
def broken(tmp_path):
    """Two methods that are right more often than a full cache whose answers were all cut; one is cheapest."""
    store(tmp_path, "full", {"a": [0] * 24}, ratio=1.0, **CUT)
    store(tmp_path, "snapkv", {"a": [1] * 20 + [0] * 4}, ratio=0.5, flags=["fallback"], **CUT)
    store(tmp_path, "kivi", {"a": [0] * 24}, ratio=0.3, nll=0.2, **CUT)
    return tmp_path


def said(root, capsys, *words: str) -> str:
    """The output of a command, in one line."""
    assert main([words[0], f"results_dir={root}", *words[1:]]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_compare_gives_no_verdict(broken, capsys) -> None:
    """By score; forced answers are judged as ever."""
    out = said(broken, capsys, "compare", "resamples=300")
    assert out.startswith(f"! {WHY}") and "raise protocol.max_new_tokens" in out
    table = out.split("[a, b]")[0].split("difference to")[1]
    assert table.count("no verdict") == 2 and " better " not in table
    assert "(`fallback`): snapkv 24 of 24" in out and out.count("NO STANDING") == 1
    cfg = compose_command("compare", [f"results_dir={broken}", "resamples=300"])
    rows, notes = compare_group(load_groups(cfg)[0], cfg)
    assert notes[0].startswith(WHY) and not any(row.pairs.is_enough for row in rows)  # which `advise` asks
    cfg = compose_command("ranks", [f"results_dir={broken}", "metrics=[nll,score]"])
    assert f"toy with tiny: {WHY}" in " ".join(rankings(load_groups(cfg), cfg)[1])
    assert "NO STANDING" not in said(broken, capsys, "compare", "resamples=300", "metric=nll")


@pytest.mark.parametrize(
    ("form", "mark"), [("txt", "! toy with tiny: "), ("md", "**toy with tiny: "), ("tex", "% toy with tiny: ")]
)
def test_table_marks_no_best(broken, capsys, form: str, mark: str) -> None:
    """In plain text, Markdown and LaTeX, where the caption says it too."""
    out = said(broken, capsys, "table", f"format={form}", "resamples=300")
    assert out.startswith(mark + WHY) and "84.3*" not in out and "bold" not in out
    assert form != "tex" or f"\\caption{{toy with tiny: {WHY}" in out.replace("\\%", "%")


def test_pareto_has_no_standing_and_draws_no_frontier(broken, capsys, tmp_path) -> None:
    """The table, the CSV and the words of the picture; the wide grey line is not there."""
    out = said(broken, capsys, "pareto", "resamples=300", "axes=[resident]", "kinds=[]", f"out={tmp_path / 'x'}")
    assert out.startswith(f"! {WHY}") and "dominated" not in out.split("[a, b]")[0]
    assert "best estimate" not in out.split("[a, b]")[0] and out.count("no standing") >= 3
    cfg = compose_command("pareto", [f"results_dir={broken}", "resamples=300"])
    (panel,) = panels_of(load_groups(cfg), cfg)
    assert set(standing(panel, "resident").values()) == {"no standing"}
    drawing = Drawing(panel, "resident")
    text = " ".join(panels_words(drawing))
    assert text.startswith(WHY) and "Ringed" not in text and "Wide grey" not in text
    figure = frontier_figure.panels_figure(drawing)
    assert not any(line.get_drawstyle() == "steps-post" for axes in figure.axes for line in axes.lines)


def test_report_says_it_before_all_else(broken, capsys, monkeypatch, tmp_path) -> None:
    """The first warning of the page, and no verdict and no standing in its table."""
    monkeypatch.setattr(frontier_figure, "render", lambda panel, axis, kind: None)
    path = tmp_path / "page.html"
    said(broken, capsys, "report", "resamples=300", f"out={path}")
    page = path.read_text()
    assert f"<ul><li>{WHY}" in page and page.index(WHY) < page.index("<table")
    assert page.count("no verdict") >= 2 and page.count("<td>no standing</td>") == 3
