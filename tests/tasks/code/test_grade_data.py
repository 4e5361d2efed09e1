"""Grading of the HumanEval+ and MBPP+ rows at hand: their references pass, programs that differ from them fail.

By default a few rows of HumanEval+; `make test-code` takes all of both, which lasts minutes. Where
KVBENCH_EVALPLUS_PYTHON names an interpreter that has the package `evalplus`, mutants must get its verdicts.
"""

import ast
import copy
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from cage_target import needs_cage
from places import DATA, need_data
from selection import FULL

from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.wire import decode
from kvbench.tasks.code.grade import GradeResult
from kvbench.tasks.code.grade import grade as grade_task

EVALPLUS = os.environ.get("KVBENCH_EVALPLUS_PYTHON")
FILES = {"humaneval_plus": "humaneval_plus/humanevalplus.jsonl", "mbpp_plus": "mbpp_plus/MbppPlus.jsonl"}
needs_data, needs_mbpp = map(need_data, FILES.values())
PASS = GradeResult("pass", True, True)


def rows(name: str = "humaneval_plus") -> list[dict]:
    """The rows at hand; a few spread over them unless the full run is asked for."""
    every = [json.loads(line) for line in (DATA / FILES[name]).read_text().splitlines()]
    return every if FULL else every[1::45]


def grade(completion: str, row: dict, name: str = "humaneval_plus") -> GradeResult:
    """Grade with consent."""
    return grade_task(name, row, completion, allow_code_execution=True)


@needs_cage
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("humaneval_plus", marks=needs_data),
        pytest.param("mbpp_plus", marks=[needs_mbpp, pytest.mark.exhaustive]),
    ],
)
def test_every_reference_passes(name):
    """Every canonical solution at hand passes base and plus, alone and in a chat reply; Mbpp/255 returns more than a
    gigabyte."""

    def both(row: dict) -> list[GradeResult]:
        program = ("" if name == "mbpp_plus" else row["prompt"]) + row["canonical_solution"]
        reply = f"Here it is:\n\n```python\n{program}\n```\nIt works.\n"
        return [grade(row["canonical_solution"], row, name), grade(reply, row, name)]

    results = zip(rows(name), cage.map_bounded(both, rows(name), workers=2), strict=True)
    assert [(row["task_id"], found) for row, found in results if found != [PASS, PASS]] == []


BOTH_WAYS = ((ast.Add, ast.Sub), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.And, ast.Or))
BOTH_WAYS += ((ast.In, ast.NotIn),)
SWAPS = dict(BOTH_WAYS) | {other: one for one, other in BOTH_WAYS}
SWAPS |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}


def mutations(node: ast.AST) -> list:
    """What can be done to one node: functions that change it in place."""
    found = []
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        found.append(lambda node: setattr(node, "op", SWAPS[type(node.op)]()))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        found.append(lambda node: node.ops.__setitem__(0, SWAPS[type(node.ops[0])]()))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found.append(lambda node: setattr(node, "value", node.value + 1))
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        found.append(lambda node: setattr(node, "value", not node.value))
    if isinstance(node, ast.If):
        found.append(lambda node: setattr(node, "body", [ast.Pass()]))
        found.append(lambda node: setattr(node, "test", ast.Constant(True)))
    if isinstance(node, ast.Return):
        found.append(lambda node: setattr(node, "value", ast.Constant(None)))
    return found


def mutants(row: dict, count: int, generator: random.Random) -> list[str]:
    """Programs that differ from the reference in one place inside the function; the first always returns None."""
    text = row["prompt"] + row["canonical_solution"]
    tree = ast.parse(text)
    *_, function = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == row["entry_point"])
    places = [(place, kind) for place, node in enumerate(ast.walk(function)) for kind in range(len(mutations(node)))]
    made = []
    for place, kind in generator.sample(places, min(count, len(places))):
        changed = copy.deepcopy(tree)
        *_, function = (n for n in changed.body if isinstance(n, ast.FunctionDef) and n.name == row["entry_point"])
        node = list(ast.walk(function))[place]
        mutations(node)[kind](node)
        made.append(ast.unparse(ast.fix_missing_locations(changed)))
    nothing = f"def {row['entry_point']}(*arguments):\n    return None\n"
    return [nothing, *dict.fromkeys(made)]


def clearly_equal(one: object, other: object) -> bool:
    """Equal, or floats that a tolerance might take for equal."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-3 * max(1.0, abs(one))
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(clearly_equal, one, other))
    return one == other


def differs(row: dict, mutant: str, expected: list) -> bool:
    """Whether the mutant gives another value, raises or takes too long on an input, by plain equality."""
    found = []

    def look(output: cage.Output) -> bool:
        if output.index < 0:
            same = output.kind == "v"
        else:
            same = output.kind == "v" and clearly_equal(expected[output.index], decode(output.payload))
        found.append(same)
        return same

    calls = row["base_input"] + row["plus_input"]
    report = cage.run(mutant, row["entry_point"], calls, call_s=4.0, allow_code_execution=True, on_output=look)
    return report.status != "done" or not all(found)


@needs_cage
@needs_data
@pytest.mark.timeout(1800)
def test_mutants_fail():
    """Programs that differ from the reference on some input are not passed; at least 300 of them in the full run."""

    def grade_all(row: dict) -> list[tuple[str, str, GradeResult]]:
        found = []
        calls = row["base_input"] + row["plus_input"]
        limits = cage.Limits(value_bytes=1 << 28, output_bytes=1 << 30)
        program = row["prompt"] + row["canonical_solution"]
        report = cage.run(program, row["entry_point"], calls, call_s=30, allow_code_execution=True, limits=limits)
        expected = [decode(output.payload) for output in report.outputs[1:]]
        for mutant in mutants(row, 5 if FULL else 2, random.Random(row["task_id"])):
            # Any root is right in HumanEval/32, so another output says nothing there; None is no root.
            if row["entry_point"] == "find_zero" and "return None" not in mutant:
                continue
            if differs(row, mutant, expected):
                found.append((row["task_id"], mutant, grade(f"```python\n{mutant}\n```", row)))
        return found

    results = [found for group in cage.map_bounded(grade_all, rows(), workers=2) for found in group]
    statuses = [result.status for _, _, result in results]
    print(f"{len(results)} mutants: { {status: statuses.count(status) for status in sorted(set(statuses))} }")
    assert [(task, mutant) for task, mutant, result in results if result.plus_passed or result.status == "pass"] == []
    assert len(results) >= (300 if FULL else 6)


@needs_cage
@needs_data
@pytest.mark.exhaustive
@pytest.mark.skipif(not EVALPLUS, reason="KVBENCH_EVALPLUS_PYTHON names no interpreter with evalplus")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["humaneval", pytest.param("mbpp", marks=needs_mbpp)])
def test_mutants_get_evalplus_verdicts(name):
    """Hundreds of each benchmark, base and plus; the answer is the program in a fence."""
    # EvalPlus gives no verdict on find_zero's own reference, and takes a minute and gigabytes for each of the others.
    left_out = ("HumanEval/32", "Mbpp/255", "Mbpp/599", "Mbpp/630")
    chosen = [row for row in rows(f"{name}_plus") if row["task_id"] not in left_out]
    programs = []
    for number, row in enumerate(chosen):
        count = 2 if name == "humaneval" else 1
        programs += [(number, mutant) for mutant in mutants(row, count, random.Random(row["task_id"]))[1:]]
    job = json.dumps({"dataset": name, "rows": chosen, "programs": programs})
    script = Path(__file__).parent / "evalplus_verdicts.py"
    official = subprocess.run([EVALPLUS, script], input=job, stdout=subprocess.PIPE, text=True, check=True)
    fenced = [(chosen[number], f"```python\n{mutant}\n```") for number, mutant in programs]
    results = cage.map_bounded(lambda pair: grade(pair[1], pair[0], f"{name}_plus"), fenced)
    ours = [[result.base_passed, result.plus_passed] for result in results]
    # Our plus includes the base inputs, as EvalPlus' pass@1 does.
    theirs = [[base, base and plus] for base, plus in json.loads(official.stdout)]
    differ = [
        (chosen[number]["task_id"], mutant, one, other, result)
        for (number, mutant), one, other, result in zip(programs, ours, theirs, results, strict=True)
        if one != other
    ]
    print(f"{len(programs)} mutants of {name}: {sum(map(all, theirs))} pass in both, {len(differ)} differ")
    assert differ == [] and len(programs) >= (200 if name == "humaneval" else 300)
