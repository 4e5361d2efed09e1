"""Finding final answers: thoughts, boxes, numbers; avg@n and pass@k."""

from decimal import Decimal
from itertools import combinations

import pytest

from kvbench.tasks import aime, gsm8k
from kvbench.tasks import mathematics as maths
from kvbench.tasks.answers import after_thinking, last_boxed, to_number
from kvbench.tasks.sampling_stats import answer_statistics, maj_at_k, pass_at_k, sampling_statistics


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("plain", False, "plain"),
        ("<think>a \\boxed{1}</think>b", False, "b"),
        ("a</think>b</think>c", True, "c"),
        ("<think>cut off \\boxed{1}", False, None),
        ("cut off \\boxed{1}", True, None),
        ("", False, ""),
    ],
)
def test_only_what_follows_the_thoughts_counts(text: str, opened: bool, expected: str | None) -> None:
    """Thoughts without an end leave no answer, whoever opened them."""
    assert after_thinking(text, opened) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1,2\\right\\}}", "\\left\\{1,2\\right\\}"),
        ("\\framebox{204}", "204"),
        ("\\fbox{9}", "9"),
        ("\\boxed 7$.", "7"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{", None),
        ("no box", None),
        ("\\boxed", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_box(text: str, expected: str | None) -> None:
    """The last complete box, nested and escaped braces included."""
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,234.50", "1234.5"), ("$ 18.", "18"), ("\\$5", "5"), ("- 3", "-3"), ("0042", "42"), ("x", None), ("", None)],
)
def test_numbers(text: str, expected: str | None) -> None:
    """Currency, commas, spaces and trailing dots do not matter; text that is no number is none, nor is Infinity."""
    assert to_number(text) == (None if expected is None else Decimal(expected))
    assert to_number("Infinity") is None


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("so\n#### 72", 72, 72),
        ("#### 1,072", 1072, 1072),
        ("#### $5.00\n#### 6", 5, 6),
        ("The answer is 8. The answer is 9.", 8, 9),
        ("The answer is: **$1,000**.", 1000, 1000),
        ("the final answer is \\(\\boxed{12}\\).", 12, 12),
        ("Answer: -5", -5, -5),
        ("It costs 10-5 dollars, 5.", 5, 5),
        ("$\\boxed{3}$ of 4", 3, 3),
        ("3 apples and 4 pears", 4, 4),
        ("a total of 12.", 12, 12),
        ("minus -7", -7, -7),
        ("The answer is 3 + 4 = 7.", 7, 7),
        ("The answer is $12 \\times 4 = 48$.", 48, 48),
        ("The answer is 15 eggs after 3 days", 15, 15),
        ("The answer is \u221215.", -15, -15),
        ("\\boxed{2{,}000}", 2000, 2000),
        ("The answer is 2\u2009000.", 2000, 2000),
        ("The answer is 2\u202f000\u202f000.", 2000000, 2000000),
        ("It is 2\xa0000", 2000, 2000),
        ("It is 2 000", 0, 0),
        ("The answer is $15/hour.", 15, 15),
        ("The answer is 15 or so.", 15, 15),
        ("The answer is 15\n- 16 eggs", 15, 15),
        ("The answer is 1/2.", None, None),
        ("The answer is 15 or 16.", None, None),
        ("The answer is 15\u00b2.", None, None),
        ("#### 15^2", None, None),
        ("#### 15-16", None, None),
        ("The answer is 15 1/2", None, None),
        ("\\boxed{3\\frac{1}{2}}", None, None),
        ("it is \\frac12", None, None),
        ("at 15:30", None, None),
        ("The answer is unknown", None, None),
        ("", None, None),
    ],
)
def test_gsm8k_answers(text: str, first: int | None, last: int | None) -> None:
    """Marked numbers go before others; few-shot forms take the first marked one, chats the last. What is more than a
    number is none."""
    assert gsm8k.find_answer(text) == first
    assert gsm8k.find_answer(text, last=True) == last


def test_gsm8k_tells_wrong_from_unparsed() -> None:
    """A wrong number is parsed; no number, and thoughts without an end, are not."""
    assert gsm8k.grade("72", "#### 72.0", last=False) == {"correct": 1.0, "parsed": 1.0}
    assert gsm8k.grade("72", "#### 73", last=False) == {"correct": 0.0, "parsed": 1.0}
    assert gsm8k.grade("72", "so 72", last=False) == {"correct": 1.0, "parsed": 1.0, "fallback": 1.0}
    assert gsm8k.grade("1", "1. The answer is <number>.", last=True)["fallback"] == 1.0
    assert gsm8k.grade("72", "I do not know", last=False) == {"correct": 0.0, "parsed": 0.0}
    assert gsm8k.grade("72", "<think>it is 72", last=True) == {"correct": 0.0, "parsed": 0.0}


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("so\n#### 72\n#### 73", True),
        ("so\n#### 72\n#### 72.0", False),
        ("so\n#### 1,072\nagain\n#### $1072", False),
        ("#### 72\nThe answer is 73.", False),  # the first kind of mark decides alone
        ("The answer is 8. The answer is 9.", True),
        ("The answer is 8. The answer is 8.", False),
        ("so 72, 73", False),
        ("#### 72", False),
    ],
)
def test_gsm8k_flags_several_answers(text: str, several: bool) -> None:
    """Unlike numbers behind the mark that counts; which one is graded stays as in lm-eval."""
    for last in (False, True):
        assert ("several" in gsm8k.grade("72", text, last=last)) is several
    assert gsm8k.grade("72", "#### 72\n#### 73", last=False)["correct"] == 1
    assert gsm8k.grade("72", "#### 72\n#### 73", last=True)["correct"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{042}", 42),
        ("\\boxed{42}", 42),
        ("\\boxed{\\textbf{(113) }}", 113),
        ("\\boxed{m+n = 113}", 113),
        ("\\boxed{70.0}", 70),
        ("\\boxed{1{,}000}", 1000),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{42.5}", None),
        ("\\boxed{4 2x}", None),
        ("\\boxed{1 2}", None),
        ("first \\boxed{1}, no: \\boxed{2}", 2),
        ("The answer is 042.", 42),
        ("The answer is $42$.", 42),
        ("The answer is 4/2", None),
        ("42", None),
        ("", None),
    ],
)
def test_aime_answers(text: str, expected: int | None) -> None:
    """Whole numbers with leading zeros; a bare number is no final answer."""
    found = aime.find_answer(text)
    assert (None if found is None else aime.to_integer(found)) == expected


@pytest.mark.parametrize(
    ("box", "right"),
    [
        ("\\boxed{70^\\circ}", True),
        ("\\boxed{70^{\\circ}}", True),
        ("\\boxed{70\u00b0}", True),
        ("\\boxed{70\\text{ degrees}}", True),
        ("\\boxed{70\\text{ units}}", True),
        ("\\boxed{70 \\text{ cm}^2}", True),
        ("\\boxed{\\$70}", True),
        ("\\boxed{N \\equiv 70}", True),
        ("\\boxed{N \\equiv 70 \\pmod{1000}}", True),
        ("\\boxed{070 \\text{ (mod 1000)}}", True),
        ("\\boxed{\\frac{140}{2}}", True),
        ("\\boxed{\\dfrac{140}{2}}", True),
        ("\\boxed70", True),
        ("The answer is $70^\\circ$.", True),
        ("\\boxed{7,0}", False),
        ("\\boxed{7 0}", False),
        ("\\boxed{(7)(0)}", False),
        ("\\boxed{7\\text{ or }0}", False),
        ("\\boxed{70, 71}", False),
        ("\\boxed{\\frac{141}{2}}", False),
        ("\\boxed{\u221270}", False),
        ("\\boxed{1070 \\pmod{1000}}", False),
        ("\\boxed{70x}", False),
        ("\\boxed{70^2}", False),
        ("\\boxed{70_{8}}", False),
        ("\\boxed{70_{10}}", True),
        ("\\boxed{70 or 71}", False),
        ("The answer is 70 or 71.", False),
    ],
)
def test_aime_takes_units_and_values_but_nothing_else(box: str, right: bool) -> None:
    """Degrees, units, dollars, congruences and fractions are read as people read them; other numbers stay others."""
    assert aime.grade("70", box) == {"correct": float(right), "parsed": 1.0}


def test_aime_thinking_traces() -> None:
    """A box inside the thoughts is no answer."""
    assert aime.grade("42", "<think>\\boxed{42}</think>so \\boxed{41}") == {"correct": 0.0, "parsed": 1.0}
    assert aime.grade("42", "\\boxed{41}</think>\\boxed{042}") == {"correct": 1.0, "parsed": 1.0}
    assert aime.grade("42", "<think>\\boxed{42}") == {"correct": 0.0, "parsed": 0.0}


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    """Counted over all subsets of k answers."""
    for right in range(n + 1):
        answers = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(answers, k)]
            assert pass_at_k(n, right, k) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(ValueError, match="k must lie in"):
        pass_at_k(n, 0, n + 1)


@pytest.mark.parametrize("answers", ["aab", "aabb-", "abc", "aabbcd-", "bb-", "--", "abbcc", "aaabbbcc"])
def test_maj_at_k_is_the_share_of_draws_that_the_right_answer_wins(answers: str) -> None:
    """Counted over all draws of k: `a` is right, `-` does not vote, a tie is drawn by lot."""
    wrong = [answers.count(letter) for letter in "bcd" if letter in answers]
    for k in range(1, len(answers) + 1):
        won = []
        for draw in combinations(answers, k):
            votes = {letter: draw.count(letter) for letter in draw if letter != "-"}
            best = [letter for letter, count in votes.items() if count == max(votes.values())]
            won.append(("a" in best) / max(len(best), 1))
        found = maj_at_k(answers.count("a"), wrong, answers.count("-"), k)
        assert found == pytest.approx(sum(won) / len(won)), k
    with pytest.raises(ValueError, match="k must lie in"):
        maj_at_k(1, [1], 0, 3)


def test_sampling_statistics_of_any_k_with_votes() -> None:
    """The k that are asked for and exist; right answers vote alike however written; 64 different answers are quick."""
    texts = ["7", "7.0", "8", "8"]
    records = [record("a", r, float("7" in text), text=text) for r, text in enumerate(texts)]
    result = sampling_statistics(records, "correct", sizes=[3, 4, 8], vote=lambda row: row["text"])
    assert [name for name in result if "@" in name] == ["avg@4", "pass@3", "maj@3", "pass@4", "maj@4"]
    assert result["maj@3"]["value"] == result["maj@4"]["value"] == 0.5
    many = [record("a", r, float(r < 20), text=str(r)) for r in range(64)]
    result = sampling_statistics(many, "correct", vote=lambda row: row["text"])
    assert result["maj@64"]["value"] == 1.0 and 0.3 < result["maj@2"]["value"] < 1
    assert not [name for name in sampling_statistics(many, "correct") if name.startswith("maj@")]


@pytest.mark.parametrize(
    ("text", "number", "latex"),
    [
        ("\\boxed{070}", "70", "070"),
        ("\\boxed{70^\\circ}", "70", "70"),
        ("\\boxed{\\dfrac{1}{2}}", "\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("<think>\\boxed{1}", None, None),
        ("nothing", None, None),
    ],
)
def test_votes(text: str, number: str | None, latex: str | None) -> None:
    """An answer votes for what it says, in normal form; without an answer it does not vote."""
    assert aime.Aime(name="aime24").vote(text, False) == number
    assert maths.Math500(name="math500").vote(text, False) == latex


def record(sample: str, repeat: int, correct: float, **more: object) -> dict:
    """A journal record."""
    base = {"sample_id": sample, "subset": "s", "repeat": repeat, "status": "ok", "scores": {"correct": correct}}
    return base | {"finish": "eos", "token_ids": [1, 2]} | more


def test_sampling_statistics_leave_out_incomplete_problems() -> None:
    """Eight whole problems of four answers give avg@4 and pass@k with intervals; one with a failed answer none."""
    records = [record(f"a{i}", r, float(r == 0)) for i in range(4) for r in range(4)]
    records += [record(f"b{i}", r, 0.0) for i in range(4) for r in range(4)]
    records += [record("c", r, 1.0, **({"status": "oom", "scores": {}} if r == 2 else {})) for r in range(4)]
    result = sampling_statistics(records, "correct")
    assert (result["num_samples"], result["num_problems"], result["num_incomplete"]) == (4, 8, 1)
    values = {key: result[key]["value"] for key in ("avg@4", "pass@1", "pass@2", "pass@4")}
    assert values == pytest.approx({"avg@4": 0.125, "pass@1": 0.125, "pass@2": 0.25, "pass@4": 0.5})
    assert all(0 <= result[key]["low"] <= values[key] <= result[key]["high"] <= 1 for key in values)
    assert sampling_statistics([record("a", 0, 1.0)], "correct") == {}
    assert sampling_statistics([], "correct") == {}


def test_answer_statistics() -> None:
    """Length, share cut by the limit and parse failures, over the answers that ended well."""
    rows = [
        record("a", 0, 1.0) | {"scores": {"correct": 1.0, "parsed": 1.0}},
        record("b", 0, 0.0, finish="length", token_ids=[1] * 6) | {"scores": {"correct": 0.0, "parsed": 0.0}},
        record("c", 0, 0.0, status="nan"),
    ]
    expected = {"num_answers": 2, "mean_tokens": 4, "cut_share": 0.5, "loop_share": 0.0, "num_unparsed": 1}
    expected |= {"num_fallback": 0, "num_out_of_time": 0, "num_several": 0}
    flagged = [rows[0] | {"flags": ["fallback", "out_of_time", "several"]}, *rows[1:]]
    assert answer_statistics(flagged) == expected | {"num_fallback": 1, "num_out_of_time": 1, "num_several": 1}
    assert answer_statistics(rows) == expected
    assert answer_statistics([]) == dict.fromkeys(("mean_tokens", "cut_share", "loop_share")) | {"num_answers": 0}
