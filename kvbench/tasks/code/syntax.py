"""Takes Python text apart: whether it parses, which names its statements bind, and which they need.

The text is a stranger's. It is parsed here and never run.
"""

import ast
import builtins
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FILE = "<answer>"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Code that asks for names by text may need any of them.
_DYNAMIC = frozenset(("eval", "exec", "globals", "locals", "vars", "__import__"))
_BUILTINS = frozenset(dir(builtins))


def parse(text: str) -> tuple[ast.Module | None, int]:
    """Parse a text: gives its tree and 0, or None and the line, from 1, at which it ceases to be a program."""
    # What a compiler warns of in an answer is nobody's business here, and must not become an error.
    warnings.filterwarnings("ignore", module=re.escape(_FILE))
    try:
        # A null byte or half a surrogate pair is as wrong as another control character, and not an error of its own.
        tree = ast.parse(text.replace("\0", "\1").encode("utf-8", "replace").decode(), _FILE)
    except SyntaxError as error:
        return None, error.lineno or 1
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return None, 1
    lines = [node.lineno for node in _in_module_scope(tree) if isinstance(node, ast.Return)]
    return (None, min(lines)) if lines else (tree, 0)


def may_begin_code(line: str) -> bool:
    """Tell whether a program could begin with this line; most lines of prose could not."""
    warnings.filterwarnings("ignore", module=re.escape(_FILE))
    try:
        ast.parse(line.replace("\0", "\1").encode("utf-8", "replace").decode(), _FILE)
    except IndentationError:
        return True  # a header whose block comes below
    except SyntaxError as error:
        unfinished = ("was never closed", "unterminated triple-quoted", "unexpected EOF")
        return line.startswith("@") or any(part in (error.msg or "") for part in unfinished)
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _in_module_scope(*roots: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without the insides of functions and classes."""
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack += ast.iter_child_nodes(node)


def bound_names(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a meaning to."""
    names = set()
    for node in _in_module_scope(statement):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def defines(tree: ast.Module, name: str) -> bool:
    """Tell whether a program gives a name more than a header with a docstring, or with words as prose."""
    binding = [statement for statement in tree.body if name in bound_names(statement)]
    if not binding:
        return False
    last = binding[-1]
    if not isinstance(last, _FUNCTIONS):
        return True
    return not all(
        isinstance(part, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(part, ast.Expr) and not isinstance(part.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom))
        for part in last.body
    )


def _root(node: ast.AST) -> str | None:
    """The name at the beginning of `name.a[0]().b`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


@dataclass(frozen=True)
class _Use:
    """The use that a statement makes of names."""

    bound: set[str]  # it gives them a meaning
    changed: set[str]  # it changes the values they stand for
    settings: bool  # it changes a setting of a module, such as the depth of recursion
    loaded: set[str]  # it reads them


def _use(statement: ast.stmt, imported: set[str]) -> _Use:
    changed: set[str | None] = set()
    settings = False
    for node in _in_module_scope(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed.add(_root(node))
            settings |= _root(node) in imported
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute):
                if _root(function) not in imported:
                    changed.add(_root(function))
                else:
                    settings |= function.attr.startswith("set") or function.attr == "seed"
    loaded = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return _Use(bound_names(statement), {name for name in changed if name}, settings, loaded)


@dataclass(frozen=True)
class Needs:
    """The needs of a program for one of its names.

    Args:
        kept: The statements that the name needs, as numbers in the module's body.
        missing: Names that these read, that no statement binds and that are not built in; locals are among them.
    """

    kept: set[int]
    missing: set[str]


def needs(tree: ast.Module, name: str, always: int = 0) -> Needs:
    """Find the statements that a name needs; what only shows or tests it is left out.

    A statement is needed that binds a needed name, or changes what one stands for, or sets something in a module
    (`sys.setrecursionlimit`). One that only uses the name (a print, an assertion, `input()`) is not.

    Args:
        tree: The program.
        name: Name of the function.
        always: How many statements at the beginning are kept whatever they do.

    Returns:
        The statements, and what is missing.
    """
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {name for node in imports for name in bound_names(node)}
    uses = [_use(statement, imported) for statement in tree.body]
    by_name: dict[str, list[int]] = defaultdict(list)
    for number, use in enumerate(uses):
        for one in use.bound | use.changed:
            by_name[one].append(number)
    dynamic = any(use.loaded & _DYNAMIC for use in uses)
    first = [
        number
        for number, (statement, use) in enumerate(zip(tree.body, uses, strict=True))
        if number < always
        or use.settings
        or use.bound & {"*"}
        or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
        or (dynamic and use.bound and name not in use.loaded)
    ]
    kept: set[int] = set()
    reached, todo = {name}, [*first, *by_name[name]]
    while todo:
        number = todo.pop()
        if number in kept:
            continue
        kept.add(number)
        for one in uses[number].loaded - reached:
            reached.add(one)
            todo += by_name[one]
    bound = set().union(*(use.bound for use in uses))
    return Needs(kept, reached - bound - _BUILTINS)


def without(lines: Sequence[str], tree: ast.Module, kept: set[int]) -> str:
    """The text of a program without some of its statements.

    Args:
        lines: The program.
        tree: What was parsed of it.
        kept: The statements that stay, as numbers in the module's body.

    Returns:
        Python source. Imports from `__future__` come first, where Python wants them.
    """

    def span(statement: ast.stmt) -> range:
        above = [decorator.lineno for decorator in getattr(statement, "decorator_list", ())]
        return range(min([statement.lineno, *above]) - 1, statement.end_lineno or statement.lineno)

    future = [
        number
        for number, statement in enumerate(tree.body)
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    ]
    gone: set[int] = set()
    stay: set[int] = set()
    for number, statement in enumerate(tree.body):
        (stay if number in kept and number not in future else gone).update(span(statement))
    gone -= stay
    head = [ast.unparse(tree.body[number]) for number in future]
    return "\n".join([*head, *(line for number, line in enumerate(lines) if number not in gone)])
