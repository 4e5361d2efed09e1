"""A run with its samples, as the writers take it."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One complete run."""

    folder: Path
    record: RunRecord
    samples: list[SampleRecord]
    """In the order of the journal, of any status."""


def file_name(text: str) -> str:
    """A text as part of a file name that every system takes, as lm-eval writes task names."""
    return re.sub(r"\W", "_", text)[:80] or "_"


def gold_of(record: SampleRecord) -> list[str]:
    """The right answers; in journals of before, what the task kept beside the sample."""
    found = record.get("gold")
    if found is None:
        kept = record["meta"].get("answers", record["meta"].get("answer"))
        found = kept if isinstance(kept, list) else [] if kept is None else [kept]
    return [str(one) for one in found]
