"""Rows of HumanEval+ and MBPP+: the EvalPlus release files, which have the inputs that answers are tested on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from kvbench.tasks.files import DataFile, find_rows
from kvbench.tasks.rows import Rows, text_field

RELEASE = {"humaneval_plus": ("HumanEvalPlus", "v0.1.10", 164), "mbpp_plus": ("MbppPlus", "v0.2.0", 378)}
"""Task -> name, version and rows of its release."""


class CodeRow(TypedDict):
    """One problem, as the release files have it.

    Args:
        task_id: For example `HumanEval/0` or `Mbpp/2`.
        prompt: What the model continues: imports, helpers, signature and docstring; or a docstring alone (MBPP+).
        entry_point: Name of the function that is called.
        canonical_solution: The reference; it continues the prompt.
        base_input: Arguments of each call of the original benchmark.
        plus_input: Arguments of each added call.
        atol: Absolute tolerance of the task, >= 0; 0 where outputs must be equal.
    """

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
    """Check the object of a line.

    Args:
        row: The fields of `CodeRow`, and others that are not read. An empty `plus_input` is allowed.

    Returns:
        The row.

    Raises:
        ValueError: What is wrong with the row.
    """
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

    Returns:
        `test`: rows with the fields of the release as one text `row` (integers of any size survive), `prompt`,
        `task_id`, `gold`, `context` (empty), `index`.
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
