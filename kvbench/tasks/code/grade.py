"""Grades answers to HumanEval+ and MBPP+: every call in the cage, every comparison here.

The reference solution runs in a cage of its own; what it returned never enters the cage of an answer. An answer can
send back what it likes, but it is judged by value against numbers it cannot see.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.wire import WireError, decode
from kvbench.tasks.code.dataset import CodeRow
from kvbench.tasks.code.extract import build_program
from kvbench.tasks.code.mbpp_inputs import restore_inputs
from kvbench.tasks.code.oracle import FOUND_TASKS, is_right

# Source: EvalPlus 0.3.1, config.py and eval/__init__.py: four times the reference's time but at least 1 s for a call,
# and 60 s for all calls.
_CALL_FACTOR, _MIN_CALL_S, _MAX_CALLS_S = 4.0, 1.0, 60.0
_START_S = 5.0
_REFERENCE_CALL_S, _REFERENCE_WALL_S, _REFERENCE_BYTES = 30.0, 120.0, 1 << 30
_SPARE_BYTES = 1 << 20
_FIELDS = tuple(CodeRow.__annotations__)


@dataclass(frozen=True)
class GradeResult:
    """The verdict on one answer.

    Args:
        status: `pass` on all inputs; `fail` a wrong output; `timeout`; `error` an exception, a program that does not
            load or ends itself; `unsupported` an output of a type that cannot be compared. All but the first count as
            wrong.
        base_passed: All inputs of the original benchmark were answered right.
        plus_passed: Those and all added ones were.
        message: What went wrong first, for people; empty on a pass.
    """

    status: str
    base_passed: bool
    plus_passed: bool
    message: str = ""


@dataclass(frozen=True)
class _Group:
    """One set of inputs with what the reference made of it."""

    calls: list[list[object]]
    expected: list[object]
    call_s: list[float]
    sent_bytes: int


def grade_humaneval_plus(
    row: CodeRow, completion: str, *, allow_code_execution: bool, limits: cage.Limits | None = None
) -> GradeResult:
    """Grade an answer to a HumanEval+ problem.

    Args:
        row: A row of the EvalPlus release file.
        completion: What the model wrote: the continuation of the prompt, or a reply with a fenced block.
        allow_code_execution: The setting `task.allow_code_execution`.
        limits: What the program may use; its times follow from the reference's.

    Returns:
        The verdict.

    Raises:
        CageRefused: Not allowed, or no isolation on this machine.
        ValueError: The row lacks a field, or its own reference solution does not run.

    Source: EvalPlus 0.3.1 (inputs, tolerances, time limits, special oracles).
    Differs: see `oracle` and `extract`; programs see the standard library only.
    """
    return _grade("humaneval", row, completion, allow_code_execution, limits or cage.Limits())


def grade_mbpp_plus(
    row: CodeRow, completion: str, *, allow_code_execution: bool, limits: cage.Limits | None = None
) -> GradeResult:
    """Grade an answer to an MBPP+ problem.

    Args:
        row: A row of the EvalPlus release file, read as plain JSON.
        completion: What the model wrote.
        allow_code_execution: The setting `task.allow_code_execution`.
        limits: What the program may use; its times follow from the reference's.

    Returns:
        The verdict.

    Raises:
        CageRefused: Not allowed, or no isolation on this machine.
        ValueError: The row lacks a field, or its own reference solution does not run.

    Source: EvalPlus 0.3.1.
    """
    return _grade("mbpp", row, completion, allow_code_execution, limits or cage.Limits())


def _grade(dataset: str, row: CodeRow, completion: str, allow_code_execution: bool, limits: cage.Limits) -> GradeResult:
    cage.require_consent(allow_code_execution)
    absent = [name for name in _FIELDS if name not in row]
    if absent:
        raise ValueError(
            f"Row {row.get('task_id', '?')} has no {', '.join(absent)}. Use the release file of EvalPlus"
            " (HumanEvalPlus.jsonl or MbppPlus.jsonl); the files in the original format lack the inputs."
        )
    program = build_program(row["prompt"], row["entry_point"], completion)
    base_passed = False
    for group in _reference(dataset, row, limits):
        status, message = _run_group(dataset, row, program, group, limits)
        if status != "pass":
            return GradeResult(status, base_passed, False, message)
        base_passed = True  # the original inputs come first
    return GradeResult("pass", True, True)


def _run_group(dataset: str, row: CodeRow, program: str, group: _Group, limits: cage.Limits) -> tuple[str, str]:
    verdict: list[tuple[str, str]] = []

    def judge(output: cage.Output) -> bool:
        found = _judge(dataset, row, group, output)
        if found is not None:
            verdict.append(found)
        return found is None

    room = 2 * group.sent_bytes + _SPARE_BYTES
    wall_s = min(_MAX_CALLS_S, sum(group.call_s)) + _START_S
    try:
        report = cage.run(
            program,
            row["entry_point"],
            group.calls,
            allow_code_execution=True,
            call_s=group.call_s,
            limits=replace(limits, wall_s=wall_s, value_bytes=room, output_bytes=2 * room),
            on_output=judge,
        )
    except cage.CageRefused:
        raise
    except ValueError as error:
        return "error", str(error)
    if verdict:
        return verdict[0]
    if report.status == "done":
        return "pass", ""
    if report.status == "jail":
        raise cage.CageRefused(f"The cage did not come up: {report.message}. Try again with fewer programs at a time.")
    return ("timeout" if report.status == "timeout" else "error"), f"{report.status}: {report.message}"


def _judge(dataset: str, row: CodeRow, group: _Group, output: cage.Output) -> tuple[str, str] | None:
    """What is wrong with one output; None when nothing is."""
    text = output.payload[:300].decode("utf-8", "replace") if output.kind != "v" else ""
    if output.index < 0:
        where = "loading the program"
        if output.kind in "vu":
            return None
    else:
        where = f"call {output.index + 1} of {len(group.calls)}"
    if output.kind == "t":
        return "timeout", f"{where}: the time limit was reached"
    if output.kind == "e":
        return "error", f"{where}: {text}"
    expected = group.expected[output.index]
    if output.kind == "u":
        # Something, of whatever type, is all that these tasks ask for.
        if dataset == "mbpp" and row["entry_point"] in FOUND_TASKS:
            return None if expected else ("fail", f"{where}: found something where nothing is")
        return "unsupported", f"{where}: {text}"
    try:
        # A right answer is about as large as the expected one; more is not read.
        value = decode(output.payload, max_nodes=1000 + 16 * _num_parts(expected))
    except WireError as error:
        return "fail", f"{where}: {error}"
    if is_right(dataset, row["entry_point"], group.calls[output.index], value, expected, row["atol"]):
        return None
    return "fail", f"{where}: a wrong output"


def _num_parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(_num_parts(key) + _num_parts(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(_num_parts, value))
    return 1


_references: dict[bytes, list[_Group]] = {}
_references_lock = threading.Lock()


def _reference(dataset: str, row: CodeRow, limits: cage.Limits) -> list[_Group]:
    """Base and added inputs with the reference's outputs and time limits; computed once for each row."""
    fields: Mapping[str, object] = row
    key = hashlib.sha256(json.dumps([dataset, *(fields[name] for name in _FIELDS)]).encode()).digest()
    with _references_lock:
        known = _references.get(key)
    if known is None:
        inputs = [row["base_input"], row["plus_input"]]
        if dataset == "mbpp":
            inputs = [restore_inputs(row["task_id"], calls) for calls in inputs]
        known = [_run_reference(dataset, row, calls, limits) for calls in inputs]
        with _references_lock:
            _references[key] = known
    return known


def _run_reference(dataset: str, row: CodeRow, calls: Sequence[Sequence[object]], limits: cage.Limits) -> _Group:
    report = cage.run(
        row["prompt"] + row["canonical_solution"],
        row["entry_point"],
        calls,
        allow_code_execution=True,
        call_s=_REFERENCE_CALL_S,
        limits=replace(
            limits, wall_s=_REFERENCE_WALL_S, value_bytes=_REFERENCE_BYTES >> 2, output_bytes=_REFERENCE_BYTES
        ),
    )
    found = dataset == "mbpp" and row["entry_point"] in FOUND_TASKS
    outputs = report.outputs[1:]
    wrong = [output for output in report.outputs if output.kind not in ("vu" if found or output.index < 0 else "v")]
    if report.status != "done" or wrong:
        said = wrong[0].payload[:300].decode("utf-8", "replace") if wrong else report.message
        raise ValueError(
            f"The reference solution of {row['task_id']} does not run in the cage ({report.status}: {said}), so nothing"
            " can be graded against it. Check the file against its release, or leave the row out."
        )
    values = [None if output.kind == "u" else decode(output.payload) for output in outputs]
    if found:
        values = [output.kind == "u" or value is not None for output, value in zip(outputs, values, strict=True)]
    call_s = [max(_MIN_CALL_S, _CALL_FACTOR * output.elapsed_s) for output in outputs]
    sent_bytes = sum(len(output.payload) for output in outputs)
    return _Group([list(arguments) for arguments in calls], values, call_s, sent_bytes)
