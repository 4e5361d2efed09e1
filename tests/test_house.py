"""The house: folders are layers, imports point one way, and what an answer depends on is decided by folders."""

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain

import pytest
from places import ROOT

from kvbench.config import code, extensions
from kvbench.results import provenance
from kvbench.tasks.taskset import fingerprint

# The floors stand in docs/architecture.md, highest first. A module imports only from lower floors and its own folder.
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FLOORS = next(block for block in PAGE.split("```")[1::2] if block.split()[0] == "extensions")
LAYERS = [set(line.split()) for line in reversed(FLOORS.strip().splitlines())] + [{"__init__", "__main__"}]
FLOOR = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
# What some rooms know beside themselves; the others may import from every lower floor.
KNOWS = {
    "errors": set(),
    "stats": {"errors"},
    "kernels": set(),
    "rules": {"errors"},
    "policy": {"errors", "rules"},
    "config": {"errors", "rules", "__init__"},
    "methods": {"policy"},
    "cache": {"policy", "kernels", "errors", "rules"},
    "models": {"errors", "config", "kernels", "rules"},
    "results": {"stats", "config", "errors", "rules", "engine", "__init__"},
    "show": {"results", "stats", "config", "errors"},
    "sizing": {"results", "engine", "cache", "models", "methods", "policy", "kernels", "config", "errors", "rules"},
    "evidence": {"results", "stats", "show", "sizing", "config", "errors", "rules"},
}
# The libraries, beside Python's own, of the rooms that must stay light.
LIBRARIES = {
    "kernels": {"torch", "triton", "numpy"},
    "policy": {"torch"},
    "methods": {"torch"},
    "cache": {"torch"},
    "stats": {"numpy", "scipy"},
}
# A bridge may import what it bridges to, and nobody else may.
BRIDGES = {"kvbench.methods.kvpress": {"kvpress"}}
# How the names end in transformers that only engine/hf.py may use.
INTERNALS = ("Cache", "CacheLayerMixin", "AttentionInterface", "AttentionMaskInterface", "_FUNCTIONS")
INTERNALS += ("cache_utils", "masking_utils")


def modules():
    """Dotted name -> path of every module of the package."""
    found = {}
    for folder, package in (("kvbench", "kvbench"), ("kernels", "kvbench.kernels"), ("methods", "kvbench.methods")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "kvbench" and "tests" in path.parts[len(ROOT.parts) :]:
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def room(name):
    """The room of a module: the folder or file beneath kvbench/."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def names_imported(source, module):
    """Full dotted names that a source imports anywhere, TYPE_CHECKING and functions included, and what it takes of
    transformers by attribute."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively, which hides where a name comes from"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
            names.append(f"transformers.{node.attr}")
    return names


def inner(names, module, known):
    """Of imported names, the modules of the package."""
    found = set()
    for imported in names:
        while imported and imported not in known:
            imported = imported.rpartition(".")[0]
        if imported and imported != module:
            found.add(imported)
    return found


@cache
def graph():
    """Module -> the modules of the package that it imports."""
    known = modules()
    return {name: inner(names_imported(path.read_text(), name), name, known) for name, path in known.items()}


def against(importer, imported):
    """What is wrong with an import, or None."""
    mine, theirs = room(importer), room(imported)
    if theirs == "extensions":
        return against_extension(importer, imported)
    if mine == theirs:
        return None
    if mine in KNOWS:
        wrong = "" if theirs in KNOWS[mine] else f"{mine}/ knows only {sorted(KNOWS[mine])}"
    else:  # __init__ is imported for the version
        wrong = "" if theirs == "__init__" or FLOOR[theirs] < FLOOR[mine] else f"{theirs}/ is not below {mine}/"
    return f"{importer} imports {imported}: {wrong}" if wrong else None


def against_extension(importer, imported):
    """What is wrong with an import of an extension's module, or None: the core imports none, and an extension another
    one where its manifest says so."""
    mine, theirs = (name.split(".")[2:3] for name in (importer, imported))
    if room(importer) != "extensions":
        return f"{importer} imports {imported}: the core imports no extension"
    if mine == theirs or theirs[0] in extensions.discovered()[mine[0]].uses:
        return None
    return f"{importer} imports {imported}: {mine[0]}/extension.toml does not name {theirs[0]} in uses"


def foreign(module, names):
    """What is wrong with the libraries that a module imports."""
    found, light = [], LIBRARIES.get(room(module))
    allowed = {*(light or ()), *BRIDGES.get(module, ()), "kvbench", *sys.stdlib_module_names}
    for name in names:
        top = name.split(".")[0]
        if top in ("kernels", "methods", "conf"):
            found.append(f"{module} imports {name}: root folders are reached as kvbench.{name}")
        elif light is not None and top not in allowed:
            found.append(f"{module} imports {name}: {room(module)}/ knows only {sorted(light)}")
        internals = top == "transformers" and any(part.endswith(INTERNALS) for part in name.split("."))
        if internals and module not in ("kvbench.engine.hf", "kvbench.models.fused"):  # the latter runs layers itself
            found.append(f"{module} imports {name}: only engine/hf.py touches transformers' cache, attention and masks")
    return found


def circle(edges):
    """The modules of a circle; empty where there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_every_room_has_a_floor():
    """Only the named files lie directly in kvbench/, and every folder is in LAYERS."""
    directly = {path.stem for path in (ROOT / "kvbench").glob("*.py")}
    assert directly == {"__init__", "__main__", "errors", "lm"}
    assert {room(name) for name in modules()} == set(chain(*LAYERS))


def test_the_page_names_every_room():
    """docs/architecture.md has a line for every folder, and what it says that a room may import is what is checked."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    described = set(re.findall(r"`(?:kvbench/)?(\w+)(?:/|\.py)`", " ".join(line.split("|")[1] for line in rows)))
    assert described == set(chain(*LAYERS)) - {"__init__", "__main__", "errors"}
    for line in rows:
        (room_named,) = re.findall(r"^\| `(?:kvbench/)?(\w+)(?:/|\.py)`", line)
        for other in re.findall(r"`(\w+)`", line.split("|")[3]):
            assert FLOOR[other] < FLOOR[room_named], f"{room_named} may not import {other}"
            assert other in KNOWS.get(room_named, {other}), f"{room_named} does not know {other}"


def test_imports_point_down():
    """No import goes to a higher floor, or from a room to one that it does not know."""
    off = {one.package for name, one in extensions.discovered().items() if name not in extensions.enabled()}
    rows = [(name, other) for name, found in graph().items() for other in found]
    rows = [row for row in rows if not row[0].startswith(tuple(f"{package}." for package in off))]
    wrong = [line for name, other in rows if (line := against(name, other))]
    assert not wrong, "\n".join(sorted(wrong))


def test_a_file_is_read_in_one_go():
    """No source file has more than 395 lines, in Python or in C++, without empty ones and those of closing quotes,
    which a docstring's form decides."""
    paths = [*modules().values(), *(ROOT / "kernels").rglob("*.h"), *(ROOT / "kernels").rglob("*.cpp")]
    lines = {path.name: [line.strip() for line in path.read_text().splitlines()] for path in paths}
    assert not [name for name, every in lines.items() if sum(line not in ("", '"""') for line in every) > 395]


# Files of kvbench that may make a ValueError without a code: how many, and why no user sees it.
_ROW = "caught by read_rows, which names the file and the line"
UNCODED = {
    "kvbench.api.generate": (1, "Generation.text of several answers: a slip of the caller's code"),
    "kvbench.config.settings": (2, "caught by its own function, which names the file"),
    "kvbench.lm": (2, "an answer that failed inside lm-eval's loop; the message holds the cause"),
    "kvbench.models.gguf": (5, "caught by check_gguf, which names the file"),
    "kvbench.models.gguf_header": (7, "caught by check_gguf"),
    "kvbench.policy.tiers": (1, "caught by Tier.parse, which names the setting"),
    "kvbench.tasks.aime": (1, _ROW),
    "kvbench.tasks.code.cage.mechanism": (1, "caught by the grading of an answer, whose program it is"),
    "kvbench.tasks.code.cage.process": (3, "caught by run_process: reports of a child that is not trusted"),
    "kvbench.tasks.code.cage.wire": (1, "its text is the child's, which imports nothing of kvbench"),
    "kvbench.tasks.code.dataset": (4, _ROW),
    "kvbench.tasks.code.reference": (1, "caught by unusable, which sets the row aside"),
    "kvbench.tasks.custom.dataset": (15, _ROW),
    "kvbench.tasks.custom.metrics": (3, _ROW),
    "kvbench.tasks.fetch": (2, "caught by first_on_hub, which goes on to the next place"),
    "kvbench.tasks.gsm8k": (1, _ROW),
    "kvbench.tasks.longbench": (7, _ROW),
    "kvbench.tasks.longbench.metrics": (1, "a reference that check_row lets through is none such"),
    "kvbench.tasks.longbench_v2": (2, _ROW),
    "kvbench.tasks.mathematics": (1, _ROW),
    "kvbench.tasks.rows": (7, _ROW),
    "kvbench.tasks.sampling_stats": (2, "a slip of the calling code: k beyond the samples"),
    "kvbench.tasks.scbench": (2, _ROW),
    "kvbench.results.journal": (1, "a slip of the calling code: a journal finished with gaps"),
    "kvbench.results.lines": (7, "caught by journal_lines, which names the file"),
    "kvbench.results.typed": (3, "caught by what reads a record, which names the file"),
    "kvbench.sizing.project": (1, "caught by what sizes a stored run"),
    "kvbench.stats.binomial": (2, "a slip of the calling code; the setting is checked before"),
    "kvbench.stats.paired": (1, "a slip of the calling code: values that are not finite"),
    "kvbench.stats.ranks": (1, "a slip of the calling code: too few runs"),
    "kvbench.extensions.bench.continuous": (1, "caught by serve, which shows it in the row"),
    "kvbench.extensions.bench.serve": (1, "caught by its own function, which shows it in the row"),
    "kvbench.extensions.bench.times": (1, "caught by times, which names the setting"),
    "kvbench.extensions.papers.papers": (6, "entries that kvbench ships"),
    "kvbench.extensions.search.search": (1, "caught by optuna, which goes on with another setting"),
}


def uncoded(source):
    """How often a source makes a ValueError, or derives from it, instead of a kind of KvbenchError."""
    nodes = [*ast.walk(ast.parse(source))]
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "ValueError"]
    bare = [
        node for node in nodes if isinstance(node, ast.Raise) and node.exc and ast.unparse(node.exc) == "ValueError"
    ]
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    return len(made) + len(bare) + sum(ast.unparse(base) == "ValueError" for base in bases)


def test_errors_have_codes():
    """What a user can act on is a kind of KvbenchError; each further ValueError is counted above, with a reason."""
    found = {
        name: count
        for name, path in modules().items()
        if room(name) not in {"kernels", "errors"} and (count := uncoded(path.read_text()))  # kernels know no room
    }
    assert found == {name: count for name, (count, _) in UNCODED.items()}
    assert uncoded("raise ValueError\nx = ValueError('y')\nclass Z(ValueError): ...") == 3


def test_no_two_files_of_tests_have_one_name():
    """pytest takes files of one name for one module, and stops before the first test."""
    folders = ROOT / "tests", ROOT / "kvbench" / "extensions"
    names = [path.name for folder in folders for path in folder.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_import_circles():
    """No module imports itself by way of others, not even for types or inside a function."""
    assert not circle(graph())


def test_libraries_stay_where_they_belong():
    """Methods, policies, the cache and the kernels need few libraries; transformers' internals are in one file."""
    files = {name: path.read_text() for name, path in modules().items()}
    wrong = [line for name, text in files.items() for line in foreign(name, names_imported(text, name))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbench.methods.bad", "def f():\n    from kvbench.cache.store import CompressedStore"),
        ("kvbench.methods.bad", "from kvbench.cache import store"),
        ("kvbench.methods.bad", "import transformers"),
        ("kvbench.policy.bad", "from kvbench.engine.hf import attach"),
        ("kvbench.cache.bad", "if TYPE_CHECKING:\n    from kvbench.engine.engine import Engine"),
        ("kvbench.kernels.bad", "from kvbench.policy import Tier"),
        ("kvbench.kernels.bad", "import hydra.utils"),
        ("kvbench.evidence.bad", "from kvbench.runs.run import run_experiment"),
        ("kvbench.engine.bad", "from transformers import DynamicCache"),
        ("kvbench.engine.bad", "import transformers\nx = transformers.AttentionInterface"),
        ("kvbench.models.bad", "from transformers.masking_utils import create_causal_mask"),
        ("kvbench.cache.bad", "import kernels.pool"),
        ("kvbench.cli.bad", "from kvbench.extensions.export import export"),
        ("kvbench.__main__", "def f():\n    import kvbench.extensions.export.export"),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    """The checker sees an import against the direction: nested, for types only, or by attribute."""
    names = names_imported(source, module)
    known = {*modules(), module}
    wrong = [line for other in inner(names, module, known) if (line := against(module, other))]
    assert len(wrong + foreign(module, names)) == 1


def test_a_circle_is_seen():
    """The checker sees a circle of three, and none in a tree."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


# What an answer depends on.


FOLDERS = sorted({path.parent for name, path in modules().items()} | {ROOT / "kernels" / "cpu" / "csrc"})


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_the_hash_of_the_code_moves_for_the_folders_it_should(backend, monkeypatch):
    """A changed file of the policy, cache, engine, models, runs, the reference or the running backend makes stored runs
    another version; one of the command line, a picture, a downloader, a task or another backend does not."""
    own = {"torch": "kernels/reference", "cpu": "kernels/cpu", "triton": "kernels/gpu"}[backend]
    should = {"kvbench/policy", "kvbench/cache", "kvbench/engine", "kvbench/models", "kvbench/runs"}
    should |= {"kernels/reference", own} | ({"kernels/cpu/csrc"} if backend == "cpu" else set())
    real, moved = cache(code.meaning), set()
    monkeypatch.setattr(code, "meaning", real)
    before = provenance.harness_hash.__wrapped__(backend)
    for folder in FOLDERS:
        chosen = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".cpp"))[-1]
        monkeypatch.setattr(code, "meaning", lambda path, chosen=chosen: real(path) + b"x" * (path == chosen))
        if provenance.harness_hash.__wrapped__(backend) != before:
            moved.add(str(folder.relative_to(ROOT)))
    assert moved == should | {"kernels"}  # its last file is table.py, which every backend has under it


def test_what_the_reference_stands_on_counts():
    """Every file right under kernels/ that the pages or the reference import, at any remove, is part of the hash; only
    the checks of a call's arguments are not, which change no answer."""
    imports = graph()
    begin = ("kvbench.kernels.reference", "kvbench.kernels.backend")
    todo = {name for name in imports if name.startswith(begin)}
    seen = set()
    while todo:
        seen |= todo
        todo = {other for name in todo for other in imports.get(name, ())} - seen
    under = {ROOT / "kernels" / f"{name.rpartition('.')[2]}.py" for name in seen if name.count(".") == 2}
    counted = set(provenance.code_files("torch").values())
    assert {path.name for path in under if path.is_file() and path not in counted} <= {"checks.py"}
    assert ROOT / "kernels" / "codes.py" in under


def test_kernels_beside_the_pages_do_not_count():
    """Of the files directly in kernels/, those that benches and checks of a device use change no answer."""
    counted = {name for name in provenance.code_files("cpu") if name.count("/") == 1 and name.startswith("kernels/")}
    pages = ("codes", "format", "pool", "table", "memory", "backend", "operands")
    assert counted == {f"kernels/{name}.py" for name in pages}


def test_a_task_counts_its_folder_and_what_all_tasks_share(monkeypatch):
    """A task's fingerprint moves for its own files and the shared ones, not for the sandbox nor for another task."""
    folder, real = ROOT / "kvbench" / "tasks" / "code", cache(code.meaning)
    before, moved = fingerprint([], {}, folder), set()
    for name in ("code/grade", "code/cage/probe", "code/cage/jail", "prompts", "gsm8k/__init__"):
        changed = folder.parent / f"{name}.py"
        monkeypatch.setattr(code, "meaning", lambda path, changed=changed: real(path) + b"x" * (path == changed))
        if fingerprint([], {}, folder) != before:
            moved.add(name)
    assert moved == {"code/grade", "prompts"}
