"""The answers that a run lost or gained beside another run."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.evidence.pairing import Pairs
from kvbench.evidence.runs import StoredRun
from kvbench.results.measures import Measure
from kvbench.results.sample import SampleRecord, answers_of


@dataclass(frozen=True, kw_only=True)
class Change:
    """A sample whose score got worse or better."""

    sample: str
    subset: str
    mine: float
    theirs: float
    text: str
    """Answer of the run, every turn of a conversation; the first one whose score differs, when there are several."""
    other_text: str
    """Answer of the other run."""
    expected: str
    """The right answer, when the task keeps it."""
    lost: bool


def changes(
    run: StoredRun | None, other: StoredRun | None, pairs: Pairs, what: Measure, tolerance: float = 0.0
) -> list[Change]:
    """The samples that differ by more than noise, the largest losses first, then the largest gains.

    Args:
        run: The run that is judged; None where the values are of several runs, which have no one answer.
        other: What it is compared with.
        pairs: The values of the two.
        what: The metric.
        tolerance: Largest difference that is noise.
    """
    sign = 1 if what.higher_is_better else -1
    found = []
    for members in pairs.samples.values():
        for sample in members:
            mine, theirs = pairs.mine.values[sample], pairs.theirs.values[sample]
            if mine == theirs or abs(mine - theirs) <= tolerance:
                continue
            answers = _answers(run, other, sample[1], what) if run and other else None
            found.append(
                Change(
                    sample=sample[1],
                    subset=sample[0],
                    mine=mine,
                    theirs=theirs,
                    text=_said(answers_of(answers[0])) if answers else "",
                    other_text=_said(answers_of(answers[1])) if answers else "",
                    expected=_expected(answers[0]) if answers else "",
                    lost=sign * (mine - theirs) < 0,
                )
            )
    return sorted(found, key=lambda item: (not item.lost, -abs(item.mine - item.theirs), item.subset, item.sample))


def _answers(run: StoredRun, other: StoredRun, sample: str, what: Measure) -> tuple[SampleRecord, SampleRecord] | None:
    """The first answers to a sample whose values differ, else the first ones; None where no answer is in both runs."""
    both = [
        (record, other.samples[key]) for key, record in run.samples.items() if key[0] == sample and key in other.samples
    ]
    differ = (pair for pair in both if _value(pair[0], what) != _value(pair[1], what))
    return next(differ, both[0] if both else None)


def _value(record: SampleRecord, what: Measure) -> float | None:
    try:
        return what.above(record)
    except (KeyError, TypeError):
        return None


def _said(texts: Sequence[str]) -> str:
    """Several texts as one, each with its number."""
    return texts[0] if len(texts) == 1 else "\n".join(f"[{place}] {text}" for place, text in enumerate(texts, 1))


def _expected(record: SampleRecord) -> str:
    if turns := record.get("turns"):
        return _said(["; ".join(right) for right in (*(turn["gold"] for turn in turns), record.get("gold", []))])
    if record.get("gold"):
        return "; ".join(record["gold"])
    meta = record.get("meta") or {}  # journals of before have the answer there, where the task kept it
    found = next((meta[key] for key in ("answer", "answers", "gold", "target") if key in meta), "")
    return "; ".join(map(str, found)) if isinstance(found, list) else str(found)
