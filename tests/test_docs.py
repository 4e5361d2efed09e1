"""The documents: those that are generated, what the others name, and the methods of the papers' rows."""

import ast
import csv
import importlib.util
import re
import shlex
from functools import cache

import pytest
from hydra.utils import instantiate
from places import ROOT, WITHOUT

import kvbench
from kvbench.cli import method_table
from kvbench.cli.commands import compose_command
from kvbench.cli.sweeping import PLUGINS
from kvbench.cli.words import split_command
from kvbench.config import files as listing
from kvbench.config.compose import compose
from kvbench.config.methods import method_settings
from kvbench.config.settings import read_config

pytestmark = pytest.mark.skipif(bool(WITHOUT), reason="the documents are of the core and all extensions")
WITH_RUNS = ("suite", "paper", "offline")  # commands whose words go to their runs, but for their own settings
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "results/gpu/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "kvbench" / "extensions").glob("*/*.md"))),
]
# The examples of new methods: files that a reader would write.
EXAMPLE = {"methods/toy.py", "conf/method/toy.yaml", "methods/mylag.py", "conf/method/mylag.yaml"}
FOLDERS = "kvbench|kernels|methods|conf|tests|docs|notebooks|results/example|results/cpu"


def test_method_document_is_the_codes():
    """docs/methods.md is what `make docs` writes today."""
    assert (ROOT / "docs" / "methods.md").read_text() == method_table.render(), "run `make docs`"


@pytest.mark.parametrize("name", sorted(listing.options("method")))
def test_every_method_is_in_the_document(name):
    """A method has two full rows, what it keeps and where it comes from, and a section that explains every setting."""
    text = (ROOT / "docs" / "methods.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| [{name}](#{name}) |")]
    assert [len(cells) for cells in rows] == [7, 3]
    assert all(cell.strip("| ") for cells in rows for cell in cells)
    part = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
    settings = method_settings(name)
    for key in set(settings) - {"_target_"}:
        assert re.search(rf"^- `{key}=.*`: \S", part, re.MULTILINE), key
    assert "\nSource: " in part and "methods.md" not in part


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("full", "(N + T) 4 d; 256 / 512"),
        ("int4", "(N + T) (d + 8); 72 / 136"),
        ("snapkv", "(B + T) 4 d; 256 / 512"),
        ("h2o", "B (4 d + 8); 264 / 520"),
        ("kivi", "(N + T - R) 0.75 d + 4 R d, R = 128; 48 / 96"),
        ("minikv", "(B + T - R) d + 4 R d, R = 128; 64 / 128"),
        ("diffkv", "n0 (1.5 d + 16) + n1 (0.75 d + 16); 112 / 208, 64 / 112"),
    ],
)
def test_memory_formulas_are_the_papers(name, formula):
    """The formula of the document, worked out from the page format, is the one that the papers' bits give by hand."""
    assert method_table.memory(instantiate(method_settings(name))) == formula


def lines_of(name, code):
    """The lines of a document that lie inside code blocks, or outside of them, with their numbers."""
    inside = False
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif inside == code:
            yield number, line


def commands_in(name):
    """Every `python -m kvbench...` command of a document's code blocks, as words; `$NAME` stands for what was set."""
    variables = {}
    for _, line in lines_of(name, code=True):
        if set_here := re.match(r"([A-Z]+)=\"(.*)\"$", line):
            variables["$" + set_here[1]] = filled(set_here[2], variables)
        if found := re.search(r"python -m (kvbench.*)", line):
            yield shlex.split(filled(found[1], variables), comments=True)


def filled(text, variables):
    """A line with what a shell puts in place of variables."""
    for variable, value in variables.items():
        text = text.replace(variable, value)
    return text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_exists(name):
    """Every local link and every path of the repository that a document names exists."""
    text = (ROOT / name).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    # A path ends before a placeholder, which no file matches: results/<task>/...
    paths = set(re.findall(rf"(?<![\w./~-])((?:{FOLDERS})/[\w./*-]*[\w*/])(?![\w<])", text)) - EXAMPLE
    missing += [path for path in paths if not any(ROOT.glob(path))]
    assert not missing, f"{name} names {missing}"


GENERATED = {"docs/methods.md", "kvbench/extensions/papers/tables.md"}


@pytest.mark.parametrize("name", sorted({*DOCUMENTS} - GENERATED))
def test_documents_fit_a_terminal(name):
    """No line of prose is longer than 120 characters; tables and code blocks may be."""
    long = [number for number, line in lines_of(name, code=False) if len(line) > 120 and not line.startswith("|")]
    assert not long, f"{name}: lines {long}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_of_a_document_compose(name):
    """Every command in a document's code blocks is one, and its settings exist. Those that choose alike are composed at
    once, with the settings of all."""
    alike = {}
    for module, *words in commands_in(name):
        assert importlib.util.find_spec(module), module
        if module != "kvbench":
            continue
        if "--config-dir" in words or any(re.match(r"method=\S+\.py$", word) for word in words):  # not here
            continue
        command, words = split_command(words)
        if command in ("list", "help", "lm_eval", "engine"):  # what they take is no setting
            continue
        if command in WITH_RUNS:
            own = read_config(listing.path_of("command", command))
            words = [word for word in words if word.partition("=")[0] in own or "=" not in word]
        # Of a sweep's values, the last: `full` comes first, and lacks the settings that go to those that have them.
        settings = [
            re.sub(r"=.*,", "=", word) if not re.search(r"[{[]", word) else word
            for word in words
            if not word.startswith(("-", "hydra"))  # launchers belong to packages that need not be installed
        ]
        assert all(word.partition("=")[2] in PLUGINS for word in words if word.startswith("hydra/launcher="))
        settings = [word for word in settings if command != "run" or "=" in word]
        chosen = [word for word in settings if "." not in word.partition("=")[0]]
        single = {word.partition("=")[0]: word for word in settings if word not in chosen}
        alike.setdefault((command, *chosen), {}).update(single)
    for (command, *chosen), single in alike.items():
        composes(command, *chosen, *single.values())


@cache
def composes(command, *settings):
    """Composes a command once, which several documents have."""
    compose([*settings]) if command == "run" else compose_command(command, [*settings])


@pytest.mark.parametrize("group", ["method", "task"])
@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/tasks.md"])
def test_a_page_lists_every_choice(page, group):
    """The README has every method and every task by the name that is typed, and so have the tables of the pages on
    choosing and on tasks."""
    if (page, group) in (("docs/choosing.md", "task"), ("docs/tasks.md", "method")):
        return
    text = (ROOT / page).read_text()
    assert {name for name in listing.options(group) if not re.search(rf"[`\[]{name}[`\]]", text)} == set()


def test_the_first_page_is_one_page():
    """The README has at most 9 KB, and its results are those of the study."""
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 9 * 1024
    with (ROOT / "results" / "example" / "measures.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["group"].startswith("mean over")]
    found = {(row["run"].removesuffix(" tier=fp16"), row["metric"]): row for row in rows}

    def difference(run, metric, scale, form):
        value, low, high = (
            format(scale * float(found[run, metric][key]), form) for key in ("difference", "low", "high")
        )
        return f"{value} [{low}, {high}]"

    table = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    assert len(table) > 8
    for run, held, score, by_score, by_nll in table:
        row = found[run, "score"]
        assert (held, score) == (f"{100 * float(row['resident']):.1f}", f"{100 * float(row['value']):.1f}")
        assert row["n"] == "200"
        assert (by_score, by_nll) == (difference(run, "score", 100, "+.1f"), difference(run, "nll", 1, "+.2f"))


def test_the_site_has_every_page():
    """Every document is in the navigation of the site, once."""
    pages = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted({*DOCUMENTS, "CHANGELOG.md"})


def python_in(name):
    """The code of a document's Python blocks that use kvbench, in their order."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
    return [block for block in blocks if "kb." in block]


@pytest.mark.long
def test_the_lines_of_python_in_the_readme_run(embedded_model, monkeypatch, capsys):
    """They print an answer, that the cache holds about a quarter of the full one, and what KIVI's is made of."""
    monkeypatch.chdir(ROOT)
    (lines,) = python_in("README.md")
    exec(compile(lines, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    held, full = map(int, re.search(r"(\d+) bytes held; (\d+) in", printed).groups())
    assert 0.25 < held / full < 0.3
    items = ast.literal_eval(printed.splitlines()[-1])
    assert 0 < items["quant_meta_bytes"] < items["resident_bytes"] < 0.6 * items["fp16_bytes"]


@pytest.mark.exhaustive
def test_the_lines_of_the_page_on_python_run(embedded_model, monkeypatch, tmp_path, capsys):
    """The blocks of docs/python.md run one after the other, from a folder that is no clone, and leave nothing there."""
    monkeypatch.chdir(tmp_path)
    names, printed = {}, []
    for block in python_in("docs/python.md"):
        exec(compile(block, "docs/python.md", "exec"), names)
        printed.append(capsys.readouterr().out)
    assert len(printed) == 7 and all(printed) and not list(tmp_path.iterdir())
    assert "Paris" in printed[0] and "And the sea?" in printed[3] and "vs full" in printed[4]
    assert names["result"].record.status == "complete" and len(names["several"]) == 4
    assert len(names["runs"]) == 5 and len(names["answers"]) == 5
    kvbench.release()
