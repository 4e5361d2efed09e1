"""Finding the final answer in what a model wrote: behind the thoughts, in the last box, or behind an answer phrase."""

import re
from decimal import Decimal, InvalidOperation

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)?")
_END_OF_THOUGHT = "</think>"
_START_OF_THOUGHT = "<think>"
# An optional minus that is no subtraction, an optional currency sign, digits with or without thousands commas.
NUMBER = r"(?:(?<![\w)\]])[-+]\s?)?(?:\\?\$\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"


def after_thinking(text: str, opened: bool = False) -> str | None:
    """The part of an answer behind its thoughts.

    Args:
        text: The answer as generated.
        opened: The prompt already ended with `<think>`, so the answer begins with thoughts.

    Returns:
        The text behind the last `</think>`; all of it when there are no thoughts; None when they have no end, because
        then there is no answer yet.
    """
    _, end, rest = text.rpartition(_END_OF_THOUGHT)
    if end:
        return rest
    return None if opened or _START_OF_THOUGHT in text else text


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` (or `\\fbox`, `\\framebox`) that is complete; None without one.

    Braces are balanced; `\\boxed 5` gives the next word, as TeX would nearly do.
    """
    for found in reversed(list(_BOX.finditer(text))):
        if found.group(1) is None:
            word = text[found.end() :].split(maxsplit=1)
            if word and text[found.end() - 1 : found.end()].isspace():
                return word[0].strip("$.")
            continue
        depth, place = 1, found.end()
        while place < len(text):
            sign = text[place]
            if sign == "\\":
                place += 2  # an escaped brace is no brace
                continue
            depth += (sign == "{") - (sign == "}")
            if not depth:
                return text[found.end() : place].strip()
            place += 1
    return None


def to_number(text: str) -> Decimal | None:
    """A written number, without currency sign, thousands commas, spaces and trailing dots; None when it is none."""
    bare = re.sub(r"[\s,$\\]", "", text).rstrip(".")
    try:
        value = Decimal(bare)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
