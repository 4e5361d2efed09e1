"""Finding the final answer in what a model wrote: after the thoughts, in the last box, or after an answer phrase.

Every pattern here and in the graders reads a text once: parts that repeat are possessive (`*+`), so that what one took
is never tried again. A cache that is broken writes ten thousand newlines, and these must not cost minutes.
"""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TypeVar

from kvbench.engine.requests import FALLBACK, OUT_OF_TIME, SEVERAL, Request

T = TypeVar("T")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\s*+(\{)|\s++(?=(\S++))|(-?\d[\d,.]*+)|)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_END_OF_THOUGHT = "</think>"
_START_OF_THOUGHT = "<think>"
MINUS = "-\u2212"  # a hyphen, and the sign that typesetting knows
# Separators of thousands, except a comma: a comma in braces, a thin space of LaTeX, and three spaces that do not break.
GROUP = r"(?:\{,\}|\\,|[\u2009\u202f\xa0])"
DIGITS = rf"\d(?:[\d,]|{GROUP}(?=\d{{3}}(?!\d)))*+"
# An optional minus that is no subtraction, an optional currency sign, digits with or without marks for the thousands.
NUMBER = rf"(?:(?<![\w)\]])[{MINUS}+]\s?)?(?:\\?\$\s?)?(?:{DIGITS}(?:\.\d++)?|\.\d++)"
_BLANK = r"[^\S\n]"
_SIGN = rf"{_BLANK}?(?:\*\*?|[+/\u00d7\u00f7]|\\(?:times|cdot|div)){_BLANK}?"
_JOINT = rf"(?:{_SIGN}|[-:\u2013\u2212]|\^\{{?|{_BLANK}++or{_BLANK}++)"
_MIXED = rf"{_BLANK}?(?:\d++{_BLANK}?/{_BLANK}?\d++|\\[dt]?frac[\s{{]*+\d++[\s{{}}]*+\d*+)"
_POWER = "[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]"
# A number with all that it is a part of: 1/2, 15 1/2, 15-16, 15^2, 15:30, 15 or 16. `to_number` takes those for none.
TERM = rf"(?:\\[dt]?frac[\s{{]*+{NUMBER}[\s{{}}]*+(?:{NUMBER})?|{NUMBER}(?:{_JOINT}{NUMBER}|{_MIXED}|{_POWER})*+)"
# Zero-width spaces and joiners, soft hyphens, marks of direction and of byte order: nobody sees them.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
_NO_PART = re.compile(r"\{,\}|[\s,$\\]")


def after_thinking(text: str, opened: bool = False) -> str | None:
    """The part of an answer after its thoughts; None where they have no end. `opened`: the prompt began them."""
    _, end, rest = text.rpartition(_END_OF_THOUGHT)
    if end:
        return rest
    return None if opened or _START_OF_THOUGHT in text else text


def final_answer(text: str, find: Callable[[str], T | None], opened: bool = False) -> T | None:
    """Answer that `find` extracts from the text after the thoughts.

    None for none, and where the thoughts have no end.

    Characters that nobody sees are no part of an answer.
    """
    rest = after_thinking(text, opened)
    return None if rest is None else find(visible(rest))


def visible(text: str) -> str:
    """The text without invisible characters."""
    return _INVISIBLE.sub("", text)


def graded(
    answer: T | None, is_right: Callable[[T], bool | None], is_marked: bool = True, several: bool = False
) -> dict[str, float]:
    """The scores of a final answer, each 0 or 1: `correct`, `parsed`, and those of `FLAGS` that hold.

    Args:
        answer: None is none.
        is_right: None where the answer cannot be judged in time; it counts as wrong.
        is_marked: The text says which part of it is the final answer.
        several: It says so of several unlike ones.
    """
    if answer is None:
        return {"correct": 0.0, "parsed": 0.0}
    verdict = is_right(answer)
    scores = {"correct": float(verdict or False), "parsed": 1.0}
    flags = {FALLBACK: not is_marked, OUT_OF_TIME: verdict is None, SEVERAL: several}
    return scores | {flag: 1.0 for flag, holds in flags.items() if holds}


def graded_text(request: Request, text: str) -> str:
    """The part of an answer that is graded: in a chat, what follows the thoughts; nothing where they have no end."""
    if request.thoughts is None:
        return text
    rest = after_thinking(text, request.thoughts.opened)
    return "" if rest is None else rest if rest == text else rest.lstrip("\n")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`, `\framebox`) that is complete; None without one.

    Braces are balanced; `\boxed 5` gives the next word, as TeX would nearly do, and `\boxed5` the number.
    """
    boxes = list(_BOX.finditer(text))
    opening = {box.start(1) for box in boxes if box[1]}
    ends: dict[int, int] = {}  # where a box opens -> where it ends
    open_braces: list[int] = []
    for sign in _BRACE.finditer(text) if opening else ():
        if sign[0] == "{":
            open_braces.append(sign.start())
        elif sign[0] == "}" and open_braces and (start := open_braces.pop()) in opening:
            ends[start] = sign.start()
    for box in reversed(boxes):
        if box[1] and box.start(1) in ends:
            return text[box.end() : ends[box.start(1)]].strip()
        if word := box[2] or box[3]:
            return word.strip("$.")
    return None


def to_number(text: str) -> Decimal | None:
    """A number without currency sign, marks for the thousands, spaces and trailing dots; None when it is none."""
    bare = _NO_PART.sub("", text).rstrip(".").replace("\u2212", "-")
    try:
        value = Decimal(bare)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
