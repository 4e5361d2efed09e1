"""Grading of generated code: references pass, broken ones fail, and the special cases of the benchmarks hold."""

import itertools

import numpy as np
import pytest
from cage_target import needs_cage
from refusals import refused
from selection import few

from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.wire import decode, encode
from kvbench.tasks.code.dataset import check_row, restore_inputs
from kvbench.tasks.code.grade import GradeResult
from kvbench.tasks.code.grade import grade as grade_task
from kvbench.tasks.code.oracle import is_right
from kvbench.tasks.code.reference import UnusableRow

PASS = GradeResult("pass", True, True)

ROW = {
    "task_id": "Own/0",
    "prompt": "from typing import List\n\nSCALE = 2\n\n\ndef scaled(numbers: List[int]):\n    '''Doubled.'''\n",
    "entry_point": "scaled",
    "canonical_solution": "    return [SCALE * number for number in numbers]\n",
    "base_input": [[[1, 2]], [[]]],
    "plus_input": [[[-3]], [[10**30]]],
    "atol": 0,
}


def grade(completion: str, row: dict = ROW) -> GradeResult:
    """Grade with consent."""
    return grade_task("humaneval_plus", row, completion, allow_code_execution=True)


@needs_cage
@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("    return [SCALE * number for number in numbers]\n\n\ndef main():\n    syntax error", "pass"),
        ("return [SCALE * number for number in numbers]", "pass"),
        ("<think>def scaled()</think>```py\ndef scaled(x: List[int]):\n    return [n * 2 for n in x]\n```", "pass"),
        ("    return [n + n for n in numbers] + [n for n in numbers if n > 10**20]", "base"),
        ("    return [n * n for n in numbers]", "fail"),
        ("    return tuple(2 * n for n in numbers)", "fail"),
        ("    return map(lambda n: 2 * n, numbers)", "unsupported"),
        ("    while True: pass", "timeout"),
        ("    raise ValueError(numbers)", "error"),
        ("    this is no program", "error"),
        ("", "fail"),
    ],
)
def test_status_of_small_answers(completion, expected):
    """Each way to answer has its status; a plus failure keeps the base pass."""
    result = grade(completion)
    if expected == "base":
        assert result == GradeResult("fail", True, False, "call 2 of 2: a wrong output")
    else:
        assert (result.status, result.base_passed) == (expected, expected == "pass")


@needs_cage
def test_changed_arguments_and_state_between_calls():
    """A solution that spoils its argument passes; one that remembers calls is judged by what it returns."""
    assert grade("    for place in range(len(numbers)):\n        numbers[place] *= 2\n    return numbers") == PASS
    counting = "    scaled.calls = getattr(scaled, 'calls', 0) + 1\n    return [2 * n for n in numbers] * scaled.calls"
    assert grade(counting) == GradeResult("fail", True, False, "call 2 of 2: a wrong output")


@needs_cage
@pytest.mark.parametrize(
    ("root", "passes"),
    few(
        [("1.0", True), ("2.0", True), ("2.00001", True), ("2.1", False), ("None", False)],
        *[("2.00001", True), ("2.1", False), ("None", False)],
    ),
)
def test_any_root_is_right(root, passes):
    """HumanEval/32 takes every root within its tolerance, not only the reference's."""
    row = {**ROW, "prompt": "def find_zero(xs: list):\n", "entry_point": "find_zero", "atol": 1e-4}
    row |= {"canonical_solution": "    return 1.0\n", "base_input": [[[2, -3, 1]]], "plus_input": [[[4, -6, 2]]]}
    assert (grade(f"    return {root}\n", row) == PASS) is passes


@needs_cage
def test_mbpp_row():
    """MBPP+: arguments get their tuples back, a match object counts as found, sets ignore order."""
    right = "def similar_elements(a, b):\n    assert a == tuple(a)\n    return (*set(a) & set(b),)\n"
    row = ROW | {"task_id": "Mbpp/2", "prompt": '"""\nShared elements.\nassert True\n"""\n'}
    row |= {"entry_point": "similar_elements", "canonical_solution": right}
    row |= {"base_input": [[[3, 4, 5], [5, 4]]], "plus_input": [[[1], [2]]]}
    one = "```python\ndef similar_elements(a, b):\n    return [x for x in reversed(a) if x in b]\n```"
    assert grade_task("mbpp_plus", row, one, allow_code_execution=True) == PASS
    assert grade_task("mbpp_plus", row, one.replace("if x in b", ""), allow_code_execution=True).status == "fail"
    row |= {"task_id": "Mbpp/0", "entry_point": "text_match_three"}
    row |= {"base_input": [["abbb"], ["a"]], "plus_input": [["abb"]]}
    row |= {"canonical_solution": "import re\ndef text_match_three(text):\n    return re.search('ab{3}', text)\n"}
    same = "```python\nimport re\ndef text_match_three(text):\n    return bool(re.search('abbb', text))\n```"
    for answer, status in ((same, "pass"), (same.replace("bool", ""), "pass"), (same.replace("abbb", "ab"), "fail")):
        assert grade_task("mbpp_plus", row, answer, allow_code_execution=True).status == status


def test_refusals():
    """No consent and a row of another format are told apart and named."""
    with refused("code-not-run", "task.allow_code_execution", "allow_code_execution=true"):
        grade_task("humaneval_plus", ROW, "", allow_code_execution=False)
    with pytest.raises(UnusableRow, match=r"Own/0 has no base_input, plus_input.*release file"):
        grade("", {name: ROW[name] for name in ROW if not name.endswith("input")})


@needs_cage
def test_a_timeout_is_tried_once_more(monkeypatch):
    """A machine that is slow for once makes no verdict; two timeouts do."""
    slow: list[bool] = []

    def run(*arguments, on_output=None, **more):
        if on_output is not None and slow and slow.pop(0):
            return cage.CageReport("timeout", (), 1.0, "the time limit was reached")
        return real(*arguments, on_output=on_output, **more)

    real = cage.run
    monkeypatch.setattr(cage, "run", run)
    for runs, status in (([1], "pass"), ([0, 1], "pass"), ([1, 0, 1], "pass"), ([1, 1], "timeout")):
        slow[:] = map(bool, runs)
        assert (grade(ROW["canonical_solution"]).status, slow) == (status, [])


@pytest.mark.parametrize(
    ("output", "expected", "atol", "right"),
    [
        (1, 1.0, 0, True),
        (True, 1, 0, True),
        ([1], (1,), 0, False),
        (0.3, 0.1 + 0.2, 0, True),
        ([0.3], [0.1 + 0.2], 0, True),
        ((0.3,), [0.1 + 0.2], 0, False),
        ([0.3, 1.0], [0.1 + 0.2], 0, False),
        (0.30001, 0.3, 0, False),
        (1e12 + 1, 1e12, 0, True),
        (1, 1 + 1e-9, 0, False),
        ([1, 2], [1, 3], 0, False),
        ([[0.3]], [[0.1 + 0.2]], 0, False),
        ([[0.3]], [[0.1 + 0.2]], 1e-6, True),
        (float("nan"), float("nan"), 0, False),
        (float("inf"), float("inf"), 1e-6, True),
        (10**400, 1.5, 1e-6, False),
        ("1.0", 1.0, 1e-6, False),
        (None, None, 0, True),
    ],
)
def test_comparison(output, expected, atol, right):
    """Exact by value, with a tolerance only where floats are expected or the task gives one."""
    assert is_right("humaneval_plus", "any", [], output, expected, atol) is right


@pytest.mark.parametrize(
    ("name", "inputs", "output", "expected", "right"),
    [
        ("find_char_long", [], ["b", "a", "a"], ["a", "b"], True),
        ("find_char_long", [], None, ["a"], False),
        ("are_equivalent", [1, 2], "anything", True, True),
        ("sum_div", [8], 0, 7, True),
        ("sum_div", [8], 1, 7, False),
        ("surface_Area", [3, 4], 33, 33, True),
        ("surface_Area", [3, 4], 35, 33, True),  # 9 + 2*3*sqrt(2.25+16) = 34.6
        ("surface_Area", [3, 4], 34, 33, False),
        ("digit_distance_nums", [1, 256], 12, 0, True),  # 001 and 256: 2 + 5 + 5
        ("digit_distance_nums", [1, 256], 11, 0, False),
        ("check_str", [], None, False, True),
        ("check_str", [], False, False, True),
        ("check_str", [], True, False, False),
    ],
)
def test_special_cases_of_mbpp(name, inputs, output, expected, right):
    """The tasks where equality is the wrong question, by hand; the same names mean nothing in HumanEval."""
    assert is_right("mbpp_plus", name, inputs, output, expected, 0) is right
    assert is_right("humaneval_plus", name, inputs, output, expected, 0) is (output == expected)


def test_inputs_of_mbpp_get_their_types():
    """One task of each kind."""
    cases = {
        "Mbpp/2": ([[1], [2]], [(1,), (2,)]),
        "Mbpp/63": ([[[1, 2]]], [[(1, 2)]]),
        "Mbpp/75": ([[[1, 2]], 3], [[(1, 2)], 3]),
        "Mbpp/106": ([[1], [2]], [[1], (2,)]),
        "Mbpp/115": ([[[1, 1], []]], [[{1}, {}]]),
        "Mbpp/124": (["1.5", "2j"], [1.5, 2j]),
        "Mbpp/252": (["(1+2j)"], [1 + 2j]),
        "Mbpp/259": ([[[1], [2]]], [((1,), (2,))]),
        "Mbpp/278": ([[1, [2]]], [(1, (2,))]),
        "Mbpp/307": ([[1], 2, 3], [(1,), 2, 3]),
        "Mbpp/722": ([{"a": [1]}, 2, 3], [{"a": (1,)}, 2, 3]),
        "Mbpp/580": ([[1, [2, [3]]]], [(1, (2, (3,)))]),
        "Mbpp/3": ([[1]], [[1]]),
    }
    for task, (stored, meant) in cases.items():
        assert restore_inputs(task, [stored]) == [meant]


# Every kind of output; what is near to what and what is not.
VALUES = [0, 1, -1, True, None, "1.0", 10**400, 0.0, 1.0, 1.0000005, 1 + 1e-9, 0.3, 0.1 + 0.2, 1e12, 1e12 + 1]
VALUES += [float("inf"), float("-inf"), float("nan"), 1e308, 1j, 1j + 1e-9, complex(float("inf"), 0)]
VALUES += [[], (), {}, "", b""]
NESTED = [shape for value in VALUES for shape in (value, [value], (value,), [value, 1.0], [(value, 0.5)])]
NESTED += [{1: 0.3}, {1: 0.1 + 0.2}, {0.3}, {0.1 + 0.2}, [0.3, "x"], [0.1 + 0.2, "x"], [[1.0], [1.0, 2.0]]]


def is_regular(value: object) -> bool:
    """Whether numpy takes it for an array: it raises for ragged lists, which EvalPlus then calls wrong."""
    try:
        np.shape(value)
    except ValueError:
        return False
    return True


def evalplus_accepts(output: object, expected: object, atol: float) -> bool:
    """EvalPlus' comparison of one output by itself, with numpy as there, but for stretching one shape over another."""
    if output == expected:
        return True
    floats = isinstance(expected, list | tuple) and expected and all(isinstance(entry, float) for entry in expected)
    if atol == 0 and (isinstance(expected, float) or floats):
        atol = 1e-6
    if atol == 0 or type(output) is not type(expected):
        return False
    try:
        if isinstance(expected, list | tuple) and len(output) != len(expected):
            return False
        return np.shape(output) == np.shape(expected) and np.allclose(output, expected, rtol=1e-7, atol=atol)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return False


@pytest.mark.parametrize("atol", [0, 1e-6, 1e-4])
def test_comparison_is_that_of_evalplus(atol):
    """All pairs of many values; equal infinities are right, no number is near one, and NaN is near nothing."""
    # An output comes over a pipe, so no NaN is right for being the same object.
    outputs = [decode(encode(value, max_bytes=1000)) for value in NESTED]
    with np.errstate(all="ignore"):
        differ = [
            (output, expected)
            for output, expected in itertools.product(outputs, filter(is_regular, NESTED))
            if is_right("humaneval_plus", "any", [], output, expected, atol)
            is not evalplus_accepts(output, expected, atol)
        ]
    assert differ == []


@pytest.mark.parametrize(("added", "problem"), [(None, "it is null"), (0, "it is int"), ("", "it is str")])
def test_added_inputs_are_a_list_or_an_empty_object(added, problem):
    """A null is no way to say that nothing was added: the base inputs alone would count as the plus benchmark."""
    with pytest.raises(ValueError, match=f"field plus_input must be a list, {problem}"):
        check_row({**ROW, "plus_input": added})
    assert check_row({**ROW, "plus_input": {}})["plus_input"] == []
