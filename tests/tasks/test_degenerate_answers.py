"""Answers as a broken cache writes them: graders read them in time that grows with their length, and none raises.

KVBENCH_DEGENERATE=1 takes 10,000 answers and texts of a million characters. Otherwise texts have 20,000, and the
exhaustive run takes a hundred answers for each grader, the default run 40.
"""

import os
import random
import time

import pytest
from selection import FULL

from kvbench.tasks import aime, custom, gsm8k, longctx
from kvbench.tasks import mathematics as maths
from kvbench.tasks.answers import after_thinking, last_boxed, to_number
from kvbench.tasks.longbench import metrics as longbench

LONG = os.environ.get("KVBENCH_DEGENERATE") == "1"
SIZES = (1_000, 30_000, 1_000_000) if LONG else (20_000,)
NUM_ANSWERS = 10_000 if LONG else 100 if FULL else 40
FRAGMENTS = [*"\n \t\xa07-.$*:#`{}\\([^"]
FRAGMENTS += "1,|1{,}|{,}000|\u2212 |$$|\\$|**|\\boxed{|\\boxed |\\boxed|\\boxed{}|\\{|\\(|\\[|\\)|####".split("|")
FRAGMENTS += "#### |answer|answer is |The answer is|final answer:|about|Answer:\n|1 + |1+1=|x = |/2|\\frac{".split("|")
FRAGMENTS += "\\text{|\\text{ or }|\\pmod{|(mod 7|\\equiv|^\\circ|<think>|</think>|the |the. ".split("|")
FRAGMENTS += [":\n", "\\begin{align*}", "\\end{align*}", "\\begin{aligned}\n1 &= 2 \\\\\n", "$1$ or ", "7 people "]
FRAGMENTS += ["Answer\n", "\u221a(", "\u00e9", "\u00df"]
STARTS = ("", "The answer is", "**Answer:**", "#### ", "\\boxed{", "$")
REFERENCE = "The report says that the answer is 7. It was about the number of the house. "
QA = {"answers": [REFERENCE], "all_classes": ["Answer", "the answer", "number"]}
GRADERS = {
    "thoughts": after_thinking,
    "box": last_boxed,
    "number": to_number,
    "gsm8k": lambda text: gsm8k.grade("7", text, last=True),
    "custom": lambda text: [custom.grade(name, text, ["the answer is 7."]) for name in custom.METRICS[:-1]],
    "aime": lambda text: (aime.grade("70", text), aime.Aime(name="aime24").vote(text, False)),
    "math": lambda text: (maths.grade("\\frac{7}{2}", text), maths.Math500(name="math500").vote(text, False)),
    "qa": lambda text: longbench.score_qa_f1(QA, [text]),
    "rouge": lambda text: longbench.score_rouge(QA, [text]),
    "count": lambda text: longbench.score_count({"answers": ["7"], "all_classes": None}, [text]),
    "classes": lambda text: longbench.score_first_line_classification(QA, [text]),
    "code": lambda text: longbench.score_code_similarity(QA, [text]),
    "recall": lambda text: longctx.recall_score(text, REFERENCE),
    "figure": lambda text: longctx.number_score(text, "7"),
}


def cpu_s(grader, text: str) -> float:
    """Processor time of one grading."""
    start = time.process_time()
    grader(text)
    return time.process_time() - start


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("name", GRADERS)
def test_time_grows_with_the_length(name: str) -> None:
    """Every fragment, repeated, behind every start. What took quadratic time needed minutes for the longest of these;
    the bound is generous, for machines that do much else."""
    for fragment in FRAGMENTS:
        for start in STARTS if LONG else STARTS[:2]:
            for size in SIZES:
                text = start + fragment * (size // len(fragment))
                spent = cpu_s(GRADERS[name], text)
                assert spent < 1 + size / 100_000, (start, fragment, size, spent)


@pytest.mark.parametrize("name", ["gsm8k", "aime", "math", "rouge"])
def test_no_degenerate_answer_raises(name: str) -> None:
    """Fragments in any order, each repeated up to a hundred times: no grader raises."""
    made, slowest = random.Random(7), 0.0
    for _ in range(NUM_ANSWERS):
        parts = [made.choice(FRAGMENTS) * made.choice((1, 1, 1, 2, 5, 100)) for _ in range(made.randint(1, 30))]
        slowest = max(slowest, cpu_s(GRADERS[name], "".join(parts)))
    assert slowest < 1
