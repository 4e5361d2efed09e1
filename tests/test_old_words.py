"""Names and prose in the source: one idea has one name, of the field's, and no private word stands for several."""

import ast
import functools
import re

from places import ROOT

# Each stood for several ideas, hundreds of times: grep for one answered nothing.
WORDS = frozenset(("asked", "beside", "found", "given", "own", "place", "told", "turned"))
FILES = WORDS | {"again", "ahead", "argued", "following", "joined", "needs", "signs", "together", "waiting"}
# What is stored in records, or is a setting that users give.
KEPT = {"asked_again": "a key of a record's session", "place": "a setting of `kvbench check`"}


def names(tree: ast.AST) -> set[str]:
    """Every name that a file binds or reads."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found.update(name.split("."))
    return found


def words(name: str) -> set[str]:
    """The words of a name in snake case or in capitals."""
    return set(re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()))


def old_names(tree: ast.AST) -> set[str]:
    """Names of a file that have an old word, Python's and libraries' errors apart; a test's name is a sentence."""
    return {
        name
        for name in names(tree)
        if words(name.removesuffix("NotFoundError")) & WORDS and name not in KEPT and not name.startswith("test_")
    }


def test_no_old_word_is_a_name():
    """Neither an identifier nor a file of the source, an extension's tests included, has one of the old words."""
    old = {}
    for room in ("kvbench", "methods", "kernels"):
        for path in (ROOT / room).rglob("*.py"):
            file = words(path.stem.removeprefix("test_")) & FILES
            if hits := file | old_names(ast.parse(path.read_text(encoding="utf-8"))):
                old[path.relative_to(ROOT).as_posix()] = sorted(hits)
    assert old == {}


def test_tests_name_nothing_beside_or_turned():
    """Two of the words are gone from the default tests, too, apart from names of tests, which are sentences."""
    old = {}
    for path in (ROOT / "tests").rglob("*.py"):
        names_there = old_names(ast.parse(path.read_text(encoding="utf-8")))
        if hits := {name for name in names_there if words(name) & {"beside", "turned"}}:
            old[path.relative_to(ROOT).as_posix()] = sorted(hits)
    assert old == {}


def test_old_words_are_seen_in_every_form():
    """A variable, a parameter, an attribute, a class and an import with one of the words are named."""
    source = "own_rows = 1\ndef f(given): ...\nx.is_found\nclass AskedBack: ...\nimport a.beside\nf(told=1)\nrows = 2\n"
    assert old_names(ast.parse(source)) == {"own_rows", "given", "is_found", "AskedBack", "beside", "told"}


# A first line names the thing or begins with a verb; these begin a clause, or say of what without saying what.
CLAUSES = re.compile(
    r"(What|How|Who|Whose|Whoever|Where|Whether|Which|When|While|Why|Is|Are|Of|As|It|They|That|These|Those"
    r"|(u?int|fp|bf)\d+)\b"
)
# Turns of phrase of a translation; `What` as a subject, of a sentence or of an entry of `Args`.
PHRASES = re.compile(
    r"\b([Ll]ikewise|but for|[Gg]iv(e|es|en|ing) way|[Ww]hoever|[Bb]eside)\b|(^|[.;:] |\"\"\"|# )What(?!')\b"
)


@functools.cache
def sources() -> list[tuple[str, str, list[str]]]:
    """Path, text and docstrings of every Python file of the source, tests of extensions apart."""
    paths = [path for room in ("kvbench", "methods", "kernels") for path in sorted((ROOT / room).rglob("*.py"))]
    here = [path for path in paths if "tests" not in path.relative_to(ROOT).parts]
    texts = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in here]
    return [(name, text, docstrings(text)) for name, text in texts]


def docstrings(source: str) -> list[str]:
    """Docstrings of a file, of a module, its classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def prose(source: str, docs: list[str]) -> list[str]:
    """Docstrings and comments of a file, each on one line."""
    return [" ".join(text.split()) for text in [*docs, *re.findall(r"(?:^|\s)(# .*)$", source, re.MULTILINE)]]


def test_no_docstring_begins_with_a_clause():
    """The first line of each docstring names the thing or begins with a verb."""
    lines = [(path, text.splitlines()[0]) for path, _, docs in sources() for text in docs]
    assert [f"{path}: {line}" for path, line in lines if CLAUSES.match(line)] == []


def test_no_phrase_of_a_translation():
    """Docstrings and comments have none of the phrases that stopped readers."""
    hits = [
        (path, match[0], text)
        for path, source, docs in sources()
        for text in prose(source, docs)
        if (match := PHRASES.search(text))
    ]
    assert hits == []


def test_phrases_are_seen_in_docstrings_and_comments():
    """A phrase over two lines of a docstring, an entry of Args and a comment are seen; a string of the code is not."""
    doc = '"""Get all but\n    for one.\n\n    Args:\n        a: What it is.\n    """'
    source = f'def f(a):\n    {doc}\n    # What b is\n    return "beside"\n'
    texts = prose(source, docstrings(source))
    assert [bool(PHRASES.search(text)) for text in texts] == [True, True]
    assert PHRASES.findall(texts[0])[0][0] == "but for"
