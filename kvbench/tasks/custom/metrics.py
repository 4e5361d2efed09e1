"""The scores that a file of the user's own can be graded by, each in [0, 1]."""

import re
from collections.abc import Callable, Sequence

from kvbench.tasks.longbench.metrics import code_similarity, normalize_answer, qa_f1, rouge


def exact(text: str, answer: str) -> float:
    """1 when both are the same, but for case, articles, ASCII punctuation and white space."""
    return float(normalize_answer(text) == normalize_answer(answer))


def contains(text: str, answer: str) -> float:
    """1 when the answer stands in the text, whatever case and white space."""
    return float(" ".join(answer.split()).casefold() in " ".join(text.split()).casefold())


def regex(text: str, answer: str) -> float:
    """1 when the regular expression is found anywhere in the text."""
    return float(re.search(answer, text) is not None)


SCORES: dict[str, tuple[Callable[[str, str], float], str]] = {
    "exact": (exact, "the answer is one of the right ones, but for case, articles and punctuation"),
    "contains": (contains, "one of the right answers stands in the text"),
    "contains_all": (contains, "share of the right answers that stand in the text"),
    "f1": (qa_f1, "F1 of words with the nearest right answer, as in SQuAD and LongBench"),
    "rouge_l": (rouge, "ROUGE-L F with the nearest right answer, as in LongBench"),
    "code": (code_similarity, "edit similarity of the first line of code, as in LongBench; nothing is run"),
    "regex": (regex, "one of the regular expressions is found in the text"),
}
CHOICE_MEANING = "the right choice has the highest log-likelihood"
METRICS = (*SCORES, "choice")


def grade(metric: str, text: str, answers: Sequence[str]) -> float:
    """Score a text: the best over the answers, for `contains_all` the mean.

    Args:
        metric: A name of `SCORES`.
        text: What the model wrote, without its thoughts.
        answers: At least one.
    """
    values = [SCORES[metric][0](text.strip(), answer) for answer in answers]
    return sum(values) / len(values) if metric == "contains_all" else max(values)
