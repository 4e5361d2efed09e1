"""Names in the source: one idea has one name, of the field's, and no private word stands for several."""

import ast
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


def test_old_words_are_seen_in_every_form():
    """A variable, a parameter, an attribute, a class and an import with one of the words are named."""
    source = "own_rows = 1\ndef f(given): ...\nx.is_found\nclass AskedBack: ...\nimport a.beside\nf(told=1)\nrows = 2\n"
    assert old_names(ast.parse(source)) == {"own_rows", "given", "is_found", "AskedBack", "beside", "told"}


# A first line names the thing or begins with a verb; these begin a clause.
CLAUSES = re.compile(r"(What|How|Who|Whose|Whoever|Where|Whether|Which|When|Why)\b")


def test_no_docstring_begins_with_a_clause():
    """The first line of each docstring names the thing or begins with a verb."""
    clauses = []
    for path in (ROOT / "kvbench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if CLAUSES.match(text):
                    clauses.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert clauses == []
