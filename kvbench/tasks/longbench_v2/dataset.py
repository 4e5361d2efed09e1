"""Rows of LongBench v2."""

from collections.abc import Mapping
from typing import Any

from kvbench.tasks.problem_source import Place, text_field

LETTERS = ("A", "B", "C", "D")
LENGTHS = ("short", "medium", "long")
PLACE = Place(
    task="longbench_v2",
    what="its questions",
    stems=("longbench_v2", "data"),
    list_file="data.json",
    hub=(("THUDM/LongBench-v2", "data.json"), ("zai-org/LongBench-v2", "data.json")),
    prepared=(("LongBench-v2", "default", "train"),),
    fetch="To get it, run `hf download THUDM/LongBench-v2 data.json --repo-type dataset --local-dir FOLDER` where "
    "there is a network, and set task.data_dir=FOLDER.",
)


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check a row.

    Args:
        row: `context`, `question`, `choice_A` to `choice_D`, `answer` (a letter), `difficulty`, `length`, `domain`.

    Returns:
        The same, `choices` for the four choices, texts without white space around them as they are asked.

    Raises:
        ValueError: What is wrong with the row.
    """
    texts = {name: text_field(row, name).strip() for name in ("context", "question", "answer", "domain")}
    if texts["answer"] not in LETTERS:
        raise ValueError(f"field answer must be one of {', '.join(LETTERS)}, it is {texts['answer'][:40]!r}")
    for name, known in (("difficulty", ("easy", "hard")), ("length", LENGTHS)):
        if row.get(name) not in known:
            raise ValueError(f"field {name} must be one of {', '.join(known)}, it is {str(row.get(name))[:40]!r}")
    choices = [text_field(row, f"choice_{letter}").strip() for letter in LETTERS]
    return texts | {"choices": choices, "difficulty": row["difficulty"], "length": row["length"]}
