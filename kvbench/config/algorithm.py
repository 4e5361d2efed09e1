"""Hash of what source files compute, which a renamed variable, an annotation or a comment leaves as it is."""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbench.config.code import without_docstrings

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)
_NAMES = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name"),
    **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar), "name"),
    ast.arg: "arg",
    ast.Name: "id",
}
_DONE = "#.@"  # a name that begins with one of these is no identifier: it stands for what the name means


def algorithm_hash(files: Mapping[str, Path]) -> str:
    """Hash Python files by the name under which each counts and by what they compute; 64 hexadecimal digits.

    A name that a file binds (local, parameter, function, constant, private member) counts by where it occurs, so that
    a consistent renaming changes nothing. Public members of classes, keywords of calls and names from other modules
    (`torch.argmin`) count as written. Comments, formatting, docstrings, annotations, imports, and which error is raised
    with which text do not count. The hash is the same in every version of Python that reads the files.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = repr(_dump(_normalised(path.read_bytes()))).encode()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _normalised(content: bytes) -> ast.Module:
    tree = without_docstrings(ast.parse(content))
    imported = {
        alias.asname
        or alias.name.partition(".")[0]: f"@{alias.name.rpartition('.')[2] if alias.asname else alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = imported.get(node.id, node.id)
    tree = _Bare().visit(tree)
    _number_private_members(tree)
    _number(tree, 0)
    return tree


class _Bare(ast.NodeTransformer):
    """Removes what computes nothing: imports, annotations, and the errors that are raised."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.If | None:  # one for type checkers holds imports alone
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        return ast.Raise()

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.generic_visit(node)
        return ast.Assert(test=node.test)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign(targets=[node.target], value=node.value) if node.value else ast.Expr(node.target)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(arg=node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node


def _number_private_members(tree: ast.Module) -> None:
    """Replace names with one leading underscore that the file gives to members, by the order in which they occur."""
    members: list[tuple[ast.AST, str]] = [(node, "attr") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    members += [
        (node, _NAMES[type(node)])
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for part in each.body
        for node in ([part] if isinstance(part, ast.FunctionDef | ast.ClassDef) else ast.walk(part))
        if _binds(node)
    ]
    bound = {getattr(node, field) for node, field in members if _binds(node)}
    numbers: dict[str, int] = {}
    for node, field in members:
        name = getattr(node, field)
        if name in bound and name.startswith("_") and not name.startswith("__"):
            setattr(node, field, f".{numbers.setdefault(name, len(numbers))}")


def _number(scope: ast.AST, depth: int) -> None:
    """Replace the names that a scope and those within it bind by order of occurrence, inner scopes first."""
    for child in ast.iter_child_nodes(scope):
        _number(child, depth + isinstance(scope, _SCOPES))
    if not isinstance(scope, _SCOPES):
        return
    inside = [(node, _NAMES[type(node)]) for node in ast.walk(scope) if node is not scope and type(node) in _NAMES]
    bound = {name for node, field in inside if _binds(node) and (name := getattr(node, field)) and name[0] not in _DONE}
    numbers: dict[str, int] = {}
    for node, field in inside:
        if (name := getattr(node, field)) in bound:
            public = isinstance(scope, ast.ClassDef)
            setattr(node, field, f".{name}" if public else f"#{depth}.{numbers.setdefault(name, len(numbers))}")


def _binds(node: ast.AST) -> bool:
    return (
        type(node) in _NAMES
        and not isinstance(getattr(node, "ctx", None), ast.Load)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    )


def _dump(node: object) -> object:
    """A syntax tree as nested tuples, without what is empty: versions of Python differ in that."""
    if isinstance(node, list):
        return tuple(map(_dump, node))
    if not isinstance(node, ast.AST):
        return node
    return type(node).__name__, *_fields(node)


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    for name, value in ast.iter_fields(node):
        if value is not None and value != [] and name not in ("ctx", "kind", "type_comment"):
            yield name, _dump(value)
