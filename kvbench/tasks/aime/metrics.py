"""Grades AIME: whole numbers, read from the last box or behind "the answer is"."""

import re

from kvbench.tasks.answers import DIGITS, found_in, last_boxed, to_number
from kvbench.tasks.latex import equivalent, plain_signs

MAX_ANSWER_CHARS = 200
_MODULUS = re.compile(r"\\p?mod\s*\{?\s*\d+\s*\}?|\(\s*\\?(?:p|b)?mod(?:ulo)?\s*\d+\s*\)")
_WORDS = re.compile(r"\\(?:text(?:bf|rm|it)?|mathbf|mathrm|mbox)\s*\{[^{}\d]*\}(?:\s*\^\s*\{?\d\}?)?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])|\u00b0|\b(?:degrees?|units?|dollars?)\b")
_WRAPPERS = re.compile(r"\\(?:text(?:bf|rm|it)?|mathbf|mathrm|mbox)\s*|\\[!,;: $]|[{}()\s$*]")
_WHOLE = re.compile(r"-?(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.0*+)?")
_SEVERAL = re.compile(r",|\d\s++\d")
_PHRASE = re.compile(rf"\banswer\s*+(?:is|:)[\s:*$]*+(?:\\\(\s*+)?({DIGITS}(?:\.\d++)?)(?![\d/])", re.IGNORECASE)


def bare_answer(latex: str) -> str:
    """The content of a box without degrees, units, dollars, a modulus, and what is said to be equal."""
    text = _MODULUS.sub(" ", plain_signs(latex).replace("{,}", ","))
    text = _DEGREES.sub(" ", _WORDS.sub(" ", text)).replace("\\equiv", "=")
    return text.rpartition("=")[2].strip().rstrip(".")


def to_integer(text: str) -> int | None:
    """A whole number as it may stand in a box: leading zeros, commas, bold, `m+n = 113`, `70.0` and `336^\\circ` are
    understood.

    Returns:
        The number, or None for anything else.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    bare = _WRAPPERS.sub(" ", bare_answer(text)).strip()
    value = to_number(bare) if _WHOLE.fullmatch(bare) else None
    return None if value is None else int(value)


def find_answer(text: str) -> str | None:
    """The last box; without a box, the number behind the last "answer is"; else None, as for an absurdly long one."""
    found = last_boxed(text)
    if found is None:
        found = next(reversed(_PHRASE.findall(text)), None)
    return None if found is None or len(found) > MAX_ANSWER_CHARS else found


def is_right(reference: str, answer: str) -> bool:
    """Tell whether an answer is the right number, written as one or as something that equals it (`\\frac{140}{2}`).

    Raises:
        TimeoutError: The comparison took too long.
    """
    value = to_integer(answer)
    if value is not None:
        return value == int(reference)
    bare = bare_answer(answer)
    # Two numbers are no answer, and without a digit there is none.
    return not _SEVERAL.search(bare) and any(map(str.isdigit, bare)) and equivalent(reference, bare)


def find_gradable(text: str) -> str | None:
    """As `find_answer`; None also for one without a digit."""
    answer = find_answer(text)
    return answer if answer is not None and any(map(str.isdigit, answer)) else None


def grade(reference: str, text: str, opened: bool = False) -> dict[str, float]:
    """Score one answer: `correct` and `parsed`, each 0 or 1; `opened` says whether the prompt opened the thoughts.

    Raises:
        TimeoutError: The comparison took too long.
    """
    answer = found_in(text, opened, find_gradable)
    return {"correct": float(answer is not None and is_right(reference, answer)), "parsed": float(answer is not None)}


def vote(text: str, opened: bool = False) -> str | None:
    """The vote of an answer among several to one problem: its number, else what it says; None for none."""
    answer = found_in(text, opened, find_gradable)
    value = None if answer is None else to_integer(answer)
    return str(value) if value is not None else answer and bare_answer(answer)


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval."""
    return grade(doc["answer"], results[0])
