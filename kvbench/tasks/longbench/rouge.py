"""ROUGE-L as the `rouge` package computes it, which is what LongBench's summaries are scored with.

It is not the usual ROUGE-L: words are counted as sets, and the common words of sentence pairs are united over the whole
text. The package itself is not used because its recursion fails on long sentences and it has not been maintained since
2021.
"""

from collections.abc import Callable, Sequence

import numpy as np

_NUMPY_COLUMNS = 128  # rows shorter than this are faster in plain Python


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of ROUGE-L, summary level, over distinct words.

    Text is divided at full stops only. For every sentence of the reference, the words of its longest common subsequence
    with each sentence of the prediction are collected; the share of distinct words so found in either text gives
    precision and recall.

    Args:
        prediction: Generated summary.
        reference: Reference summary.

    Returns:
        2PR / (P + R + 1e-8), in [0, 1); 0 when a text has no sentence.

    Source: rouge 1.0.1, rouge_score.py `rouge_l_summary_level` with exclusive=True, and rouge.py `Rouge.get_scores`.
    Differs: where the package would exceed Python's recursion limit (two sentences of about 1,000 words together),
    LongBench scores 0 and this scores the true value.
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common: set[str] = set()
    for sentence in wanted:
        known = set(sentence)
        # Words that the sentence lacks are on no common path, and an answer that repeats itself says little else.
        shared = dict.fromkeys(tuple(word for word in other if word in known) for other in predicted)
        for words in shared:
            common |= _common_words(sentence, words)
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space only is a sentence of one empty word, as in the package: it counts in the set of words.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common_words(wanted: Sequence[str], predicted: Sequence[str]) -> set[str]:
    """Words on one longest common subsequence: of several, the one that the package finds."""
    goes_up = _table if len(predicted) < _NUMPY_COLUMNS else _table_of_bits
    is_up = goes_up(wanted, predicted)
    words: set[str] = set()
    rows, columns = len(wanted), len(predicted)
    while rows and columns:
        if wanted[rows - 1] == predicted[columns - 1]:
            rows, columns = rows - 1, columns - 1
            words.add(wanted[rows])
        elif is_up(rows, columns):
            rows -= 1
        else:
            columns -= 1
    return words


def _table(wanted: Sequence[str], predicted: Sequence[str]) -> Callable[[int, int], bool]:
    """Which way a common subsequence goes back from a cell: up, or else left."""
    table = [[0] * (len(predicted) + 1)]
    for word in wanted:
        above, row = table[-1], [0]
        for column, other in enumerate(predicted, 1):
            row.append(above[column - 1] + 1 if word == other else max(above[column], row[-1]))
        table.append(row)
    return lambda row, column: table[row - 1][column] > table[row][column - 1]


def _table_of_bits(wanted: Sequence[str], predicted: Sequence[str]) -> Callable[[int, int], bool]:
    """The same for long answers, of which a bit for each cell is kept."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(wanted))}
    places = np.array([numbers.get(word, -1) for word in predicted])
    row = np.zeros(len(predicted) + 1, np.int32)
    ups = []
    for word in wanted:
        above = row
        row = np.zeros_like(above)
        # A cell is the largest of its left and its upper neighbour, or one more than the one before both.
        np.maximum.accumulate(np.where(places == numbers[word], above[:-1] + 1, above[1:]), out=row[1:])
        ups.append(np.packbits(above[1:] > row[:-1]))
    return lambda row, column: bool(ups[row - 1][(column - 1) >> 3] >> (7 - ((column - 1) & 7)) & 1)
