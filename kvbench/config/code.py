"""Source code that an answer depends on: files, the parts of them that are hashed, and imported libraries."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path

from kvbench.errors import KvbenchError

SOURCE_SUFFIXES = {".py", ".yaml", ".cpp", ".c", ".h", ".cu", ".jinja", ".json", ".txt"}
# Libraries that compute no answer, prompt or score: they compose the settings, fetch, lock, read, put weights on their
# devices, and show. Their outputs (resolved settings, weights, prompts, references) have hashes of their own. Every
# library not named here counts.
HANDS_ON = {"accelerate", "datasets", "filelock", "huggingface_hub", "hydra", "omegaconf", "pyarrow", "rich"}
# Libraries whose requirements are a platform's and not a computation's: kvbench imports the parts that it uses.
FRAMEWORKS = {"lm-eval", "tokenizers", "torch", "transformers"}
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})


def sources(folder: Path) -> list[Path]:
    """The source files of a folder and of those beneath it, sorted."""
    return sorted(
        path for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts
    )


def meaning(path: Path) -> bytes:
    """Hashed content of a source file.

    Of Python the syntax tree without docstrings, so that comments, formatting and documentation do not count; of other
    files every byte.
    """
    content = path.read_bytes()
    return _meaning_of_python(content) if path.suffix == ".py" else content


# A process that makes many runs reads the same files for each; what they say follows from their bytes alone.
@lru_cache(maxsize=1024)
def _meaning_of_python(content: bytes) -> bytes:
    return ast.dump(without_docstrings(ast.parse(content))).encode()


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove the docstrings of a module, in place."""
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module and its statements at any depth, a tenth of its nodes; the caller may change their bodies."""
    todo: list[ast.AST] = [tree]
    while todo:
        yield (node := todo.pop())
        todo += _within(node)


def _within(node: ast.AST) -> list[ast.AST]:
    """Children of a statement: statements, handlers and cases."""
    return [each for part in ("body", "handlers", "orelse", "finalbody", "cases") for each in getattr(node, part, ())]


def hash_files(files: dict[str, Path]) -> str:
    """Hash files by counted name and content, wherever they are installed; 64 hexadecimal digits.

    Python counts without comments, formatting and docstrings.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = meaning(path)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def libraries(files: Iterable[Path]) -> dict[str, str]:
    """The libraries that source files import, those that these require in turn, and the versions that are installed.

    math-verify grades with sympy, and reads formulas with the runtime of antlr: neither is imported here, and another
    version of either can turn a right answer into a wrong one. Frameworks are not looked into, nor what a library
    requires for an extra.
    """
    installed = versions(imports(files))
    todo = [name for name in installed if name not in FRAMEWORKS]
    while todo:
        for line in _required(todo.pop()):
            wanted, _, condition = line.partition(";")
            name = re.match(r"[\w.-]+", wanted)
            if name is None or "extra" in condition or name[0].replace("-", "_") in HANDS_ON:
                continue
            distribution, version = _installed(name[0])
            if distribution not in installed and version:  # one for another system is not installed here
                installed[distribution] = version
                todo += [distribution] if distribution not in FRAMEWORKS else []
    return dict(sorted(installed.items()))


def imports(files: Iterable[Path]) -> frozenset[str]:
    """The libraries that Python files import themselves: top-level names, without Python's own and `HANDS_ON`."""
    names = {name.partition(".")[0] for path in files if path.suffix == ".py" for name in names_imported(path)}
    return frozenset(names - {*sys.stdlib_module_names, *HANDS_ON, "kvbench"})


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of libraries named as they are imported (`math_verify`), by distribution (`math-verify`), sorted.

    The name itself and an empty version where there is no distribution.

    A version has its build tag (torch 2.13.0+cpu): two builds of torch are two sets of compiled kernels, whose sums may
    differ in the last bit, and a method that rounds can turn that into another token.
    """
    return dict(sorted(_installed(name) for name in names))


def reached(files: Iterable[Path], package: str, folder: Path) -> set[Path]:
    """The modules of a package (`kvbench.tasks`), which lies in a folder, that Python files import at any remove."""
    todo, seen = [path for path in files if path.suffix == ".py"], set[Path]()
    while todo:
        for name in names_imported(todo.pop()):
            inside = name.removeprefix(f"{package}.").split(".") if name.startswith(f"{package}.") else []
            for path in (folder.joinpath(*inside).with_suffix(".py"), folder.joinpath(*inside, "__init__.py")):
                if inside and path.is_file() and path not in seen:
                    seen.add(path)
                    todo.append(path)
    return seen


def users_files(modules: Iterable[str], *, room: str, included: str = "") -> dict[str, Path]:
    """Source files of modules and of their imports, at any remove, by module.

    Those of the user's, wherever they are, and those of one room of kvbench. Methods, tasks and metrics count by this
    rule.

    Not among them are Python's own modules, installed libraries, whose versions count instead, and the rest of kvbench.
    An import of a computed name is not seen.

    Args:
        modules: Modules to begin with.
        room: A package of kvbench that counts.
        included: A module that counts in any case, with the installed package that it is part of.
    """
    todo, seen = set(modules), set[str]()
    files: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        if module in seen or not _is_users(module, room, included):
            continue
        seen.add(module)
        parent = module.rpartition(".")[0]  # what is in a package's own file has run before its modules
        todo |= {parent} - {""}
        origin = _source(module)
        if origin is not None:
            drop_stale_bytecode([origin])
            files[module] = origin
            todo |= set(names_imported(origin, module if origin.name == "__init__.py" else parent))
    return dict(sorted(files.items()))


def _is_users(module: str, room: str, included: str) -> bool:
    top = module.partition(".")[0]
    if top == "kvbench":
        return module.startswith(f"{room}.") or module == included
    return top == included.partition(".")[0] or not (top in sys.stdlib_module_names or _is_installed(top))


def is_library(path: Path) -> bool:
    """True for a file of an installed library, of this environment or of another one that it was laid over."""
    return not LIBRARY_FOLDERS.isdisjoint(path.resolve().parts)


def _is_installed(top: str) -> bool:
    """True for an installed library, and for nothing."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return True
    places = [] if spec is None else [spec.origin] if spec.has_location else spec.submodule_search_locations or []
    return all(is_library(Path(path or "")) for path in places)


def _source(module: str) -> Path | None:
    """The Python file of a module; None for one that does not exist or has none, such as a folder without a file."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None and module not in sys.modules:
        try:
            spec = importlib.util.find_spec(module)
        except Exception:  # a class looks like a module of its module; and packages above are run, which may fail
            return None
        origin = spec.origin if spec else None
    return Path(origin).resolve() if origin and origin.endswith(".py") else None


class ChangedSource(KvbenchError, RuntimeError, code="source-changed"):
    """A file is no longer what Python runs."""


_first_read: dict[str, str] = {}  # file -> hash of what was in it when it counted first in this process


def check_unchanged(files: Mapping[str, Path]) -> None:
    """Refuse files that are no longer what Python runs: a result would be stored under the wrong hash.

    A command ends soon; a notebook stays open while files are edited.

    Raises:
        ChangedSource: Names the file.
    """
    for name, path in files.items():
        digest = hash_files({name: path})
        if _first_read.setdefault(str(path), digest) != digest:
            raise ChangedSource(
                f"{path} was changed after this Python had imported it, so the old code would run under the new "
                "code's name; restart Python (or the notebook's kernel) and repeat the call"
            )


def drop_stale_bytecode(files: Iterable[Path]) -> None:
    """Remove the cached bytecode of Python files that were written after it.

    Python compares whole seconds and the size: after two writes of a second of one size it would run the code of the
    first under the hash of the second.
    """
    for path in files:
        bytecode = Path(importlib.util.cache_from_source(str(path)))
        try:
            if bytecode.stat().st_mtime_ns <= path.stat().st_mtime_ns:
                bytecode.unlink()
        except OSError:  # there is none, or its folder cannot be written: Python's rule holds then
            continue


def interpreter() -> dict[str, str]:
    """Python's minor version, for what is run or graded by it: syntax and libraries differ between minor versions."""
    return {"python": "{}.{}".format(*sys.version_info[:2])}


def names_imported(path: Path, package: str = "") -> tuple[str, ...]:
    """Full names that a Python file imports anywhere, except for type checkers alone.

    Some are names in modules. Relative imports start from `package`; without one they are left out.
    """
    return _names_in(path.read_bytes(), package)


@lru_cache(maxsize=1024)
def _names_in(content: bytes, package: str) -> tuple[str, ...]:
    todo: list[ast.AST] = [ast.parse(content)]
    names: list[str] = []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # above the top: it cannot be imported either
                    continue
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
        else:
            todo += _within(node)
    return tuple(names)


@cache  # each run of a sweep looks up forty, and libraries of a process do not change
def _installed(name: str) -> tuple[str, str]:
    """The distribution that a top-level name comes from, spelt as package indexes do, and its version."""
    try:  # most are called like what is imported from them; the list of all takes a quarter of a second and more
        metadata = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        if (owner := _owner(name)) is None:
            return name, ""
        metadata = importlib.metadata.distribution(owner)
    return re.sub(r"[-_.]+", "-", metadata.name).lower(), metadata.version


@cache
def _required(distribution: str) -> tuple[str, ...]:
    """Requirement lines of a distribution; none where it is not installed."""
    try:
        return tuple(importlib.metadata.requires(distribution) or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def _owner(name: str) -> str | None:
    """The distribution that a top-level name comes from, of several the first."""
    distributions = importlib.metadata.distributions()
    said = [each.name for each in distributions if name in (each.read_text("top_level.txt") or "").split()]
    return min(said or _owners().get(name, []), default=None)  # not all of them say so in a file


@cache
def _owners() -> Mapping[str, list[str]]:
    """Top-level name -> distributions, of everything that is installed, by the lists of their files."""
    return importlib.metadata.packages_distributions()
