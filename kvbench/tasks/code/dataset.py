"""Rows of HumanEval+ and MBPP+: the EvalPlus release files, which have the inputs that answers are tested on."""

import json
from pathlib import Path

from kvbench.tasks.problem_source import Place, find_rows, text_field
from kvbench.tasks.source import Rows

RELEASE = {"humaneval_plus": ("HumanEvalPlus", "v0.1.10"), "mbpp_plus": ("MbppPlus", "v0.2.0")}


def place(subset: str) -> Place:
    """Where the release file of a benchmark is; its copies on the hub lack the inputs."""
    name, version = RELEASE[subset]
    cache = Path("~/.cache/evalplus").expanduser()
    return Place(
        task=subset,
        what="its release file",
        stems=(name.lower(), name, f"{name}-{version}", "test"),
        local=(cache / f"{name}-{version}.jsonl",),
        fetch=f"To get it, unpack {name}.jsonl.gz of the EvalPlus release {version} (repository "
        f"evalplus/{subset.replace('_', '')}_release) into a folder and set task.data_dir to it.",
    )


def check_row(row: object) -> dict:
    """Check a parsed line.

    Args:
        row: `task_id`, `prompt`, `entry_point`, `canonical_solution`, `base_input`, `plus_input`, `atol`.

    Returns:
        These fields. An empty `plus_input` is allowed.

    Raises:
        ValueError: What is wrong with the row.
    """
    texts = {name: text_field(row, name) for name in ("task_id", "prompt", "entry_point", "canonical_solution")}
    for name in ("base_input", "plus_input"):
        if name not in row:
            raise ValueError(f"field {name} is missing; use the EvalPlus release file, not the one in original format")
    if not isinstance(row["base_input"], list) or not row["base_input"]:
        raise ValueError("field base_input must be a list of at least one call")
    # Some rows of MBPP+ write "no inputs were added" as an empty object.
    plus = row["plus_input"] or []
    if not isinstance(plus, list):
        raise ValueError(f"field plus_input must be a list, it is {type(plus).__name__}")
    atol = row.get("atol", 0)
    if isinstance(atol, bool) or not isinstance(atol, int | float) or atol < 0:
        raise ValueError(f"field atol must be a number of at least 0, it is {atol!r}")
    return texts | {"base_input": row["base_input"], "plus_input": plus, "atol": atol}


def load(
    subset: str, form: str, data_dir: str | None = None, allow_code_execution: bool = False, **_: object
) -> dict[str, Rows]:
    """The problems; the function that the YAMLs name as `custom_dataset`.

    Args:
        subset: `humaneval_plus` or `mbpp_plus`.
        form: `complete` or `chat`.
        data_dir: Folder with the release file.
        allow_code_execution: Consent to run what the model writes; grading refuses without it.

    Returns:
        `test`: rows with the fields of the release as one text `row` (integers of any size survive), `prompt`,
        `task_id`, `gold`, `context` (empty), `index`.

    Raises:
        MissingDataError: No source has the file.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    rows = find_rows(place(subset), data_dir, check_row)
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
    return {"test": Rows(documents, quarantined=rows.quarantined, origin=rows.origin)}


def _gold(subset: str, form: str, row: dict) -> str:
    """The canonical solution as an answer in this form would read."""
    if form == "complete":
        return row["canonical_solution"]
    program = row["canonical_solution"] if subset == "mbpp_plus" else row["prompt"] + row["canonical_solution"]
    return f"```python\n{program.strip()}\n```"
