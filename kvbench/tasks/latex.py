"""Compares final answers in LaTeX: as text, by their form, or as mathematics."""

import re

from kvbench.tasks import verifier
from kvbench.tasks.answers import GROUP

_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
# The base of a number system (52_8), and the power of a unit (15\\mbox{ cm}^2): math-verify drops both.
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\^\{?(\d+)\}?$")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\$|[\s$]")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|\\degrees?(?![a-z])|\u00b0")
_GROUP = re.compile(rf"(?<=\d){GROUP}(?=\d{{3}}(?!\d))")
_CLOSED_INFINITY = re.compile(r"\[[-+]?\\infty|\\infty\]")
_MEMBER = re.compile(r"^[A-Za-z]\\in(?![a-z])")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_ENCLOSED = re.compile(r"(\(|\[|\\\{).*(\)|\]|\\\})", re.DOTALL)
_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
MAX_DEPTH = 16  # brackets inside of brackets
_SIGN = re.compile(r"\\[{}]|[()\[\]{},]|\\.", re.DOTALL)


def plain_signs(latex: str) -> str:
    """The same with the hyphen for a minus, and no marks between thousands but commas."""
    return _GROUP.sub("", latex.replace("\u2212", "-"))


def normalise(latex: str) -> str:
    """A light normal form for equality as text: no spaces, sizes, degrees or text commands; one kind of fraction."""
    latex = _TEXT.sub(r"\1", plain_signs(latex).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _DEGREES.sub("", _DROPPED.sub("", latex).rstrip(".")).replace("\\%", "")


def form(latex: str) -> str:
    """The brackets around the several things that an answer is: `()` for a point, `(]` for an interval, ...

    `\\{\\}` for a set and for a bare list; empty for a single thing, and for what is made of such parts."""
    bare = _MEMBER.sub("", normalise(latex))
    if _THOUSANDS.fullmatch(bare):
        return ""
    depth, commas, ends = 0, [0, 0], 0  # commas outside of all brackets, and inside of one
    for sign in _SIGN.finditer(bare):
        depth += (sign[0] in _OPENING) - (sign[0] in _CLOSING)
        ends += sign[0] in _CLOSING and depth == 0
        if sign[0] == "," and depth in (0, 1):
            commas[depth] += 1
    if commas[0]:
        return "\\{\\}"
    found = _ENCLOSED.fullmatch(bare)
    return found[1] + found[2] if found and commas[1] and ends == 1 else ""


def is_readable(latex: str) -> bool:
    """False for braces that do not match, and for deep brackets: sympy takes minutes to refuse them."""
    depth, braces = 0, 0
    for sign in _SIGN.finditer(latex):
        depth += (sign[0] in _OPENING) - (sign[0] in _CLOSING)
        braces += (sign[0] == "{") - (sign[0] == "}")
        if depth > MAX_DEPTH or braces < 0:
            return False
    return not braces


def equivalent(reference: str, answer: str) -> bool:
    """Compare two final answers: as text after `normalise`, or as mathematics.

    A point is no set and no bare list, and nothing is closed at infinity.

    Raises:
        TimeoutError: The comparison took too long.
    """
    if normalise(reference) == normalise(answer):
        return True
    if not is_readable(answer):
        return False
    for pattern in (_BASE, _UNIT_POWER):
        wanted, given = pattern.search(reference.strip()), pattern.search(answer.strip())
        if wanted and given and wanted[1] != given[1]:
            return False
    forms = form(reference), form(answer)
    if all(forms) and ("()" in forms) and ("\\{\\}" in forms):
        return False
    if bool(_CLOSED_INFINITY.search(normalise(reference))) != bool(_CLOSED_INFINITY.search(normalise(answer))):
        return False
    return verifier.shared.equal(plain_signs(reference), plain_signs(answer))
