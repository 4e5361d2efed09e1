"""One answer, its references and a score worked out by hand, for every subset, through the function its YAML names."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from kvbench.tasks import longbench

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
