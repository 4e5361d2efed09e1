"""Extracts the program to grade from a model's text: code is recognised by its syntax; nothing of it runs."""

import ast
import builtins
import re
import textwrap
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
# Spaces that look like one and that Python does not take for one; and marks that cannot be seen.
_SPACES = dict.fromkeys((0xA0, 0x202F, 0x3000, *range(0x2000, 0x200B)), " ") | dict.fromkeys(range(0x200B, 0x200E))
# More than a program may have; see `cage.mechanism`.
_MAX_CHARS = 1 << 20
# How much is parsed to find code, per character of the answer and at least; it keeps the search linear.
_PARSED_PER_CHAR, _MIN_PARSED = 4, 200_000
_FILE = "<answer>"
# Up to Python 3.11.7 and 3.12.1 one count of nested nodes serves all threads (python/cpython#106905): a thread that
# parses meanwhile makes it wrong, and that is a SystemError of the other.
_PARSER, _TRIES = threading.Lock(), 5
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Code that asks for names by text may need any of them.
_DYNAMIC = frozenset(("eval", "exec", "globals", "locals", "vars", "__import__"))
_BUILTINS = frozenset(dir(builtins))


def build_program(prompt: str, entry_point: str, completion: str) -> str:
    """Put the program together that an answer stands for; prompt and answer where no code defines the function.

    Code is whatever parses. An answer continues the prompt, or is whole: then the last run of lines that
    parses and defines the function is taken, in a fenced block or not, with what it needs of others, after the imports
    and helpers of the prompt. Statements that the function does not need (demonstrations, tests, `input()`) are left
    out. Text up to `</think>` is dropped.

    Source: EvalPlus 0.3.1, `sanitize.py` (the longest lines that parse; what the function needs of them).
    Differs: EvalPlus takes the code of a chat reply without the prompt's imports; a reply that leaves `from typing
        import List` to the prompt fails there and runs here. There, the longest run of lines is taken, here the last
        that defines the function; there, each name keeps its first definition, here its last; there, loops and calls
        at the top level are dropped, here those stay that the function needs.
    """
    answer = completion.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "").rpartition("</think>")[2]
    if len(answer) <= _MAX_CHARS:
        for text in dict.fromkeys((answer, answer.translate(_SPACES))):
            if program := _Search(prompt, entry_point, text).program():
                return program
    return f"{prompt}{_indented(answer)}\n"


class _Search:
    """Search for code in one answer, with a bound on parsing."""

    def __init__(self, prompt: str, entry_point: str, answer: str) -> None:
        # Some rows of MBPP+ end with the quotes of their docstring.
        self.prompt = prompt if prompt.endswith("\n") or not prompt else prompt + "\n"
        self.entry_point, self.answer = entry_point, answer
        self.left = _PARSED_PER_CHAR * (len(prompt) + len(answer)) + _MIN_PARSED

    def program(self) -> str | None:
        """The program; None when no code defines the function."""
        blocks = _blocks(self.answer)
        continued = [self.answer, *blocks[-1:]]
        if not blocks:
            return self._continuation(self.answer) or self._whole(self.answer)
        program = self._whole(self.answer)
        for text in continued:
            program = program or self._continuation(text)
        for block in reversed(blocks):  # a block within a list is indented
            program = program or self._whole(textwrap.dedent(block))
        return program

    def _continuation(self, text: str) -> str | None:
        """The prompt, and of the text all that continues it."""
        for body in dict.fromkeys((text, _indented(text))):
            lines = f"{self.prompt}{body}".split("\n")
            longest = self._longest_from(lines, 0)
            if longest and defines(longest[0], self.entry_point):
                tree, end = longest
                prompt_lines = self.prompt.count("\n")
                always = sum(statement.lineno <= prompt_lines for statement in tree.body)
                return self._needed(lines[:end], tree, always)
        return None

    def _whole(self, text: str) -> str | None:
        """The last code in a text that defines the function by itself, after the head of the prompt."""
        if self.entry_point not in text:
            return None
        lines = text.split("\n")
        regions = list(self._regions(lines))
        chosen = max((at for at, (tree, _, _) in enumerate(regions) if defines(tree, self.entry_point)), default=None)
        if chosen is None:
            return None
        definition = rf"^(?:async )?def {re.escape(self.entry_point)}\b"
        head = re.split(definition, self.prompt, maxsplit=1, flags=re.MULTILINE)[0]
        taken = {chosen}
        while True:
            parts = [head, *("\n".join(lines[start:end]) for at, (_, start, end) in enumerate(regions) if at in taken)]
            whole = "\n".join(parts).split("\n")
            tree, _ = parse("\n".join(whole))
            if tree is None:
                return "\n".join(whole) + "\n"  # a prompt without its docstring, or with code that is none
            missing = dependencies(tree, self.entry_point).missing
            more = {at for at, (tree, _, _) in enumerate(regions) if self._helps(tree, missing, at < chosen)} - taken
            if not more:
                always = sum(statement.lineno <= head.count("\n") + 1 for statement in tree.body) if head.strip() else 0
                return self._needed(whole, tree, always)
            taken |= more

    def _helps(self, tree: ast.Module, missing: set[str], before: bool) -> bool:
        bound = set().union(*map(bound_names, tree.body)) if missing else set()
        return bool(bound & missing) and (before or self.entry_point not in bound)

    def _needed(self, lines: list[str], tree: ast.Module, always: int) -> str:
        return without(lines, tree, dependencies(tree, self.entry_point, always).kept) + "\n"

    def _regions(self, lines: list[str]) -> Iterator[tuple[ast.Module, int, int]]:
        """Runs of lines that parse, each as long as can be: the tree, and the first line and the one after."""
        number = 0
        while number < len(lines) and self.left > 0:
            line = lines[number]
            region = None
            self.left -= len(line)
            if line.strip() and not line[0].isspace() and may_begin_code(line):
                region = self._longest_from(lines, number)
            if region:
                yield region[0], number, region[1]
            number = region[1] if region else number + 1

    def _longest_from(self, lines: list[str], start: int) -> tuple[ast.Module, int] | None:
        """The longest run of lines from one on that parses, and the line after it; None when there is none."""
        end = len(lines)
        while end > start and self.left > 0:
            text = "\n".join(lines[start:end]) + "\n"
            self.left -= len(text)
            tree, line = parse(text)
            if tree is not None:
                return tree, end
            end = min(end - 1, start + line - 1)
        return None


def _blocks(answer: str) -> list[str]:
    """The contents of fenced blocks of Python or of no stated language; the last may lack its end."""
    fences = list(_FENCE.finditer(answer))
    blocks, number = [], 0
    while number < len(fences):
        start = fences[number]
        ends = (at for at in range(number + 1, len(fences)) if not fences[at][2] and fences[at][1].startswith(start[1]))
        end = next(ends, None)
        stop = fences[end].start() if end is not None else len(answer)
        # The end of an answer that began inside a block has no text after it.
        if start.group(2).lower() in _PYTHON and answer[start.end() : stop].strip():
            blocks.append(answer[start.end() : stop].strip("\n"))
        if end is None:
            break
        number = end + 1
    return blocks


def _indented(body: str) -> str:
    """Give the first line of a function body back the indentation that chat models and tokenizers strip."""
    if not body[:1].strip() or body.startswith("#"):
        return body
    return "    " + body


def parse(text: str) -> tuple[ast.Module | None, int]:
    """Parse a text: gives its tree and 0, or None and the line, from 1, at which it ceases to be a program."""
    try:
        tree = _tree(text)
    except SyntaxError as error:
        return None, error.lineno or 1
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return None, 1
    lines = [node.lineno for node in _in_module_scope(tree) if isinstance(node, ast.Return)]
    return (None, min(lines)) if lines else (tree, 0)


def _tree(text: str) -> ast.Module:
    """Tree of `ast.parse`, or its exception.

    Graders take turns; other threads that parse code in this process do not, and a parse that they disturbed is
    repeated.
    """
    # A compiler's warnings about an answer are irrelevant here, and must not become errors.
    warnings.filterwarnings("ignore", module=re.escape(_FILE))
    # A null byte or half a surrogate pair is as wrong as another control character, and not an error of its own.
    text = text.replace("\0", "\1").encode("utf-8", "replace").decode()
    for _ in range(_TRIES):
        with _PARSER, suppress(SystemError):
            return ast.parse(text, _FILE)
    with _PARSER:  # the answer is not graded where it fails here too, which is not a wrong answer
        return ast.parse(text, _FILE)


def may_begin_code(line: str) -> bool:
    """Tell whether a program could begin with this line; most lines of prose could not."""
    try:
        _tree(line)
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
class Dependencies:
    """The needs of a program for one of its names.

    Args:
        kept: The statements that the name needs, as numbers in the module's body.
        missing: Names that these read, that no statement binds and that are not built in; locals are among them.
    """

    kept: set[int]
    missing: set[str]


def dependencies(tree: ast.Module, name: str, always: int = 0) -> Dependencies:
    """Find the statements that a name needs; demonstrations and tests of it are left out.

    A statement is needed that binds a needed name, or changes what one stands for, or sets something in a module
    (`sys.setrecursionlimit`), and so are the first ones (`always`). One that only uses the name (a print, an assertion,
    `input()`) is not.
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
    return Dependencies(kept, reached - bound - _BUILTINS)


def without(lines: Sequence[str], tree: ast.Module, kept: set[int]) -> str:
    """The text of a program with the kept statements alone; imports from `__future__` first."""

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
