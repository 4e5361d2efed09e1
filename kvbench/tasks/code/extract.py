"""From what a model wrote to the program that is graded: the code in it is found by its syntax; nothing of it runs."""

import ast
import re
import textwrap
from collections.abc import Iterator

from kvbench.tasks.code.syntax import bound_names, defines, may_begin_code, needs, parse, without

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
# Spaces that look like one and that Python does not take for one; and marks that cannot be seen.
_SPACES = dict.fromkeys((0xA0, 0x202F, 0x3000, *range(0x2000, 0x200B)), " ") | dict.fromkeys(range(0x200B, 0x200E))
# More than a program may have; see `cage.mechanism`.
_MAX_CHARS = 1 << 20
# How much is parsed to find code, per character of the answer and at least; it keeps the search linear.
_PARSED_PER_CHAR, _MIN_PARSED = 4, 200_000


def build_program(prompt: str, entry_point: str, completion: str) -> str:
    """Put the program together that an answer stands for.

    What counts as code is what parses. An answer continues the prompt, or is whole: then the last run of lines that
    parses and defines the function is taken, in a fenced block or not, with what it needs of others, behind the imports
    and helpers of the prompt. Statements that the function does not need (demonstrations, tests, `input()`) are left
    out. Text up to `</think>` is dropped.

    Args:
        prompt: What the model was given to continue: imports, helpers, signature and docstring; or a docstring alone
            (MBPP+).
        entry_point: Name of the function.
        completion: The answer.

    Returns:
        Python source; where no code was found that defines the function, the prompt with the answer as it is.

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
    """Looks for code in one answer, and parses only so much on the way."""

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
        found = self._whole(self.answer)
        for text in continued:
            found = found or self._continuation(text)
        for block in reversed(blocks):  # a block within a list is indented
            found = found or self._whole(textwrap.dedent(block))
        return found

    def _continuation(self, text: str) -> str | None:
        """The prompt, and of the text all that continues it."""
        for body in dict.fromkeys((text, _indented(text))):
            lines = f"{self.prompt}{body}".split("\n")
            found = self._longest_from(lines, 0)
            if found and defines(found[0], self.entry_point):
                tree, end = found
                given = self.prompt.count("\n")
                always = sum(statement.lineno <= given for statement in tree.body)
                return self._needed(lines[:end], tree, always)
        return None

    def _whole(self, text: str) -> str | None:
        """The last code in a text that defines the function by itself, behind the head of the prompt."""
        if self.entry_point not in text:
            return None
        lines = text.split("\n")
        regions = list(self._regions(lines))
        place = max((at for at, (tree, _, _) in enumerate(regions) if defines(tree, self.entry_point)), default=None)
        if place is None:
            return None
        head = _before_definition(self.prompt, self.entry_point)
        taken = {place}
        while True:
            parts = [head, *("\n".join(lines[start:end]) for at, (_, start, end) in enumerate(regions) if at in taken)]
            whole = "\n".join(parts).split("\n")
            tree, _ = parse("\n".join(whole))
            if tree is None:
                return "\n".join(whole) + "\n"  # a prompt without its docstring, or with code that is none
            missing = needs(tree, self.entry_point).missing
            more = {at for at, (tree, _, _) in enumerate(regions) if self._helps(tree, missing, at < place)} - taken
            if not more:
                always = sum(statement.lineno <= head.count("\n") + 1 for statement in tree.body) if head.strip() else 0
                return self._needed(whole, tree, always)
            taken |= more

    def _helps(self, tree: ast.Module, missing: set[str], before: bool) -> bool:
        bound = set().union(*map(bound_names, tree.body)) if missing else set()
        return bool(bound & missing) and (before or self.entry_point not in bound)

    def _needed(self, lines: list[str], tree: ast.Module, always: int) -> str:
        return without(lines, tree, needs(tree, self.entry_point, always).kept) + "\n"

    def _regions(self, lines: list[str]) -> Iterator[tuple[ast.Module, int, int]]:
        """Runs of lines that parse, each as long as can be: the tree, and the first line and the one behind."""
        place = 0
        while place < len(lines) and self.left > 0:
            line = lines[place]
            found = None
            self.left -= len(line)
            if line.strip() and not line[0].isspace() and may_begin_code(line):
                found = self._longest_from(lines, place)
            if found:
                yield found[0], place, found[1]
            place = found[1] if found else place + 1

    def _longest_from(self, lines: list[str], start: int) -> tuple[ast.Module, int] | None:
        """The longest run of lines from one on that parses, and the line behind it; None when there is none."""
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
    blocks, place = [], 0
    while place < len(fences):
        start = fences[place]
        ends = (at for at in range(place + 1, len(fences)) if _closes(fences[at], start))
        end = next(ends, None)
        stop = fences[end].start() if end is not None else len(answer)
        # The end of an answer that began inside a block has no text behind it.
        if start.group(2).lower() in _PYTHON and answer[start.end() : stop].strip():
            blocks.append(answer[start.end() : stop].strip("\n"))
        if end is None:
            break
        place = end + 1
    return blocks


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    return not fence.group(2) and fence.group(1).startswith(opening.group(1))


def _before_definition(prompt: str, entry_point: str) -> str:
    found = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else prompt


def _indented(body: str) -> str:
    """Give the first line of a function body back the indentation that chat models and tokenizers strip."""
    if not body[:1].strip() or body.startswith("#"):
        return body
    return "    " + body
