"""RULER's two scores: the share of the answers that are in the text, and whether any is."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(text: str) -> str:
    """The text without white space around it, its control characters made line breaks."""
    return _CONTROL.sub("\n", text.strip()).strip()


def match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in the text, whatever their case."""
    found = clean(text).lower()
    return sum(answer.lower() in found for answer in answers) / len(answers)


def match_any(text: str, answers: Sequence[str]) -> float:
    """1 when one of the answers stands in the text, whatever its case; the score of question answering."""
    found = clean(text).lower()
    return float(any(answer.lower() in found for answer in answers))
