"""The mutants that the code has: one changed spot each. tests/mutants.py draws and runs them.

No mutant changes what no run can show: annotations, decorators and docstrings, messages of errors and of asserts,
f-strings, `strict=True` of a zip (it only ever raises an error that cannot happen), imports that only a type checker
reads, and abstract methods. Whole numbers become one more and one less, with two exceptions that would mostly be the
same place under another name: a 0 that is an index or an argument does not become -1 (the last of one is the first),
and no -1 becomes 1 (the last of two axes; -1 becomes -2 and 0 already).
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Mod: ast.FloorDiv,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LEFT_ALONE = ("annotation", "returns", "decorator_list", "exc", "msg", "type_params")


@dataclass(frozen=True)
class Mutant:
    """One change of a file, whose path is from the root of the repository."""

    path: str
    line: int
    """From 1."""
    code: str
    """That line, without its indentation."""
    change: str
    """`old -> new`; the second such change of a code ends in `, place 2`."""
    text: str
    """The whole file without the change."""
    way: tuple
    """The fields and indices that lead from the file's root to the node."""
    new: ast.AST
    """The node that stands there instead."""

    @property
    def name(self) -> tuple[str, str, str]:
        """What a list of mutants knows it by, wherever its line moves."""
        return self.path, self.code, self.change

    @property
    def source(self) -> str:
        """The whole file with the change."""
        tree = ast.parse(self.text)
        owner: ast.AST = tree
        for field, index in self.way[:-1]:
            owner = getattr(owner, field) if index is None else getattr(owner, field)[index]
        field, index = self.way[-1]
        if index is None:
            setattr(owner, field, self.new)
        else:
            getattr(owner, field)[index] = self.new
        return ast.unparse(ast.fix_missing_locations(tree))

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}\n    {self.code}"


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """All mutants of a file's text."""
    tree, lines, same = ast.parse(text), text.splitlines(), Counter[tuple[str, str]]()
    for way, node, chooses in _spots(tree):
        for new in _replacements(node, chooses):
            line = node.lineno  # type: ignore[attr-defined]
            code = lines[line - 1].strip()
            old, after = (" ".join(ast.unparse(ast.fix_missing_locations(x)).split()) for x in (node, new))
            change = f"{old} -> {after}"
            same[code, change] += 1
            change += f", place {same[code, change]}" if same[code, change] > 1 else ""
            yield Mutant(path, line, code, change, text, way, new)


def _replacements(node: ast.AST, chooses: bool) -> Iterator[ast.AST]:
    """The nodes that a node may become instead; `chooses` says that it is an index or an argument."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        if not isinstance(node.operand, ast.Constant):
            yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        if not (chooses and node.value == 0):
            yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.If) and not node.orelse:
        yield ast.If(ast.Constant(False), node.body, [])


def _spots(node: ast.AST, path: tuple = ()) -> Iterator[tuple[tuple, ast.AST, bool]]:
    """Every node that may change, with the way to it, and whether it is an index or an argument."""
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(x) == "abstractmethod" for x in node.decorator_list):
        return
    for field, value in ast.iter_fields(node):
        if field in LEFT_ALONE:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _unseen(child):
                way = (*path, (field, index))
                chooses = isinstance(node, ast.Subscript | ast.Tuple | ast.Call | ast.keyword)
                yield way, child, chooses
                yield from _spots(child, way)


def _unseen(node: ast.AST) -> bool:
    """Says that no run can show what stands in a node."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg == "strict")
