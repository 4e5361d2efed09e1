"""Results and times of the reference solution of a problem, found out before any answer is graded.

It runs in a cage of its own, and what it returned never enters the cage of an answer. The result is kept, in memory and
in the cache folder, a failure too.
"""

import contextlib
import hashlib
import json
import platform
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from kvbench.models.cache import cache_root
from kvbench.tasks.code.cage import run as cage
from kvbench.tasks.code.cage.process import Limits
from kvbench.tasks.code.cage.wire import WireError, decode, encode
from kvbench.tasks.code.dataset import CodeRow, restore_inputs
from kvbench.tasks.code.oracle import has_special_rule, is_match_question
from kvbench.tasks.task import long_work

_CALL_S, _CPU_S, _WALL_S = 100.0, 400.0, 3600.0
# Source: EvalPlus 0.3.1, `eval/__init__.py`: what a solution may take there.
_LARGE_BYTES = 4 << 30
# A larger output is compared by its digest.
_VALUE_BYTES, _VALUE_PARTS = 8 << 20, 1_000_000
_OUTPUT_BYTES = 1 << 30
_DIGESTED = "_kvbench_call"
_HERE = Path(__file__).parent
_FIELDS = tuple(CodeRow.__annotations__)


class UnusableRow(ValueError):
    """Row against which no answer can be graded; the message says why."""


@dataclass(frozen=True)
class Group:
    """One set of inputs with the reference's outputs.

    Args:
        calls: Arguments of each call.
        expected: Return value of each; for `MATCH_TASKS` whether it was not None; of a large output its `digest`.
        large: Mask of outputs that are too large to send.
        cpu_s: CPU time of each call, in seconds.
        sent_bytes: Size of all outputs, as sent.
        memory_bytes: Address space that was enough.
    """

    calls: list[list[object]]
    expected: list[object]
    large: list[bool]
    cpu_s: list[float]
    sent_bytes: int
    memory_bytes: int


def reference(task: str, row: CodeRow, limits: Limits) -> list[Group]:
    """Base and added inputs, two groups, with the reference's outputs and times; computed once for each row.

    Args:
        task: `humaneval_plus` or `mbpp_plus`.
        row: The row.
        limits: Limits of an answer; a reference may take more time, and more memory where it needs it.

    Raises:
        UnusableRow: The row lacks a field, or its reference solution does not run.
        CageRefused: No isolation on this machine.
    """
    key = _key(task, row, limits)
    inputs = [row["base_input"], row["plus_input"]]
    if task == "mbpp_plus":
        inputs = [restore_inputs(row["task_id"], calls) for calls in inputs]
    entry = _known(key)
    if entry is None:
        try:
            groups = [_run(task, row, [list(call) for call in calls], limits) for calls in inputs]
            entry = {
                "groups": [{name: value for name, value in vars(one).items() if name != "calls"} for one in groups]
            }
        except UnusableRow as error:
            entry = {"failed": str(error)}
        _remember(key, entry)
    if "failed" in entry:
        raise UnusableRow(entry["failed"])
    return [Group([list(call) for call in calls], **one) for one, calls in zip(entry["groups"], inputs, strict=True)]


def unusable(task: str, rows: Iterable[tuple[int, CodeRow]]) -> dict[int, str]:
    """Run the references of rows, each with its number, side by side; gives those that cannot be used, and why.

    Raises:
        CageRefused: No isolation on this machine.
    """

    def why(item: tuple[int, CodeRow]) -> tuple[int, str] | None:
        row, limits = item[1], Limits()
        try:
            if not _ran(_key(task, row, limits)):
                reference(task, row, limits)
        except ValueError as error:
            if isinstance(error, cage.CageRefused):
                raise
            return item[0], str(error)
        return None

    listed = list(rows)
    with long_work(f"reference solutions of {task}", len(listed)) as step:
        return dict(filter(None, cage.map_bounded(why, listed, after_each=step)))


def _run(task: str, row: CodeRow, calls: list[list[object]], limits: Limits) -> Group:
    said = ""
    may = replace(limits, load_s=max(limits.load_s, _CALL_S), cpu_s=_CPU_S, wall_s=_WALL_S)
    may = replace(may, value_bytes=_VALUE_BYTES, output_bytes=_OUTPUT_BYTES)
    for memory_bytes in dict.fromkeys((limits.memory_bytes, max(limits.memory_bytes, _LARGE_BYTES))):
        may = replace(may, memory_bytes=memory_bytes)
        large = [False] * len(calls)
        group, said, large = _attempt(task, row, calls, large, may)
        if any(large):
            group, said, _ = _attempt(task, row, calls, large, may)
        if group is not None:
            return group
    raise UnusableRow(
        f"The reference solution of {row['task_id']} does not run in the cage ({said}), so nothing"
        " can be graded against it. Check the file against its release, or leave the row out."
    )


def _attempt(
    task: str, row: CodeRow, calls: list[list[object]], large: list[bool], limits: Limits
) -> tuple[Group | None, str, list[bool]]:
    """The group; or what went wrong, and which outputs were too large to send."""
    program, entry_point, jobs = job(row["prompt"] + row["canonical_solution"], row["entry_point"], calls, large)
    report = cage.run(program, entry_point, jobs, allow_code_execution=True, call_s=_CALL_S, limits=limits)
    is_truth = is_match_question(task, row["entry_point"])
    outputs = report.outputs[1:]
    wrong = [output for output in report.outputs if output.kind not in ("vu" if is_truth or output.index < 0 else "v")]
    if report.status != "done" or wrong:
        said = wrong[0].payload[:300].decode("utf-8", "replace") if wrong else report.message
        too_large = [output.kind == "u" and b"too large" in output.payload for output in outputs]
        fits = report.status == "done" and all(output.kind == "u" for output in wrong)
        return None, f"{report.status}: {said}", too_large if fits and not any(large) else [False] * len(calls)
    expected: list[object] = []
    for number, output in enumerate(outputs):
        if is_truth:
            expected.append(output.kind == "u" or decode(output.payload) is not None)
            continue
        try:
            value = decode(output.payload, max_nodes=_VALUE_PARTS)
        except WireError as error:
            if "too many parts" not in str(error):
                return None, str(error), [False] * len(calls)
            return None, str(error), [large or number == at for at, large in enumerate(large)]
        if large[number]:
            assert isinstance(value, list)  # `digest.digest` made it
            if row["atol"] or value[1] or has_special_rule(task, row["entry_point"]):
                return None, "its output is too large to be compared with a tolerance", [False] * len(calls)
        expected.append(value)
    sent_bytes = sum(len(output.payload) for output in outputs)
    cpu_s = [output.elapsed_s for output in outputs]
    return Group(calls, expected, large, cpu_s, sent_bytes, limits.memory_bytes), "", []


def job(
    program: str, entry_point: str, calls: Sequence[list[object]], large: Sequence[bool]
) -> tuple[str, str, list[list[object]]]:
    """The text, the entry point and the calls of a cage that sends the digests of large outputs."""
    if not any(large):
        return program, entry_point, list(calls)
    # The name on a line of its own makes a program without it fail to load, as it would without all this.
    end = (
        f"\n\n_kvbench = {{}}\nexec({(_HERE / 'digest.py').read_text()!r}, _kvbench)\n{entry_point}\n\n"
        f"def {_DIGESTED}(large, given):\n    value = {entry_point}(*given)\n"
        "    return _kvbench['digest'](value) if large else value\n"
    )
    return program + end, _DIGESTED, [[flag, arguments] for flag, arguments in zip(large, calls, strict=True)]


_OUTPUTS = b"d4:s6:groups"  # as a result begins that is no failure: two entries, the first of them its groups
_memory: dict[str, dict] = {}  # one operation of a dictionary at a time needs no lock


@cache
def _code() -> str:
    """A text of what computes the outputs and the times: this machine, its Python, and the code that runs inside."""
    texts = [path.read_text() for path in (Path(__file__), _HERE / "digest.py", *sorted((_HERE / "cage").glob("*.py")))]
    return json.dumps([platform.node(), platform.python_version(), platform.machine(), texts])


def _key(task: str, row: CodeRow, limits: Limits) -> str:
    """The name under which a row's result is kept; refuses a row that lacks a field."""
    fields: Mapping[str, object] = row
    absent = [name for name in _FIELDS if name not in row]
    if absent:
        raise UnusableRow(
            f"Row {row.get('task_id', '?')} has no {', '.join(absent)}. Use the release file of EvalPlus"
            " (HumanEvalPlus.jsonl or MbppPlus.jsonl); the files in the original format lack the inputs."
        )
    what = [_code(), task, limits.memory_bytes, *(fields[name] for name in _FIELDS)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _cache_path(key: str) -> Path:
    return cache_root() / "code-references" / key[:2] / key


def _known(key: str) -> dict | None:
    if key in _memory:
        return _memory[key]
    try:
        data = decode(zlib.decompress(_cache_path(key).read_bytes()), max_nodes=1 << 40)
    except (OSError, ValueError, zlib.error):
        return None
    if not isinstance(data, dict) or data.pop("key", None) != key:
        return None
    return _memory.setdefault(key, data)


def _ran(key: str) -> bool:
    """True if outputs are kept under a key; they may be large, and are read when an answer is graded."""
    if key in _memory:
        return "failed" not in _memory[key]
    try:
        begin = zlib.decompressobj().decompress(_cache_path(key).read_bytes(), len(_OUTPUTS))
    except (OSError, zlib.error):
        return False
    return begin == _OUTPUTS


def _remember(key: str, entry: dict) -> None:
    """Keep a result; in the cache folder where that can be written, and no failure that another try may not have."""
    _memory[key] = entry
    if "Error: " not in entry.get("failed", "Error: ") or "MemoryError" in entry.get("failed", ""):
        return
    with contextlib.suppress(OSError, ValueError):
        path = _cache_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # One that was cut off or mixed with another does not pass `_known`, and is computed again.
        path.write_bytes(zlib.compress(encode({**entry, "key": key}, max_bytes=1 << 31), 1))
