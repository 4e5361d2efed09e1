"""Rows of HumanEval+ and MBPP+: the EvalPlus release files, which have the inputs that answers are tested on.

The release stores tuples, sets and complex numbers as JSON; `restore_inputs` gives MBPP+ its own types back.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.rows import Rows, text_field

RELEASE = {"humaneval_plus": ("HumanEvalPlus", "v0.1.10", 164), "mbpp_plus": ("MbppPlus", "v0.2.0", 378)}
"""Task -> name, version and rows of its release."""


class CodeRow(TypedDict):
    """One problem, as the release files have it; the reference continues the prompt, in MBPP+ a docstring alone."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    base_input: list[list[object]]
    plus_input: list[list[object]]
    atol: float


def data_file(subset: str) -> DataFile:
    """The release file of a benchmark; its copies on the hub lack the inputs."""
    name, version, rows = RELEASE[subset]
    repo = f"evalplus/{subset.replace('_', '')}_release"
    return DataFile(
        task=subset,
        stems=(name.lower(), name, f"{name}-{version}", "test"),
        rows=rows,
        check=check_row,
        local=(Path("~/.cache/evalplus").expanduser() / f"{name}-{version}.jsonl",),
        # The address that EvalPlus itself fetches from.
        url=f"https://github.com/{repo}/releases/download/{version}/{name}.jsonl.gz",
        by_hand=f"unpack {name}.jsonl.gz of the EvalPlus release {version} (repository {repo}) into a folder",
    )


def check_row(row: Mapping[str, object]) -> CodeRow:
    """Check a line, which may have other fields and an empty `plus_input`."""
    names = ("task_id", "prompt", "entry_point", "canonical_solution")
    task_id, prompt, entry_point, solution = (text_field(row, name) for name in names)
    for name in ("base_input", "plus_input"):
        if name not in row:
            raise ValueError(f"field {name} is missing; use the EvalPlus release file, not the one in original format")
    base = row["base_input"]
    if not isinstance(base, list) or not base:
        raise ValueError("field base_input must be a list of at least one call")
    # Some rows of MBPP+ write "no inputs were added" as an empty object.
    plus = [] if row["plus_input"] == {} else row["plus_input"]
    if not isinstance(plus, list):
        raise ValueError(f"field plus_input must be a list, it is {'null' if plus is None else type(plus).__name__}")
    atol = row.get("atol", 0)
    if isinstance(atol, bool) or not isinstance(atol, int | float) or atol < 0:
        raise ValueError(f"field atol must be a number of at least 0, it is {atol!r}")
    return CodeRow(
        task_id=task_id,
        prompt=prompt,
        entry_point=entry_point,
        canonical_solution=solution,
        base_input=base,
        plus_input=plus,
        atol=atol,
    )


def load(
    subset: str, form: str, data_dir: str | None = None, allow_code_execution: bool = False, **_: object
) -> dict[str, Rows]:
    """The problems of a benchmark, for lm-eval, as the YAMLs' `custom_dataset`.

    `row` has the fields of the release as one text, so that integers of any size survive.
    """
    rows = find_rows(data_file(subset), data_dir)
    documents = [
        {
            "index": row["index"],
            "subset": subset,
            "task_id": row["task_id"],
            "prompt": row["prompt"],
            "context": "",
            "gold": _gold(subset, form, row),
            "allow_code_execution": allow_code_execution,
            "row": json.dumps({key: value for key, value in row.items() if key != "index"}),
        }
        for row in rows
    ]
    return {"test": rows.made_into(documents)}


def _gold(subset: str, form: str, row: Mapping[str, str]) -> str:
    """The canonical solution as an answer in this form would read."""
    if form == "complete":
        return row["canonical_solution"]
    program = row["canonical_solution"] if subset == "mbpp_plus" else row["prompt"] + row["canonical_solution"]
    return f"```python\n{program.strip()}\n```"


# One name per argument: how it is turned. A row with fewer names than arguments leaves the rest, or repeats the last
# name where it ends in `*`.
_SHAPES = {
    "rows*": "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
    "rows_of*": "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780",
    "rows_of": "75 413 444 753",
    "same rows": "106 750",
    "sets": "115",
    "float complex": "124",
    "rows": "250 405 446 617 720 763 808 307",
    "rows_of_rows*": "259 401 445",
    "mixed_rows": "278",
    "values": "722",
    "complex": "252",
    "deep*": "580 615 791",
}


def _deep(value: object) -> object:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


_TURNS: dict[str, Callable] = {
    "same": lambda value: value,
    "rows": tuple,
    "rows_of": lambda value: [tuple(entry) for entry in value],
    "rows_of_rows": lambda value: tuple(tuple(entry) for entry in value),
    "mixed_rows": lambda value: tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value),
    "sets": lambda value: [set(entry) if isinstance(entry, list) and entry else {} for entry in value],
    "values": lambda value: {key: tuple(entry) for key, entry in value.items()},
    "float": float,
    "complex": complex,
    "deep": _deep,
}
_BY_TASK = {int(number): names for names, numbers in _SHAPES.items() for number in numbers.split()}


def restore_inputs(task_id: str, inputs: Sequence[Sequence[object]]) -> list[list[object]]:
    """Give stored arguments of each call the types that the task's (`Mbpp/124`) reference solution takes.

    Source: EvalPlus 0.3.1, `evalplus/data/mbpp.py` (which task holds which types).
    """
    names = _BY_TASK.get(int(task_id.rpartition("/")[2]))
    if names is None:
        return [list(arguments) for arguments in inputs]
    if names.endswith("*"):
        turn = _TURNS[names[:-1]]
        return [[turn(value) for value in arguments] for arguments in inputs]
    turns = [_TURNS[name] for name in names.split()]
    return [
        [turn(value) for turn, value in zip(turns, arguments, strict=False)] + list(arguments[len(turns) :])
        for arguments in inputs
    ]
