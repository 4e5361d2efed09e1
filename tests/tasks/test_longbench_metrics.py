"""LongBench's scores: one answer and its score worked out by hand, through the function that the YAML of each subset
names; ROUGE-L and classes against plain code and the official code's quirks."""

import random
import re
import time
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks import longbench
from kvbench.tasks.longbench import metrics

FOLDER = Path(longbench.__file__).parent
FOOD = ["Food", "Date", "Animal"]
# Subset, answer, references, score. Words of question answering are compared after lower case, without punctuation and
# a, an, the; F = 2PR / (P + R).
CASES = [
    ("qasper", "\nParis", ["Paris"], 1),
    ("qasper", "Paris, France", ["Paris"], 2 / 3),  # P 1/2, R 1
    ("qasper", "No, it is not", ["No"], 0.4),  # P 1/4, R 1
    ("qasper", "The 3.5 million", ["3.5 million"], 1),  # the full stop goes: 35 million
    ("qasper", "3,000", ["3000"], 1),
    ("qasper", "x x y", ["x y y"], 2 / 3),  # one x and one y are common
    ("qasper", "Bob", ["Bob Dylan"], 2 / 3),  # P 1, R 1/2
    ("qasper", "Bob Bob", ["Bob Dylan"], 1 / 2),  # the second Bob finds no partner: P 1/2, R 1/2
    ("qasper", "Bob Bob Dylan", ["Bob Dylan Bob"], 1),  # order does not count
    ("qasper", "the Bob, Dylan!", ["Bob Dylan"], 1),
    ("qasper", "", ["Bob"], 0),
    ("qasper", "the", ["a"], 0),  # both are empty after normalisation
    ("qasper", "can't", ["cant"], 1),  # punctuation goes before words are divided
    ("qasper", "well-known", ["well known"], 0),
    ("qasper", "theatre", ["atre"], 0),  # articles are whole words
    ("qasper", "bob dylan", ["x", "Bob Dylan", "Bob"], 1),  # the best reference counts, whatever their order
    ("qasper_e", "Unanswerable.", ["unanswerable"], 1),
    ("narrativeqa", "in the box", ["on the mat", "in a box"], 1),  # the best reference counts
    ("narrativeqa", "b c d", ["b c"], 0.8),  # P 2/3, R 1
    ("multifieldqa_en", "It's 5km", ["5 km"], 0),
    ("multifieldqa_en_e", "U.S.", ["US"], 1),
    ("hotpotqa", "Barack  Obama\n\nQuestion", ["Barack Obama"], 0.8),  # the whole answer counts: P 2/3, R 1
    ("hotpotqa_e", "\n\nBarack Obama", ["Barack Obama"], 1),
    ("2wikimqa", "Yes.", ["yes"], 1),
    ("2wikimqa_e", "no", ["yes"], 0),
    ("musique", "", ["x"], 0),
    ("musique", "an x the y", ["x y"], 1),
    ("triviaqa", "Barack Obama\nQuestion: who?", ["Barack Obama"], 1),  # the first line only
    ("triviaqa", "\n\nBarack Obama\nx", ["Barack Obama"], 1),  # behind leading line breaks
    ("triviaqa", "Answer:\nBarack Obama", ["Barack Obama"], 0),
    ("triviaqa_e", " \nBarack Obama", ["Barack Obama"], 0),  # a line of one space is a line
    ("trec", "\nFood", ["Food"], 1),
    ("trec", "Type: Food\nType: Date", ["Food"], 1),
    ("trec", "Date or Food", ["Food"], 1 / 2),
    ("trec_e", "Food, Date, Animal", ["Food"], 1 / 3),
    ("trec_e", " \nFood", ["Food"], 0),
    ("trec", "food", ["Food"], 0),
    ("trec", "", ["Food"], 0),
    ("samsum", "\nAmy bakes.\nDialogue: x", ["Amy bakes"], 1),
    ("samsum", "Amy", ["Amy bakes cookies"], 0.5),  # P 1, R 1/3
    ("samsum", "Amy\nbakes cookies", ["Amy bakes cookies"], 0.5),  # the first line only
    ("samsum_e", "bakes Amy", ["Amy bakes"], 0.5),  # the longest common subsequence has one word
    ("gov_report", "Amy\nbakes cookies", ["Amy bakes cookies"], 1),  # all lines; white space is one space
    ("gov_report_e", "x", ["y"], 0),
    ("qmsum", "a b c d e", ["a c e"], 0.75),  # P 3/5, R 1
    ("multi_news", "the cat sat. on the mat", ["the cat sat on the mat"], 1),  # subsequences are united
    ("multi_news_e", "", ["x y"], 0),
    ("passage_count", "There are 7 unique paragraphs", ["7"], 1),
    ("passage_count", "7 paragraphs; 30 in total", ["7"], 1 / 2),
    ("passage_count_e", "seven", ["7"], 0),
    ("passage_count_e", "17", ["7"], 0),
    ("passage_count", "07", ["7"], 0),  # compared as text
    ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1),
    ("passage_retrieval_en", "12, 3, 12", ["Paragraph 12"], 2 / 3),
    ("passage_retrieval_en_e", "Paragraph 1", ["Paragraph 12"], 0),
    ("passage_retrieval_en", "Paragraph 33", ["Paragraph 3"], 0),
    ("passage_retrieval_en", "three", ["Paragraph 3"], 0),
    ("passage_retrieval_en", "3, 3 and 3", ["Paragraph 3"], 1),
    # Code: the first line without back-tick, # or //, by the indel ratio 2 * common / (both lengths), in whole percent.
    ("lcc", "x = 1\ny = 2", ["x = 1"], 1),
    ("lcc", "\n\n\nx = 1", ["x = 1"], 1),
    ("lcc", "\n   \nx = 1", ["x = 1"], 0.5),  # a line of three spaces is a line: 2 * 2 / (3 + 5)
    ("lcc", "x = 1  # no\nx = 2", ["x = 2"], 1),
    ("lcc", "`x`\nreturn", ["return"], 1),
    ("lcc", "abc", ["abd"], 0.67),  # 2 * 2 / 6
    ("lcc_e", "    x", ["x"], 0.33),  # 2 * 1 / 6
    ("lcc", "    x = 1", ["    x = 1"], 1),  # indentation is part of a line of code: nothing is stripped
    ("lcc", "x = 1", ["    x = 1"], 0.71),  # 2 * 5 / 14
    ("lcc", "  \n    return x\n", ["    return x"], 0.29),  # a blank line is a line: 2 * 2 / (2 + 12), rounded
    ("lcc", "# no\n```\n// no\nreturn x", ["return x"], 1),
    ("lcc", "# only a comment", ["return x"], 0),
    ("lcc", "", [""], 1),
    ("lcc", "abcd", ["abxd"], 0.75),  # indel: 3 common of 4 + 4
    ("lcc", "abcdefg", ["a"], 0.25),
    ("lcc", "aabbb", ["ab"], 0.57),  # 4/7 in whole percent
    ("lcc_e", "", ["x"], 0),
    ("repobench-p", "return self.x", ["return self.y"], 0.92),  # 2 * 12 / 26
    ("repobench-p", "// why\nfoo()", ["foo();"], 0.91),  # 2 * 5 / 11
    ("repobench-p_e", "ab", ["ba"], 0.5),
    ("repobench-p_e", "QQabc", ["aXbXcQQ"], 0.5),  # 2 * 3 / 12; difflib finds QQ only and says 0.33
]


def scorer(subset: str):
    """The function that the subset's YAML names."""
    text = (FOLDER / f"{subset}.yaml").read_text()
    found = re.search(r"process_results: !function (\S+)\.(\w+)", text)
    if found is None:  # the -E variants include their subset
        return scorer(re.search(r"include: (\S+)\.yaml", text)[1])
    return getattr(import_module(found[1]), found[2])


@pytest.mark.parametrize(("subset", "answer", "references", "expected"), CASES)
def test_score_by_hand(subset: str, answer: str, references: list[str], expected: float) -> None:
    """The score of one answer is the one worked out by hand."""
    doc = {"answers": references, "all_classes": FOOD if subset.startswith("trec") else None}
    assert scorer(subset)(doc, [answer])["score"] == pytest.approx(expected, abs=1e-7)


def test_every_subset_has_a_case() -> None:
    """16 English subsets and 13 of LongBench-E, at least 50 cases."""
    assert {case[0] for case in CASES} == {*longbench.ENGLISH, *longbench.LONGBENCH_E}
    assert len(CASES) >= 50


@pytest.mark.parametrize(
    ("prediction", "reference", "common", "num_predicted", "num_wanted"),
    [
        ("a b c", "a b c", 3, 3, 3),
        ("a b c d", "a c", 2, 4, 2),
        ("a a a b", "a b", 2, 2, 2),  # words are a set
        ("c b a", "a b c", 1, 3, 3),  # order counts inside a sentence
        ("a b. c d", "c d. a b", 4, 4, 4),  # but not between sentences
        ("a x b. a y c", "a b c", 3, 5, 3),  # common words of several sentences are united
        ("a b. ", "a b", 2, 3, 2),  # white space behind a full stop is an empty word, as in the package
    ],
)
def test_rouge(prediction: str, reference: str, common: int, num_predicted: int, num_wanted: int) -> None:
    """ROUGE-L of the `rouge` package from counts made by hand."""
    precision, recall = common / num_predicted, common / num_wanted
    assert metrics.rouge(prediction, reference) == pytest.approx(2 * precision * recall / (precision + recall + 1e-8))


def test_rouge_takes_the_subsequence_that_the_package_takes() -> None:
    """Of two longest common subsequences the words differ, and later sentences make that visible in the score."""
    # "a" and "b" are both longest for reference "a b" and prediction "b a". On a tie the package drops the last word of
    # the prediction first and so finds "b". A second sentence adds to that only if it holds the other word.
    assert metrics.rouge("b a", "a b") == pytest.approx(2 * 0.25 / (1 + 1e-8))
    assert metrics.rouge("b a.b", "a b") == pytest.approx(metrics.rouge("b a", "a b"))
    assert metrics.rouge("b a.a", "a b") == pytest.approx(2 / (2 + 1e-8))


@pytest.mark.parametrize("text", ["", "...", "."])
def test_rouge_of_nothing_is_zero(text: str) -> None:
    """The package raises there, and LongBench counts 0."""
    assert metrics.rouge(text, "a b") == 0.0
    assert metrics.rouge("a b", text) == 0.0


def common_by_table(wanted: list[str], predicted: list[str]) -> set[str]:
    """Words of the longest common subsequence that the package takes, from the table of lengths."""
    table = [[0] * (len(predicted) + 1)]
    for word in wanted:
        above, row = table[-1], [0]
        for column, other in enumerate(predicted, 1):
            row.append(above[column - 1] + 1 if word == other else max(above[column], row[-1]))
        table.append(row)
    words, row, column = set(), len(wanted), len(predicted)
    while row and column:
        if wanted[row - 1] == predicted[column - 1]:
            row, column = row - 1, column - 1
            words.add(wanted[row])
        elif table[row - 1][column] > table[row][column - 1]:
            row -= 1
        else:
            column -= 1
    return words


@settings(max_examples=300)
@given(st.lists(st.sampled_from("abcdefgh"), max_size=40), st.lists(st.sampled_from("abcdefghxy"), max_size=70))
def test_common_words_are_those_of_the_table(wanted: list[str], predicted: list[str]) -> None:
    """Of several longest common subsequences, the one whose way back the plain table shows, ties and all."""
    assert metrics._common_words(wanted, predicted, metrics._positions(predicted)) == common_by_table(wanted, predicted)


@settings(max_examples=150)
@given(st.text("abc .", max_size=80), st.text("abcd .", max_size=80))
def test_rouge_is_that_of_every_pair_of_sentences(prediction: str, reference: str) -> None:
    """Pairs that are left out, because they can add nothing, change no score."""
    predicted, wanted = (
        [piece.split() or [""] for piece in text.split(".") if piece] for text in (prediction, reference)
    )
    common = set().union(*(common_by_table(one, other) for one in wanted for other in predicted))
    if predicted and wanted:
        precision, recall = (len(common) / len(set().union(*text)) for text in (predicted, wanted))
        expected = 2 * precision * recall / (precision + recall + 1e-8)
    assert metrics.rouge(prediction, reference) == (expected if predicted and wanted else 0.0)


def test_time_of_rouge_is_bounded() -> None:
    """32,000 words that are all in a reference of 2,000, in short, long and one sentence, take a second at most."""
    rng = random.Random(0)
    wanted = ". ".join(" ".join(f"w{rng.randrange(400)}" for _ in range(40)) for _ in range(50))
    for size in (8, 130, 32_000):
        answer = ". ".join(" ".join(f"w{rng.randrange(400)}" for _ in range(size)) for _ in range(32_000 // size))
        for reference in (wanted, wanted.replace(".", "")):
            begin = time.process_time()
            assert metrics.rouge(answer, reference) > 0.5
            assert time.process_time() - begin < 1


def test_rouge_of_sentences_too_long_for_the_package() -> None:
    """A sentence beyond Python's recursion limit is scored, not failed."""
    text = " ".join(f"w{place}" for place in range(1500))
    assert metrics.rouge(text, text) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prediction", "reference", "classes", "expected"),
    [
        ("Other location", "Other location", ["location", "Other location"], 1.0),  # the part is taken out
        ("Other location", "location", ["location", "Other location"], 0.5),  # the whole is not
        # Both "a" and "b" are parts of "ab", but the loop skips "b" after it took "a" out: 1 of 2 names is right.
        ("ab", "ab", ["a", "b", "ab"], 0.5),
    ],
)
def test_classification(prediction: str, reference: str, classes: list[str], expected: float) -> None:
    """Share of the right class among the names found, with the official loop's skip."""
    assert metrics.classification(prediction, reference, classes) == expected


def test_retrieval_needs_a_numbered_reference() -> None:
    """A reference without a number is a fault of the data, not a score of 0."""
    with pytest.raises(ValueError, match="Paragraph 1"):
        metrics.retrieval("3", "the third")
