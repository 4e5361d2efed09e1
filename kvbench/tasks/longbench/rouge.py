"""ROUGE-L as the `rouge` package computes it, which is what LongBench's summaries are scored with.

It is not the usual ROUGE-L: words are counted as sets, and the common words of sentence pairs are united over the whole
text. The package itself is not used because its recursion fails on long sentences and it has not been maintained since
2021.
"""

from collections.abc import Sequence


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
        for other in predicted:
            common |= _common_words(sentence, other)
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space only is a sentence of one empty word, as in the package: it counts in the set of words.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common_words(wanted: Sequence[str], predicted: Sequence[str]) -> set[str]:
    """Words on one longest common subsequence: of several, the one that the package finds."""
    rows, columns = len(wanted), len(predicted)
    table = [[0] * (columns + 1)]
    for word in wanted:
        above, row = table[-1], [0]
        for column, other in enumerate(predicted, 1):
            row.append(above[column - 1] + 1 if word == other else max(above[column], row[-1]))
        table.append(row)
    words: set[str] = set()
    while rows and columns:
        if wanted[rows - 1] == predicted[columns - 1]:
            rows, columns = rows - 1, columns - 1
            words.add(wanted[rows])
        elif table[rows - 1][columns] > table[rows][columns - 1]:
            rows -= 1
        else:
            columns -= 1
    return words
