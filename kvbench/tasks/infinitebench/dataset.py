"""Rows of InfiniteBench's retrieval subsets, and what its authors fix about each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.problem_source import Place, text_field

REPO = "xinrongzhang2022/InfiniteBench"
_HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it{and_more}. I will quiz you about the "
)
_HIDDEN += "important information there.\n\n"


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One subset.

    Args:
        begin: What stands before the text.
        prefix: How the answer begins; empty where it just begins.
        answer_tokens: Longest answer behind the prefix.
        rows: Rows of the whole subset.
    """

    begin: str
    prefix: str
    answer_tokens: int
    rows: int


# Source: InfiniteBench src/prompt.py (yarn_mistral_templates) and src/eval_utils.py at 220fd2e.
SUBSETS = {
    "passkey": Subset(
        begin=_HIDDEN.format(and_more=" and memorize them"), prefix="The pass key is", answer_tokens=6, rows=590
    ),
    "number_string": Subset(
        begin=_HIDDEN.format(and_more=""), prefix="The sequence of digits is", answer_tokens=12, rows=590
    ),
    "kv_retrieval": Subset(
        begin="Extract the value corresponding to the specified key in the JSON object below.\n\n",
        prefix="",
        answer_tokens=50,
        rows=500,
    ),
}


def place(subset: str) -> Place:
    """Where the file of a subset is."""
    return Place(
        task="infinitebench",
        what=subset,
        stems=(subset,),
        hub=((REPO, f"{subset}.jsonl"),),
        prepared=(("InfiniteBench", "default", subset),),
        fetch=f"To get it, run `hf download {REPO} {subset}.jsonl --repo-type dataset --local-dir FOLDER` where there "
        "is a network, and set task.data_dir=FOLDER.",
    )


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `context` (in some copies `content`), `input`, `answer` (a text, or a list whose first is the answer).

    Returns:
        `context`, `input`, `answer`.

    Raises:
        ValueError: What is wrong with the row.
    """
    given = row.get("answer")
    answer = given[0] if isinstance(given, list) and given else given
    texts = {"context": text_field(row, "context", "content"), "input": text_field(row, "input")}
    return texts | {"answer": text_field({"answer": answer}, "answer").strip()}
