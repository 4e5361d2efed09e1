"""Grades answers to HumanEval+ and MBPP+: calls run in the cage, comparisons run here.

The reference solution runs in a separate cage, and its results never enter the cage of an answer. An answer may return
anything, but is compared by value with results that it cannot see.
"""

import json
from dataclasses import dataclass, replace

from kvbench.tasks.answers import after_thinking
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.process import Limits, Output, guard_s
from kvbench.tasks.code.cage.wire import WireError, decode
from kvbench.tasks.code.dataset import CodeRow
from kvbench.tasks.code.extract import build_program
from kvbench.tasks.code.oracle import is_match_question, is_right
from kvbench.tasks.code.reference import Group, job, reference

# Source: EvalPlus 0.3.1, config.py and eval/__init__.py: four times the reference's time but at least 1 s for a call,
# and 60 s for all calls.
# Differs: times are CPU times, so that other programs on the machine do not count; and where the reference takes longer
# than half of the 60 s, all calls may take twice its time.
_CALL_FACTOR, _MIN_CALL_S, _CALLS_FACTOR, _MAX_CALLS_S = 4.0, 1.0, 2.0, 60.0
_START_S = 5.0
_MAX_WALL_S = 3600.0
_SPARE_BYTES = 1 << 20
_LOADING = "loading the program"


@dataclass(frozen=True)
class GradeResult:
    """Verdict on one answer.

    Args:
        status: `pass` on all inputs; `fail` a wrong output; `timeout`; `error` an exception, a program that does not
            load or ends itself; `unsupported` an output of a type that cannot be compared.
        base_passed: All inputs of the original benchmark passed.
        plus_passed: Those and all added inputs passed.
        message: First failure, for people; empty on a pass.
    """

    status: str
    base_passed: bool
    plus_passed: bool
    message: str = ""


def grade(
    task: str, row: CodeRow, completion: str, *, allow_code_execution: bool, limits: Limits | None = None
) -> GradeResult:
    """Grade an answer: the continuation of the prompt, or a reply with a fenced block.

    Args:
        task: `humaneval_plus` or `mbpp_plus`.
        row: A row of the EvalPlus release file, read as plain JSON.
        completion: Text of the model.
        allow_code_execution: The setting `task.allow_code_execution`.
        limits: Limits of the program; its times follow from the reference's.

    Raises:
        CageRefused: Not allowed, or no isolation on this machine.
        UnusableRow: The row lacks a field, or its own reference solution does not run.

    Source: EvalPlus 0.3.1 (inputs, tolerances, time limits, special oracles).
    Differs: see `oracle` and `extract`; programs see the standard library only.
    """
    cage.require_consent(allow_code_execution)
    groups = reference(task, row, limits or Limits())
    limits = limits or Limits(wall_s=_MAX_WALL_S)
    program = build_program(row["prompt"], row["entry_point"], completion)
    base_passed = False
    for group in groups:
        status, message = _run_group(task, row, program, group, limits)
        if status == "timeout":  # once more: the machine may have been busy
            status, message = _run_group(task, row, program, group, limits)
        if status != "pass":
            return GradeResult(status, base_passed, False, message)
        base_passed = True  # the original inputs come first
    return GradeResult("pass", True, True)


def _run_group(task: str, row: CodeRow, program: str, group: Group, limits: Limits) -> tuple[str, str]:
    verdict: list[tuple[str, str]] = []

    def judge(output: Output) -> bool:
        judged = _judge(task, row, group, output)
        if judged is not None:
            verdict.append(judged)
        return judged is None

    room = 2 * group.sent_bytes + _SPARE_BYTES
    call_s = [max(_MIN_CALL_S, _CALL_FACTOR * cpu_s) for cpu_s in group.cpu_s]
    cpu_s = min(max(_MAX_CALLS_S, _CALLS_FACTOR * sum(group.cpu_s)), sum(call_s)) + _START_S
    memory_bytes = max(limits.memory_bytes, group.memory_bytes)
    may = replace(limits, cpu_s=cpu_s, wall_s=min(limits.wall_s, guard_s(cpu_s)), memory_bytes=memory_bytes)
    text, entry_point, calls = job(program, row["entry_point"], group.calls, group.large)
    try:
        report = cage.run(
            text,
            entry_point,
            calls,
            allow_code_execution=True,
            call_s=call_s,
            limits=replace(may, value_bytes=room, output_bytes=2 * room),
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
    return ("timeout" if report.status == "timeout" else "error"), f"{report.status}: {report.message}"


def _judge(task: str, row: CodeRow, group: Group, output: Output) -> tuple[str, str] | None:
    """Status and message of a wrong output; None for a right one."""
    text = output.payload[:300].decode("utf-8", "replace") if output.kind != "v" else ""
    if output.index < 0:
        where = _LOADING
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
        # These tasks accept a value of any type.
        if is_match_question(task, row["entry_point"]):
            return None if expected else ("fail", f"{where}: found something where nothing is")
        return "unsupported", f"{where}: {text}"
    try:
        # A right output is about as large as the expected one; a larger one is not decoded.
        if group.large[output.index]:
            same = decode(output.payload, max_nodes=3) == expected
            return None if same else ("fail", f"{where}: a wrong output")
        value = decode(output.payload, max_nodes=1000 + 16 * _num_parts(expected))
    except WireError as error:
        return "fail", f"{where}: {error}"
    if is_right(task, row["entry_point"], group.calls[output.index], value, expected, row["atol"]):
        return None
    return "fail", f"{where}: a wrong output"


def _num_parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(_num_parts(key) + _num_parts(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(_num_parts, value))
    return 1


def process(doc: dict, results: list[str]) -> dict[str, float]:
    """Score for lm-eval: `plus`, `base` and `parsed`, each 0 or 1."""
    consent = doc["allow_code_execution"]
    cage.require_consent(consent)
    answer = after_thinking(results[0])
    if answer is None or not answer.strip():
        return {"plus": 0.0, "base": 0.0, "parsed": 0.0}
    result = grade(doc["subset"], json.loads(doc["row"]), answer, allow_code_execution=consent)
    loads = not (result.status == "error" and result.message.startswith(_LOADING))
    return {"plus": float(result.plus_passed), "base": float(result.base_passed), "parsed": float(loads)}
