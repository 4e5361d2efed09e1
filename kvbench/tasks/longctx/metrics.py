"""Scores of the generated tasks, each in [0, 1]."""

import re

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


def number_score(answer: str, reference: str) -> dict[str, float]:
    """Compare the first whole number of the answer, in which `1,234` reads as 1234, with the reference's.

    Returns:
        `score` and `exact`, which are the same here: 1 when the numbers are equal; `partial`: digits that are the
        reference's in the same place, as a share of the longer number.
    """
    found, wanted = re.search(r"\d+", _THOUSANDS.sub("", answer)), reference.strip()
    digits = found[0] if found else ""
    exact = float(digits == wanted)
    same = sum(mine == right for mine, right in zip(digits, wanted, strict=False))
    return {"score": exact, "exact": exact, "partial": same / max(len(digits), len(wanted))}


def recall_score(answer: str, reference: str) -> dict[str, float]:
    """Measure how much of the text that follows the quoted words came back in order.

    Returns:
        `score`: 2 L / (a + r), where L is the length of the longest common subsequence of words, a and r the numbers of
        words; `partial`: the same; `exact`: 1 when the words are the same.
    """
    from rapidfuzz.distance import LCSseq

    words, wanted = answer.split(), reference.split()
    score = 2 * LCSseq.similarity(words, wanted) / (len(words) + len(wanted)) if wanted else 0.0
    return {"score": score, "exact": float(words == wanted), "partial": score}


def process_number(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: multikey, kv and passkey."""
    return number_score(results[0], doc["answer"])


def process_recall(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: recall."""
    return recall_score(results[0], doc["answer"])
