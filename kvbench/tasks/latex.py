"""Compares final answers in LaTeX: as text, by their form, or as mathematics."""

import re
import unicodedata
from functools import cache

from kvbench.tasks import verifier
from kvbench.tasks.answers import GROUP

_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
# math-verify drops the base of a number system (52_8), the power of a unit (15\mbox{ cm}^2), and a relation in front
# (\neq 5).
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_RELATION = re.compile(r"\\(?:neq?|leq?(?:slant)?|geq?(?:slant)?|lt|gt)(?![a-z])|[<>]")
_NAMES = {"\\not=": "\\neq ", "\u2260": "\\neq ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2212": "-"}
_NAMES |= {"\\varnothing": "\\emptyset", "\u2205": "\\emptyset", "\u00d7": "\\times ", "\u03c0": "\\pi "}
# One half, two thirds, ...: NFKC writes a slash of its own between the two digits.
_NAMES |= {
    sign: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\u2044"))
    for sign in map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F)))
}
_ROOT = re.compile(r"\u221a\s?(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]|\\pi(?![a-z])))")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![A-Za-z])")
_PERCENT = re.compile(r"(?<!\\)%")
_COUNTED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?=\s*(?:\\text|\\mathrm|\\mbox|\\%|\s[A-Za-z]))")  # with a unit
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


def plain_symbols(latex: str) -> str:
    """Normalise symbols of LaTeX: hyphen for minus, usual names, no bracket sizes, commas between thousands."""
    for sign, name in _NAMES.items():
        latex = latex.replace(sign, name)
    latex = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", _SIZES.sub("", latex))
    latex = _RAISED.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", latex)
    latex = _GROUP.sub("", _PERCENT.sub(r"\\%", latex))
    return _COUNTED.sub(lambda number: number[0].replace(",", ""), latex)


def normalise(latex: str) -> str:
    """A light normal form for equality as text: no spaces, sizes, degrees or text commands; one kind of fraction."""
    latex = _TEXT.sub(r"\1", plain_symbols(latex).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _DEGREES.sub("", _DROPPED.sub("", latex).rstrip(".")).replace("\\%", "")


def form(latex: str) -> str:
    r"""The brackets around the several things that an answer is: `()` for a point, `(]` for an interval, ...

    `\{\}` for a set and for a bare list; empty for a single thing, and for what is made of such parts.
    """
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
    match = _ENCLOSED.fullmatch(bare)
    return match[1] + match[2] if match and commas[1] and ends == 1 else ""


def is_readable(latex: str) -> bool:
    """False for braces that do not match, and for deep brackets: sympy takes minutes to refuse them."""
    depth, braces = 0, 0
    for sign in _SIGN.finditer(latex):
        depth += (sign[0] in _OPENING) - (sign[0] in _CLOSING)
        braces += (sign[0] == "{") - (sign[0] == "}")
        if depth > MAX_DEPTH or braces < 0:
            return False
    return not braces


def _base(latex: str) -> str:
    """The base that a number names, as digits; empty without one."""
    match = _BASE.search(normalise(latex))
    return match[1] if match else ""


def _relation(latex: str) -> str:
    r"""The relation that stands in front of everything, such as `ne` for `\neq 5`; empty without one."""
    match = _RELATION.match(normalise(latex))
    return {"<": "lt", ">": "gt"}.get(match[0], match[0][1:3]) if match else ""


def equivalent(reference: str, answer: str) -> bool:
    r"""Compare two final answers: as text after `normalise`, or as mathematics.

    MATH has three published graders: Hendrycks' (equal texts in a normal form), Minerva's (sympy), and math-verify.
    A common verdict of all three is kept. Where they differ, mathematics decides.

    - `15\text{ m}` is right for `15\text{ cm}`: the first two take units off, and the third reads none. (A power of
      the unit counts here, since it says whether a length, an area or a volume was found.)
    - `x \le 2` is wrong for `(-\infty,2]`: the problems that have such answers ask for intervals. Math-verify takes
      the interval where the reference is the relation, and so does this.
    - `52` is right for `52_8`, as in math-verify: the problem names the base. `52_8` is wrong for `52`.
    - `\neq 5` is wrong for `5`, and so is any other relation; math-verify does not see one without a left side.
    - `1.41421356` is wrong for `\sqrt{2}`, and `0.333333` for a third: math-verify rounds to six decimals, by which
      .000067 would also be .0000672.
    - A point is no set and no bare list, and nothing is closed at infinity.

    Raises:
        TimeoutError: The comparison took too long.
    """
    if normalise(reference) == normalise(answer):
        return True
    if not is_readable(answer) or _relation(reference) != _relation(answer):
        return False
    if (base := _base(answer)) and base != (_base(reference) or "10"):
        return False
    wanted, got = _UNIT_POWER.search(reference.strip()), _UNIT_POWER.search(answer.strip())
    if wanted and got and wanted[1] != got[1]:
        return False
    forms = form(reference), form(answer)
    if all(forms) and ("()" in forms) and ("\\{\\}" in forms):
        return False
    if bool(_CLOSED_INFINITY.search(normalise(reference))) != bool(_CLOSED_INFINITY.search(normalise(answer))):
        return False
    return verifier.shared.equal(plain_symbols(reference), plain_symbols(answer))


def judge(reference: str, answer: str) -> bool | None:
    """See `equivalent`; None where the answer cannot be judged in time, while the reference can.

    An unneeded tower of powers or integral is an answer like others; excluding it would favour the model that writes
    it.

    Raises:
        TimeoutError: The reference cannot be judged in time either.
    """
    try:
        return equivalent(reference, answer)
    except TimeoutError:
        check_reference(reference)
        return None


@cache
def check_reference(reference: str) -> None:
    """Compare a reference with 0; raises TimeoutError where even that takes too long."""
    verifier.shared.equal(plain_symbols(reference), "0")
