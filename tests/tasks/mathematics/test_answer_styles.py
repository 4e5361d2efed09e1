"""Final answers of mathematics in many styles: the right one is right, and another one in the same style is wrong."""

import pytest
from tasks.mathematics.answer_styles import ANSWERS, FORMS, POSITIONS, SENTENCES, Style, cases

from kvbench.tasks.latex import judge
from kvbench.tasks.mathematics import find_answer, grade

CASES = cases()
# Each place with one answer; the others run in the exhaustive suite.
USUAL = {f"{name}: {ANSWERS[count % len(ANSWERS)][0]}" for count, name in enumerate(POSITIONS)}
USUAL |= {style.name for style in (*FORMS, *SENTENCES)}


@pytest.mark.parametrize(
    "style",
    [
        pytest.param(style, id=style.name, marks=() if style.name in USUAL else pytest.mark.exhaustive)
        for style in CASES
    ],
)
def test_answers_in_every_style(style: Style) -> None:
    """Where the answer stands and how it is written decide nothing; which one it is does."""
    assert grade(style.reference, style.right)["correct"] == 1
    assert grade(style.reference, style.wrong) == grade(style.reference, style.wrong) | {"correct": 0.0, "parsed": 1.0}


def test_styles_are_many() -> None:
    """At least 60, each with a right and a wrong answer."""
    names = [style.name for style in CASES]
    assert len(POSITIONS) >= 50 and len(FORMS) >= 90 and len(set(names)) == len(names)
    assert all(style.right != style.wrong for style in CASES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The final answer is:\n\\[\n\\frac{1}{2}\n\\]\n", "\\frac{1}{2}"),
        ("Answer:\n\n$$\nx=1\n$$", "x=1"),
        ("The answer is\n\\begin{align}\ny &= 1 + 1 \\\\\n  &= 2.\n\\end{align}", "2"),
        ("The answer is\n\\begin{gather*}\ny = 1 \\\\\nx = 2\n\\end{gather*}", "y = 1, x = 2"),
        ("The answer is:\n\\[\n42", "42"),
        ("The answer is $5$, while $6$ is not.", "5"),
        ("### Final Answer\n\n7\n\n8 is too large.", "7"),
        ("The answer is > 5", "> 5"),
        ("\\[ \\begin{aligned} \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix} \\end{aligned} \\]", None),
    ],
)
def test_where_the_answer_stands(text: str, expected: str | None) -> None:
    """Mathematics goes on over lines; a matrix inside of them stays whole."""
    assert find_answer(text) == (expected or "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}")


@pytest.mark.parametrize("small", ["2^{-99}", "10^{-20}", "1.5\\times 10^{-30}", "e^{-100}", "\\frac{1}{100!}"])
@pytest.mark.parametrize("shape", ["{}", "\\{{1,{}\\}}", "(1,{})", "x={}", "x+{}", "{}i", "[0,{}]", "x<{}"])
def test_small_numbers_are_compared_by_their_size(small: str, shape: str) -> None:
    """Alone and as a part: the same one is equal however written, its double and 0 are not."""

    def put(number: str) -> str:
        return shape.format(number)

    assert judge(put(small), put(f"\\frac{{{small}}}{{1}}"))
    assert not judge(put(small), put(f"2 \\cdot {small}"))
    assert not judge(put(f"2 \\cdot {small}"), put(small))


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("0", "10^{-30}", False),
        ("\\frac{1}{3}", "0.333333333333333", True),
        ("\\frac{1}{3}", "0.33333333", False),
        ("\\frac{1}{3 \\cdot 10^{20}}", "3.33333333333333 \\times 10^{-21}", True),
        ("\\frac{1}{3 \\cdot 10^{20}}", "3.3333 \\times 10^{-21}", False),
        ("0.3", "0.1 \\cdot 3", True),
        ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}", True),
        ("9\\%", "9", True),
        ("12345678901234567.1", "12345678901234567.2", False),
    ],
)
def test_decimals_are_compared_to_twelve_digits(reference: str, answer: str, equal: bool) -> None:
    """Of their own size, and others exactly."""
    assert judge(reference, answer) is equal
