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
    # An answer that repeats itself has few different sentences.
    different = {words: _places(words) for words in dict.fromkeys(map(tuple, predicted))}
    for sentence in wanted:
        known = set(sentence)
        for words, places in different.items():
            # Most pairs of a long answer have no word that another pair has not found already.
            if not (known & places.keys()) <= common:
                common |= _common_words(sentence, words, places)
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space only is a sentence of one empty word, as in the package: it counts in the set of words.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _places(words: Sequence[str]) -> dict[str, list[int]]:
    """The places of each word."""
    places: dict[str, list[int]] = {}
    for place, word in enumerate(words):
        places.setdefault(word, []).append(place)
    return places


def _common_words(wanted: Sequence[str], predicted: Sequence[str], places: dict[str, list[int]]) -> set[str]:
    """Words on one longest common subsequence: of several, the one that the package finds.

    The usual table of lengths is never written. Of its row for the first words of `wanted`, an integer has bit j where
    the length grows with word j of `predicted`; the next row follows by one addition, whose carry moves each growth to
    the first match before it.

    Args:
        wanted: A sentence of the reference.
        predicted: A sentence of the prediction.
        places: Where each word of `predicted` stands in it.

    Source: Hyyro, "Bit-parallel LCS-length computation revisited", AWOCA 2004, for the addition.
    Differs: the rows are kept, to go back through them. At a mismatch the package goes up where the length above is
        greater than the one to the left, which is where it grows in both rows.
    """
    matches = {word: sum(1 << place for place in places.get(word, ())) for word in set(wanted)}
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
