"""Names from outside are text wherever they are shown: terminal, rich's tables and bars, pictures, CSV."""

import ast
import csv
import io
import re
import xml.dom.minidom

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from places import ROOT
from rich.text import Text

from kvbench.results.record import Metric, RunRecord
from kvbench.show import figure, table, terminal
from kvbench.show.csv_file import csv_bytes
from kvbench.show.picture import headed, picture_bytes
from kvbench.show.progress import LiveBar, Progress, note
from kvbench.show.text import safe, visible

HOSTILE = ("[/red]", "[bold]x[/bold]", "a$x^{$", "\x1b[31mred", "\x1b]0;title\x07", "a\rb", "\u202eabc", "\ud800")
HOSTILE += ("\x9b31m", ":smile:", "x" * 100_000)


def is_plain(text):
    """Nothing in a text that a terminal obeys."""
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_one_visible_line(name):
    """Control characters, escapes, turned writing and halves of characters are seen; a long name loses its middle."""
    assert safe(name).isprintable() and len(safe(name)) <= 100
    assert is_plain(visible(f"one\n{name}"))


def test_usual_names_stay():
    """Letters of every language, brackets and dollars are text."""
    for name in ("smollm2-135m", "Qwen/Qwen2.5-7B", "modèle", "模型", "a [b] $c", ""):
        assert safe(name) == visible(name) == name
    assert safe(None) == "None" and safe(5) == "5"
    assert visible("a\nb") == "a\nb" and safe("a\nb\tc\x00") == "a\\nb\\tc?"
    assert safe("0123456789" * 3, 15) == "01234 ... 56789"


@pytest.mark.parametrize("name", HOSTILE[:-1])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_table_shows_names_as_they_are(monkeypatch, name, is_terminal):
    """Cell, heading, title and note hold the name itself, with nothing read as markup or passed on as an escape."""
    monkeypatch.setenv("FORCE_COLOR", "1") if is_terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    target = terminal.console(200, file=stream)
    shown = terminal.plain_table(f"title {name}")
    shown.add_column(f"heading {name}")
    shown.add_row(f"cell {name}")
    shown.add_row(Text(f"text {name}"))
    target.print(shown, Text(f"note {name}"), f"print {name}")
    found = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) if is_terminal else stream.getvalue()
    assert is_plain(found)
    allowed = {visible(name), visible(name.translate({7: None, 13: None}))}  # rich takes some controls out of a Text
    for kind in ("title", "heading", "cell", "text", "note", "print"):
        assert any(f"{kind} {text}" in found for text in allowed), kind


@pytest.mark.parametrize("name", HOSTILE[:-1])
def test_progress_and_notes_are_plain(capsys, name):
    """A line on stderr and the live bar obey no name."""
    note(f"name {name}")
    with Progress(name, 1, stream=(stream := io.StringIO())):
        pass
    assert is_plain(capsys.readouterr().err) and is_plain(stream.getvalue())
    bar = LiveBar(stream := io.StringIO(), name, total=2, state=name)
    bar.update(1, 2, name)
    bar.stop()
    assert is_plain(stream.getvalue())


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_picture_draws_names_as_they_are(kind, name):
    """No name is a formula, in a title, a legend or at an axis; an SVG is XML whatever a name holds."""
    made = Figure()
    FigureCanvasAgg(made)
    axes = made.subplots()
    axes.plot([1, 2], label=safe(name))
    axes.legend()
    axes.set_xlabel(name[:1000])
    axes.set_title(name[:1000])
    made.suptitle(name[:1000], wrap=True)
    axes.set_yticks([1, 2], [safe(name), "b"])
    content = picture_bytes(made, kind)
    if kind == "svg":
        xml.dom.minidom.parseString(content)
    else:
        assert content.startswith(b"\x89PNG")


def test_a_heading_stands_above_what_a_picture_shows():
    """The picture grows by its lines, and what was there stays as it was, dot by dot."""

    def drawn_with(text):
        made = Figure(figsize=(3, 2), dpi=100, layout="constrained")
        FigureCanvasAgg(made)
        made.subplots().plot([1, 2])
        with headed(text):
            return imread(io.BytesIO(picture_bytes(made, "png")))

    plain, one, several = (drawn_with(text) for text in ("", "other model", "other model, " * 20))
    assert plain.shape[0] < one.shape[0] < several.shape[0] and plain.shape[1] == one.shape[1]
    assert (one[-plain.shape[0] :] == plain).all() and (one[: -plain.shape[0]] < 1).any()


def test_the_table_and_picture_of_a_run_survive_every_name(tmp_path, capsys):
    """The end of a run and of a sweep is shown whatever method, model and task are called."""
    records = []
    for number, name in enumerate(HOSTILE):
        metric = Metric(value=0.5, num_samples=4, low=0.1, high=0.9, primary=True)
        ledger = {"resident_bytes": 5.0, "fp16_bytes": 10.0, "resident_ratio": 0.5, "payload_bytes": 5.0}
        made = RunRecord(task=HOSTILE[0], model=HOSTILE[2], method=name, hash=f"{number:x}" * 64, status="failed")
        made.message, made.metrics, made.ledger, made.backend = name, {"exact": metric}, ledger, "torch"
        records.append(made)
    table.show(records, [tmp_path])
    assert is_plain(capsys.readouterr().out)
    assert figure.draw(records, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_csv_has_no_formula():
    """A text that a spreadsheet would compute has an apostrophe before it; numbers stay numbers, text stays text."""
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", " =1", "=\x1b[31m"]
    plain = ["-", "+", "a=b", "snapkv budget=0.25", "-0.5", "", "a,b", 'a"b']
    numbers = [1, -2, 0.1, -1e-12, None]
    rows = list(csv.reader(io.StringIO(csv_bytes(["a"], [[*formulas, *plain, *numbers]]).decode())))
    assert rows[0] == ["a"]
    assert [cell[0] for cell in rows[1][: len(formulas)]] == ["'"] * len(formulas)
    assert all(cell.isprintable() for cell in rows[1])
    assert rows[1][len(formulas) :] == [*plain, "1", "-2", "0.1", "-1e-12", ""]


def test_nothing_goes_round_the_gates():
    """Consoles, tables and bars are made in one file, pictures become bytes in one, and CSV in one."""
    gates = {
        "Console": {"kvbench/models/fetched.py"},  # says names of its own files only
        "PlainConsole": {"kvbench/show/terminal.py"},
        "Table": set(),
        "PlainTable": {"kvbench/show/terminal.py"},
        "TextColumn": {"kvbench/models/fetched.py", "kvbench/show/progress.py"},
        "savefig": {"kvbench/show/picture.py"},
        "writer": {"kvbench/show/csv_file.py"},
        "DictWriter": set(),
        "from_markup": set(),
    }
    found = {name: set() for name in gates}
    for path in sorted((ROOT / "kvbench").rglob("*.py")):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in gates:
                    found[name].add(path.relative_to(ROOT).as_posix())
    assert found == gates
