"""Every reference answer of GSM8K, MATH-500 and AIME at hand, against itself and against perturbed ones.

The files are not part of the repository; where they are absent, a skip says how to get them. KVBENCH_ALL_GOLD=1 takes
all rows; otherwise the exhaustive run takes a fifth of MATH-500, and the default run a fifteenth.
"""

import json
import os
import re
import threading

import pytest
from places import DATA, need_data
from selection import FULL

from kvbench.tasks import aime, gsm8k
from kvbench.tasks import mathematics as maths
from kvbench.tasks.latex import equivalent, judge
from kvbench.tasks.verifier import Verifier

ALL = os.environ.get("KVBENCH_ALL_GOLD") == "1"
STEP = 1 if ALL else 5 if FULL else 15


def rows_of(file: str, check) -> list[dict]:
    """The checked rows of one file of the benchmark data."""
    return [check(json.loads(line)) for line in (DATA / file).read_bytes().split(b"\n") if line]


@pytest.mark.parametrize(
    "split", [pytest.param(split, marks=need_data(f"gsm8k/{split}.jsonl")) for split in ("train", "test")]
)
def test_gsm8k_gold_answers(split: str) -> None:
    """All of a split: the reference in the words of each form is right, and off by one, ten-fold or negated wrong."""
    rows = rows_of(f"gsm8k/{split}.jsonl", gsm8k.check_row)
    assert len(rows) >= 900
    right, wrong = {"correct": 1.0, "parsed": 1.0}, {"correct": 0.0, "parsed": 1.0}
    for row in rows:
        answer = row["answer"]
        for form in ("cot8", "fewshot5", "zeroshot"):
            text = gsm8k._gold(form, row)
            assert gsm8k.grade(answer, text, last=form == "zeroshot") == right, text
        number = int(answer.replace(",", ""))
        for other in {number + 1, number * 10 or 1, -number or 2, number - 1}:
            for text in (f"It is {answer}.\n#### {other:,}", f"{answer}... The answer is {other}."):
                assert gsm8k.grade(answer, text, last=True) == wrong, (answer, text)
            assert gsm8k.grade(answer, f"so {other}", last=True) == wrong | {"fallback": 1.0}, (answer, other)


def perturbed(answer: str) -> list[str]:
    """Answers near a right one: every number in it one larger, a sign put in front, something added."""
    others = [
        answer[: found.start()] + str(int(found.group()) + 1) + answer[found.end() :]
        for found in re.finditer(r"\d+", answer)
    ]
    if re.fullmatch(r"-?[\d.,]*[1-9][\d.,]*", answer):
        others.append(answer[1:] if answer.startswith("-") else f"-{answer}")
    if not others:
        others.append("\\text{no}" if "\\text" in answer else f"{answer}+1")
    return others


@need_data("math500/test.jsonl")
def test_math_gold_answers() -> None:
    """The reference in a box and its whole solution are right; no perturbed answer is."""
    rows = rows_of("math500/test.jsonl", maths.check_row)[::STEP]
    right, count = {"correct": 1.0, "parsed": 1.0}, 0
    for row in rows:
        answer = row["answer"]
        assert maths.grade(answer, f"Therefore $\\boxed{{{answer}}}$.") == right, answer
        assert maths.grade(answer, row["solution"]) == right, answer
        for other in perturbed(answer):
            count += 1
            assert maths.grade(answer, f"$\\boxed{{{other}}}$") == {"correct": 0.0, "parsed": 1.0}, (answer, other)
    assert count >= len(rows)
    print(f"{len(rows)} answers, {count} perturbed ones")


@need_data("aime24/test.jsonl")
def test_aime_gold_answers() -> None:
    """All problems: the reference is right with and without leading zeros, its neighbours are wrong."""
    for row in rows_of("aime24/test.jsonl", aime.check_row):
        value = int(row["answer"])
        assert aime.grade(row["answer"], f"\\boxed{{{value:03d}}}") == {"correct": 1.0, "parsed": 1.0}
        for other in (value + 1, value - 1, value * 10 + 1):
            assert aime.grade(row["answer"], f"\\boxed{{{other}}}") == {"correct": 0.0, "parsed": 1.0}


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("\\frac{1}{2}", "0.5"),
        ("\\frac12", "\\dfrac{1}{2}"),
        ("(1,2)", "(1, 2)"),
        ("[0,1)", "\\left[0,1\\right)"),
        ("x^2+2x+1", "(x+1)^2"),
        ("10\\%", "10"),
        ("\\$5.50", "5.50"),
        ("\\text{Evelyn}", "Evelyn"),
        ("90^\\circ", "90"),
        ("52_8", "52_{8}"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("10,080", "10080"),
        ("-2,1", "\\{1,-2\\}"),
        ("-3", "\u22123"),
        ("2000", "2{,}000"),
        ("2000", "2\u202f000"),
        ("36", "\\$36"),
        ("(2,\\infty)", "x \\in (2, \\infty)"),
        ("15\\text{ cm}", "15\\text{ m}"),
        ("52_8", "52"),
        ("52", "52_{10}"),
        ("x \\le 2", "(-\\infty,2]"),
        ("x \\neq 5", "x \u2260 5"),
        ("5.4", "\\frac{27}{5}"),
    ],
)
def test_math_equal_forms(reference: str, answer: str) -> None:
    """The same answer in other words is right, in the main thread and in another."""
    assert equivalent(reference, answer)
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(equivalent(reference, answer)))
    thread.start()
    thread.join()
    assert verdicts == [True]


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("p - q", "q - p"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "[0,1]"),
        ("52_8", "52_9"),
        ("15\\mbox{ cm}^2", "15\\mbox{ cm}^3"),
        ("\\frac{1}{2}", "\\frac{2}{1}"),
        ("\\text{even}", "\\text{odd}"),
        ("3", ""),
        ("3", "\\frac{"),
        ("(-2,1)", "\\{-2,1\\}"),
        ("(-2,1)", "-2,1"),
        ("\\{-2,1\\}", "(-2,1)"),
        ("(2,\\infty)", "(2,\\infty]"),
        ("(-\\infty,2]", "[-\\infty,2]"),
        ("5", "\\neq 5"),
        ("5", "\\not= 5"),
        ("5", "\\leq 5"),
        ("\\neq 5", "\\ge 5"),
        ("52", "52_8"),
        ("\\sqrt{2}", "1.41421356"),
        ("\\frac{1}{3}", "0.33333333"),
        (".0000672", ".000067"),
        ("(-\\infty,2]", "x \\le 2"),
        ("3", "{" * 200 + "3" + "}" * 200 + "+1"),
    ],
)
def test_math_near_misses(reference: str, answer: str) -> None:
    """Swapped, open for closed, another base, power or relation, rounded, or broken LaTeX: all wrong."""
    assert not equivalent(reference, answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1} so \\boxed{2}", "2"),
        ("The final answer is $\\frac{1}{2}$.", "\\frac{1}{2}"),
        ("The answer is: 7.", "7"),
        ("$x=1$ hence \\(y=2\\)", "y=2"),
        ("we get 3 and 4", "4"),
        ("Final Answer: The final answer is \\frac{1}{2}. I hope it is correct.", "\\frac{1}{2}"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("The final answer is $\\$36$.", "\\$36"),
        ("The answer is .0000672", ".0000672"),
        ("we get \u22123", "\u22123"),
        ("\\(a\\) and \\(b", "a"),
        ("nothing", None),
        ("", None),
        ("\\boxed{}", None),
        (f"\\boxed{{{'1' * 2000}}}", None),
    ],
)
def test_math_final_answers(text: str, expected: str | None) -> None:
    """The last box, else the answer phrase, else the last mathematics or number; an absurdly long one is none."""
    assert maths.find_answer(text) == expected
    assert (maths.grade("1", text)["parsed"] == 1.0) is (expected is not None)


def test_an_answer_that_cannot_be_judged_in_time_is_wrong(monkeypatch) -> None:
    """It is flagged; where the reference cannot be judged either, nothing is said of the answer."""
    hard = "9^{9^{9}}"

    def equal(self, reference: str, answer: str) -> bool:
        if hard in (reference, answer):
            raise TimeoutError("no end")
        return reference == answer

    monkeypatch.setattr(Verifier, "equal", equal)
    late = {"correct": 0.0, "parsed": 1.0, "out_of_time": 1.0}
    assert maths.grade("7", f"\\boxed{{{hard}}}") == aime.grade("7", f"\\boxed{{{hard}}}") == late
    assert maths.grade("7", f"so ${hard}$") == late | {"fallback": 1.0}
    with pytest.raises(TimeoutError):
        judge(hard, "7")
    assert judge(hard, hard)


@pytest.mark.parametrize("grade", [maths.grade, aime.grade, lambda right, text: gsm8k.grade(right, text, last=True)])
def test_what_nobody_sees_is_no_part_of_an_answer(grade) -> None:
    """A zero-width space, a mark of direction, a byte-order mark."""
    for sign in "\u200b\u200e\ufeff\u00ad":
        assert grade("15", f"\\boxed{{1{sign}5{sign}}}") == {"correct": 1.0, "parsed": 1.0}
