"""Metrics of `task=custom`.

Each scores a right answer 1 against itself and 0 against an empty answer, or the row is set aside (`check_answers`);
`absent` does the reverse, and `regex` refuses patterns that every text matches.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvbench.tasks.answers import visible
from kvbench.tasks.longbench.metrics import rouge

ABSENT, CHOICE, REGEX = "absent", "choice", "regex"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Another number, not another way to write one: 2 with a superscript 2 is not 22, nor 1 with a half 11/2.
_NUMBER_FORMS = ("<super>", "<sub>", "<fraction>")
_CODE_MARKS = ("`", "#", "//")
# Nothing but a pattern that every text matches finds something in both of these, negative lookarounds apart.
_TEXTS = ("", (string.printable + "".join(map(chr, range(0xA0, 0x180)))) * 8)


def plain(text: str) -> str:
    """The text in Unicode's composed form, without invisible characters."""
    return text if text.isascii() else unicodedata.normalize("NFC", visible(text))


def fold(text: str) -> str:
    """The text without case, in one Unicode form, without invisible characters.

    Full-width characters and ligatures become plain ones, and a sharp s two. The four letters i of Turkish are one,
    since case pairs them otherwise than in other languages.
    """
    if text.isascii():
        return text.lower()
    wide = (
        sign if unicodedata.decomposition(sign).startswith(_NUMBER_FORMS) else unicodedata.normalize("NFKC", sign)
        for sign in visible(text)
    )
    folded = unicodedata.normalize("NFD", "".join(wide)).casefold()
    return unicodedata.normalize("NFC", folded.replace("i\u0307", "i").replace("\u0131", "i"))


def _words(text: str, articles: str, drop: Mapping[int, int | None] = _PUNCTUATION) -> list[str]:
    """The words of a folded text without some characters, then without articles, as SQuAD orders the two."""
    bare = text.translate(drop)
    return (re.sub(rf"\b(?:{articles})\b", " ", bare) if articles else bare).split()


def compared_words(text: str, answer: str) -> tuple[list[str], list[str]]:
    """The words of both texts as `exact` and `f1` compare them: without ASCII punctuation and articles, as in SQuAD.

    A right answer that has nothing else keeps its articles, then its punctuation. In one of single letters, such as `A`
    or `B, C`, `a` is no article.
    """
    text, answer = fold(text), fold(answer)
    bare = _words(answer, "")
    letters = bool(bare) and all(len(word) == 1 and word.isalpha() for word in bare)
    for articles, drop in (("an|the" if letters else "a|an|the", _PUNCTUATION), ("", _PUNCTUATION), ("", {})):
        if wanted := _words(answer, articles, drop):
            return _words(text, articles, drop), wanted
    return text.split(), []


def exact(text: str, answer: str) -> float:
    """1 when both have the same words (`compared_words`) in the same order."""
    said, wanted = compared_words(text, answer)
    return float(said == wanted)


def f1(text: str, answer: str) -> float:
    """F1 of the bags of words (`compared_words`); 0 when they share none."""
    said, wanted = compared_words(text, answer)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def contains(text: str, answer: str) -> float:
    """1 when the answer is part of the text; case (`fold`) and the amount of white space do not matter."""
    return float(" ".join(fold(answer).split()) in " ".join(fold(text).split()))


def rouge_l(text: str, answer: str) -> float:
    """LongBench's ROUGE-L; an answer of nothing but full stops, which has no sentence, is compared unchanged."""
    text, answer = plain(text), plain(answer).strip()
    return rouge(text, answer) if answer.strip(".") else float(text == answer)


def code(text: str, answer: str) -> float:
    """Edit similarity of the first lines of code, in whole percent.

    Source: LongBench metrics.py, code_sim_score, at 2e00731.
    Differs: of an answer of several lines the first that is code counts, of the text blank lines do not count, and an
        answer whose lines all look like comments is compared with the text's first line.
    """
    from rapidfuzz import fuzz

    text, answer = plain(text), plain(answer).strip()
    wanted = _code_line(answer)
    said, wanted = (_code_line(text), wanted) if wanted else (_code_line(text, ()), _code_line(answer, ()))
    return round(fuzz.ratio(said, wanted)) / 100 if said and wanted else 0.0


def _code_line(text: str, marks: Sequence[str] = _CODE_MARKS) -> str:
    return next((line for line in text.split("\n") if line.strip() and not any(mark in line for mark in marks)), "")


def regex(text: str, answer: str) -> float:
    """1 when the pattern is found in the text; both are in Unicode's composed form."""
    return float(re.search(unicodedata.normalize("NFC", answer), unicodedata.normalize("NFC", text)) is not None)


SCORES: dict[str, tuple[Callable[[str, str], float], str]] = {
    "exact": (exact, "the answer is one of the right ones, but for case, articles and punctuation"),
    "contains": (contains, "one of the right answers stands in the text"),
    "contains_all": (contains, "share of the right answers that stand in the text"),
    "f1": (f1, "F1 of words with the nearest right answer, as in SQuAD and LongBench"),
    "rouge_l": (rouge_l, "ROUGE-L F with the nearest right answer, as in LongBench"),
    ABSENT: (
        lambda text, answer: 1.0 - contains(text, answer),
        "none of the texts stands in the answer, as of a secret",
    ),
    "code": (code, "edit similarity of the first line of code, as in LongBench; nothing is run"),
    REGEX: (regex, "one of the regular expressions is found in the text"),
}
CHOICE_MEANING = "the right choice has the highest log-likelihood"
METRICS = (*SCORES, CHOICE)


def grade(metric: str, text: str, answers: Sequence[str]) -> float:
    """Score a text without its thoughts: the best over the answers.

    For `contains_all` the mean, for `absent` the worst.
    """
    values = [SCORES[metric][0](text.strip(), answer) for answer in answers]
    if metric == ABSENT:
        return min(values)
    return sum(values) / len(values) if metric == "contains_all" else max(values)


def check_answers(metric: str, answers: Sequence[str]) -> None:
    """Check that a metric distinguishes each right answer from an empty one.

    Raises:
        ValueError: It does not, or a regular expression is none.
    """
    for answer in answers if metric != CHOICE else ():
        if metric == REGEX:
            _check_pattern(answer)
        elif abs(grade(metric, answer, [answer]) - grade(metric, "", [answer])) < 1 - 1e-6:
            raise ValueError(
                f"field answers has {answer[:40]!r}, which metric={metric} cannot tell from an empty answer; take "
                "another metric for this row"
            )


def _check_pattern(pattern: str) -> None:
    try:
        compiled = re.compile(unicodedata.normalize("NFC", pattern))
    except re.error as error:
        raise ValueError(f"field answers has no regular expression: {error}") from error
    if all(map(compiled.search, _TEXTS)) and not re.search(r"\(\?<?!", pattern):
        raise ValueError(
            f"field answers has the regular expression {pattern[:40]!r}, which is found in every text, the empty one "
            "included; write one that needs a character"
        )
