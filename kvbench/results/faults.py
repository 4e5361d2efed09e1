"""Faults of earlier code that numbers of a stored run may have, known by its record and named where it is read.

`RunRecord.revision` is that of the code which began a run, and each fault has the revision in which it was mended. To
register one, raise `REVISION`, add an entry to `FAULTS` with that number, and a line to CHANGELOG.md. A predicate is
cautious: it says that a run may be affected, and may look only at what records of before have.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord, answers_of

REVISION = 1  # of this code
MOST_NAMED = 3  # runs that a note names one by one
SHOWN = 0.0005  # of an FP16 full cache: what moves the last digit of a share of it


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the runs that may have it."""

    name: str
    summary: str
    """The fault, as a clause."""
    mended: int
    """Revision of the first records without it."""
    affects: Callable[[RunRecord], bool]
    """A record's numbers may be wrong."""
    seen: Callable[[SampleRecord], bool] | None = None
    """An answer that may be graded wrong, where the samples can be looked at; None where no answer can be graded wrong
    by it."""
    unlike: Callable[[RunRecord], set[str]] | None = None
    """Property that must differ, within a run or between runs read together, for a fault; None: no condition."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """A stored run as a reader has it."""

    label: str
    record: RunRecord
    samples: Iterable[SampleRecord] | None = None
    """Its answers; None where they are not at hand."""


def _words(record: RunRecord) -> list[str]:
    """The words of the commands that worked on a run."""
    return [word for session in record.sessions for word in session.command]


def _may_set(record: RunRecord, *names: str) -> bool:
    """True where settings may have been given: they were, or no command line is stored (Python, an experiment file)."""
    has_commands = record.sessions and all(session.command for session in record.sessions) and not record.experiment
    return not has_commands or any(word.lstrip("+").startswith(names) for word in _words(record))


def _has_neighbours(record: RunRecord) -> bool:
    """True where several answers may have been decoded together."""
    is_alone = record.identity.get("batch_size") == 1 or "batch_size=1" in _words(record)
    return record.counts.total != 1 and not is_alone


# Models of the hub whose rotary factors change with the length of the text, by their names.
LENGTH_ROPE = re.compile(r"phi-?_?(3|4-mini)|minicpm|longrope|dynamic", re.IGNORECASE)


def _has_length_rope(record: RunRecord) -> bool:
    return any(LENGTH_ROPE.search(text) for text in (record.model, *_words(record)))


def _is_rotated(record: RunRecord) -> bool:
    return (record.identity.get("store") or {}).get("rotation") == "hadamard" and _has_neighbours(record)


def _is_of(*tasks: str) -> Callable[[RunRecord], bool]:
    return lambda record: record.task in tasks


def _graded_by(*metrics: str) -> Callable[[RunRecord], bool]:
    return lambda record: record.task == "custom" and record.protocol.get("metric") in metrics


def _has_helpers(record: RunRecord) -> bool:
    return record.task.startswith("lm_eval_") and _may_set(record, "task.include_path")


def _has_user_module(record: RunRecord) -> bool:
    """True where a method from outside of kvbench computed it, or shared its process.

    A full cache has the command of the run that needed it.
    """
    target = str((record.identity.get("method") or {}).get("_target_", ""))
    return not target.startswith("kvbench.methods.") or any(word.startswith("--config-dir") for word in _words(record))


def _counts_tables(record: RunRecord) -> bool:
    """True where its page tables have enough bytes to change a shown digit."""
    tables, whole = (record.ledger.get(name, 0.0) for name in ("table_bytes", "fp16_bytes"))
    return record.counts.total != 1 and tables > SHOWN * whole


def _has_byte_budget(record: RunRecord) -> bool:
    """True where its method has a budget in bytes that includes page tables."""
    budget = (record.identity.get("method") or {}).get("budget")
    unit = budget.get("unit") if isinstance(budget, dict) else "bytes" * bool(re.search(r"\d *[KMG]?i?B$", str(budget)))
    return record.counts.total != 1 and unit == "bytes"


def _has_passed_over_data(record: RunRecord) -> bool:
    """True where it names a folder of data, and its haystacks are kvbench's text."""
    is_text = record.protocol.get("essays") == "kvbench"
    return is_text and any(word.lstrip("+").startswith("task.data_dir=") for word in _words(record))


def _pythons(record: RunRecord) -> set[str]:
    """The minor versions of Python that worked on a run."""
    versions = [session.versions for session in record.sessions] + [record.versions]
    return {".".join(one.python.split(".")[:2]) for one in versions if one is not None and one.python}


ARTICLES = re.compile(r"\b(a|an|the)\b")


def _has_empty_gold(sample: SampleRecord) -> bool:
    """True where a right answer has nothing but articles and punctuation."""
    return any(not re.search(r"[^\W_]|[^\x00-\x7f]", ARTICLES.sub(" ", gold.lower())) for gold in _golds(sample))


def _golds(sample: SampleRecord) -> list[str]:
    turns = [gold for turn in sample.get("turns") or () for gold in turn["gold"]]
    return [*turns, *(sample.get("gold") or ())]


def _is_not_normal(sample: SampleRecord) -> bool:
    """True where a right answer or an answer has characters that can be encoded in two ways."""
    texts = [*_golds(sample), *answers_of(sample)]
    return not all(unicodedata.is_normalized("NFKC", text) for text in texts)


def _catches_all(sample: SampleRecord) -> bool:
    """True where a program catches every exception, the alarm of its time limit included."""
    return any(re.search(r"except\s*(BaseException[^:]*)?:", text) for text in answers_of(sample))


def _has_display(sample: SampleRecord) -> bool:
    """True where the answer, or the right one, has display mathematics or a large or negative power."""
    texts = [*_golds(sample), *answers_of(sample)]
    return any(re.search(r"\\\[|\$\$|\^\s*\{?\s*(-|\d\d)", text) for text in texts)


TEXTS = ("exact", "contains", "contains_all", "f1", "rouge_l", "absent")
FAULTS = (
    Fault(
        name="rope-neighbours",
        summary="rotary factors were those of the longest text beside a row, and a text that crossed the model's "
        "original length kept the short ones",
        mended=1,
        affects=_has_length_rope,
    ),
    Fault(
        name="hadamard-batch",
        summary="last digits depended on the number of rows that were rotated together",
        mended=1,
        affects=_is_rotated,
    ),
    Fault(
        name="lm-eval-helpers",
        summary="functions and modules that a task's own grader calls were in no hash, so that two graders could mix",
        mended=1,
        affects=_has_helpers,
    ),
    Fault(
        name="python-minor",
        summary="Python's minor version decides verdicts on programs, was in no hash, and differs here",
        mended=1,
        affects=_is_of("humaneval_plus", "mbpp_plus"),
        unlike=_pythons,
    ),
    Fault(
        name="torch-modes",
        summary="modes of torch that a method's own module sets changed the numbers of every method of its process",
        mended=1,
        affects=_has_user_module,
    ),
    Fault(
        name="custom-gold",
        summary="a right answer of articles or punctuation alone scored 0 against itself, and 1 against nothing",
        mended=1,
        affects=_graded_by("exact", "f1"),
        seen=_has_empty_gold,
    ),
    Fault(
        name="custom-unicode",
        summary="characters that can be written in two ways were not the same in an answer and in the right one",
        mended=1,
        affects=_graded_by(*TEXTS),
        seen=_is_not_normal,
    ),
    Fault(
        name="math-display",
        summary="an answer in display mathematics was not read, and unequal small numbers were equal",
        mended=1,
        affects=_is_of("math500", "math", "aime24", "aime25", "aime26"),
        seen=_has_display,
    ),
    Fault(
        name="late-program",
        summary="a program that catches its alarm passed behind its time limit",
        mended=1,
        affects=_is_of("humaneval_plus", "mbpp_plus"),
        seen=_catches_all,
    ),
    Fault(
        name="data-dir",
        summary="a folder of data without any file that is read was passed over, and text of kvbench's own was read",
        mended=1,
        affects=_has_passed_over_data,
    ),
    Fault(
        name="byte-budget",
        summary="a budget in bytes paid for page tables as long as the run's longest text needs, so that fewer tokens "
        "were kept",
        mended=1,
        affects=_has_byte_budget,
    ),
    Fault(
        name="row-bytes",
        summary="bytes count page tables as long as the run's longest text needs",
        mended=1,
        affects=_counts_tables,
    ),
)


def _hit(fault: Fault, run: Read) -> bool:
    if run.record.revision >= fault.mended or not fault.affects(run.record):
        return False
    return fault.seen is None or run.samples is None or any(map(fault.seen, run.samples))


def notes(runs: Sequence[Read], faults: Sequence[Fault] = FAULTS) -> list[str]:
    """One sentence for each fault that some runs which are read together may have: its name and their labels."""
    said = []
    for fault in faults:
        hit = [run for run in runs if _hit(fault, run)]
        if fault.unlike is not None and len(set().union(*(fault.unlike(run.record) for run in hit))) < 2:
            continue
        if hit:
            names = [run.label for run in hit[:MOST_NAMED]]
            more = f" and {len(hit) - MOST_NAMED} more" if len(hit) > MOST_NAMED else ""
            who = "every run here" if len(hit) == len(runs) > 1 else ", ".join(names) + more
            said.append(f"{fault.name}, mended since, may affect {who}: {fault.summary}")
    return said
