"""Rows of LongBench: what a row must hold, and where the files are."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.tasks.longbench.metrics import REFERENCE
from kvbench.tasks.source import (
    MissingDataError,
    Rows,
    in_archive,
    in_datasets_cache,
    in_folder,
    in_hub_cache,
    on_hub,
    read_rows,
)

# The data set moved from the first id to the second; the hub and local caches may know it by either.
HUB_REPOS = ("THUDM/LongBench", "zai-org/LongBench")
HUB_ARCHIVE = "data.zip"
_ON_HUB = [(repo, HUB_ARCHIVE) for repo in HUB_REPOS]


def load(subset: str, data_dir: str | None = None, **_: object) -> dict[str, Rows]:
    """The test split of one subset; the function that the YAMLs name as `custom_dataset`.

    Args:
        subset: Official name, with `_e` for LongBench-E.
        data_dir: Folder with `<subset>.jsonl`; None or a folder without it goes on to the local caches and the hub.

    Returns:
        `test`: the rows, with `context`, `input`, `answers`, `all_classes`, `length`, `index`.

    Raises:
        MissingDataError: no source has the subset; the message says where was looked and how to get it.
        ValueError: data_dir is no folder, or all rows are broken.
    """
    looked = []
    for find in (
        lambda: in_folder(data_dir, subset) if data_dir else (None, "task.data_dir (not set)"),
        lambda: in_hub_cache(_ON_HUB, lambda path: in_archive(path, subset, "cache")),
        lambda: in_datasets_cache("LongBench", subset),
        lambda: on_hub(_ON_HUB, lambda path: in_archive(path, subset, "hub")),
    ):
        source, where = find()
        if source:
            return {"test": read_rows(source, lambda row: check_row(row, subset))}
        looked.append(where)

    def text(parts: Sequence[str]) -> str:
        names = ",".join(parts)
        return (
            f"task=longbench has no data for the subset{'s' * (len(parts) > 1)} {', '.join(parts)}. Looked in: "
            f"{'; '.join(looked)}. To get it, run `kvbench data task=longbench task.subsets=[{names}] to=longbench` "
            f"where there is a network (or unpack {HUB_ARCHIVE} of {HUB_REPOS[0]} by hand), and set "
            "task.data_dir=longbench. Without it, `kvbench task=longctx` runs on generated data."
        )

    raise MissingDataError(text, subset)


def check_row(row: Mapping[str, Any], subset: str) -> dict[str, Any]:
    """Check the object of a line and give it the official field names.

    Args:
        row: What the line holds. The question is `input` officially and `question` in one copy on the hub.
        subset: Decides which fields are needed.

    Returns:
        A new dict with `context`, `input`, `answers`, `all_classes` (None where the subset has none) and `length`
        (words; None when the file does not say).

    Raises:
        ValueError: what is wrong with the row.
    """
    name = row.get("dataset")
    if name is not None and name not in (subset, subset.removesuffix("_e")):
        raise ValueError(f"field dataset is {str(name)[:80]!r}: this row belongs to another subset than {subset}")
    question = row["input"] if "input" in row else row.get("question")
    for name, value in (("context", row.get("context")), ("input", question)):
        if not isinstance(value, str):
            raise ValueError(
                f"field {name} must be a text, it is {'missing' if value is None else type(value).__name__}"
            )
    if not row["context"].strip():
        raise ValueError("field context is empty")
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("field answers must be a list of at least one text")
    length = row.get("length")
    if isinstance(length, bool) or not isinstance(length, int | None):
        raise ValueError(f"field length must be a whole number, it is {length!r}")
    if length is None and subset.endswith("_e"):
        raise ValueError("field length is missing; LongBench-E reports its scores by length")
    classes = row.get("all_classes")
    base = subset.removesuffix("_e")
    if base == "trec":
        if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
            raise ValueError("field all_classes must be the list of class names")
    else:
        classes = None
    if base == "passage_retrieval_en" and not all(REFERENCE.search(answer) for answer in answers):
        raise ValueError(f"field answers must name a paragraph ('Paragraph 1'), it is {answers!r}")
    return {"context": row["context"], "input": question, "answers": answers, "all_classes": classes, "length": length}


def length_bucket(length: int) -> str:
    """LongBench-E's group of a document of that many words.

    Source: LongBench eval.py, scorer_e, at 2e00731.
    """
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
