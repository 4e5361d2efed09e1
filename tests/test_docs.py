"""The documents: those that are generated, their lengths, links and commands, and the tables that stand in them."""

import ast
import csv
import importlib.util
import re
import shlex
from functools import cache
from importlib import import_module

import pytest
import size
from hydra.utils import instantiate
from places import ROOT, WITHOUT

import kvbench
from kvbench.cli import error_table, method_table, settings_table
from kvbench.cli.commands import compose_command
from kvbench.cli.sweeping import PLUGINS
from kvbench.cli.words import split_command
from kvbench.config import files as listing
from kvbench.config.compose import compose
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import CODES

pytestmark = pytest.mark.skipif(bool(WITHOUT), reason="the documents are of the core and all extensions")
WITH_RUNS = ("suite", "paper", "offline")  # commands whose words go to their runs, but for their own settings
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "results/gpu/README.md",
    "results/history/performance.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "kvbench" / "extensions").glob("*/*.md"))),
]
METHODS, SETTINGS = ROOT / "docs" / "reference" / "methods.md", ROOT / "docs" / "reference" / "settings.md"
# The examples of new methods: files that a reader would write.
EXAMPLE = {"methods/toy.py", "conf/method/toy.yaml", "methods/mylag.py", "conf/method/mylag.yaml"}
FOLDERS = "kvbench|kernels|methods|conf|tests|docs|notebooks|results/example|results/cpu"


def test_method_document_is_the_codes():
    """It is what `make docs` writes today."""
    assert METHODS.read_text() == method_table.render(), "run `make docs`"


def test_the_page_of_settings_is_the_codes():
    """It is what `make docs` writes today, and has every setting of every task and protocol."""
    text = SETTINGS.read_text()
    assert text == settings_table.render(), "run `make docs`"
    for group in ("task", "protocol"):
        for name in listing.options(group):
            part = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
            listed = as_dict(read_config(listing.path_of(group, name)))
            for key in set(listed.get(group, listed)) - {"_target_", "defaults"}:
                assert re.search(rf"^- `{key}=", part, re.MULTILINE), (name, key)


def test_the_page_of_errors_is_the_codes():
    """It is what `make docs` writes today, and has every code that an imported class registers, once, and no other."""
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert text == error_table.render(), "run `make docs`"
    listed = re.findall(r"^\| `([\w-]+)` \| \S", text, re.MULTILINE)
    for module in sorted({one.module for one in error_table.coded()}):
        import_module(module)
    assert sorted(code for code, kind in CODES.items() if kind.__module__.startswith("kvbench.")) == listed


@pytest.mark.parametrize("name", sorted(listing.options("method")))
def test_every_method_is_in_the_document(name):
    """A method has a full row, and an entry with its memory, source and differences, which explains every setting or
    names the part that does."""
    text = METHODS.read_text()
    ((_, *cells),) = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| [{name}](#{name}) |")]
    assert len(cells) == 4 and all(cell.strip("| ") for cell in cells)
    parts = {
        re.sub(r"\s", "-", title.lower()): part
        for title, part in re.findall(r"^##+ (.+)\n((?:(?!##).*\n)*)", text, re.MULTILINE)
    }
    part = parts[name]
    settings = method_settings(name)
    for key in set(settings) - {"_target_"}:
        if re.search(rf"^- `{key}=[^`]*`: (?!see \[)\S", part, re.MULTILINE):
            continue
        (link,) = re.findall(rf"^- .*`{key}=[^`]*`.*: see \[[^]]*\]\(#([\w-]+)\)$", part, re.MULTILINE)
        assert re.search(rf"^- `{key}(=[^`]*)?`: (?!see \[)\S", parts[link], re.MULTILINE), (key, link)
    for word in ("Precision", "Acts", "Memory"):
        assert re.search(rf"^- {word}: \S", part, re.MULTILINE)
    assert re.search(r"^Source: \S", part, re.MULTILINE) and re.search(r"^Differs: \S", part, re.MULTILINE)
    assert "methods.md" not in part


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
    """Every `kvbench ...` and `python -m kvbench...` of a document's code blocks, as words; `$NAME` is what was set."""
    variables = {}
    for _, line in lines_of(name, code=True):
        if set_here := re.match(r"([A-Z]+)=\"(.*)\"$", line):
            variables["$" + set_here[1]] = filled(set_here[2], variables)
        if found := re.search(r"python -m (kvbench.*)|^(kvbench(?: .*)?)$", line):
            yield shlex.split(filled(found[1] or found[2], variables), comments=True)


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


def test_files_of_the_architecture_exist():
    """Its paths begin at `kvbench/` or at the root."""
    paths = re.findall(r"`((?:\w+/)+\w+\.py)", (ROOT / "docs" / "architecture.md").read_text())
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists() and not (ROOT / "kvbench" / path).exists()]


GENERATED = {*(f"docs/reference/{name}.md" for name in ("methods", "settings")), "kvbench/extensions/papers/tables.md"}


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
@pytest.mark.parametrize("page", ["README.md", "docs/choose.md", "docs/reference/tasks.md"])
def test_a_page_lists_every_choice(page, group):
    """The README has every method and every task by the name that is typed, and so have the tables of the pages on
    choosing and on tasks."""
    if (page, group) in (("docs/choose.md", "task"), ("docs/reference/tasks.md", "method")):
        return
    text = (ROOT / page).read_text()
    assert {name for name in listing.options(group) if not re.search(rf"[`\[]{name}[`\]]", text)} == set()


def rows_of(page, table):
    """The cells of a table of a document, without its head."""
    lines = (ROOT / page).read_text().split(f"<!-- table: {table} -->\n")[1].split("<!-- end -->")[0].splitlines()
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_first_page_is_one_page():
    """The README has at most 9 KB, and its results are those of the study of a real model."""
    assert len((ROOT / "README.md").read_bytes()) <= 9 * 1024
    with (ROOT / "results" / "example" / "mission.csv").open(newline="") as file:
        found = {(row["run"], row["task"]): row for row in csv.DictReader(file) if row["metric"] == "score"}
    table = rows_of("README.md", "mission in brief")
    assert len(table) == 8
    names = {"kivi bits=2": "kivi bits=2", "minikv": "minikv bits=2", "diffkv": "diffkv"}
    names |= {name: f"{name} budget=50%seen" for name in ("h2o", "snapkv", "random")}
    for name, held, on_humaneval, *_ in table[2:]:
        row = found[names[name], "humaneval_plus"]
        value, low, high = (f"{100 * float(row[key]):+.1f}" for key in ("difference", "low", "high"))
        early = "" if float(row["n"]) == 120 else f" (n={float(row['n']):.0f})"
        low_bytes, high_bytes = (int(bound) for bound in (held.split("-") * 2)[:2])  # over all benchmarks
        assert low_bytes <= round(100 * float(row["bytes"])) <= high_bytes
        assert on_humaneval == f"{value} [{low}, {high}]{early}"


def test_results_are_those_of_the_study():
    """Bytes, scores and likelihoods of the embedded model, as the file of measures has them."""
    with (ROOT / "results" / "example" / "measures.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["group"].startswith("mean over")]
    found = {(row["run"].removesuffix(" tier=fp16"), row["metric"]): row for row in rows}
    table = rows_of("docs/reference/results.md", "others")
    assert len(table) > 8
    for run, held, nll, by_nll, _, _, score in table:
        row, likelihood = found[run, "score"], found[run, "nll"]
        assert (held, score) == (f"{100 * float(row['resident']):.1f}", f"{100 * float(row['value']):.1f}")
        assert row["n"] == "200" and nll == f"{float(likelihood['value']):.2f}"
        if run != "full":
            value, low, high = (f"{float(likelihood[key]):+.2f}" for key in ("difference", "low", "high"))
            assert by_nll == f"{value} [{low}, {high}]"


def test_speeds_are_those_that_a_bench_printed():
    """Every figure with quartiles on the page on speed, and what it quotes of serving, is in the text of its folder."""
    checked = 0
    for line in (ROOT / "docs" / "performance.md").read_text().splitlines():
        folders = re.findall(r"\]\(\.\./results/cpu/([\w-]+)\)", line)
        figures = re.findall(r"[\d.]+ \[[\d.]+, [\d.]+\]", line)
        for figure in figures:
            texts = [(ROOT / "results" / "cpu" / name / "bench.txt").read_text() for name in folders]
            assert any(figure in text for text in texts), (folders, figure)
            checked += 1
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    for name in ("serve-96", "serve-peers"):
        said = re.findall(r"[\d.]+ \([\d.]+ x\)", (ROOT / "results" / "cpu" / name / "bench.txt").read_text())
        assert said and all(one in page or one.partition(" ")[0] in page for one in said), said
    assert checked > 20


def test_the_site_has_every_page():
    """Every document is in the navigation of the site, once."""
    pages = re.findall(r"^ +- (?:[\w ,]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted({*DOCUMENTS, "CHANGELOG.md"})


def anchors_of(path):
    """The anchors of a document's headings."""
    found = set()
    for _, line in lines_of(path.relative_to(ROOT), code=False):
        if heading := re.match(r"#+ (.*)", line):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_anchors_of_links_exist(name):
    """A link to a part of a page names a heading of it."""
    path = (ROOT / name).resolve()
    links = re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", "\n".join(line for _, line in lines_of(name, code=False)))
    local = [(page, anchor) for page, anchor in links if "://" not in page]
    missing = [
        (page, anchor)
        for page, anchor in local
        if anchor not in anchors_of((path.parent / page).resolve() if page else path)
    ]
    assert not missing, f"{name}: {missing}"


def test_old_pages_lead_to_new_ones(tmp_path):
    """Each page that was moved has a page on the site that goes to an existing one, and is there no longer."""
    source = (ROOT / "docs" / "redirects.py").read_text()
    hook = {}
    exec(compile(source, "redirects.py", "exec"), hook)
    moved = hook["MOVED"]
    old = "beyond choosing evidence extending journeys large limits measures methods models official reference".split()
    assert {f"docs/{name}.md" for name in (*old, "statistics", "tasks", "usage")} <= moved.keys()
    for page, target in moved.items():
        assert not (ROOT / page).exists() and (ROOT / target).exists(), page
    hook["on_post_build"]({"site_dir": str(tmp_path)})
    for page, target in moved.items():
        written = tmp_path / page.replace(".md", ".html")
        (link,) = set(re.findall(r'(?:url=|href=")([^"]+)"', written.read_text()))
        assert (written.parent / link).resolve() == (tmp_path / target.replace(".md", ".html")).resolve()


# Words of pages that are read, at most; `tests/size.py` prints them.
MOST_WORDS = {
    "README.md": 900,
    **{f"docs/{name}.md": 1_500 for name in ("run", "choose", "read", "python", "extend")},
    "docs/findings.md": 1_200,
    "docs/architecture.md": 2_000,
}


def test_documents_are_as_short_as_they_promise():
    """README and each page for users, findings, architecture, the changelog of a version that is not released (3 KB),
    and all that is meant to be read: 20,000 words."""
    too_long = {name: count for name, most in MOST_WORDS.items() if (count := size.words_of(name)) > most}
    assert not too_long
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 3 * 1024
    by_kind = size.documents()
    assert set(by_kind) == {*size.KINDS} and all(by_kind.values())
    listed = [name for names in by_kind.values() for name in names]
    assert sorted(listed) == sorted({*DOCUMENTS, "CHANGELOG.md"})
    assert set(MOST_WORDS) <= {*by_kind["read"]} and {*by_kind["generated"]} >= GENERATED
    assert sum(by_kind["read"].values()) <= size.MOST_READ == 20_000


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
