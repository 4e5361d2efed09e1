"""Grades AIME: whole numbers, read from the last box or behind "the answer is"."""

import re

from kvbench.tasks.answers import after_thinking, last_boxed, to_number

_WRAPPERS = re.compile(r"\\(?:textbf|text|mathbf|mbox|mathrm)\s*|\\[!,;: ]|[{}()\s$*]")
_PHRASE = re.compile(r"\banswer\s*(?:is|:)[\s:*$]*(?:\\\(\s*)?(\d[\d,]*(?:\.\d+)?)(?![\d/])", re.IGNORECASE)


def to_integer(text: str) -> int | None:
    """A whole number as it may stand in a box: leading zeros, commas, bold, `m+n = 113` and `70.0` are understood.

    Returns:
        The number, or None for anything else.
    """
    bare = _WRAPPERS.sub("", text).rpartition("=")[2]
    value = to_number(bare) if re.fullmatch(r"-?[\d,]+(?:\.0*)?", bare) else None
    return None if value is None else int(value)


def find_answer(text: str) -> int | None:
    """The whole number in the last box; without a box, the one behind the last "answer is"; else None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return to_integer(boxed)
    phrases = _PHRASE.findall(text)
    return to_integer(phrases[-1]) if phrases else None


def grade(reference: str, text: str, opened: bool = False) -> dict[str, float]:
    """Score one answer.

    Args:
        reference: The right number, decimal digits.
        text: The answer as generated.
        opened: The prompt opened the thoughts.

    Returns:
        `correct` and `parsed`, each 0 or 1.
    """
    rest = after_thinking(text, opened)
    value = None if rest is None else find_answer(rest)
    return {"correct": float(value is not None and value == int(reference)), "parsed": float(value is not None)}


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """What lm-eval calls."""
    return grade(doc["answer"], results[0], doc.get("thinking_opened", False))
