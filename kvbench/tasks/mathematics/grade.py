"""Grades MATH: the last boxed or final answer, compared with the reference by math-verify.

math-verify needs sympy, which takes a second to import; it is imported when the first answer is graded.
"""

import re
import threading

from kvbench.tasks.answers import after_thinking, last_boxed

# Longer than any reference by far; keeps sympy away from runaway answers, which it would chew on for minutes.
MAX_ANSWER_CHARS = 1000
_TIMEOUT_S = 5
_FINAL = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*:?\s*(.+)", re.IGNORECASE)
_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_LAST_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
# The base of a number system (52_8), and the power of a unit (15\\mbox{ cm}^2): math-verify drops both.
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\^\{?(\d+)\}?$")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\$|[\s$]")


def find_answer(text: str) -> str | None:
    """The final answer as LaTeX: the last box, what follows the last "answer is", or the last mathematics or number.

    Args:
        text: The answer, thoughts removed.

    Returns:
        The LaTeX without its box or dollars, or None when the text has none of these, or one that is absurdly long.
    """
    found = last_boxed(text)
    if found is None:
        phrases = _FINAL.findall(text)
        tail = phrases[-1] if phrases else text
        spans = [next(part for part in match if part) for match in _MATH.findall(tail)]
        numbers = _LAST_NUMBER.findall(tail)
        if spans:
            found = spans[0] if phrases else spans[-1]
        elif phrases and tail.strip(" .*"):
            found = tail.strip(" .*")
        else:
            found = numbers[-1] if numbers else None
    if found is None or not found.strip() or len(found) > MAX_ANSWER_CHARS:
        return None
    return found.strip()


def normalise(latex: str) -> str:
    """A light normal form for equality as text: no spaces, sizes or text commands; one kind of fraction."""
    latex = _TEXT.sub(r"\1", latex.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _DROPPED.sub("", latex).rstrip(".").replace("^{\\circ}", "").replace("^\\circ", "").replace("\\%", "")


def equivalent(reference: str, answer: str) -> bool:
    """Whether two final answers are the same: as text after `normalise`, or as mathematics.

    math-verify's time limits rest on SIGALRM, which only the main thread may use; elsewhere it runs without them, on
    answers that `MAX_ANSWER_CHARS` keeps short.

    Args:
        reference: The right answer, LaTeX.
        answer: The other one.
    """
    if normalise(reference) == normalise(answer):
        return True
    for pattern in (_BASE, _UNIT_POWER):
        wanted, given = pattern.search(reference.strip()), pattern.search(answer.strip())
        if wanted and given and wanted[1] != given[1]:
            return False
    from math_verify import parse, verify

    limit = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    gold, given = (parse(f"\\boxed{{{latex}}}", parsing_timeout=limit) for latex in (reference, answer))
    return bool(gold and given and verify(gold, given, timeout_seconds=limit))


def grade(reference: str, text: str, opened: bool = False) -> dict[str, float]:
    """Score one answer.

    Args:
        reference: The right answer, LaTeX.
        text: The answer as generated.
        opened: The prompt opened the thoughts.

    Returns:
        `correct` and `parsed`, each 0 or 1.
    """
    rest = after_thinking(text, opened)
    answer = None if rest is None else find_answer(rest)
    if answer is None:
        return {"correct": 0.0, "parsed": 0.0}
    return {"correct": float(equivalent(reference, answer)), "parsed": 1.0}


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """What lm-eval calls."""
    return grade(doc["answer"], results[0], doc.get("thinking_opened", False))
