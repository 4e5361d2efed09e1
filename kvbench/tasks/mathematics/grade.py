"""Grades MATH: the last boxed or final answer, compared with the reference by math-verify."""

import re
from collections import deque
from collections.abc import Iterator

from kvbench.tasks.answers import GROUP, MINUS, found_in, last_boxed
from kvbench.tasks.latex import equivalent, normalise

# Longer than any reference by far; keeps sympy away from runaway answers, which it would chew on for minutes.
MAX_ANSWER_CHARS = 1000
_FINAL = re.compile(r"answer\s*+(?:is|:|=)\s*+(?::\s*+)?", re.IGNORECASE)
_MATH = re.compile(r"\\[(\[]|\\.|\$\$?", re.DOTALL)
_DOLLARS = re.compile(r"((?:[^$\\]|\\.)++)\$\$?", re.DOTALL)
_LAST_NUMBER = re.compile(rf"[{MINUS}]?\d++(?:(?:,|{GROUP})\d{{3}}(?!\d))*+(?:\.\d++)?(?:/\d++)?")
_HOPE = "I hope it is correct"  # how the examples of Minerva's prompt end


def find_answer(text: str) -> str | None:
    """The final answer as LaTeX: the last box, what follows the last "answer is", or the last mathematics or number.

    Args:
        text: The answer, thoughts removed.

    Returns:
        The LaTeX without its box or dollars, or None when the text has none of these, or one that is absurdly long.
    """
    found = last_boxed(text)
    if found is None:
        phrase = next(iter(deque(_FINAL.finditer(text), maxlen=1)), None)
        tail = text[phrase.end() :].partition("\n")[0].partition(_HOPE)[0] if phrase else text
        spans = list(_mathematics(tail))
        words = tail.rstrip(" .*").lstrip(" *")
        if spans:
            found = spans[0] if phrase else spans[-1]
        elif phrase and words:
            found = words
        else:
            numbers = _LAST_NUMBER.findall(tail)
            found = numbers[-1] if numbers else None
    if found is None or not found.strip() or len(found) > MAX_ANSWER_CHARS:
        return None
    return found.strip()


def _mathematics(text: str) -> Iterator[str]:
    """The text between dollars, `\\(` and `\\)`, or `\\[` and `\\]`, in order; an escaped dollar is none."""
    place, ends = 0, {"\\(": "\\)", "\\[": "\\]"}
    while sign := _MATH.search(text, place):
        place = sign.end()
        if sign[0].startswith("$"):
            if found := _DOLLARS.match(text, place):
                place = found.end()
                yield found[1]
        elif close := ends.get(sign[0]):
            end = text.find(close, place + 1)
            if end < 0:
                del ends[sign[0]]  # nothing closes the others either
            else:
                yield text[place:end]
                place = end + len(close)


def grade(reference: str, text: str, opened: bool = False) -> dict[str, float]:
    """Score one answer: `correct` and `parsed`, each 0 or 1; `opened` says whether the prompt opened the thoughts."""
    answer = found_in(text, opened, find_answer)
    right = answer is not None and equivalent(reference, answer)
    return {"correct": float(right), "parsed": float(answer is not None)}


def vote(text: str, opened: bool = False) -> str | None:
    """The vote of an answer among several to one problem: its final answer in normal form; None for none."""
    answer = found_in(text, opened, find_answer)
    return None if answer is None else normalise(answer)


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval."""
    return grade(doc["answer"], results[0])
