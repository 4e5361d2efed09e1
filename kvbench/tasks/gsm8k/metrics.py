"""Grades GSM8K: the number behind `####`, behind "The answer is", or the last one."""

import re
from decimal import Decimal

from kvbench.tasks.answers import NUMBER, found_in, last_boxed, to_number

# A sum that is written out stands for what it comes to: 3 + 4 = 7 is 7.
_VALUE = rf"(?:{NUMBER}(?:\s?(?:[-+*/\u2212\u00d7\u00f7]|\\times|\\cdot)\s?{NUMBER}){{1,20}}+\s?=\s?)?+({NUMBER})"
_HASHES = re.compile(rf"####\s*+(?:\*\*)?({NUMBER})")
_SENTENCE = re.compile(rf"\bThe answer is\s*+{_VALUE}")
# What chat models put between the phrase and the number: a colon, bold, mathematics.
_PHRASE = re.compile(
    r"\banswer\s*+(?:is|:)[\s:*]*+(?:(?:approximately|about)[\s:*]*+)?(?:\\[(\[]|\\boxed\{|\$|\s)*+" + _VALUE,
    re.IGNORECASE,
)
_NUMBER = re.compile(NUMBER)


def find_answer(text: str, last: bool = False) -> Decimal | None:
    """The number an answer stands for.

    Args:
        text: The answer, thoughts removed.
        last: Take the last marked number where there are several; False takes the first, as is usual for few-shot
            prompts, where a base model goes on with other problems.

    Returns:
        The number behind `####`; else the one behind "The answer is", or a looser form of it; else the one in
        the last box; else the last in the text; None without any.

    Source: lm-eval 0.4.13 gsm8k (strict and flexible filters) and gsm8k_cot, joined; the original's `####`.
    Differs: one rule for all forms; currency signs, marks for the thousands and trailing dots do not matter; 18.00 is
        18; the minus of typesetting is one; behind the phrase, 3 + 4 = 7 is 7.
    """
    for pattern in (_HASHES, _SENTENCE, _PHRASE):
        found = pattern.findall(text)
        if found:
            return to_number(found[-1 if last else 0])
    boxed = last_boxed(text)
    found = _NUMBER.findall(boxed if boxed is not None else text) or _NUMBER.findall(text)
    return to_number(found[-1]) if found else None


def grade(reference: str, text: str, *, last: bool, opened: bool = False) -> dict[str, float]:
    """Score one answer: `correct` and `parsed`, each 0 or 1; for `last` see `find_answer`, and `opened` says whether
    the prompt opened the thoughts."""
    value = found_in(text, opened, lambda rest: find_answer(rest, last))
    return {"correct": float(value is not None and value == to_number(reference)), "parsed": float(value is not None)}


def process_few_shot(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: the few-shot forms."""
    return grade(doc["answer"], results[0], last=False)


def process_chat(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: the zero-shot form."""
    return grade(doc["answer"], results[0], last=True)
