"""The final answer of a mathematical text: a box, what stands after "the answer is", or the last mathematics."""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvbench.tasks.answers import GROUP, MINUS, last_boxed

# Longer than any reference by far; keeps sympy away from runaway answers, which it would chew on for minutes.
MAX_ANSWER_CHARS = 1000
MAX_BLOCK_CHARS = 4000  # of lines that come to an answer
# "The answer is", "Answer:", or a line that is nothing but a heading.
_FINAL = re.compile(
    r"answer\s*+(?:is|:|=|\uff1a)\s*+(?:[:\uff1a]\s*+)?(?:(?:therefore|thus|hence|simply|exactly|equal\s+to)\b[\s:,]*+)?"
    r"|^[ \t*#_]*+(?:the\s)?(?:final\s)?answer[ \t*_\r]*+$(?!\s*+(?:is\b|[:=\uff1a]))",
    re.IGNORECASE | re.MULTILINE,
)
_ENVIRONMENTS = r"(?:equation|displaymath|math|align(?:at|ed)?|flalign|gather(?:ed)?|split|multline|eqnarray)\*?"
_MATH = re.compile(rf"\\begin\{{{_ENVIRONMENTS}\}}|\\[(\[]|\\.|\$\$?", re.DOTALL)
_DOLLARS = re.compile(r"((?:[^$\\]|\\.)++)\$\$?", re.DOTALL)
_CLOSING = {"\\(": "\\)", "\\[": "\\]"}
_BLOCK = re.compile(rf"\s*\\begin\{{({_ENVIRONMENTS})\}}(.*)\\end\{{\1\}}[\s.,]*", re.DOTALL)
_SIGN = re.compile(r"\\(?:begin|end)(?![a-z])|\\.|[{}&]", re.DOTALL)
_LAST_NUMBER = re.compile(rf"[{MINUS}]?\d++(?:(?:,|{GROUP})\d{{3}}(?!\d))*+(?:\.\d++)?(?:/\d++)?")
_MARKUP = re.compile(r"[\s*_`#]*+")  # of Markdown
_OPENING = re.compile(r"(?:\s|\\[(\[]|\$)*+")  # of mathematics that is never closed
_JOINT = re.compile(r"\s*+(?:[,;](?:\s*+(?:and|or)\b)?|and\b|or\b)\s*+", re.IGNORECASE)
# A number of things, `12,345 people`: math-verify has some units and reads other words as products of letters.
_COUNT = re.compile(
    rf"([{MINUS}]?\d[\d,]*+(?:\.\d++)?)\s++"
    r"(?!(?:hundred|thousand|million|billion|trillion|dozen|plus|minus|times|over|choose|factorial|squared|cubed|more|less)"
    r"\b)[a-z]{2,}+(?:\s(?!and\b|or\b)[a-z]{2,}+){0,3}"
)
_OR = re.compile(r"\s*+,?\s*+or\s++", re.IGNORECASE)
_HOPE = "I hope it is correct"  # how the examples of Minerva's prompt end


class _Span(NamedTuple):
    """Mathematics in a text: where it begins and ends, delimiters included, and what it says."""

    start: int
    end: int
    latex: str


def find_answer(text: str) -> str | None:
    """The final answer as LaTeX: the last box, what follows the last "answer is", or the last mathematics or number.

    None where the text has none of these, or one that is absurdly long.
    """
    latex = last_boxed(text)
    if latex is None:
        phrase = next(iter(deque(_FINAL.finditer(text), maxlen=1)), None)
        latex = _last_mathematics(text) if phrase is None else _behind(text[phrase.end() :].partition(_HOPE)[0])
    if latex is None or not latex.strip() or len(latex) > MAX_ANSWER_CHARS:
        return None
    return latex.strip()


def is_marked(text: str) -> bool:
    """Tell whether a text says what its answer is; of others, the last mathematics or number is graded."""
    return last_boxed(text) is not None or bool(_FINAL.search(text))


def _last_mathematics(text: str) -> str | None:
    """The last mathematics of a text, with what "or" joins to it; without any, the last number."""
    spans: list[_Span] = []
    for span in _mathematics(text):
        if spans and not _OR.fullmatch(text, spans[-1].end, span.start):
            spans.clear()
        spans.append(span)
    return ", ".join(_result(span.latex) for span in spans) if spans else _last_number(text)


def _behind(text: str) -> str | None:
    """Answer at the beginning of a text.

    The first mathematics that begins on its first line, however many lines that goes on for, else the line itself;
    where that only announces the answer, the same of the next line.
    """
    text = _MARKUP.sub("", text, count=1)
    line, _, rest = text.partition("\n")
    latex = _begun_within(text, len(line))
    if not latex and line.rstrip().endswith(":") and rest.strip():
        text = _MARKUP.sub("", rest, count=1)
        latex = _begun_within(text, len(text.partition("\n")[0]))
    if latex:
        return latex
    words = _OPENING.sub("", text, count=1).partition("\n")[0].rstrip(" .*_`\r")
    if count := _COUNT.fullmatch(words):
        return count[1]
    return words or _last_number(text)


def _begun_within(text: str, stop: int) -> str:
    """The first mathematics that begins within so many characters, and what "or" and "and" join to it."""
    spans: list[_Span] = []
    for span in _mathematics(text):
        if span.start >= stop or (spans and not _JOINT.fullmatch(text, spans[-1].end, span.start)):
            break
        spans.append(span)
    return ", ".join(_result(span.latex, whole=True) for span in spans)


def _last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _mathematics(text: str) -> Iterator[_Span]:
    r"""Mathematics between dollars, `\(` and `\)`, `\[` and `\]`, or of an environment, in order.

    An escaped dollar is none.
    """
    position, closed = 0, set[str]()
    while sign := _MATH.search(text, position):
        position = sign.end()
        opening = sign[0]
        if opening.startswith("$"):
            if inner := _DOLLARS.match(text, position):
                position = inner.end()
                yield _Span(sign.start(), position, inner[1])
            continue
        close = opening.replace("begin", "end") if opening.startswith("\\begin") else _CLOSING.get(opening, "")
        if not close or close in closed:
            continue
        end = text.find(close, position)
        if end < 0:
            closed.add(close)  # nothing closes the others either
            continue
        first = sign.start() if opening.startswith("\\begin") else position  # an environment keeps its name
        latex, position = text[first : end + (first < position) * len(close)], end + len(close)
        if latex:
            yield _Span(sign.start(), position, latex)


def _result(latex: str, whole: bool = False) -> str:
    """Result of mathematics over several lines: the last line.

    Of a `whole` answer all, unless each goes on with an equals sign.
    """
    while len(latex) <= MAX_BLOCK_CHARS and (block := _BLOCK.fullmatch(latex)):
        rows = [bare for row in _rows(block[2]) if (bare := row.strip().rstrip(".,").strip())]
        goes_on = not whole or all(row.startswith("=") for row in rows[1:])
        latex = rows[-1].lstrip("= ") if rows and goes_on else ", ".join(rows)
    return latex


def _rows(latex: str) -> list[str]:
    """The lines of an environment without alignment marks; those of a matrix inside of it are one."""
    rows, depth, start = [""], 0, 0
    for sign in _SIGN.finditer(latex):
        depth += (sign[0] in ("\\begin", "{")) - (sign[0] in ("\\end", "}"))
        if sign[0] in ("\\\\", "&") and not depth:
            rows[-1] += latex[start : sign.start()]
            rows += [""] if sign[0] == "\\\\" else []
            start = sign.end()
    rows[-1] += latex[start:]
    return rows
