"""Tables of every command at 80, 100 and 140 columns of a terminal: no word is cut, and no line runs over."""

import re
import shutil

import pytest

from kvbench.cli import main as cli
from kvbench.show.terminal import PlainConsole, plain_table

OF_RUNS = {"compare": ["compare"], "status": ["status"], "report table": ["report", "view=table"]}
OF_NOTHING = {
    "list": ["list"],
    "list method": ["list", "method"],
    "list model": ["list", "model"],
    "help": ["help"],
    "help columns": ["help", "columns"],
    "help kivi": ["help", "kivi"],
    "help longbench": ["help", "longbench"],
    "bytes": ["bytes"],
    "bytes many": ["bytes", "method=kivi,int4", "model=llama3-8b", "length=8192", "batch=16"],
    "engine": ["engine", "vllm serve m --kv-cache-dtype fp8"],
    "paper": ["paper"],
    "paper minikv": ["paper", "minikv"],
}
WIDTHS = (80, 100, 140)

# Lines that are copied whole, and paths: a terminal may break these.
COPIED = re.compile(
    r"^\s*(kvbench|next:|llama\.cpp:|vLLM:|SGLang:|/|\w+: kvbench )|kvbench [a-z_]+=|\.(png|csv|html|json|log)$"
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the results of one sweep lie that every case takes a copy of."""
    return tmp_path_factory.mktemp("kept") / "results"


@pytest.fixture
def stored(fakes, kept, capsys):
    """Results of two methods and the full cache."""
    if not kept.exists():
        words = ["experiment=paper", "limit=4", "batch_size=2", "method=kivi,snapkv"]
        assert cli.main(words) == 0
        shutil.copytree(fakes / "results", kept)
    else:
        shutil.copytree(kept, fakes / "results")
    capsys.readouterr()
    return fakes / "results"


def show(words, width, monkeypatch, capsys):
    """What a command prints on a terminal of some width, without its colours."""
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(words) == 0
    shown = re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().out)
    assert shown.strip()
    return shown


def check(shown, width):
    """Nothing is wider than the terminal but what is copied, and nothing is cut."""
    assert [line for line in shown.splitlines() if len(line.rstrip()) > width and not COPIED.search(line)] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


@pytest.mark.parametrize("words", OF_RUNS.values(), ids=OF_RUNS)
def test_a_terminal_shows_every_word_of_stored_runs(words, stored, monkeypatch, capsys):
    """Tables of stored runs at three widths."""
    for width in WIDTHS:
        check(show(words, width, monkeypatch, capsys), width)


@pytest.mark.parametrize("words", OF_NOTHING.values(), ids=OF_NOTHING)
def test_a_terminal_shows_every_word(words, tmp_path, monkeypatch, capsys):
    """Tables of commands that read no run at three widths."""
    monkeypatch.chdir(tmp_path)
    for width in WIDTHS:
        check(show(words, width, monkeypatch, capsys), width)


def test_a_table_that_does_not_fit_is_split(capsys):
    """Every cell of a wide table stands under its heading, in parts that begin with the first column."""
    table = plain_table("title")
    for name in ("name", *(f"column-{index}" for index in range(9))):
        table.add_column(name, no_wrap=True)
    for row in ("one", "two"):
        table.add_row(row, *(f"{row}-{index}" for index in range(9)))
    console = PlainConsole(width=40)
    with console.capture() as taken:
        console.print(table)
    parts = taken.get().split("\n\n")
    assert len(parts) > 1 and taken.get().count("title") == 1
    for part in parts:
        *_, head, one, two = part.rstrip().splitlines()
        assert max(map(len, (head, one, two))) <= 40
        assert [cell.replace("name", "one").replace("column", "one") for cell in head.split()] == one.split()
        assert two.split() == [cell.replace("one", "two") for cell in one.split()]
