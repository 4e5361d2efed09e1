"""The official LongBench scores, each in [0, 1].

Written from the official definitions, quirks included, because published numbers have them. lm-eval's LongBench
differs: it strips predictions, skips blank code lines and stops at the first newline.

Source: LongBench metrics.py and eval.py at 2e00731.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

# The form of passage_retrieval_en's references.
REFERENCE = re.compile(r"Paragraph (\d+)")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, then extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def qa_f1(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """F1 of the bags of normalised words; 0 when they share none (also when both are empty)."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(reference).split()
    num_common = sum((Counter(predicted) & Counter(wanted)).values())
    if not num_common:
        return 0.0
    precision, recall = num_common / len(predicted), num_common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F of the `rouge` package: 2PR / (P + R + 1e-8), and 0 when either text has nothing but full stops.

    It is not the usual ROUGE-L. Text is divided at full stops only. For every sentence of the reference, the words of
    its longest common subsequence with each sentence of the prediction are collected; the share of distinct words so
    found in either text gives precision and recall. The package itself is not used because its recursion fails on long
    sentences and it has not been maintained since 2021.

    Source: rouge 1.0.1, rouge_score.py `rouge_l_summary_level` with exclusive=True, and rouge.py `Rouge.get_scores`.
    Differs: where the package would exceed Python's recursion limit (two sentences of about 1,000 words together),
    LongBench scores 0 and this scores the true value.
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common: set[str] = set()
    # An answer that repeats itself has few different sentences.
    different = {words: _positions(words) for words in dict.fromkeys(map(tuple, predicted))}
    for sentence in wanted:
        known = set(sentence)
        for words, positions in different.items():
            # Most pairs of a long answer have no word that another pair has not found already.
            if not (known & positions.keys()) <= common:
                common |= _common_words(sentence, words, positions)
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space only is a sentence of one empty word, as in the package: it counts in the set of words.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _positions(words: Sequence[str]) -> dict[str, list[int]]:
    """The places of each word."""
    positions: dict[str, list[int]] = {}
    for index, word in enumerate(words):
        positions.setdefault(word, []).append(index)
    return positions


def _common_words(wanted: Sequence[str], predicted: Sequence[str], positions: dict[str, list[int]]) -> set[str]:
    """Words on one longest common subsequence: of several, the one that the package returns.

    `positions` has where each word of `predicted` occurs in it.

    The usual table of lengths is never written. Of its row for the first words of `wanted`, an integer has bit j where
    the length grows with word j of `predicted`; the next row follows by one addition, whose carry moves each growth to
    the first match before it.

    Source: Hyyro, "Bit-parallel LCS-length computation revisited", AWOCA 2004, for the addition.
    Differs: the rows are kept, to go back through them. At a mismatch the package goes up where the length above is
        greater than the one to the left, which is where it grows in both rows.
    """
    matches = {word: sum(1 << index for index in positions.get(word, ())) for word in set(wanted)}
    whole = (1 << len(predicted)) - 1
    still, grows, ups = whole, 0, []
    for word in wanted:
        held = still & matches[word]
        still = ((still + held) | (still - held)) & whole
        above, grows = grows, whole ^ still
        ups.append(above & grows)
    words: set[str] = set()
    rows, columns = len(wanted), len(predicted)
    while rows and columns:
        if wanted[rows - 1] == predicted[columns - 1]:
            rows, columns = rows - 1, columns - 1
            words.add(wanted[rows])
        elif ups[rows - 1] >> (columns - 1) & 1:
            rows -= 1
        else:
            columns -= 1
    return words


def classification(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """1 / (number of class names in the answer) when the right one is among them, else 0.

    Class names that are a proper part of the right one are taken out first. The official code does so while it walks
    the same list, which skips the name after each one taken out; published scores contain that, so it is kept.
    """
    names = [name for name in all_classes or () if name in prediction]
    index = 0
    while index < len(names):
        if names[index] in reference and names[index] != reference:
            # Python's loop over the list moves on although the list has moved up. `remove` takes the first equal entry.
            names.remove(names[index])
        index += 1
    return 1.0 / len(names) if reference in names else 0.0


def retrieval(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the answer that are the paragraph's number; 0 when there are none."""
    wanted = REFERENCE.search(reference)
    if wanted is None:
        raise ValueError(f"the reference {reference!r} is not of the form 'Paragraph 1'")
    return _share_of_numbers(prediction, wanted[1])


def count(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """Share of the numbers in the answer that are the reference; 0 when there are none."""
    return _share_of_numbers(prediction, reference)


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, all_classes: Sequence[str] | None = None) -> float:
    """Edit similarity of the first line of code, in whole percent.

    Leading line breaks are dropped; then the first line without a back-tick, `#` or `//` counts, even when it is blank.

    Differs: the official `fuzz.ratio` of fuzzywuzzy gives the indel ratio with python-Levenshtein installed and
    difflib's ratio without; this is always the indel ratio.
    """
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return float(line == reference)
    return round(fuzz.ratio(line, reference)) / 100


def first_line(prediction: str) -> str:
    """The first line after leading line breaks: the official rule for trec, triviaqa and samsum."""
    return prediction.lstrip("\n").split("\n")[0]


def _scorer(
    metric: Callable[..., float], cut: Callable[[str], str] = str
) -> Callable[[dict, list[str]], dict[str, float]]:
    """Score a sample for lm-eval: the best score over all references of the document."""

    def process(doc: dict, results: list[str]) -> dict[str, float]:
        prediction = cut(results[0])
        return {"score": max(metric(prediction, reference, doc["all_classes"]) for reference in doc["answers"])}

    return process


# The names that the YAMLs refer to.
score_qa_f1 = _scorer(qa_f1)
score_rouge = _scorer(rouge)
score_retrieval = _scorer(retrieval)
score_count = _scorer(count)
score_code_similarity = _scorer(code_similarity)
score_first_line_qa_f1 = _scorer(qa_f1, first_line)
score_first_line_rouge = _scorer(rouge, first_line)
score_first_line_classification = _scorer(classification, first_line)
