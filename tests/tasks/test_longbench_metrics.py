"""ROUGE-L and classes of LongBench against plain code and the official code's quirks; the other scores are cases."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks.longbench import metrics


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
    assert metrics._common_words(wanted, predicted, metrics._places(predicted)) == common_by_table(wanted, predicted)


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
