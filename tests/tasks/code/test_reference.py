"""References: large outputs are compared whole, what does not run is known before answers are, and results are kept."""

import itertools
import json
from contextlib import contextmanager

import pytest
from cage_target import needs_cage

from kvbench.show.progress import steps_shown
from kvbench.tasks.code import reference
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.wire import decode, encode
from kvbench.tasks.code.digest import digest
from kvbench.tasks.code.grade import GradeResult
from kvbench.tasks.code.grade import grade as grade_task
from kvbench.tasks.code.reference import UnusableRow, unusable
from kvbench.tasks.task import watched

PASS = GradeResult("pass", True, True)
ROW = {
    "task_id": "Own/1",
    "prompt": '"""\nAll choices of n letters.\n"""\n',
    "entry_point": "choices",
    "canonical_solution": "\nfrom itertools import product\ndef choices(letters, n):\n"
    "    return list(product(letters, repeat=n))\n",
    "base_input": [["ab", 2]],
    "plus_input": [["ab", 12], [[1, 2], 1]],
    "atol": 0,
}


def grade(answer: str, row: dict = ROW) -> GradeResult:
    """Grade with consent."""
    return grade_task("mbpp_plus", row, f"```python\n{answer}\n```", allow_code_execution=True)


@pytest.fixture(autouse=True)
def small_values(monkeypatch):
    """Large begins at 64 KiB."""
    monkeypatch.setattr(reference, "_VALUE_BYTES", 1 << 16)


EXHAUSTIVE = pytest.mark.exhaustive  # where a case of the default run differs in what is wrong alone
RIGHT = "def choices(letters, n):\n    if n == 0:\n        return [()]\n"
RIGHT += "    return [(one, *rest) for one in letters for rest in choices(letters, n - 1)]\n"


@needs_cage
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (RIGHT, PASS),
        pytest.param(ROW["canonical_solution"], PASS, marks=EXHAUSTIVE),
        pytest.param(
            RIGHT + "old = choices\ndef choices(letters, n): return old(letters, n) + [()] * (n > 5)",
            "fail",
            marks=EXHAUSTIVE,
        ),
        (RIGHT + "old = choices\ndef choices(letters, n): return old(letters, n)[::1 if n < 5 else -1]", "fail"),
        (RIGHT + "old = choices\ndef choices(letters, n): return list(map(list, old(letters, n)))", "fail"),
        pytest.param(
            RIGHT + "old = choices\ndef choices(letters, n): return old(letters, n) if n < 5 else '0' * 64",
            "fail",
            marks=EXHAUSTIVE,
        ),
        (
            RIGHT + "old = choices\ndef choices(letters, n): return old(letters, n) if n < 5 else ['0' * 64, False]",
            "fail",
        ),
        (RIGHT + "old = choices\ndef choices(letters, n): return old(letters, n) if n < 5 else iter(())", "error"),
    ],
)
def test_an_output_too_large_to_send_is_compared_by_its_digest(answer, expected):
    """As Mbpp/255 has one of 1.66 million tuples, more than a gigabyte as sent; here some 200 kB are large."""
    result = grade(answer)
    assert result == expected or result.status == expected
    groups = reference.reference("mbpp_plus", ROW, cage.Limits())
    assert [large for group in groups for large in group.large] == [False, True, False]


@needs_cage
@pytest.mark.exhaustive  # seconds of filling memory
def test_a_reference_may_take_more_memory_than_the_limit_and_so_may_its_answers():
    """EvalPlus gives 4 GiB to all; here those rows have it that need it."""
    body = "def choices(size):\n    return len(bytearray(size))\n"
    row = {**ROW, "canonical_solution": body, "base_input": [[1500 << 20]], "plus_input": []}
    assert grade(body, row) == PASS
    assert [group.memory_bytes >> 30 for group in reference.reference("mbpp_plus", row, cage.Limits())] == [4, 1]


@needs_cage
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"canonical_solution": "def choices(letters, n):\n    return 1 / 0\n"}, "ZeroDivisionError"),
        ({"canonical_solution": "def other(): pass\n"}, "does not define choices"),
        ({"canonical_solution": "def choices(letters, n):\n    return object()\n"}, "unsupported type object"),
        ({"atol": 1e-6}, "too large to be compared with a tolerance"),
        pytest.param(
            {"canonical_solution": "def choices(letters, n):\n    return [0.5] * 3**n\n", "plus_input": [["ab", 10]]},
            "too large to be compared with a tolerance",
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_rows_that_nothing_can_be_graded_against_are_named(change, reason):
    """Before anything is generated, each with its reason; the others are not touched by them."""
    rows = [(3, ROW), (5, {**ROW, **change}), (8, {**ROW, "plus_input": []})]
    found = unusable("mbpp_plus", rows)
    assert list(found) == [5] and reason in found[5] and "Own/1" in found[5]


@needs_cage
def test_references_that_run_are_watched(capsys):
    """Each row is one step, also one that fails; who loads a task sees them, and nobody else."""
    bad = {**ROW, "canonical_solution": "def choices(*x):\n    return x[9]\n"}
    steps = []

    @contextmanager
    def watcher(label, number):
        steps.append((label, number))
        yield lambda: steps.append("step")

    with watched(watcher):
        assert list(unusable("mbpp_plus", iter([(0, ROW), (1, bad)]))) == [1]
    assert steps == [("reference solutions of mbpp_plus", 2), "step", "step"]
    unusable("mbpp_plus", [(0, ROW)])
    assert len(steps) == 3 and not capsys.readouterr().err
    with watched(steps_shown):
        unusable("mbpp_plus", [(0, ROW)])
    first, last = capsys.readouterr().err.splitlines()
    assert (first, last) == tuple(
        f"reference solutions of mbpp_plus: {text}" for text in ("1 programs", "1/1 programs")
    )


@needs_cage
def test_results_are_kept_in_memory_and_on_the_disk(monkeypatch):
    """A reference runs once, also one that fails; a damaged file is computed again."""
    runs = []
    real = cage.run
    monkeypatch.setattr(cage, "run", lambda *given, **more: runs.append(given) or real(*given, **more))
    good, bad = {**ROW, "base_input": [["x", 1]]}, {**ROW, "canonical_solution": "def choices(*x):\n    return x[9]\n"}
    first = reference.reference("mbpp_plus", good, cage.Limits())
    with pytest.raises(UnusableRow, match="IndexError"):
        reference.reference("mbpp_plus", bad, cage.Limits())
    assert runs
    for forget in (False, True):
        runs.clear()
        if forget:
            monkeypatch.setattr(reference, "_memory", {})
        assert reference.reference("mbpp_plus", good, cage.Limits()) == first
        with pytest.raises(UnusableRow, match="IndexError"):
            reference.reference("mbpp_plus", bad, cage.Limits())
        assert runs == []
    monkeypatch.setattr(reference, "_memory", {})
    with monkeypatch.context() as patch:  # what is told of many rows is told without reading what came out
        patch.setattr(reference, "decode", lambda *_, **__: runs.append("read") or {})
        assert reference.unusable("mbpp_plus", [(3, good)]) == {} and runs == []
    assert list(reference.unusable("mbpp_plus", [(3, good), (4, bad), (5, {})])) == [4, 5] and runs == []
    (path,) = (path for path in reference.cache_root().rglob("*") if path.name == _key_of(good))
    path.write_bytes(path.read_bytes()[:-3])
    monkeypatch.setattr(reference, "_memory", {})
    assert reference.reference("mbpp_plus", good, cage.Limits())[1].expected == first[1].expected and runs
    runs.clear()
    reference.reference("mbpp_plus", {**good, "atol": 1e-3, "plus_input": []}, cage.Limits())
    assert runs


def _key_of(row: dict) -> str:
    return reference._key("mbpp_plus", row, cage.Limits())


INFINITY, NO_NUMBER = float("inf"), float("nan")
VALUES = [0, 1, True, False, None, 1.0, 1.5, 0.0, -0.0, 10**30, 1e30, 10**5000, 2**20000, INFINITY, NO_NUMBER, 1j]
VALUES += [1 + 0j]
VALUES += ["1", "a, b", "None", b"1", "\ud800", (), [], {}, set(), frozenset(), complex(0, NO_NUMBER)]
HASHED = [value for value in VALUES if not isinstance(value, list | dict | set)]
NESTED = [shape for value in VALUES for shape in (value, [value], (value, 1), [[value], 1.0])]
NESTED += [{value, 1} for value in HASHED] + [frozenset((1.0, value)) for value in HASHED] + [[1], [True], [[1], True]]
NESTED += [shape for value in HASHED for shape in ({value: 1, 2: [True]}, {2: [1], value: True})]
NESTED += [["a", "b"], ["a, b"]]


def test_a_digest_is_equal_where_values_are():
    """All pairs of many values; and it says whether a tolerance could hold."""
    other = [decode(encode(value, max_bytes=1 << 20)) for value in NESTED]
    digests = [digest(value)[0] for value in NESTED]
    again = [digest(value)[0] if "nan" not in repr_of(value) else None for value in other]
    for (place, one), (at, two) in itertools.product(enumerate(NESTED), enumerate(other)):
        assert (one == two) is (digests[place] == again[at]), (one, two)
    floats = [1.5, [1.5], (0.5, INFINITY)]
    assert [digest(value)[1] for value in (*floats, [], [1], [1.5, 1], [[1.5]], None)] == [True] * 3 + [False] * 5
    with pytest.raises(TypeError, match="unsupported type"):
        digest([range(3)])


def repr_of(value: object) -> str:
    """Its text, of long integers too."""
    return json.dumps(str(encode(value, max_bytes=1 << 20)))
